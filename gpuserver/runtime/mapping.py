"""The pool's address space as a runtime sees it: granules of its memory at the pool's own offsets, nothing else.

Memory that is mapped for reading cannot be written: a kernel that tries ends its runtime, and no other.
"""

import ctypes
import errno
import mmap
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import torch

from dormouse.schemas import messages as m
from dormouse.schemas.errors import DormouseError

_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class PoolMapping(Protocol):
    """All of the address space is reserved, and nothing of it is mapped at first."""

    device: torch.device

    def map(self, granules: Sequence[m.GranuleAt], fds: Sequence[int], writable: bool) -> None:
        """A descriptor for each. Granules that are writable already stay so. Raises DormouseError."""

    def keep_written(self, spans: Sequence[tuple[int, int]]) -> None:
        """Of writable granules, only those that these ``(offset, nbytes)`` touch stay mapped."""

    def unmap(self, offsets: Sequence[int]) -> None:
        """Unmap the read-only granules at these offsets, if there are any."""

    def clear(self) -> None:
        """Nothing is mapped any more."""

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """All of the address space, one-dimensional: only mapped parts may be touched."""

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Elements from ``offset`` bytes on. Raises ValueError outside."""

    def settle(self) -> None:
        """Wait until the device has finished its work."""


class HostMapping:
    """Of an emulated GPU: its granules are memfds."""

    device = torch.device("cpu")

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._mapped: dict[int, tuple[int, bool]] = {}  # nbytes and whether it can be written, by offset
        self._base = _map(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)

    def map(self, granules: Sequence[m.GranuleAt], fds: Sequence[int], writable: bool) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        for granule, fd in zip(granules, fds, strict=True):
            if granule.offset < 0 or granule.offset + granule.nbytes > self._nbytes:
                raise DormouseError(f"a granule at {granule.offset} lies outside of the pool")
            _, before = self._mapped.get(granule.offset, (0, False))
            if before and not writable:
                continue
            address = self._base + granule.offset
            _map(address, granule.nbytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
            self._mapped[granule.offset] = granule.nbytes, writable

    def keep_written(self, spans: Sequence[tuple[int, int]]) -> None:
        for offset, (nbytes, writable) in list(self._mapped.items()):
            used = any(start < offset + nbytes and offset < start + size for start, size in spans)
            if writable and not used:
                self._unmap(offset)

    def unmap(self, offsets: Sequence[int]) -> None:
        for offset in read_only(self._mapped, offsets):
            self._unmap(offset)

    def clear(self) -> None:
        for offset in list(self._mapped):
            self._unmap(offset)

    def _unmap(self, offset: int) -> None:
        nbytes, _ = self._mapped.pop(offset)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(self._base + offset, nbytes, 0, flags, -1, 0)

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor(0, self._nbytes // dtype.itemsize, dtype)

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return tensor_at(self._base, self._nbytes, self.device, offset, numel, dtype)

    def settle(self) -> None:
        """It has: torch computes on this thread."""


def read_only(mapped: Mapping[int, tuple[int, bool]], offsets: Iterable[int]) -> list[int]:
    """Those of ``offsets`` that are mapped and cannot be written."""
    return [offset for offset in offsets if not mapped.get(offset, (0, True))[1]]


def tensor_at(
    base: int, pool_nbytes: int, device: torch.device, offset: int, numel: int, dtype: torch.dtype
) -> torch.Tensor:
    """Raises ValueError."""
    nbytes = numel * dtype.itemsize
    if offset < 0 or numel < 0 or offset + nbytes > pool_nbytes:
        raise ValueError(f"{nbytes} bytes at {offset} lie outside of the pool")
    if offset % dtype.itemsize:
        raise ValueError(f"elements of {dtype.itemsize} bytes at {offset}")
    storage = torch._C._construct_storage_from_data_pointer(base + offset, device, nbytes)
    empty = torch.empty(0, dtype=dtype, device=device)
    return empty.set_(storage, 0, (numel,))  # type: ignore[call-overload, no-any-return]


def _map(address: int | None, nbytes: int, access: int, flags: int, fd: int, offset: int) -> int:
    result = _libc.mmap(address, nbytes, access, flags, fd, offset)
    if result in (None, _FAILED):
        code = ctypes.get_errno()
        raise DormouseError(f"cannot map {nbytes:,} bytes: {errno.errorcode.get(code, code)}")
    return int(result)
