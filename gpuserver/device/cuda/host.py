"""Host memory that a copy stream reads and writes: slabs, pinned where the system lets us, and the pinned buffers
through which the rest goes.

The only module that pins memory of others: pinnable memory only (core/shm.py), whose pages stay in place. Pinning is
done behind everything else, piece by piece; memory that is not pinned yet, or cannot be, is copied through the buffers.
Decides when such memory may go: not before the last job that uses it has finished.
"""

import ctypes
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, NamedTuple

from dormouse.core.quantities import size
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.cuda import driver
from dormouse.gpuserver.device.cuda.streams import CudaContext, CudaEvent
from dormouse.gpuserver.device.protocol import DeviceError, DeviceLost

PIECE_NBYTES: Final = 64 << 20
"""Pinned at a time. Large registrations are known to fail where small ones do not (taco-project/FlexKV #240), and
several are made at once. Not measured on a GPU yet: `make gpu` sweeps it."""

PIN_THREADS: Final = 4
"""Most of the time goes to taking pages, 0.25 s per GiB on one core."""

STAGES: Final = 2
"""One is filled by the host while the other is on the link."""


class CopyRange(NamedTuple):
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

    def parts(self, offset: int, nbytes: int, longest: int) -> Iterator[CopyRange]:
        """Cut so that each lies in one registration, and is at most ``longest`` bytes where it must be staged."""
        yield CopyRange(offset, nbytes, True)

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
    """A slab. Owns ``memory``; ``pinner`` pins it, and gives it back."""

    def __init__(self, memory: SharedMemory, pinner: "Pinner") -> None:
        super().__init__(memory.address, memory.nbytes)
        self._memory = memory
        self._pinner = pinner
        self._pinned = [False] * -(-memory.nbytes // PIECE_NBYTES)

    @property
    def pieces(self) -> int:
        return len(self._pinned)

    def pin(self, index: int) -> None:
        """Pin a piece, unless the slab is about to go. Raises DeviceError."""
        if not self._retired:
            start = index * PIECE_NBYTES
            nbytes = min(PIECE_NBYTES, self.nbytes - start)
            self._memory.populate(start, nbytes)
            driver.register(self.address + start, nbytes)
            self._pinned[index] = True

    def parts(self, offset: int, nbytes: int, longest: int) -> Iterator[CopyRange]:
        end = offset + nbytes
        while offset < end:
            index = offset // PIECE_NBYTES
            pinned = self._pinned[index]
            stop = min(end, (index + 1) * PIECE_NBYTES)
            if not pinned:
                stop = min(stop, offset + longest)
            yield CopyRange(offset, stop - offset, pinned)
            offset = stop

    def _free(self) -> None:
        self._pinner.give_back(self)

    def give_back(self) -> None:
        """Unpin it and unmap it. Raises DeviceError."""
        try:
            for index, pinned in enumerate(self._pinned):
                if pinned:
                    driver.unregister(self.address + index * PIECE_NBYTES)
        finally:
            self._memory.close()


class Pinner:
    """Pins slabs and gives them back, in threads of its own: it takes about a second for 4 GiB.

    Args:
        on_trouble: called with a text for a person the first time that something cannot be pinned.
        on_lost: called if the device is lost by it. Both from any of the threads.
    """

    def __init__(
        self, context: CudaContext, on_trouble: Callable[[str], None], on_lost: Callable[[DeviceLost], None]
    ) -> None:
        self._context = context
        self._on_trouble = on_trouble
        self._on_lost = on_lost
        self._troubled = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(PIN_THREADS, "pin")
        self._work: set[Future[None]] = set()  # not done

    def pin(self, slab: HostSlab) -> None:
        for index in range(slab.pieces):
            slab.acquire()
            self._give(self._pin, slab, index)

    def _give(self, work: Callable[..., None], *arguments: Any) -> None:
        future = self._threads.submit(work, *arguments)
        self._work.add(future)
        future.add_done_callback(self._work.discard)

    def settle(self) -> None:
        """Wait until all work given so far is done, and its consequences."""
        while pending := self._work.copy():
            wait(pending)

    def _pin(self, slab: HostSlab, index: int) -> None:
        try:
            self._context.use()
            slab.pin(index)
        except DeviceLost as error:
            self._on_lost(error)
        except DeviceError as error:
            self._tell(slab, error)
        finally:
            slab.release()

    def _tell(self, slab: HostSlab, error: DeviceError) -> None:
        with self._lock:
            first, self._troubled = not self._troubled, True
        if first:
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            limit = "none" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
            self._on_trouble(
                f"{size(min(slab.nbytes, PIECE_NBYTES))} of host memory cannot be pinned, so copies are slower: "
                f"{error}; the limit of locked memory is {limit} (ulimit -l, LimitMEMLOCK=), and containers may have "
                "their own"
            )

    def give_back(self, slab: HostSlab) -> None:
        self._give(self._give_back, slab)

    def _give_back(self, slab: HostSlab) -> None:
        try:
            self._context.use()
            slab.give_back()
        except DeviceLost as error:
            self._on_lost(error)
        except DeviceError as error:
            self._on_trouble(f"host memory stays pinned: {error}")

    def close(self) -> None:
        self.settle()
        self._threads.shutdown()


class Staging:
    """Pinned buffers for one thread's copies from or to memory that is not; taken when the first such memory appears.

    A buffer is used again once its last copy has passed.
    """

    def __init__(self, context: CudaContext, nbytes: int) -> None:
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
                except driver.DriverRefused as error:
                    nbytes = STAGES * self._nbytes
                    raise DeviceError(f"not even {size(nbytes)} of pinned memory for copies: {error}") from error

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
