"""System calls that an instance may not make: a BPF program, built here from tables, and its installation.

A deny-list, because libraries that people bring use most of Linux. The calls on it serve no function, and are where
kernels have had their holes. Access to the files that a program sees is decided by mounts.py, not here.
"""

import ctypes
import errno
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

from dormouse.core.sandbox import linux

CALLS: Final = {  # by name: the numbers on x86-64 and on aarch64; None where there is no such call
    "shmget": (29, 194),
    "socket": (41, 198),
    "clone": (56, 220),
    "mmap": (9, 222),
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "modify_ldt": (154, None),
    "pivot_root": (155, 41),
    "adjtimex": (159, 171),
    "chroot": (161, 51),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "create_module": (174, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "lookup_dcookie": (212, 18),
    "clock_settime": (227, 112),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "clock_adjtime": (305, 266),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "memfd_create": (319, 279),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "clone3": (435, 435),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "memfd_secret": (447, 447),
    "open_tree_attr": (467, 467),
}

UNCOUNTED: Final = ("memfd_create", "shmget", "mmap")
"""Memory that no resource limit of a process counts. Open where a control group counts it; of `mmap`, only what is
shared and anonymous is meant."""
OF_DRIVER: Final = ("memfd_create", "mmap")
"""CUDA makes such memory with a context; where it may not, cuInit gives CUDA_ERROR_OPERATING_SYSTEM (304)."""
_BY_ARGUMENT: Final = ("socket", "clone", "mmap")
DENIED: Final = tuple(name for name in CALLS if name not in (*UNCOUNTED, *_BY_ARGUMENT, "clone3"))

FAMILIES: Final = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK. Others are old holes, or, as AF_VSOCK, know no network namespace."""

_NEW_NAMESPACE: Final = 0x7E02_0000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_SHARED_ANONYMOUS: Final = 0x21  # MAP_SHARED | MAP_ANONYMOUS; MAP_SHARED_VALIDATE has MAP_SHARED's bit
_X32: Final = 0x4000_0000

_LOAD: Final = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND: Final = 0x54  # BPF_ALU | BPF_AND | BPF_K
_IF_EQUAL: Final = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_IF_LEAST: Final = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_IF_ANY: Final = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN: Final = 0x06  # BPF_RET | BPF_K
_NUMBER, _ARCH = 0, 4  # offsets in struct seccomp_data

ALLOW: Final = 0x7FFF_0000
KILL: Final = 0x8000_0000  # SECCOMP_RET_KILL_PROCESS
_ERRNO: Final = 0x0005_0000

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


@dataclass(frozen=True)
class ProcessorKind:
    """A kind of processor: its AUDIT_ARCH, and which of the numbers in `CALLS` are its own."""

    arch: int
    column: int


MACHINES: Final = {"x86_64": ProcessorKind(0xC000_003E, 0), "aarch64": ProcessorKind(0xC000_00B7, 1)}


def _argument(index: int) -> int:
    """Offset of an argument's low half: both machines are little-endian, and no flag that we look at is in the high."""
    return 16 + 8 * index


def _refuse(number: int) -> int:
    return _ERRNO | number


def program(machine: ProcessorKind, uncounted: bool, driver: bool = False) -> list[Instruction]:
    """Everything is allowed that is not named. ``uncounted`` denies what only a control group would count; all the same
    CUDA's ``driver`` has of that what it needs.
    """
    numbers = {name: row[machine.column] for name, row in CALLS.items()}
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_IF_EQUAL, 1, 0, machine.arch),
        (_RETURN, 0, 0, KILL),  # the same numbers mean other calls there
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine.arch == MACHINES["x86_64"].arch:
        code += [(_IF_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _refuse(errno.ENOSYS))]

    def when(name: str, then: Iterable[Instruction]) -> None:
        number, steps = numbers[name], list(then)
        if number is not None:
            code.extend([(_IF_EQUAL, 0, len(steps), number), *steps])

    refused = [name for name in UNCOUNTED if uncounted and not (driver and name in OF_DRIVER)]
    for name in (*DENIED, *(name for name in refused if name not in _BY_ARGUMENT)):
        when(name, [(_RETURN, 0, 0, _refuse(errno.EPERM))])
    when("clone3", [(_RETURN, 0, 0, _refuse(errno.ENOSYS))])  # its flags are in memory; libc then uses clone
    when("clone", _if_any(0, _NEW_NAMESPACE))
    families = [(_IF_EQUAL, len(FAMILIES) - index, 0, family) for index, family in enumerate(FAMILIES)]
    when(
        "socket",
        [(_LOAD, 0, 0, _argument(0)), *families, (_RETURN, 0, 0, _refuse(errno.EAFNOSUPPORT)), (_RETURN, 0, 0, ALLOW)],
    )
    if "mmap" in refused:
        masked = [(_LOAD, 0, 0, _argument(3)), (_AND, 0, 0, _SHARED_ANONYMOUS)]
        verdict = [(_IF_EQUAL, 0, 1, _SHARED_ANONYMOUS), (_RETURN, 0, 0, _refuse(errno.EPERM)), (_RETURN, 0, 0, ALLOW)]
        when("mmap", [*masked, *verdict])
    return [*code, (_RETURN, 0, 0, ALLOW)]


def _if_any(argument: int, flags: int) -> list[Instruction]:
    return [
        (_LOAD, 0, 0, _argument(argument)),
        (_IF_ANY, 0, 1, flags),
        (_RETURN, 0, 0, _refuse(errno.EPERM)),
        (_RETURN, 0, 0, ALLOW),
    ]


@cache
def compiled(uncounted: bool, driver: bool = False) -> tuple["ctypes.Array[ctypes.c_char]", int]:
    """The program for this processor as the kernel reads it, and its length. Raises OSError."""
    machine = MACHINES.get(platform.machine())
    if machine is None:
        raise OSError(errno.ENOSYS, f"no list of system calls for {platform.machine()}")
    instructions = program(machine, uncounted, driver)
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    return ctypes.create_string_buffer(packed, len(packed)), len(instructions)


def install(uncounted: bool, driver: bool = False) -> None:
    """Install the filter for this process and all that it starts, for good. Needs no_new_privs. Raises OSError."""
    linux.set_seccomp_filter(*compiled(uncounted, driver))
