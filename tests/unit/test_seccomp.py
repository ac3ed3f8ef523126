"""The filter of system calls: its verdicts for both processors, and what the kernel of this one says to each call."""

import errno
import json
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dormouse.core.sandbox import seccomp

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}


def verdict(
    machine: seccomp.ProcessorKind, uncounted: bool, number: int, *arguments: int, arch: int = 0, driver: bool = False
) -> int:
    """What the kernel would do: the few instructions that programs of ours have, carried out."""
    data = {0: number, 4: arch or machine.arch} | {16 + 8 * index: value for index, value in enumerate(arguments)}
    program, position, register = seccomp.program(machine, uncounted, driver), 0, 0
    while True:
        code, if_true, if_false, constant = program[position]
        position += 1
        match code:
            case 0x20:
                register = data.get(constant, 0)
            case 0x54:
                register &= constant
            case 0x06:
                return constant
            case _:
                tests = {0x15: register == constant, 0x35: register >= constant, 0x45: register & constant != 0}
                position += if_true if tests[code] else if_false


@pytest.mark.parametrize("name", seccomp.MACHINES)
def test_d12_every_call_gets_its_verdict_on(name: str) -> None:
    machine = seccomp.MACHINES[name]
    numbers = {call: row[machine.column] for call, row in seccomp.CALLS.items()}

    def says(call: str, *arguments: int, uncounted: bool = True, driver: bool = False) -> int:
        number = numbers[call]
        assert number is not None
        return verdict(machine, uncounted, number, *arguments, driver=driver)

    def refused(number: int) -> int:
        return 0x0005_0000 | number

    for call in seccomp.DENIED:
        if numbers[call] is not None:
            assert says(call) == refused(errno.EPERM), call
    assert says("clone3") == refused(errno.ENOSYS)
    assert says("clone", 0x1200011) == seccomp.ALLOW  # a fork by libc
    assert says("clone", 0x3D0F00) == seccomp.ALLOW  # a thread
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert says("clone", flag | signal.SIGCHLD) == refused(errno.EPERM), hex(flag)
    for family in range(1, 46):
        known = family in (1, 2, 10, 16)
        assert says("socket", family) == (seccomp.ALLOW if known else refused(errno.EAFNOSUPPORT)), family
    for flags, shared in ((0x22, False), (0x02, False), (0x01, False), (0x21, True), (0x23, True), (0x40021, True)):
        assert says("mmap", 0, 0, 0, flags) == (refused(errno.EPERM) if shared else seccomp.ALLOW), hex(flags)
        assert says("mmap", 0, 0, 0, flags, uncounted=False) == seccomp.ALLOW
        assert says("mmap", 0, 0, 0, flags, driver=True) == seccomp.ALLOW
    for call in ("memfd_create", "shmget"):
        assert says(call) == refused(errno.EPERM)
        assert says(call, uncounted=False) == seccomp.ALLOW
        assert says(call, driver=True) == (refused(errno.EPERM) if call == "shmget" else seccomp.ALLOW)
    assert says("ptrace", driver=True) == refused(errno.EPERM)
    listed = set(numbers.values())
    assert all(verdict(machine, True, number) == seccomp.ALLOW for number in range(480) if number not in listed)
    assert verdict(machine, True, 1, arch=0x4000_0003) == seccomp.KILL  # i386 on x86-64, and so on
    if name == "x86_64":
        assert verdict(machine, True, 0x4000_0000 | 39) == refused(errno.ENOSYS)


@pytest.mark.parametrize("name", HEADERS)
def test_numbers_are_those_of_the_kernels_headers(name: str) -> None:
    header = Path(HEADERS[name])
    if not header.exists():
        pytest.skip("needs the kernel's headers: linux-libc-dev")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    column = seccomp.MACHINES[name].column
    for call, row in seccomp.CALLS.items():
        number = row[column]
        if call in defined:
            assert number == int(defined[call]), call
        else:
            assert number is None or number > 460, call  # newer than the header


PROGRAM = r"""
import ctypes, json, mmap, os, signal, socket, subprocess, sys, threading
from dormouse.core.sandbox import linux, seccomp
numbers = {name: row[int(sys.argv[1])] for name, row in seccomp.CALLS.items()}
linux.set_no_new_privileges()
seccomp.install(uncounted=True)
libc = ctypes.CDLL(None, use_errno=True)
def errno_of(number, *arguments):
    ctypes.set_errno(0)
    return 0 if libc.syscall(number, *arguments) >= 0 else ctypes.get_errno()
found = {name: errno_of(numbers[name], 0, 0, 0, 0, 0, 0) for name in seccomp.DENIED if numbers[name] is not None}
found["clone3"] = errno_of(numbers["clone3"], None, 0)
found["clone NEWUSER"] = errno_of(numbers["clone"], 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
found["memfd"] = errno_of(numbers["memfd_create"], b"x", 0)
found["shmget"] = errno_of(numbers["shmget"], 0, 4096, 0o1600)
found["vsock"] = errno_of(numbers["socket"], 40, socket.SOCK_STREAM, 0)
try:
    mmap.mmap(-1, 4096)
    found["shared anonymous"] = 0
except OSError as error:
    found["shared anonymous"] = error.errno
mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for family in (socket.AF_UNIX, socket.AF_INET):
    socket.socket(family).close()
ran = []
thread = threading.Thread(target=lambda: ran.append("thread"))
thread.start()
thread.join()
ran.append(subprocess.run(["echo", "program"], capture_output=True, text=True).stdout.strip())
found["ran"] = ran
if os.uname().machine == "x86_64":
    found["x32"] = errno_of(0x40000000 | 39)
    code = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20 (getpid of i386); int 0x80; ret
    entry = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if entry() > 0 else 1)
    found["i386"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(json.dumps(found))
"""


def test_d12_the_kernel_refuses_them() -> None:
    machine = seccomp.MACHINES.get(platform.machine())
    if machine is None:
        pytest.skip(f"needs a list of calls for {platform.machine()}")
    command = [sys.executable, "-c", PROGRAM, str(machine.column)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("ran") == ["thread", "program"]
    assert found.pop("clone3") == errno.ENOSYS
    assert found.pop("vsock") == errno.EAFNOSUPPORT
    if platform.machine() == "x86_64":
        assert found.pop("x32") == errno.ENOSYS
        assert found.pop("i386") == -signal.SIGSYS
    assert set(found.values()) == {errno.EPERM}, found
    assert {"io_uring_setup", "userfaultfd", "unshare", "mount", "ptrace", "bpf", "clone NEWUSER", "memfd"} <= set(
        found
    )
