"""The memory of an emulated GPU's pool: one contiguous mapping, or granules that move to the addresses of segments.

Owns the addresses; the pool decides the layout. ``base + offset`` is the address of a pool's offset, for offsets below
``address_nbytes``. The bytes are those of memfds, one after the other in *physical* order, which other executors map to
read from; ``populate`` takes their pages before they are needed. A granule is a memfd of its own, so a runtime can be
given one, to read or to write, and none of its neighbours.
"""

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from dormouse.core.decisions.memory.pools.protocol import Mapping
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.protocol import DeviceError
from dormouse.schemas.errors import ConfigError

HUGE_NBYTES: Final = 2 << 20
"""Granules are multiples of this and lie at multiples of it: then the kernel moves whole page tables."""

SPARE_DESCRIPTORS: Final = 8192
"""For everything else that an executor has open: instances, slabs, other GPUs' memory while it is mapped."""

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
        self._memory = SharedMemory.create("dormouse-pool", nbytes)
        self.base, self.address_nbytes = self._memory.address, nbytes

    def descriptors(self) -> list[int]:
        return [self._memory.fd]

    def descriptor(self, physical: int) -> int:
        """Of the memfd that begins there."""
        if physical:
            raise ValueError(f"no memory begins at {physical}")
        return self._memory.fd

    def populate(self, offset: int, nbytes: int) -> None:
        self._memory.populate(offset, nbytes)

    def remap(self, unmapped: Sequence[Mapping], mapped: Sequence[Mapping]) -> None:
        raise ValueError("a contiguous pool maps nothing")

    def close(self) -> None:
        self._memory.close()


class MemfdGranules:
    """Granules, a memfd each, populated once and moved by ``mremap`` between a place of their own, where they are
    parked, and the addresses of segments. An address without a granule cannot be accessed.

    Args:
        granules: ``(nbytes, count)`` of each class, in the order of their numbers.

    Raises ConfigError where the kernel cannot move shared pages, or there are not enough descriptors.
    """

    def __init__(self, granules: Sequence[tuple[int, int]], address_nbytes: int) -> None:
        if reason := unsupported():
            raise ConfigError(reason)
        sizes = [nbytes for nbytes, count in granules for _ in range(count)]
        nbytes = sum(sizes)
        self.address_nbytes = address_nbytes
        self._physical = [0, *itertools.accumulate(sizes)]  # where each begins, by number
        _raise_limit(len(sizes))
        self._fds = [_memfd(size) for size in sizes]
        self._numbers = {start: number for number, start in enumerate(self._physical[:-1])}
        self._mapped: dict[int, int] = {}  # granule by offset
        self._uncleared: set[int] = set()  # granules that were to be cleared by a remap that failed before
        self._reservations: list[tuple[int, int]] = []
        self.base = self._reserve(address_nbytes)
        self._park = self._reserve(nbytes)
        for fd, start, size in zip(self._fds, self._physical, sizes, strict=False):
            flags = mmap.MAP_SHARED | _MAP_FIXED
            _map(self._park + start, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd)

    def descriptors(self) -> list[int]:
        return list(self._fds)

    def descriptor(self, physical: int) -> int:
        """Of the granule that begins there."""
        return self._fds[self._numbers[physical]]

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
        with suppress(OSError):  # the bytes are the memfd's: those that have not moved are found there again
            _move(address, self._park + self._physical[mapping.granule], mapping.nbytes)
        del self._mapped[mapping.offset]
        # The emptied mapping still leads to the memfd: unmapped memory must not be readable.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(address, mapping.nbytes, 0, flags, -1)

    def map(self, mapping: Mapping) -> None:
        if mapping.offset % HUGE_NBYTES or mapping.offset + mapping.nbytes > self.address_nbytes:
            raise ValueError(f"a granule of {mapping.nbytes} bytes at address {mapping.offset}")
        address = self.base + mapping.offset
        try:
            _move(self._park + self._physical[mapping.granule], address, mapping.nbytes)
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
        for fd in self._fds:
            os.close(fd)


class PeerMemory:
    """Another executor's memfds, one after the other, for reading. Takes no descriptor over. Raises DeviceError."""

    def __init__(self, descriptors: Sequence[int], nbytes: int) -> None:
        sizes = [os.fstat(fd).st_size for fd in descriptors]
        sealed = all(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK for fd in descriptors)
        if sum(sizes) < nbytes or not sealed:
            raise DeviceError("what another GPU exports is smaller than announced, or could shrink")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.nbytes = sum(sizes)
        self.address = _map(None, self.nbytes, 0, flags, -1)
        start = self.address
        for fd, size in zip(descriptors, sizes, strict=True):
            _map(start, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, fd)
            start += size

    def close(self) -> None:
        _libc.munmap(self.address, self.nbytes)


def _memfd(nbytes: int) -> int:
    """Only its owner may open it anew: a runtime that is given it for reading has another uid."""
    fd = os.memfd_create("dormouse-granule", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def _raise_limit(descriptors: int) -> None:
    """Raises ConfigError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = len(os.listdir("/proc/self/fd")) + descriptors + SPARE_DESCRIPTORS
    if wanted <= soft:
        return
    if hard not in (resource.RLIM_INFINITY,) and wanted > hard:
        raise ConfigError(f"a pool of pages takes {descriptors} descriptors; raise the limit (ulimit -n {wanted})")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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
