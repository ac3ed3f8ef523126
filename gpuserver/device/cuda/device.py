"""CudaDevice: one GPU, driven through CUDA's driver.

Streams: ``compute``, on which torch runs and the device thread issues; one for copies to the GPU, which the copy thread
issues to (copies.py); one for copies from it. All are non-blocking: torch's default stream orders nothing here. This
module decides the order:

* a copy job begins after the work that the compute stream had when the job was given;
* the compute stream waits for a copy's event on the GPU, the calling thread at most until that copy is issued;
* granules are unmapped after the compute stream and every job that touches them have passed, on the host, because
  unmapping is not ordered with any stream;
* granules are cleared on the compute stream, before whatever is given to any stream next;
* a slab, a peer's memory or the pool is given back when no job uses it any more;
* slabs are pinned behind all this (host.py): copies do not wait for it.

Any error after which the context cannot be trusted is DeviceLost, here and in every later call.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

import torch

from dormouse.core.decisions.memory.pools.protocol import Mapping, Pool
from dormouse.core.decisions.memory.transfer import Copy, Kind, chunked
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.cuda import driver, nvml
from dormouse.gpuserver.device.cuda.budget import context_nbytes, crowding, divided
from dormouse.gpuserver.device.cuda.copies import CopyStream, CudaCopyJob
from dormouse.gpuserver.device.cuda.host import Pinner, Staging
from dormouse.gpuserver.device.cuda.memory import SMALL_NBYTES, CudaBlock, CudaGranules, CudaMemory, contiguous
from dormouse.gpuserver.device.cuda.sources import CopySources
from dormouse.gpuserver.device.cuda.steps import SCRATCH_NBYTES, Steps
from dormouse.gpuserver.device.cuda.streams import CudaContext, CudaEvent
from dormouse.gpuserver.device.cuda.torch_adapter import torch_adapter
from dormouse.gpuserver.device.protocol import (
    POISON,
    Capture,
    DeviceError,
    DeviceEvent,
    DeviceLost,
    Exported,
    storage_at,
)
from dormouse.schemas.messages import DeviceInfo, GpuPlace

CHUNK_NBYTES: Final = 16 << 20
"""0.3 ms of a PCIe 5 link. On an H200, chunks of 4 MiB reach 53.5 GB/s, of 8 MiB 54.4, of 32 MiB 55.1; and each costs
some 10 us of Python before the first one is on the link."""


class CudaDevice:
    """GPU ``ordinal`` of this process.

    Args:
        memory_nbytes: pool and activations; 0: the free memory, less the head-room.
        activation_nbytes: of it, for activations; 0: a quarter.
        pool: "regions" | "pages" | "buddy".
        threads: torch's threads on the device thread, for its work on the host.
        poison: overwrite spans that are given up.

    Raises DeviceError, DeviceLost.
    """

    activations_share_pool = False  # they are memory of their own

    def __init__(
        self,
        ordinal: int,
        *,
        memory_nbytes: int = 0,
        activation_nbytes: int = 0,
        pool: str = "regions",
        threads: int = 1,
        poison: bool = False,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        self.chunk_nbytes = chunk_nbytes
        self.ordinal = ordinal
        self.on_lost: Callable[[DeviceLost], None] = lambda error: None
        self.on_trouble: Callable[[str], None] = lambda text: None
        self.strategy = pool
        self._threads = threads
        self._poison = poison
        self._context = CudaContext(ordinal)
        self._closed = False
        device = self._context.device
        free_nbytes, whole_nbytes = driver.memory_info()
        self.context_nbytes = context_nbytes(free_nbytes, whole_nbytes)
        budget = divided(
            ordinal,
            free_nbytes,
            whole_nbytes,
            memory_nbytes=memory_nbytes,
            activation_nbytes=activation_nbytes,
            scratch_nbytes=SCRATCH_NBYTES,
            unit_nbytes=SMALL_NBYTES,
        )
        self.activation_nbytes, planned = budget.activation_nbytes, budget.pool_nbytes
        self._shortage = budget.shortage
        self._crowded = False
        self._memory: CudaMemory
        if pool == "pages":
            self._memory = CudaGranules(self._context, planned)
        else:
            self._memory = CudaBlock(self._context, planned, pool == "buddy")
        self.pool_nbytes = self._memory.nbytes
        self.info = DeviceInfo(
            name=driver.device_name(device),
            total_nbytes=self.pool_nbytes + self.activation_nbytes,
            capability=driver.capability(device),
            multiprocessors=driver.multiprocessors(device),
            cuda=torch.version.cuda or "",
        )
        self.place: GpuPlace | None = nvml.look(nvml.named(driver.device_uuid(device)))
        self._scratch = driver.allocate(SCRATCH_NBYTES)
        self._compute = driver.create_stream()
        self._out = driver.create_stream()
        self._out_staging = Staging(self._context, chunk_nbytes)
        self._adapter = torch_adapter(self._context, ordinal, self._compute, self.activation_nbytes)
        self.torch_device = self._adapter.device
        self.approximate = self._adapter.approximate
        self.captures = self._adapter.captures
        self._uncleared: set[int] = set()  # granules that the pool takes for cleared, after a remap that failed
        self._copies = CopyStream(self._context, chunk_nbytes, lambda error: self.on_lost(error))
        self._copies.staging.reserve()
        self._out_staging.reserve()
        self.beside_nbytes = max(0, driver.memory_info()[0] - self.activation_nbytes)
        pinner = Pinner(self._context, lambda text: self.on_trouble(text), lambda error: self.on_lost(error))
        self._sources = CopySources(self._context, pinner)

    # --- memory

    def make_pool(self) -> Pool:
        return self._memory.make_pool()

    def attach_thread(self) -> None:
        self._context.use()
        self._adapter.attach(self._threads)
        if self._shortage:
            self.on_trouble(self._shortage)

    def storage(self, offset: int, nbytes: int) -> torch.UntypedStorage:
        self._require(offset, nbytes)
        return storage_at(self._memory.base + offset, nbytes, self.torch_device)

    def contains(self, pointer: int, nbytes: int) -> bool:
        return self._in_pool(pointer, nbytes) or self._adapter.holds(pointer, nbytes)

    def _in_pool(self, pointer: int, nbytes: int) -> bool:
        return 0 <= pointer - self._memory.base <= self._memory.span_nbytes - nbytes

    def _require(self, offset: int, nbytes: int) -> None:
        if not self._memory.covers(offset, nbytes):
            raise ValueError(
                f"span [{offset}, +{nbytes}) lies outside a pool of {self.pool_nbytes} bytes, or is not mapped"
            )

    def remap(self, unmapped: Sequence[Mapping], mapped: Sequence[Mapping]) -> None:
        self._context.use()
        memory = self._memory
        if not isinstance(memory, CudaGranules):
            raise ValueError("only pools of pages are mapped")
        for mapping in (*unmapped, *mapped):
            memory.check(mapping)
        gone = [mapping for mapping in unmapped if memory.is_mapped(mapping)]  # not so after a remap that failed
        if gone:
            last = self._context.recorded(self._compute)
            for job in self._copies.touching([(start, start + nbytes) for start, nbytes in contiguous(gone)]):
                job.join()
            last.synchronize()
            memory.unmap(gone)
        self._uncleared |= {mapping.granule for mapping in mapped if mapping.clear}
        memory.map(mapped)
        owed = [mapping for mapping in mapped if mapping.granule in self._uncleared]
        for start, nbytes in contiguous(owed):
            driver.fill(memory.base + start, 0, nbytes, self._compute)
        self._uncleared -= {mapping.granule for mapping in owed}
        self._adapter.follow()

    # --- memory beside the pool

    def map_host(self, slab: int, memory: SharedMemory) -> None:
        self._sources.map_host(slab, memory)

    def settle(self) -> None:
        self._sources.settle()

    def unmap_host(self, slab: int) -> None:
        self._sources.unmap_host(slab)

    @property
    def address_nbytes(self) -> int:
        return self._memory.span_nbytes

    def granule(self, physical: int, writable: bool) -> int:
        """A descriptor of CUDA is for both: whoever imports it chooses."""
        if not isinstance(self._memory, CudaGranules):
            raise DeviceError(f"a language model needs [gpu] pool = 'pages' on CUDA devices, not {self.strategy!r}")
        self._context.use()
        return self._memory.descriptor(physical)

    def host_storage(self, slab: int, start: int, nbytes: int, touched_nbytes: int) -> torch.UntypedStorage | None:
        """None: a kernel could read a pinned slab, but its cost beside copies is not measured on a GPU."""
        return None

    def export(self) -> Exported:
        self._context.use()
        return self._memory.export()

    def map_peer(self, gpu: int, nbytes: int, handle: bytes, descriptors: Sequence[int]) -> None:
        self._sources.map_peer(gpu, nbytes, handle, descriptors)

    def drop_peer(self, gpu: int) -> None:
        self._sources.drop_peer(gpu)

    # --- copies

    def copy_in(
        self, copies: Sequence[Copy], on_done: Callable[[], None], after: DeviceEvent | None = None
    ) -> CudaCopyJob:
        self._context.use()
        plan = Steps(self._memory.base, self._scratch, self.chunk_nbytes, self._context.event)
        with self._sources.kept():
            for chunk in chunked(copies, self.chunk_nbytes):
                self._require(chunk.device, chunk.nbytes)
                inside = chunk.origin.kind is Kind.POOL
                if inside:
                    self._require(chunk.start, chunk.nbytes)
                plan.add(chunk, None if inside else self._sources.source(chunk.origin))
            point = after if isinstance(after, CudaEvent) else self._context.recorded(self._compute)
            job = CudaCopyJob(plan, point, on_done)
            self._copies.give(job)
        return job

    def copy_out(self, copies: Sequence[tuple[torch.UntypedStorage, int, int]]) -> None:
        self._context.use()
        driver.wait_event(self._out, self._context.recorded(self._compute).handle())
        for storage, number, offset in copies:
            slab = self._sources.slab(number)
            source, nbytes = storage.data_ptr(), storage.nbytes()
            target = slab.span(offset, nbytes, f"host {number}")
            if not self.contains(source, nbytes):
                raise ValueError(f"a storage of {nbytes} bytes that is not on this GPU")
            if not self._in_pool(source, nbytes) and self._adapter.in_host_memory(source, nbytes):
                ctypes.memmove(target, source, nbytes)
                continue
            for part in slab.parts(offset, nbytes, self.chunk_nbytes):
                done = part.offset - offset
                if part.pinned:
                    driver.copy_to_host(target + done, source + done, part.nbytes, self._out)
                else:
                    self._out_staging.to_host(target + done, source + done, part.nbytes, self._out)
        self._context.recorded(self._out).synchronize()

    def bandwidth(self, kind: Kind) -> float:
        if kind is Kind.PEER and not self._sources.peers:
            return 0.0  # nothing comes over a link that is not there
        return self._copies.rates.get(kind)

    # --- order

    def read_back(self, slab: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        address = self._sources.slab(slab).span(offset, nbytes, f"host {slab}")
        storage = torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)
        if nbytes:
            storage.copy_(torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8))
        return storage.untyped_storage()

    def wait(self, event: DeviceEvent) -> None:
        assert isinstance(event, CudaEvent)
        driver.wait_event(self._compute, event.handle())
        self._adapter.follow()

    def record(self) -> CudaEvent:
        self._context.use()
        return self._context.recorded(self._compute)

    def synchronize(self) -> None:
        self._context.use()
        try:
            driver.synchronize_stream(self._compute)
        except driver.DriverRefused as error:  # of something that was issued before: it is unknown of what
            driver.lose(DeviceLost(f"the compute stream failed: {error}"))
            driver.require()

    def poison(self, offset: int, nbytes: int) -> None:
        if self._poison:
            self._context.use()
            self._require(offset, nbytes)
            driver.fill(self._memory.base + offset, POISON, nbytes, self._compute)
            self._adapter.follow()

    # --- activations

    def set_activation_limit(self, nbytes: int) -> None:
        """Nothing: ``activation_nbytes`` is memory of its own, whatever the pool has free."""

    def set_owner(self, number: int) -> None:
        self._context.use()
        self._adapter.set_owner(number)

    def new_capture(self) -> Capture:
        return self._adapter.new_capture()

    def relieve(self) -> bool:
        relieved = self._adapter.relieve()
        free, _ = driver.memory_info()
        text = crowding(self._adapter.held() + free, self.activation_nbytes)
        if text and not self._crowded:
            self.on_trouble(text)
        self._crowded = bool(text)
        return relieved

    def activation_stats(self) -> tuple[int, int, int]:
        used, peak = self._adapter.stats()
        return used, peak, max(0, self.activation_nbytes - used)

    def refused(self) -> tuple[int, int]:
        return 0, 0  # the pool cannot help

    def reset_peak(self) -> None:
        self._adapter.reset_peak()

    def close(self) -> None:
        """Wait for all streams and give everything back. No storage of the pool may be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self._copies.close()
        if driver.lost() is not None:
            return  # no call succeeds any more; the process ends
        self._context.use()
        for stream in (self._compute, self._out):
            driver.synchronize_stream(stream)
        self._adapter.detach()
        self._sources.close()
        self._out_staging.close()
        driver.free(self._scratch)
        self._memory.close()
        for stream in (self._compute, self._out):
            driver.destroy_stream(stream)
        self._context.close()
