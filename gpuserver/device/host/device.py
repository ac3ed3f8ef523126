"""HostDevice: an emulated GPU whose memory is real shared memory, whose streams are threads and whose kernels are
torch's CPU ones.

The compute stream is the device thread itself, the copy stream a thread of its own (copies.py). The limit is hard: pool
bytes in use and activations together never exceed ``total_nbytes``; the caller sets how much the pool leaves.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from dormouse.core.decisions.memory.pools.buddy import Buddy
from dormouse.core.decisions.memory.pools.pages import Pages
from dormouse.core.decisions.memory.pools.protocol import Mapping, Pool
from dormouse.core.decisions.memory.pools.regions import Regions
from dormouse.core.decisions.memory.transfer import Copy, Kind, chunked
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device import allocator
from dormouse.gpuserver.device.host import memory as host_memory
from dormouse.gpuserver.device.host.copies import CopyStream, HostCopyJob, HostEvent, Memmove
from dormouse.gpuserver.device.host.links import EmulatedLink, carry
from dormouse.gpuserver.device.protocol import (
    POISON,
    Capture,
    CopyJob,
    DeviceError,
    DeviceEvent,
    DeviceLost,
    Exported,
    computed_again,
    storage_at,
)
from dormouse.schemas.messages import DeviceInfo, GpuPlace

CHUNK_NBYTES: Final = 4 << 20
"""Copies of 1 to 128 MiB all ran at 6.4-6.6 GB/s where this was measured (notes/feasibility.md): 4 MiB is 0.6 ms,
fine enough to overlap with computation and coarse enough that an event and a Python loop turn (about 10 us) are under
2 %."""

POPULATE_NBYTES: Final = 4 << 20
"""Each step holds the process's memory map: about 4 ms, so that nobody who maps memory waits long for a nice thread."""

POPULATE_NICE: Final = 10

CAPABILITY: Final = (8, 0)
"""Capability claimed for the emulated GPU: that of the oldest one with bfloat16, so that libraries choose no newer
kernels.
"""

GRANULE_NBYTES: Final = (32 << 20, 2 << 20)
"""Moving a granule's mapping took 11 us for 2 MiB here: the large ones keep the number of mappings low."""

SMALL_SHARE: Final = 4
"""One part in this many of the pool is small granules: they are for the ends of models."""

ADDRESS_FACTOR: Final = 64
"""Addresses that segments may keep, as a multiple of the pool; at least a tebibyte."""


