"""A confined process's own page table: opened once, while it may be, for client_shim/node/mappings.py.

Owns the descriptor. The meaning of the entries is not known here.
"""

import fcntl
import os

_kept: tuple[int, int] | None = None
"""(pid, descriptor) of a page table that `keep` opened."""


def keep() -> int:
    """Open this process's page table for who asks later, while this process is dumpable: in one that is not, the file
    belongs to root. Returns the descriptor, or -1 if the kernel refuses.

    The caller must have dropped its capabilities: the kernel shows physical addresses to a descriptor that was opened
    with CAP_SYS_ADMIN, whoever reads it.
    """
    global _kept
    try:
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    _kept = (os.getpid(), fd)
    return fd


def opened() -> int:
    """A descriptor for the caller to close. Raises OSError."""
    if _kept is not None and _kept[0] == os.getpid():
        return fcntl.fcntl(_kept[1], fcntl.F_DUPFD_CLOEXEC, 3)
    return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
