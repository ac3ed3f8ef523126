"""Finds the file behind an address of this process, from the kernel's map of mappings and the page table.

Nothing is remembered between two questions, because another mapping may take an address at any time; the thread that
asks must keep the memory alive. A page of a private mapping is the file's until it is written; then it is a copy,
which the page table shows as a page of no file (kernel documentation, admin-guide/mm/pagemap.rst). Only where the
kernel refuses this is the answer "no file".
"""

import bisect
import ctypes
import fcntl
import mmap
import os
import struct
import sys
from dataclasses import dataclass
from typing import Final

from dormouse.core.sandbox import pagetable

_QUERY: Final = struct.Struct("=9Q4I2Q")
"""struct procmap_query of linux/fs.h: size, flags, address; then the fields that the kernel fills in: start, end,
flags, page size, offset, inode, device (major, minor); then the length of the name's buffer, that of a build id, and
where they are."""
_PROCMAP_QUERY: Final = 0xC000_6611 | _QUERY.size << 16  # _IOWR('f', 17, struct procmap_query); Linux 6.11
_READABLE: Final = 0x01
_WRITABLE: Final = 0x02
_SHARED: Final = 0x08
_FILE_BACKED: Final = 0x20

_PATH_NBYTES: Final = 4096  # PATH_MAX: a longer name cannot be opened anyway
_MAX_PARTS: Final = 64
"""Mappings that one query may span: a program that changes the protection of single pages gets the slow way."""

_ENTRY_NBYTES: Final = 8
_TOP_BYTE: Final = 7 if sys.byteorder == "little" else 0
_UNWRITTEN: Final = bytes(top for top in range(256) if top >> 5 in (0b000, 0b101))
"""Top bytes of entries whose bits 63 (present), 62 (in swap) and 61 (page of a file) say: never touched, or the file's.
"""
_READ_NBYTES: Final = 256 << 10  # of the page table at a time: 128 MiB of memory


@dataclass(frozen=True, slots=True)
class Mapped:
    """A run of bytes that is a file's. ``identity`` is (device, inode) as mappings have them, which on some file
    systems differs from what ``stat`` says; ``offset`` is in bytes.
    """

    path: bytes
    identity: tuple[int, int]
    offset: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One mapping of a file; ``offset`` is that of its first byte."""

    start: int
    end: int
    offset: int
    identity: tuple[int, int]
    flags: int
    path: bytes


class Mappings:
    """The questions. Raises OSError at the start where there is no /proc."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._maps_fd = os.open("/proc/self/maps", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._page_table_fd = pagetable.opened()
        except OSError:
            os.close(self._maps_fd)
            raise
        self._name = ctypes.create_string_buffer(_PATH_NBYTES)
        self._has_query = True

    def file_at(self, address: int, nbytes: int) -> Mapped | None:
        """The file of which ``[address, +nbytes)`` are unmodified bytes; None if there is none, or nobody knows.

        Shared mappings that can be written do not count: such a file changes without a sign of it (its time of change
        may stay as it was), so any check of its bytes may be out of date.
        """
        if nbytes <= 0 or os.getpid() != self._pid:  # after a fork the descriptors show the parent's memory
            return None
        parts = self._parts(address, nbytes)
        if not parts:
            return None
        first = parts[0]
        whole = Mapped(first.path, first.identity, first.offset + address - first.start)
        for part in parts:
            start, end = max(address, part.start), min(address + nbytes, part.end)
            continues = (
                part.identity == first.identity
                and part.path == first.path
                and part.offset + start - part.start == whole.offset + start - address
            )
            if not continues or not part.flags & _READABLE:
                return None
            if part.flags & _SHARED:
                if part.flags & _WRITABLE:
                    return None
            elif not self._unwritten(start, end):
                return None
        return whole

    def identity_of(self, fd: int) -> tuple[int, int] | None:
        """This file's `Mapped.identity`, found by mapping it."""
        try:
            with mmap.mmap(fd, mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
                part = self._part(ctypes.addressof(ctypes.c_char.from_buffer(mapping)))
        except (OSError, ValueError):  # it cannot be mapped, or has less than a page
            return None
        return part.identity if part else None

    def close(self) -> None:
        """May be called twice."""
        for fd in (self._maps_fd, self._page_table_fd):
            if fd >= 0:
                os.close(fd)
        self._maps_fd = self._page_table_fd = -1

    # --- the map

    def _parts(self, address: int, nbytes: int) -> list[_Part] | None:
        parts: list[_Part] = []
        position = address
        while position < address + nbytes:
            part = self._part(position)
            if part is None or len(parts) == _MAX_PARTS:
                return None
            parts.append(part)
            position = part.end
        return parts

    def _part(self, address: int) -> _Part | None:
        if not self._has_query:
            return _read_part(address)
        query = bytearray(_QUERY.size)
        name = (_PATH_NBYTES, 0, ctypes.addressof(self._name), 0)
        _QUERY.pack_into(query, 0, _QUERY.size, _FILE_BACKED, address, 0, 0, 0, 0, 0, 0, 0, 0, *name)
        try:
            fcntl.ioctl(self._maps_fd, _PROCMAP_QUERY, query)
        except FileNotFoundError:
            return None
        except OSError:  # an older kernel
            self._has_query = False
            return _read_part(address)
        _, _, _, start, end, flags, _, offset, inode, major, minor, _, _, _, _ = _QUERY.unpack(query)
        return _Part(start, end, offset, (os.makedev(major, minor), inode), flags, self._name.value)

    # --- the page table

    def _unwritten(self, start: int, end: int) -> bool:
        """Whether no page of ``[start, end)`` is a copy, pages at the ends as a whole."""
        position = start // mmap.PAGESIZE * _ENTRY_NBYTES
        left = -(-end // mmap.PAGESIZE) * _ENTRY_NBYTES - position
        while left:
            data = os.pread(self._page_table_fd, min(left, _READ_NBYTES), position)
            if not data or len(data) % _ENTRY_NBYTES:
                return False
            if data[_TOP_BYTE::_ENTRY_NBYTES].translate(None, _UNWRITTEN):
                return False
            position += len(data)
            left -= len(data)
        return True


def _read_part(address: int) -> _Part | None:
    """The mapping at an address from the text of /proc/self/maps, for a kernel that cannot be asked for one."""
    with open("/proc/self/maps", "rb") as file:
        lines = file.read().splitlines()
    index = bisect.bisect_right(lines, address, key=lambda line: int(line.partition(b"-")[0], 16)) - 1
    if index < 0:
        return None
    span, permissions, offset, device, inode, *path = lines[index].split(None, 5)
    start, end = (int(word, 16) for word in span.split(b"-"))
    if address >= end or inode == b"0" or not path:
        return None
    major, minor = (int(word, 16) for word in device.split(b":"))
    flags = 0
    for letter, flag in ((b"r", _READABLE), (b"w", _WRITABLE), (b"s", _SHARED)):
        flags |= flag if letter in permissions else 0
    return _Part(start, end, int(offset, 16), (os.makedev(major, minor), int(inode)), flags, path[0])
