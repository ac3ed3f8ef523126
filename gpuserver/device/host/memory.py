"""The memory of an emulated GPU's pool: one contiguous mapping, or granules that move to the addresses of segments.

Owns the addresses; what lies where is the pool's business. ``base + offset`` is the address of a pool's offset, for
offsets below ``address_nbytes``. In both cases the bytes are those of one memfd, ``exported``, which other executors
map to read from; ``populate`` takes its pages before they are needed.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from dormouse.core.memory.pools.protocol import Mapping
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.protocol import DeviceError
from dormouse.schemas.errors import ConfigError

HUGE_NBYTES: Final = 2 << 20
"""Granules are multiples of this and lie at multiples of it: then the kernel moves whole page tables."""

_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MREMAP_DONTUNMAP: Final = 4
_MADV_POPULATE_WRITE: Final = 23
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Contiguous:
    """The pool's offsets are the memory's."""

    def __init__(self, nbytes: int) -> None:
        self.exported = SharedMemory.create("dormouse-pool", nbytes)
        self.base, self.address_nbytes = self.exported.address, nbytes

    def populate(self, offset: int, nbytes: int) -> None:
        self.exported.populate(offset, nbytes)

    def remap(self, unmapped: Sequence[Mapping], mapped: Sequence[Mapping]) -> None:
        raise ValueError("a contiguous pool maps nothing")

    def close(self) -> None:
        self.exported.close()


class MemfdGranules:
    """Granules of a memfd, populated once and moved by ``mremap`` between a place of their own, where they are parked,
    and the addresses of segments. An address without a granule cannot be accessed.

    Args:
        physical: offset of each granule in the memfd, by its number.

    Raises ConfigError where the kernel cannot move shared pages.
    """

    def __init__(self, nbytes: int, address_nbytes: int, physical: Callable[[int], int]) -> None:
        if reason := unsupported():
            raise ConfigError(reason)
        self.exported = SharedMemory.create("dormouse-pool", nbytes)
        self.address_nbytes = address_nbytes
        self._physical = physical
        self._mapped: dict[int, int] = {}  # granule by offset
        self._uncleared: set[int] = set()  # granules that were to be cleared by a remap that failed before
        self._reservations: list[tuple[int, int]] = []
        self.base = self._reserve(address_nbytes)
        self._park = self._reserve(nbytes)
        _map(self._park, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, self.exported.fd)

    def _reserve(self, nbytes: int) -> int:
        address = _map(None, nbytes + HUGE_NBYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._reservations.append((address, nbytes + HUGE_NBYTES))
        return -(-address // HUGE_NBYTES) * HUGE_NBYTES

    def populate(self, offset: int, nbytes: int) -> None:
        _libc.madvise(self._park + offset, nbytes, _MADV_POPULATE_WRITE)  # with the tables that moves then take along

    def remap(self, unmapped: Sequence[Mapping], mapped: Sequence[Mapping]) -> None:
        for mapping in unmapped:
            if self._mapped.get(mapping.offset) == mapping.granule:  # not so after a remap that failed
                self.unmap(mapping)
        self._uncleared |= {mapping.granule for mapping in mapped if mapping.clear}
        for mapping in mapped:
            self.map(mapping)

    def unmap(self, mapping: Mapping) -> None:
        address = self.base + mapping.offset
        with suppress(OSError):  # the bytes are the memfd's: what has not moved is found there again
            _move(address, self._park + self._physical(mapping.granule), mapping.nbytes)
        del self._mapped[mapping.offset]
        # The emptied mapping still leads to the memfd: what is not mapped must not be readable.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(address, mapping.nbytes, 0, flags, -1)

    def map(self, mapping: Mapping) -> None:
        if mapping.offset % HUGE_NBYTES or mapping.offset + mapping.nbytes > self.address_nbytes:
            raise ValueError(f"a granule of {mapping.nbytes} bytes at address {mapping.offset}")
        address = self.base + mapping.offset
        try:
            _move(self._park + self._physical(mapping.granule), address, mapping.nbytes)
        except OSError as error:
            raise DeviceError(
                f"cannot map a granule of {mapping.nbytes:,} bytes: {error.strerror}; {len(self._mapped)} are mapped "
                "(see vm.max_map_count)"
            ) from error
        self._mapped[mapping.offset] = mapping.granule
        if mapping.clear or mapping.granule in self._uncleared:
            ctypes.memset(address, 0, mapping.nbytes)
            self._uncleared.discard(mapping.granule)

    def close(self) -> None:
        for address, nbytes in self._reservations:
            _libc.munmap(address, nbytes)
        self.exported.close()


EmulatedMemory = Contiguous | MemfdGranules


def unsupported() -> str:
    """Why granules cannot be moved here (kernels before 5.13); empty if they can."""
    fd = os.memfd_create("dormouse-probe", os.MFD_CLOEXEC)
    page = mmap.PAGESIZE
    try:
        os.ftruncate(fd, page)
        start = _map(None, page, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd)
        target = _map(None, page, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        try:
            _move(start, target, page)
        except OSError as error:
            return f"this kernel cannot move shared pages ({error.strerror}): set gpu.pool to regions"
        finally:
            _libc.munmap(start, page)
            _libc.munmap(target, page)
    finally:
        os.close(fd)
    return ""


def _map(address: int | None, nbytes: int, access: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, access, flags, fd, 0)
    if result in (None, _FAILED):
        code = ctypes.get_errno()
        raise MemoryError(f"cannot map {nbytes:,} bytes: {errno.errorcode.get(code, code)}")
    return int(result)


def _move(source: int, target: int, nbytes: int) -> None:
    """Move the pages of a mapping; the source's mapping stays, without them, so that nobody else can take its place."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if _libc.mremap(source, nbytes, nbytes, flags, target) in (None, _FAILED):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
