"""HostDevice: an emulated GPU whose memory is real shared memory, whose streams are threads and whose kernels are
torch's CPU ones.

The compute stream is the device thread itself. The copy stream is a thread that only calls ``memmove`` through
ctypes, which releases the interpreter lock, so that copies and kernels really run side by side. The limit is hard:
pool bytes in use and activations together never exceed ``total_nbytes``; the caller says how much the pool leaves.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final, cast

import torch

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver import allocator
from dormouse.gpuserver.device import CopyJob, Event
from dormouse.gpuserver.transfer import Chunk, Copy, chunked
from dormouse.schemas.messages import DeviceInfo

CHUNK_NBYTES: Final = 4 << 20
"""Copies of 1 to 128 MiB all ran at 6.4-6.6 GB/s where this was measured (notes/feasibility.md): 4 MiB is 0.6 ms,
fine enough to overlap with computation and coarse enough that an event and a Python loop turn (about 10 us) are under
2 %."""

POPULATE_NBYTES: Final = 4 << 20
"""Each step holds the process's memory map: about 4 ms, so that nobody who maps memory waits long for a nice thread."""

POPULATE_NICE: Final = 10

POISON: Final = 0xFF
"""Every float type reads 0xFF bytes as NaN and every integer type as -1 or its largest value."""

CAPABILITY: Final = (8, 0)
"""What is claimed of the emulated GPU: the oldest one with bfloat16, so that libraries choose no newer kernels."""


class HostEvent:
    """A point on the copy thread's or the device thread's sequence."""

    __slots__ = ("_flag",)

    def __init__(self, passed: bool = False) -> None:
        self._flag = threading.Event()
        if passed:
            self._flag.set()

    def done(self) -> bool:
        return self._flag.is_set()

    def set(self) -> None:
        self._flag.set()

    def wait(self) -> None:
        self._flag.wait()


class HostCopyJob:
    """A list of chunks for the copy thread."""

    def __init__(self, chunks: list[tuple[int, int, Chunk]], count: int, on_done: Callable[[], None]) -> None:
        self.chunks = chunks  # (destination address, source address, chunk)
        self.events: list[HostEvent] = [HostEvent() for _ in range(count)]
        self.cancelled = False
        self.finished = threading.Event()
        self.on_done = on_done

    def cancel(self) -> None:
        self.cancelled = True

    def join(self) -> None:
        self.finished.wait()


