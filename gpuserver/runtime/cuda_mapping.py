"""The pool's address space on a CUDA device as a runtime sees it: granules of the driver, imported by descriptor and
put at the pool's own offsets.

A descriptor of CUDA carries no right: the importer grants its own access. Weights are granted for reading only, so that
a kernel that writes to them ends its runtime; this stops errors, not attackers, and no user code runs here.
"""

import os
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from dormouse.gpuserver.device.cuda import driver, virtual
from dormouse.gpuserver.device.cuda.probe import device_memory_is_host_memory
from dormouse.gpuserver.device.cuda.streams import CudaContext
from dormouse.gpuserver.runtime.mapping import read_only, tensor_at
from dormouse.schemas import messages as m
from dormouse.schemas.errors import DormouseError


def kernel_cache(parent: Path) -> Path:
    """The directory of this user's compiled kernels; nobody else can have put anything there."""
    directory = parent / f"dormouse-kernels-{os.getuid()}"
    with suppress(FileExistsError):
        directory.mkdir(0o700)
    found = directory.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        return directory
    return Path(tempfile.mkdtemp(prefix="dormouse-kernels-", dir=parent))


class CudaMapping:
    """Makes the primary context of GPU ``gpu`` in this process, which torch uses too. Raises DeviceError, DeviceLost.

    The fake driver's memory is the host's: torch computes on the CPU there.
    """

    def __init__(self, gpu: int, nbytes: int, activation_nbytes: int) -> None:
        self._nbytes = nbytes
        self._mapped: dict[int, tuple[int, bool]] = {}  # nbytes and whether it can be written, by offset
        self._context = CudaContext(gpu)
        self._base = virtual.reserve_addresses(nbytes)
        self._torch = not device_memory_is_host_memory()
        self.device = torch.device("cuda", gpu) if self._torch else torch.device("cpu")
        if self._torch:
            os.environ["TRITON_CACHE_DIR"] = str(kernel_cache(Path(tempfile.gettempdir())))  # home is another user's
            torch.cuda.set_device(self.device)
            fraction = min(1.0, activation_nbytes / driver.memory_info()[1])
            torch.cuda.set_per_process_memory_fraction(fraction, self.device)

    def map(self, granules: Sequence[m.GranuleAt], fds: Sequence[int], writable: bool) -> None:
        for granule, fd in zip(granules, fds, strict=True):
            if granule.offset < 0 or granule.nbytes <= 0 or granule.offset + granule.nbytes > self._nbytes:
                raise DormouseError(f"a granule at {granule.offset} lies outside of the pool")
            nbytes, before = self._mapped.get(granule.offset, (0, False))
            if before and not writable:
                continue
            if nbytes:  # another granule may be behind this address now
                self._unmap_all([granule.offset])
            self._map(granule, fd)
            self._grant(granule, writable)
            self._mapped[granule.offset] = granule.nbytes, writable

    def _map(self, granule: m.GranuleAt, fd: int) -> None:
        handle = virtual.import_granule(fd)
        try:
            virtual.map_granule(self._base + granule.offset, granule.nbytes, handle)
        finally:
            virtual.release_granule(handle)  # the mapping holds it

    def _grant(self, granule: m.GranuleAt, writable: bool) -> None:
        """A driver that only grants both is granted both."""
        address, device = self._base + granule.offset, self._context.device
        if not writable:
            try:
                virtual.grant(address, granule.nbytes, device, write=False, optional=True)
            except driver.DriverRefused:
                pass
            else:
                return
        virtual.grant(address, granule.nbytes, device)

    def keep_written(self, spans: Sequence[tuple[int, int]]) -> None:
        gone = [
            offset
            for offset, (nbytes, writable) in self._mapped.items()
            if writable and not any(start < offset + nbytes and offset < start + size for start, size in spans)
        ]
        self._unmap_all(gone)

    def unmap(self, offsets: Sequence[int]) -> None:
        self._unmap_all(read_only(self._mapped, offsets))

    def clear(self) -> None:
        self._unmap_all(list(self._mapped))
        if self._torch:
            torch.cuda.empty_cache()  # the next holder of a seat may need it

    def _unmap_all(self, offsets: Sequence[int]) -> None:
        if offsets:
            self.settle()  # unmapping waits for nothing
        for offset in offsets:
            self._unmap(offset)

    def _unmap(self, offset: int) -> None:
        nbytes, _ = self._mapped.pop(offset)
        virtual.unmap(self._base + offset, nbytes)

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor(0, self._nbytes // dtype.itemsize, dtype)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return tensor_at(self._base, self._nbytes, self.device, offset, numel, dtype)

    def settle(self) -> None:
        driver.synchronize()
