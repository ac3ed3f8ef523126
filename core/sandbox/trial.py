"""A trial of confinement on this machine: `dormouse doctor` runs this as a program, and prints its findings.

A child is forked and confined as an instance is, with small limits, and attempts acts that are forbidden to an
instance. Each line reports an attempt; none is inferred from the setup. ``CONFIG``: a node's configuration as JSON.
"""

import ctypes
import errno
import json
import os
import platform
import selectors
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from dormouse.core.config import NodeConfig
from dormouse.core.sandbox import cgroups, confinement, seccomp, view
from dormouse.core.sandbox.forkserver import ForkServer
from dormouse.schemas import messages as m

MEMORY_NBYTES: Final = 48 << 20
SCRATCH_NBYTES: Final = 1 << 20
PROCESSES: Final = 16
ANSWER_S: Final = 20.0
_CALLS: Final = ("io_uring_setup", "userfaultfd", "unshare", "mount", "bpf", "keyctl", "perf_event_open")


@dataclass(frozen=True)
class Row:
    """``held``: whether the attempt met what it should."""

    name: str
    held: bool
    found: str


def _met(what: Callable[[], object]) -> str:
    """The error's name, or "" for an attempt that went through."""
    try:
        what()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except MemoryError:
        return "MemoryError"
    return ""


def _read(path: str) -> bytes:
    return Path(path).read_bytes()


def _row(name: str, attempts: dict[str, Callable[[], object]]) -> Row:
    met = {label: _met(attempt) for label, attempt in attempts.items()}
    found = ", ".join(f"{label}: {error or 'POSSIBLE'}" for label, error in met.items())
    return Row(name, all(met.values()), found)


def _confined(secret: str, port: int, node_pid: int, node_uid: int) -> list[Row]:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str) -> None:
        number = seccomp.CALLS[name][seccomp.MACHINES[platform.machine()].column]
        if libc.syscall(number, 0, 0, 0, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), name)

    def connect() -> None:
        with socket.socket() as client:
            client.settimeout(2)
            client.connect(("127.0.0.1", port))

    others = sum(name.isdigit() for name in os.listdir("/proc")) - 2  # itself and its init
    seen: dict[str, Callable[[], object]] = {
        "signal the node": lambda: os.kill(node_pid, 0),
        "read its environment": lambda: _read(f"/proc/{node_pid}/environ"),
    }
    rows = [
        Row("sandbox uid", os.getuid() != node_uid, f"{os.getuid()}, the node's is {node_uid}"),
        _row(
            "sandbox files",
            {
                "open a file of the node": lambda: _read(secret),
                "open /etc/shadow": lambda: _read("/etc/shadow"),
                "write to /usr": lambda: open("/usr/dormouse-trial", "w").close(),
            },
        ),
        replace(row := _row("sandbox processes", seen), found=f"{row.found}, others in /proc: {others}"),
        _row("sandbox network", {"connect to the node": connect}),
    ]
    if platform.machine() in seccomp.MACHINES:
        rows.append(_row("sandbox calls", {name: lambda name=name: call(name) for name in _CALLS}))  # type: ignore[misc]
    return rows


def _scratch() -> list[Row]:
    folders = {"more in $HOME": os.environ["HOME"], "more in $TMPDIR": os.environ["TMPDIR"]}

    def fill(folder: str) -> None:
        with open(f"{folder}/trial", "wb", buffering=0) as file:
            for _ in range(4 * SCRATCH_NBYTES >> 16):
                file.write(bytes(1 << 16))

    return [_row("limit: scratch", {name: lambda f=folder: fill(f) for name, folder in folders.items()})]  # type: ignore[misc]


def _processes() -> list[Row]:
    def bomb() -> None:
        waiting, _hold = os.pipe()
        for _ in range(2 * PROCESSES):
            if os.fork() == 0:
                os.close(_hold)
                os.read(waiting, 1)
                os._exit(0)

    return [_row("limit: processes", {f"{2 * PROCESSES} processes": bomb})]


def _memory(kind: str) -> list[Row]:
    def memfd() -> None:
        fd = os.memfd_create("trial")
        for _ in range(2 * MEMORY_NBYTES >> 20):
            os.write(fd, bytes(1 << 20))

    attempts: dict[str, Callable[[], object]] = {"memfd": memfd, "own": lambda: bytearray(2 * MEMORY_NBYTES)}
    return [_row("limit: memory", {f"more {kind} memory": attempts[kind]})]