class HostDevice:
    """One emulated GPU.

    Args:
        total_nbytes: its whole memory: the pool is as large, and what of it models occupy is not there for activations.
        threads: intra-op threads of torch on the device thread.
        link_nbytes_s: bandwidth of copies from and to slabs in bytes per second; 0 is as fast as memory.
        poison: overwrite evicted bytes.

    Attributes:
        populated: set once all pages of the pool are there.
    """

    def __init__(
        self,
        total_nbytes: int,
        *,
        threads: int = 1,
        link_nbytes_s: int = 0,
        poison: bool = False,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        self.info = DeviceInfo(
            name="Dormouse emulated GPU", total_nbytes=total_nbytes, capability=CAPABILITY, multiprocessors=threads
        )
        self.torch_device = torch.device("cpu")
        self.pool_nbytes = total_nbytes
        self.chunk_nbytes = chunk_nbytes
        self._threads = threads
        self._link_nbytes_s = link_nbytes_s
        self._poison = poison
        self._pool = SharedMemory.create("dormouse-pool", total_nbytes)
        self.populated = threading.Event()
        self._closing = False
        self._populator = threading.Thread(target=self._populate, name="populate", daemon=True)
        self._populator.start()
        self._slabs: dict[int, SharedMemory] = {}
        self._limit = total_nbytes
        self.activations = allocator.install()
        self.approximate = self.activations.approximate
        self.activations.set_limit(total_nbytes)
        self._jobs: SimpleQueue[HostCopyJob | None] = SimpleQueue()
        self._copier = threading.Thread(target=self._copy_stream, name="copy-stream", daemon=True)
        self._copier.start()

    def attach_thread(self) -> None:
        torch.set_num_threads(self._threads)  # the OpenMP setting belongs to the calling thread
        self.activations.limit_this_thread()

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        if not (offset >= 0 and nbytes >= 0 and offset + nbytes <= self.pool_nbytes):
            raise ValueError(f"span [{offset}, +{nbytes}) lies outside a pool of {self.pool_nbytes} bytes")
        address = self._pool.address + offset
        storage = torch._C._construct_storage_from_data_pointer(address, self.torch_device, nbytes)
        return cast("torch.UntypedStorage", storage)  # torch's stubs say Storage

    def contains(self, pointer: int, nbytes: int) -> bool:
        offset = pointer - self._pool.address
        return 0 <= offset <= self.pool_nbytes - nbytes or self.activations.contains(pointer, nbytes)

    def map_host(self, slab: int, memory: SharedMemory) -> None:
        self._slabs[slab] = memory

    def unmap_host(self, slab: int) -> None:
        self._slabs.pop(slab).close()

    def host_address(self, slab: int, offset: int, nbytes: int) -> int:
        """Address of bytes of a slab. Raises ValueError outside of it: a wrong manifest must not become a wild copy."""
        memory = self._slabs[slab]
        if not (offset >= 0 and nbytes >= 0 and offset + nbytes <= memory.nbytes):
            raise ValueError(f"bytes [{offset}, +{nbytes}) lie outside slab {slab} of {memory.nbytes} bytes")
        return memory.address + offset

    def copy_in(self, copies: Sequence[Copy], on_done: Callable[[], None]) -> CopyJob:
        chunks = []
        for chunk in chunked(copies, self.chunk_nbytes):
            if not (chunk.device >= 0 and chunk.device + chunk.nbytes <= self.pool_nbytes):
                raise ValueError(
                    f"span [{chunk.device}, +{chunk.nbytes}) lies outside a pool of {self.pool_nbytes} bytes"
                )
            source = self.host_address(chunk.slab, chunk.host, chunk.nbytes)
            chunks.append((self._pool.address + chunk.device, source, chunk))
        job = HostCopyJob(chunks, len(copies), on_done)
        self._jobs.put(job)
        return job

    def copy_out(self, copies: Sequence[tuple[torch.UntypedStorage, int, int]]) -> None:
        chunks = []
        for storage, slab, offset in copies:
            target, source, total = (
                self.host_address(slab, offset, storage.nbytes()),
                storage.data_ptr(),
                storage.nbytes(),
            )
            for done in range(0, total, self.chunk_nbytes):
                nbytes = min(self.chunk_nbytes, total - done)
                chunks.append((target + done, source + done, Chunk(slab, offset + done, 0, nbytes, 0)))
        job = HostCopyJob(chunks, 0, lambda: None)
        self._jobs.put(job)
        job.join()

    def wait(self, event: Event) -> None:
        assert isinstance(event, HostEvent)
        event.wait()

    def record(self) -> HostEvent:
        return HostEvent(passed=True)  # the device thread is the compute stream: what was issued is done

    def poison(self, offset: int, nbytes: int) -> None:
        if self._poison:
            ctypes.memset(self._pool.address + offset, POISON, nbytes)

    def set_activation_limit(self, nbytes: int) -> None:
        self._limit = nbytes
        self.activations.set_limit(nbytes)

    def activation_stats(self) -> tuple[int, int, int]:
        used = self.activations.used()
        return used, self.activations.peak(), max(0, self._limit - used)

    def reset_peak(self) -> None:
        self.activations.reset_peak()

    def close(self) -> None:
        """Stop the copy thread and unmap everything. No storage of the pool may be used afterwards."""
        self._closing = True
        self._populator.join()
        self._jobs.put(None)
        self._copier.join()
        for slab in list(self._slabs):
            self.unmap_host(slab)
        self._pool.close()

    def _populate(self) -> None:
        """Take the pool's pages, in the order in which spans are handed out, so that copies pay for no page fault.

        Beside everything else, because it runs at about 1 GB/s: a start must not wait for it, and a wake that comes
        first merely pays for its own pages.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), POPULATE_NICE)
        for offset in range(0, self.pool_nbytes, POPULATE_NBYTES):
            if self._closing:
                return
            self._pool.populate(offset, min(POPULATE_NBYTES, self.pool_nbytes - offset))
        self.populated.set()

    def _copy_stream(self) -> None:
        while (job := self._jobs.get()) is not None:
            finished = 0
            for target, source, chunk in job.chunks:
                if job.cancelled:
                    break
                began = time.perf_counter()
                ctypes.memmove(target, source, chunk.nbytes)
                if self._link_nbytes_s:
                    time.sleep(max(0.0, began + chunk.nbytes / self._link_nbytes_s - time.perf_counter()))
                while finished < chunk.finished:
                    job.events[finished].set()
                    finished += 1
            if not job.cancelled:
                job.on_done()
            job.finished.set()
