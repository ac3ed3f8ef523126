"""The Linux calls that confinement needs and Python 3.11 lacks: namespaces, mounts, capabilities, prctl.

Thin names over libc; every failure is an OSError. The order of calls is decided in confinement.py.
"""

import ctypes
import errno
import fcntl
import os
import platform
import socket
import struct
from typing import Final

CLONE_NEWNS: Final = 0x00020000
CLONE_NEWIPC: Final = 0x08000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000

MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_RDONLY: Final = 1
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_UNBINDABLE: Final = 1 << 17
MS_PRIVATE: Final = 1 << 18

_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NAME: Final = 15
_PR_SET_SECCOMP: Final = 22
_PR_CAPBSET_DROP: Final = 24
_PR_SET_CHILD_SUBREAPER: Final = 36
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_SECCOMP_MODE_FILTER: Final = 2
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_SYS_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}
_SYS_MOUNT_SETATTR: Final = 442  # the same number on every architecture
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MNT_DETACH: Final = 2
_CAPABILITY_VERSION_3: Final = 0x20080522
_M_ARENA_MAX: Final = -8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _prctl(option: int, value: int, what: str, extra: int = 0) -> None:
    _check(_libc.prctl(option, value, extra, 0, 0), what)


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    _check(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = (os.fsencode(source), os.fsencode(target), None if kind is None else kind.encode())
    _check(_libc.mount(*encoded, flags, data.encode()), f"mount {target}")


class _MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def restrict_mount(path: str, flags: int) -> None:
    """MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC (mount_setattr has the same numbers) for the mount at ``path`` and
    what is mounted below it; before Linux 5.12 for the one at ``path`` alone.
    """
    attr = _MountAttr(attr_set=flags)
    target = os.fsencode(path)
    sizes = ctypes.byref(attr), ctypes.sizeof(attr)
    if _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, target, _AT_RECURSIVE, *sizes) == 0:
        return
    if ctypes.get_errno() != errno.ENOSYS:
        _check(-1, f"mount_setattr {path}")
    mount("none", path, None, MS_REMOUNT | MS_BIND | flags)


def unmount(path: str) -> None:
    """From this place; other places where the same is mounted keep it."""
    _check(_libc.umount2(os.fsencode(path), _MNT_DETACH), f"umount2 {path}")


def pivot_root(new_root: str) -> None:
    """Make ``new_root``, a mount, the root of this process, and let go of the old one with all that is mounted there.

    The old root is put over the new one and taken off again (pivot_root(2), "pivot_root(".", ".")").
    """
    os.chdir(new_root)
    _check(_libc.syscall(_SYS_PIVOT_ROOT.get(platform.machine(), -1), b".", b"."), "pivot_root")
    unmount(".")
    os.chdir("/")


class _Program(ctypes.Structure):
    """struct sock_fprog"""

    _fields_ = [("count", ctypes.c_ushort), ("instructions", ctypes.c_void_p)]


def set_seccomp_filter(instructions: "ctypes.Array[ctypes.c_char]", count: int) -> None:
    """``count`` instructions of BPF, which the kernel copies; only after `set_no_new_privileges`."""
    described = _Program(count, ctypes.addressof(instructions))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, "PR_SET_SECCOMP", ctypes.addressof(described))


def die_with_parent_signal(number: int) -> None:
    """Cleared by the kernel whenever the uid changes: call it again after that."""
    _prctl(_PR_SET_PDEATHSIG, number, "PR_SET_PDEATHSIG")


def change_user(uid: int) -> None:
    """For good, with the group of the same number and no other."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def set_dumpable(dumpable: bool) -> None:
    _prctl(_PR_SET_DUMPABLE, int(dumpable), "PR_SET_DUMPABLE")


def set_no_new_privileges() -> None:
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, "PR_SET_NO_NEW_PRIVS")


def raise_loopback() -> None:
    """Of a network namespace that is ours: it begins without."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def set_name(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show; the kernel keeps 15 bytes."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer), "PR_SET_NAME")


def title_place() -> tuple[int, int]:
    """The address and length of this process's command line: in a fork it is at the same place."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, the fields 48 and 49
    return start, end - start


def set_title(place: tuple[int, int], title: str) -> None:
    """Set the text that ``ps`` shows instead of the command line; it is cut to the size of that."""
    address, nbytes = place
    ctypes.memmove(address, title.encode()[: nbytes - 1].ljust(nbytes, b"\0"), nbytes)


def drop_bounding_set() -> None:
    """No program that is executed from here on can gain a capability. Needs CAP_SETPCAP."""
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        _prctl(_PR_CAPBSET_DROP, capability, "PR_CAPBSET_DROP")


def drop_capabilities() -> None:
    """Empty the permitted, effective, inheritable and ambient sets."""
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, "PR_CAP_AMBIENT")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(header, data), "capset")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "PR_SET_CHILD_SUBREAPER")


def limit_malloc_arenas(count: int) -> None:
    """glibc gives each thread an arena of its own, up to eight per core; an idle instance has no use for them."""
    _libc.mallopt(_M_ARENA_MAX, count)


def host_pid(pidfd: int) -> int:
    """The pid of a process as our /proc names it, which may be mounted from outside our pid namespace."""
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        for line in info:
            if line.startswith("Pid:"):
                return int(line.split()[1])
    raise OSError("the kernel does not say the pid of a pidfd; Linux 5.4 or newer is needed")