def run(config: NodeConfig, folder: str) -> list[Row]:
    """In the place of a zygote: forks instances, one for each kind of attempt."""
    small = msgspec.structs.replace(
        config.sandbox, memory=str(MEMORY_NBYTES), scratch=str(SCRATCH_NBYTES), processes=PROCESSES, cpus=0
    )
    os.makedirs(f"{folder}/root")
    os.makedirs(f"{folder}/i")
    os.makedirs(f"{folder}/function")
    Path(folder, "function", "function.py").touch()
    secret = Path(folder, "secret")
    secret.write_text("secret")
    groups = cgroups.Groups.claim(folder) if small.cgroups == "auto" else None
    answer, sink = os.pipe()
    level = replace(confinement.become_authority(), cgroup=groups is not None)
    if level.pid and (child := os.fork()):
        os.close(sink)
        with os.fdopen(answer, "rb") as file:
            data = file.read()
        os.waitpid(child, 0)
        if groups is not None:
            groups.remove()
        return [Row(**row) for row in json.loads(data)] if data else [_failed("the first of a pid namespace ended")]
    listening = socket.create_server(("127.0.0.1", 0))
    seen = view.gather(folder, str(config.state_directory), small.read)
    uid = small.uid_base if small.uid == "auto" else None
    level = confinement.probe(level, seen, f"{folder}/root", uid)
    node_pid, node_uid = os.getpid(), os.getuid()
    if level.pid:
        node_pid = int(os.readlink("/proc/self"))  # as an instance that still sees our /proc would name us
    port = listening.getsockname()[1]
    attempts: dict[str, Callable[[], list[Row]]] = {
        "confined": lambda: _confined(str(secret), port, node_pid, node_uid),
        "scratch": _scratch,
        "processes": _processes,
        "memfd": lambda: _memory("memfd"),
        "own": lambda: _memory("own"),
    }

    def attempt(fork: m.Fork, *_: object) -> None:
        os.write(1, json.dumps([vars(row) for row in attempts[fork.function]()]).encode())
        os._exit(0)

    server = ForkServer(level, seen, f"{folder}/root", groups, small, attempt)
    rows = [Row("confinement", "trusted functions only" not in str(level), str(level))]
    for number, kind in enumerate(attempts):
        rows += _attempt(server, kind, number, folder, small.uid_base if level.own_uid else node_uid)
    if not level.pid:
        if groups is not None:
            groups.remove()
        return rows
    os.write(sink, json.dumps([vars(row) for row in rows]).encode())
    os._exit(0)


def _failed(text: str) -> Row:
    return Row("confinement", False, f"unknown: {text}")


def _attempt(server: ForkServer, kind: str, number: int, folder: str, uid: int) -> list[Row]:
    directory = f"{folder}/i/{number}"
    os.mkdir(directory, 0o700)
    os.chown(directory, uid, uid)
    heard, said = os.pipe()
    unused = os.open("/dev/null", os.O_RDWR)
    fork = m.Fork(
        instance=f"1-{number}",
        function=kind,
        directory=directory,
        uid=uid,
        folder=f"{folder}/function",
        entry="function.py",
        arena=m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=0),
        device=m.DeviceInfo(name="", total_nbytes=0, capability=(0, 0), multiprocessors=0),
        gpus=0,
        limits={"NPROC": PROCESSES, "DATA": MEMORY_NBYTES, "NOFILE": 64},
    )
    child = server.fork(fork, [said, unused])
    os.close(said)
    with selectors.DefaultSelector() as selector:
        selector.register(child.pidfd, selectors.EVENT_READ)
        if not selector.select(ANSWER_S):
            server.signal(child, 9)
    _, limit, failure = server.finish(child)
    with os.fdopen(heard, "rb") as file:
        data = file.read()
    if failure:
        return [_failed(failure)]
    if limit == "memory":
        return [Row("limit: memory", True, f"more {kind} memory: ended by the kernel")]
    return [Row(**row) for row in json.loads(data)] if data else [_failed(f"the trial of {kind} ended without a word")]


def main() -> int:
    config = msgspec.json.decode(sys.argv[1], type=NodeConfig)
    with tempfile.TemporaryDirectory(prefix="dormouse-doctor-") as folder:
        os.chmod(folder, 0o711)
        print(json.dumps([vars(row) for row in run(config, folder)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
