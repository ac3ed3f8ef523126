"""What a copy stream reads from and writes to beside the pool: slabs in host memory, pinned where the system lets us,
and the pinned buffers through which the rest goes.

Decides when such memory may go: not before the last job that uses it has finished.
"""

import ctypes
import resource
import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.cuda import driver
from dormouse.gpuserver.cuda.streams import Context, CudaEvent
from dormouse.gpuserver.device import DeviceError

PIECE_NBYTES: Final = 256 << 20
"""Of a slab that cannot be pinned as a whole. Large single registrations are known to fail where small ones do not
(taco-project/FlexKV #240)."""

STAGES: Final = 2
"""One is filled by the host while the other is on the link."""


class Part(NamedTuple):
    """Bytes that one copy may cover."""

    offset: int
    nbytes: int
    pinned: bool


class Source:
    """Memory beside the pool that jobs use; ``retire`` gives it back once the last of them has finished."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self._users = 0
        self._retired = False
        self._lock = threading.Lock()

    def span(self, offset: int, nbytes: int, name: str) -> int:
        """Address of bytes. Raises ValueError outside: a wrong manifest must not become a wild copy."""
        if not (offset >= 0 and nbytes >= 0 and offset + nbytes <= self.nbytes):
            raise ValueError(f"bytes [{offset}, +{nbytes}) lie outside {name} of {self.nbytes} bytes")
        return self.address + offset

    def parts(self, offset: int, nbytes: int, longest: int) -> Iterator[Part]:
        """Cut so that each lies in one registration, and is at most ``longest`` bytes where it must be staged."""
        yield Part(offset, nbytes, True)

    def acquire(self) -> None:
        with self._lock:
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._retired and not self._users
        if last:
            self._free()

    def retire(self) -> None:
        with self._lock:
            last = not self._retired and not self._users
            self._retired = True
        if last:
            self._free()

    def _free(self) -> None:
        raise NotImplementedError


class HostSlab(Source):
    """A slab, pinned as a whole, else in pieces, else as far as it goes. Owns ``memory``.

    Attributes:
        trouble: why a part is not pinned, for a person; empty if all is.
    """

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory.address, memory.nbytes)
        self._memory = memory
        self.trouble = ""
        self._piece_nbytes = memory.nbytes
        self._pinned = [self._pin(0, memory.nbytes)]
        if not self._pinned[0] and memory.nbytes > PIECE_NBYTES:
            self._piece_nbytes = PIECE_NBYTES
            starts = range(0, memory.nbytes, PIECE_NBYTES)
            self._pinned = [self._pin(start, min(PIECE_NBYTES, memory.nbytes - start)) for start in starts]
        if all(self._pinned):
            self.trouble = ""

    def _pin(self, offset: int, nbytes: int) -> bool:
        try:
            driver.register(self.address + offset, nbytes)
        except driver.Refused as error:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "none" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
            self.trouble = (
                f"{self.nbytes >> 20} MiB of host memory cannot be pinned, copies from it are slower: {error}; the "
                f"limit of locked memory is {limit} (ulimit -l, LimitMEMLOCK=), and containers may have their own"
            )
            return False
        return True

    def parts(self, offset: int, nbytes: int, longest: int) -> Iterator[Part]:
        end = offset + nbytes
        while offset < end:
            index = offset // self._piece_nbytes
            pinned = self._pinned[index]
            stop = min(end, (index + 1) * self._piece_nbytes)
            if not pinned:
                stop = min(stop, offset + longest)
            yield Part(offset, stop - offset, pinned)
            offset = stop

    def _free(self) -> None:
        for index, pinned in enumerate(self._pinned):
            if pinned:
                driver.unregister(self.address + index * self._piece_nbytes)
        self._memory.close()


class Staging:
    """Pinned buffers for one thread's copies from or to memory that is not; taken when the first such memory appears.

    A buffer is used again once its last copy has passed.
    """

    def __init__(self, context: Context, nbytes: int) -> None:
        self._context = context
        self._nbytes = nbytes
        self._address = 0
        self._busy: list[CudaEvent | None] = [None] * STAGES
        self._next = 0
        self._lock = threading.Lock()

    def to_device(self, target: int, source: int, nbytes: int, stream: int, event: CudaEvent) -> None:
        """``event`` is recorded after the copy."""
        stage = self._take()
        ctypes.memmove(stage, source, nbytes)
        driver.copy_to_device(target, stage, nbytes, stream)
        event.record(stream)
        self._busy[self._next - 1] = event

    def to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Returns when the bytes are there."""
        stage = self._take()
        driver.copy_to_host(stage, source, nbytes, stream)
        self._context.recorded(stream).synchronize()
        ctypes.memmove(target, stage, nbytes)

    def reserve(self) -> None:
        """Take the buffers now. Any thread. Raises DeviceError."""
        with self._lock:
            if not self._address:
                try:
                    self._address = driver.allocate_pinned(STAGES * self._nbytes)
                except driver.Refused as error:
                    nbytes = STAGES * self._nbytes
                    raise DeviceError(f"not even {nbytes >> 20} MiB of pinned memory for copies: {error}") from error

    def _take(self) -> int:
        slot = self._next % STAGES
        self._next = slot + 1
        if (event := self._busy[slot]) is not None:
            event.synchronize()
            self._busy[slot] = None
        return self._address + slot * self._nbytes

    def close(self) -> None:
        if self._address:
            driver.free_pinned(self._address)
            self._address = 0