class HostDevice:
    """One emulated GPU. It is never lost.

    Args:
        total_nbytes: its whole memory: the pool is as large, and memory that models occupy is not free for activations.
        threads: intra-op threads of torch on the device thread.
        links: those that a copy from or to a slab passes over; none is as fast as memory.
        peer_links: those that a copy from another GPU passes over; none, if there is no such way.
        poison: overwrite evicted bytes.
        pool: "regions", "pages" or "buddy".

    Attributes:
        populated: set once all pages of the pool are there.

    Raises ConfigError if this kernel cannot do what the strategy needs.
    """

    activations_share_pool = True
    captures = False
    activation_nbytes = 0
    ordinal = -1
    place: GpuPlace | None = None

    def __init__(
        self,
        total_nbytes: int,
        *,
        threads: int = 1,
        links: Sequence[EmulatedLink] = (),
        peer_links: Sequence[EmulatedLink] = (),
        poison: bool = False,
        chunk_nbytes: int = CHUNK_NBYTES,
        pool: str = "regions",
    ) -> None:
        self.context_nbytes = self.beside_nbytes = 0
        self.info = DeviceInfo(
            name="Dormouse emulated GPU", total_nbytes=total_nbytes, capability=CAPABILITY, multiprocessors=threads
        )
        self.torch_device = torch.device("cpu")
        self.pool_nbytes = total_nbytes
        self.chunk_nbytes = chunk_nbytes
        self.strategy = pool
        self._threads = threads
        self._links = {Kind.SLAB: tuple(links), Kind.PEER: tuple(peer_links), Kind.POOL: ()}
        self._poison = poison and pool != "pages"  # unmapped memory cannot be read at all
        self._granules = _granules(total_nbytes)
        self._address_nbytes = max(ADDRESS_FACTOR * total_nbytes, 1 << 40)
        self._memory: host_memory.EmulatedMemory
        if pool == "pages":
            self._memory = host_memory.MemfdGranules(self._granules, self._address_nbytes)
        else:
            self._memory = host_memory.Contiguous(total_nbytes)
        self.on_trouble: Callable[[str], None] = lambda text: None
        self.on_lost: Callable[[DeviceLost], None] = lambda error: None
        self.populated = threading.Event()
        self._closing = False
        self._populator = threading.Thread(target=self._populate, name="populate", daemon=True)
        self._populator.start()
        self._slabs: dict[int, SharedMemory] = {}
        self._peers: dict[int, host_memory.PeerMemory] = {}
        self._limit = total_nbytes
        self.activations = allocator.install()
        self.approximate = self.activations.approximate
        self.activations.set_limit(total_nbytes)
        self._stream = CopyStream(self._links)

    def make_pool(self) -> Pool:
        match self.strategy:
            case "pages":
                return Pages(granules=self._granules, address_nbytes=self._address_nbytes)
            case "buddy":
                return Buddy(self.pool_nbytes)
            case _:
                return Regions(self.pool_nbytes)

    def attach_thread(self) -> None:
        torch.set_num_threads(self._threads)  # the OpenMP setting belongs to the calling thread
        self.activations.limit_this_thread()

    # --- memory

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        return storage_at(self._address(offset, nbytes), nbytes, self.torch_device)

    def _address(self, offset: int, nbytes: int) -> int:
        if not (offset >= 0 and nbytes >= 0 and offset + nbytes <= self._memory.address_nbytes):
            raise ValueError(f"span [{offset}, +{nbytes}) lies outside a pool of {self._memory.address_nbytes} bytes")
        return self._memory.base + offset

    def contains(self, pointer: int, nbytes: int) -> bool:
        offset = pointer - self._memory.base
        return 0 <= offset <= self._memory.address_nbytes - nbytes or self.activations.contains(pointer, nbytes)

    def map_host(self, slab: int, memory: SharedMemory) -> None:
        self._slabs[slab] = memory

    def unmap_host(self, slab: int) -> None:
        self._slabs.pop(slab).close()

    def settle(self) -> None:
        pass

    def export(self) -> Exported:
        return Exported(b"", [os.dup(fd) for fd in self._memory.descriptors()])

    @property
    def address_nbytes(self) -> int:
        return self._memory.address_nbytes

    def granule(self, physical: int, writable: bool) -> int:
        fd = self._memory.descriptor(physical)
        return os.open(f"/proc/self/fd/{fd}", (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)

    def host_storage(self, slab: int, start: int, nbytes: int, touched_nbytes: int) -> torch.UntypedStorage:
        address = _inside(self._slabs[slab], start, nbytes)
        carry(self._links[Kind.SLAB], touched_nbytes, lambda: None)
        return storage_at(address, nbytes, self.torch_device)

    def map_peer(self, gpu: int, nbytes: int, handle: bytes, descriptors: Sequence[int]) -> None:
        if not descriptors:
            raise DeviceError(f"what GPU {gpu} exports is no emulated GPU's memory")
        memory = host_memory.PeerMemory(descriptors, nbytes)
        self.drop_peer(gpu)
        self._peers[gpu] = memory

    def drop_peer(self, gpu: int) -> None:
        if (memory := self._peers.pop(gpu, None)) is not None:
            self._stream.give(memory)  # behind whatever reads it

    def remap(self, unmapped: Sequence[Mapping], mapped: Sequence[Mapping]) -> None:
        self._memory.remap(unmapped, mapped)

    def poison(self, offset: int, nbytes: int) -> None:
        if self._poison:
            ctypes.memset(self._address(offset, nbytes), POISON, nbytes)

    # --- copies

    def _source(self, kind: Kind, number: int, start: int, nbytes: int) -> int:
        """Address of bytes to read. Raises ValueError outside: a wrong manifest must not become a wild copy."""
        if kind is Kind.POOL:
            return self._address(start, nbytes)
        try:
            memory = (self._slabs if kind is Kind.SLAB else self._peers)[number]
        except KeyError:
            raise DeviceError(f"the memory of {kind.value} {number} is not mapped") from None
        return _inside(memory, start, nbytes)

    def copy_in(self, copies: Sequence[Copy], on_done: Callable[[], None], after: DeviceEvent | None = None) -> CopyJob:
        job = HostCopyJob(self._parts(copies), len(copies), on_done)
        self._stream.give(job)
        return job

    def _parts(self, copies: Sequence[Copy]) -> list[Memmove]:
        parts = []
        for chunk in chunked(copies, self.chunk_nbytes):
            kind, number = chunk.origin
            target = self._address(chunk.device, chunk.nbytes)
            source = self._source(kind, number, chunk.start, chunk.nbytes)
            parts.append(Memmove(kind, target, source, chunk.nbytes, chunk.finished))
        return parts

    def copy_out(self, copies: Sequence[tuple[torch.UntypedStorage, int, int]]) -> None:
        parts = []
        for storage, slab, offset in copies:
            total, source = storage.nbytes(), storage.data_ptr()
            target = _inside(self._slabs[slab], offset, total)
            for done in range(0, total, self.chunk_nbytes):
                nbytes = min(self.chunk_nbytes, total - done)
                parts.append(Memmove(Kind.SLAB, target + done, source + done, nbytes, 0))
        job = HostCopyJob(parts, 0, lambda: None)
        self._stream.give(job)
        job.join()

    def read_back(self, slab: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        address = _inside(self._slabs[slab], offset, nbytes)
        storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
        carry(self._links[Kind.SLAB], nbytes, partial(ctypes.memmove, storage.data_ptr(), address, nbytes))
        return storage

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, HostEvent)
        event.wait()

    def record(self) -> HostEvent:
        event = HostEvent()
        event.set()
        return event  # the device thread is the compute stream: all issued work is done

    def synchronize(self) -> None:
        """Nothing to wait for, as with :meth:`record`."""

    def bandwidth(self, kind: Kind) -> float:
        return self._stream.bandwidth[kind]

    # --- activations

    def set_activation_limit(self, nbytes: int) -> None:
        self._limit = nbytes
        self.activations.set_limit(nbytes)

    def set_owner(self, number: int) -> None:
        self.activations.set_owner(number)

    def new_capture(self) -> Capture:
        return computed_again

    def relieve(self) -> bool:
        return False

    def activation_stats(self) -> tuple[int, int, int]:
        used = self.activations.used()
        return used, self.activations.peak(), max(0, self._limit - used)

    def refused(self) -> tuple[int, int]:
        return self.activations.refused()

    def reset_peak(self) -> None:
        self.activations.reset_peak()

    def close(self) -> None:
        """Stop the copy thread and unmap everything. No storage of the pool may be used afterwards."""
        self._closing = True
        self._populator.join()
        self._stream.close()
        for slab in list(self._slabs):
            self.unmap_host(slab)
        for memory in self._peers.values():
            memory.close()
        self._memory.close()

    def _populate(self) -> None:
        """Take the pool's pages, in the order in which spans are handed out, so that copies pay for no page fault.

        Beside everything else, because it runs at about 1 GB/s: a start must not wait for it, and a wake that comes
        first merely pays for its own pages.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), POPULATE_NICE)
        for offset in range(0, self.pool_nbytes, POPULATE_NBYTES):
            if self._closing:
                return
            self._memory.populate(offset, min(POPULATE_NBYTES, self.pool_nbytes - offset))
        self.populated.set()


def _granules(total_nbytes: int) -> list[tuple[int, int]]:
    """Large and small granules, ``(nbytes, count)``, that make up a pool as far as whole ones do."""
    large, small = GRANULE_NBYTES
    large_count = (total_nbytes - total_nbytes // SMALL_SHARE) // large
    return [(large, large_count), (small, (total_nbytes - large_count * large) // small)]


def _inside(memory: SharedMemory | host_memory.PeerMemory, start: int, nbytes: int) -> int:
    if not (start >= 0 and nbytes >= 0 and start + nbytes <= memory.nbytes):
        raise ValueError(f"bytes [{start}, +{nbytes}) lie outside a memory of {memory.nbytes} bytes")
    return memory.address + start
