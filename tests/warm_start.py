"""Processes of tests' nodes start warm: forked from one that has imported what they import, where a user's start anew.

A start is imports, nine tenths of it, and a test run has hundreds of starts. Nothing else differs: each process has the
parent, command line, environment, descriptors, working directory and session that it was to have, runs the same module
as ``__main__``, and dies, is waited for and is replaced as ever. `WarmPopen` is what starts them, in place of
`subprocess.Popen`; other programs it starts as that does. Who starts processes itself (SPAWNERS) has from the
beginning, while it has one thread, a child from which to fork them; what that forks are its parent's children.

What is about the start itself (environment, memory, interpreters) is tested cold: ``COLD = True`` in a module of tests.
"""

import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import msgspec
import pytest

from dormouse.core import openmp
from dormouse.core.config import WARM
from dormouse.core.links.fds import PacketSocket
from dormouse.core.sandbox import environment, preload
from dormouse.gpuserver.commands import oplist

ZYGOTE: Final = "dormouse.core.sandbox.zygote"
EXECUTOR: Final = "dormouse.gpuserver.executor.main"
SUPERVISOR: Final = "dormouse.core.node.supervisor"
MODULES: Final = (
    SUPERVISOR,
    "dormouse.controller.main",
    "dormouse.router.main",
    "dormouse.gpuserver.store",
    ZYGOTE,
    EXECUTOR,
    "dormouse.gpuserver.runtime.zygote",
)
SPAWNERS: Final = (SUPERVISOR, EXECUTOR)
IMPORTED: Final = (*MODULES, "dormouse.gpuserver.store.main", "dormouse.client_shim.instance.warm", *WARM)
AT_START: Final = ("PYTHONPATH", "PYTHONHASHSEED", "LD_PRELOAD", "HF_HOME", "HF_HUB_CACHE")
"""Variables that are read at the start of a process, or at an import: with others than there were it starts cold."""

_AT_START: Final = {name: os.environ.get(name) for name in AT_START}

LIBRARIES: Final = "LD_LIBRARY_PATH"  # so is this one, but its values are few: for each there is a process to fork from

TITLE: Final = "dormouse-warm"  # of who forks
TITLE_NBYTES: Final = 1024  # room for a command line, which is written over the first one

POPEN: Final = subprocess.Popen  # whatever it is replaced by
_CLONE_PARENT: Final = 0x8000
_CLONE: Final = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine)  # elsewhere all starts cold
_FIRST_FD: Final = 500  # above all that a process of a node asks for by number


