"""The memory beside a GPU's pool that copies read and write: slabs of the host and other GPUs' pools, by number.

Any thread may add and take away. Memory that is taken away is given back when no job uses it any more (host.py).
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dormouse.core.decisions.memory.transfer import Kind, Origin
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.cuda.host import HostSlab, Pinner, Source
from dormouse.gpuserver.device.cuda.peers import open_peer
from dormouse.gpuserver.device.cuda.streams import CudaContext
from dormouse.gpuserver.device.protocol import DeviceError


class CopySources:
    """See the module. ``pinner`` pins slabs, and is closed with this."""

    def __init__(self, context: CudaContext, pinner: Pinner) -> None:
        self._context, self._pinner = context, pinner
        self._slabs: dict[int, HostSlab] = {}
        self._peers: dict[int, Source] = {}
        self._lock = threading.RLock()  # of the two above

    def map_host(self, slab: int, memory: SharedMemory) -> None:
        self._context.use()
        source = HostSlab(memory, self._pinner)
        with self._lock:
            self._slabs[slab] = source
        if memory.pinnable:
            self._pinner.pin(source)

    def unmap_host(self, slab: int) -> None:
        self._context.use()
        with self._lock:
            source = self._slabs.pop(slab)
        source.retire()

    def map_peer(self, gpu: int, nbytes: int, handle: bytes, descriptors: Sequence[int]) -> None:
        self._context.use()
        source = open_peer(self._context, nbytes, handle, descriptors)
        with self._lock:
            before = self._peers.pop(gpu, None)
            self._peers[gpu] = source
        if before is not None:
            before.retire()

    def drop_peer(self, gpu: int) -> None:
        self._context.use()
        with self._lock:
            source = self._peers.pop(gpu, None)
        if source is not None:
            source.retire()

    @property
    def peers(self) -> bool:
        """Whether other GPUs' memory can be read."""
        return bool(self._peers)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Nothing is taken away meanwhile: a source that was found is there until a job uses it."""
        with self._lock:
            yield

    def source(self, origin: Origin) -> Source:
        """Raises DeviceError."""
        with self._lock:
            table: dict[int, HostSlab] | dict[int, Source] = self._slabs if origin.kind is Kind.SLAB else self._peers
            source = table.get(origin.number)
        if source is None:
            raise DeviceError(f"the memory of {origin.kind.value} {origin.number} is not mapped")
        return source

    def slab(self, number: int) -> HostSlab:
        """Raises DeviceError."""
        slab = self.source(Origin(Kind.SLAB, number))
        assert isinstance(slab, HostSlab)
        return slab

    def settle(self) -> None:
        self._pinner.settle()

    def close(self) -> None:
        """No job uses anything any more."""
        for source in (*self._slabs.values(), *self._peers.values()):
            source.retire()
        self._pinner.close()
