"""Shared memory: memfds, sealed against shrinking, mapped and named by (segment, offset, nbytes).

Owns the mapping, not the meaning. There are no names in a file system, so nothing can be left behind by a killed
process; a descriptor travels over core/links/fds.py. Sealing matters because a peer that could shrink a file would kill
whoever maps it with SIGBUS.

Memory is *pinnable* or not, from its making on and in every process that maps it. A GPU's driver that pins pages keeps
those very pages: were one given back to the system, the file would get another in its place, and the GPU would go on
with the old one. So pages of pinnable memory are never given back while it lives, and nothing else may be pinned.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
from typing import Final, Self

from dormouse.schemas.errors import RemoteProtocolError

PAGE_NBYTES: Final = mmap.PAGESIZE
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; not in Python 3.11's mmap
_FALLOC_PUNCH_HOLE_KEEP_SIZE: Final = 0x02 | 0x01

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class SharedMemory:
    """A mapped memfd. ``view`` is all of it; ``address`` is where it starts in this process."""

    def __init__(self, fd: int, nbytes: int, pinnable: bool = False) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.pinnable = pinnable
        self._mmap = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.view = memoryview(self._mmap)
        anchor = ctypes.c_char.from_buffer(self._mmap)
        self.address = ctypes.addressof(anchor)
        del anchor

    @classmethod
    def create(cls, name: str, nbytes: int, pinnable: bool = False) -> Self:
        """New zeroed memory of ``nbytes``, sealed against shrinking and growing; pages are taken when first touched."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(fd, nbytes, pinnable)

    @classmethod
    def adopt(cls, fd: int, nbytes: int, pinnable: bool = False) -> Self:
        """Map memory that another process made, as that says ``pinnable`` or not; takes the descriptor over. Raises
        RemoteProtocolError if it could shrink under us.
        """
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if seals & fcntl.F_SEAL_SHRINK == 0 or os.fstat(fd).st_size < nbytes:
            os.close(fd)
            raise RemoteProtocolError("shared memory that is not sealed against shrinking, or smaller than announced")
        return cls(fd, nbytes, pinnable)

    def populate(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Take the pages now, so that no copy pays for a page fault; does nothing on kernels before 5.14."""
        first = offset // PAGE_NBYTES * PAGE_NBYTES
        end = offset + (self.nbytes - offset if nbytes is None else nbytes)
        _libc.madvise(self.address + first, end - first, _MADV_POPULATE_WRITE)

    def punch(self, offset: int, nbytes: int) -> None:
        """Give whole pages inside the range back to the system; they read as zero afterwards. Raises ValueError for
        pinnable memory.
        """
        if self.pinnable:
            raise ValueError("pages that a GPU's driver may have pinned are not given back: scrub them")
        first = -(-offset // PAGE_NBYTES) * PAGE_NBYTES
        end = (offset + nbytes) // PAGE_NBYTES * PAGE_NBYTES
        if end > first:
            _libc.fallocate(self.fd, _FALLOC_PUNCH_HOLE_KEEP_SIZE, first, end - first)

    def scrub(self, offset: int, nbytes: int) -> None:
        """Make the range read as zero: whole pages by giving them back, those of pinnable memory in place."""
        end = offset + nbytes
        first, last = -(-offset // PAGE_NBYTES) * PAGE_NBYTES, end // PAGE_NBYTES * PAGE_NBYTES
        if first >= last or self.pinnable:
            ctypes.memset(self.address + offset, 0, nbytes)
            return
        ctypes.memset(self.address + offset, 0, first - offset)
        ctypes.memset(self.address + last, 0, end - last)
        self.punch(first, last - first)

    def close(self) -> None:
        """Unmap and close. Views that others still hold keep the mapping until they are gone."""
        self.view.release()
        with contextlib.suppress(BufferError):  # a live view owns it now; the mapping goes with the view
            self._mmap.close()
        os.close(self.fd)