class Start(msgspec.Struct, array_like=True):
    """``fds``: the numbers that the descriptors beside it are to have."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    session: bool
    fds: list[int]


class Source:
    """The other end of a process that forks others: what it has forked is this process's child."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[Any] | None = None) -> None:
        self._packets: PacketSocket[int, Start] = PacketSocket(sock, int)
        self._process = process

    @classmethod
    def begun(cls, env: Mapping[str, str]) -> "Source":
        """The first of these processes, with all imports; its descendants have them done."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**env, **preload.ENVIRONMENT, **openmp.WAITING, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-P", __file__, str(theirs.fileno()), "-" * TITLE_NBYTES]
        with theirs:
            return cls(ours, POPEN(command, stdin=subprocess.DEVNULL, stdout=2, env=env, pass_fds=[theirs.fileno()]))

    def start(self, start: Start, fds: list[int]) -> int:
        """Its process id."""
        self._packets.send(start, fds)
        started = self._packets.recv()
        assert started is not None, "the process that forks others has ended; its output is above"
        return started[0]

    def close(self) -> None:
        """It ends, and what it has forked goes on."""
        self._packets.close()
        if self._process is not None:
            self._process.wait()


class WarmPopen(subprocess.Popen[Any]):
    """Starts what is in MODULES warm where it can, and all else as ever."""

    sources: ClassVar[dict[str | None, Source]] = {}  # by what they have of LIBRARIES
    begins: ClassVar = False  # one where there is none for that
    lock: ClassVar = threading.Lock()

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *more: Any) -> None:
        pass_fds, cwd, env = more[:3]
        pipes, session = more[6:12], more[-2]
        argv = [] if isinstance(args, (str, bytes)) else list(args)
        env = dict(os.environ if env is None else env)
        with self.lock:
            ordinary = preexec_fn is None and more[13:17] == (None, None, None, -1)  # neither users nor a mask
            source = self.source(argv, env) if ordinary else None
            if source is None:
                super()._execute_child(args, executable, preexec_fn, close_fds, *more)  # type: ignore[misc]
                return
            fds = [given if given >= 0 else number for number, given in enumerate((pipes[0], pipes[3], pipes[5]))]
            self.pid = source.start(
                Start(argv, env, cwd or os.getcwd(), session, [0, 1, 2, *pass_fds]), [*fds, *pass_fds]
            )
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    @classmethod
    def source(cls, argv: list[Any], env: Mapping[str, str]) -> "Source | None":
        """From which this can start warm, if it can."""
        if module_of(argv) not in MODULES or any(env.get(name) != value for name, value in _AT_START.items()):
            return None
        libraries = env.get(LIBRARIES)
        if libraries not in cls.sources and cls.begins:
            if len(cls.sources) > 1:  # each has hundreds of megabytes
                cls.sources.popitem()[1].close()
            cls.sources[libraries] = Source.begun(env)
        return cls.sources.get(libraries)


def module_of(argv: list[Any]) -> str:
    """Which one this starts with this interpreter, or ""."""
    match argv:
        case [sys.executable, "-P", "-m", str(module), *_] | [sys.executable, "-m", str(module), *_]:
            return module
    return ""


@pytest.fixture(scope="module", autouse=True)
def processes_start_warm(request: pytest.FixtureRequest) -> Iterator[None]:
    """For conftests of folders. A module that is ``COLD`` starts them as users do."""
    with pytest.MonkeyPatch.context() as patch:
        if _CLONE is not None and not getattr(request.module, "COLD", False):
            patch.setattr(WarmPopen, "begins", True)
            patch.setattr(subprocess, "Popen", WarmPopen)
        yield


def serve(source: socket.socket) -> NoReturn:
    """Fork what is asked for until nobody is there to ask."""
    requests: PacketSocket[Start, int] = PacketSocket(source, Start)
    while (packet := requests.recv()) is not None:
        start, fds = packet
        assert len(os.listdir("/proc/self/task")) == 1, "threads, which no fork has"
        requests.send(_fork(start, fds))
        for fd in fds:
            os.close(fd)
    os._exit(0)


def _fork(start: Start, fds: list[int]) -> int:
    """Fork, but as a child of this process's parent: who asks. glibc's `fork` cannot; its handlers, which are left out,
    are for what other threads held.
    """
    assert _CLONE is not None
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)  # neither gives up the interpreter's lock
    python.PyOS_BeforeFork()
    pid = int(libc.syscall(_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))  # containers may refuse clone3
    if pid == 0:
        python.PyOS_AfterFork_Child()
        _live(start, fds)
    python.PyOS_AfterFork_Parent()
    assert pid > 0, os.strerror(ctypes.get_errno())
    return pid


def _live(start: Start, fds: list[int]) -> NoReturn:
    status = 1
    try:
        module = module_of(start.argv)
        if start.session:
            os.setsid()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FD) for fd in fds]
        for fd, number in zip(high, start.fds, strict=True):
            os.dup2(fd, number)
        _close_all_but(start.fds)
        os.environ.clear()
        os.environ.update(start.env)
        if module == ZYGOTE:  # it starts with a clean environment, which it would make by starting anew
            os.environ.clear()
            os.environ.update(environment.scrubbed(start.env, environment._OWN) | {environment._CLEAN: "1"})
        os.chdir(start.cwd)
        _be_called(start.argv)
        if module in SPAWNERS:
            _have_source()
        gc.enable()
        if "OMP_NUM_THREADS" in start.env:
            sys.modules["torch"].set_num_threads(int(start.env["OMP_NUM_THREADS"]))
        sys.orig_argv[:] = start.argv
        sys.argv[:] = start.argv[start.argv.index("-m") + 1 :]
        sys.modules.pop(module if module != "dormouse.gpuserver.store" else f"{module}.__main__", None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the outermost frame
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _have_source() -> None:
    """For what this process will start: a child, forked before there are other threads."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):
            os.dup2(null, number)
        _close_all_but([0, 1, 2, theirs.fileno()])
        _be_called([TITLE])
        serve(theirs)
    theirs.close()
    WarmPopen.sources = {os.environ.get(LIBRARIES): Source(ours)}
    subprocess.Popen = WarmPopen  # type: ignore[misc]


def _close_all_but(kept: list[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with suppress(OSError):  # that of the listing
                os.close(int(name))


def _be_called(argv: list[str]) -> None:
    """What `ps` and /proc say, over what they said."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])
    text = b"\0".join(word.encode() for word in argv)[: end - first - 1]
    ctypes.memset(first, 0, end - first)
    ctypes.memmove(first, text, len(text))


if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(__file__)]
    gc.disable()
    for each in IMPORTED:
        importlib.import_module(each)
    oplist.allowed()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
