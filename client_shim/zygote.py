"""The zygote: a warm interpreter that forks instances. ``python -m dormouse.client_shim.zygote --run RUN --epoch N``.

It runs no user code and no operation and keeps one thread, because a fork copies neither other threads nor what they
held locked. It has no ZeroMQ socket: it speaks to the router over one SEQPACKET connection and to the supervisor by
bytes in an inherited pipe. Exactly one of Exited and ForkFailed ends each Fork; after it nothing of the instance runs.
"""

import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1") | {"TOKENIZERS_PARALLELISM": "false"})  # before numpy and torch

from dormouse.client_shim import linux, sandbox, warm  # noqa: E402
from dormouse.core.actor import die_with_parent, parse_arguments, read_node_config  # noqa: E402
from dormouse.core.config import NodeConfig  # noqa: E402
from dormouse.core.fds import BACKLOG, PacketSocket  # noqa: E402
from dormouse.core.link import remove_path  # noqa: E402
from dormouse.core.paths import RunPaths  # noqa: E402
from dormouse.schemas import messages as m  # noqa: E402
from dormouse.schemas.errors import DormouseError, PeerLost, ProcessFailed, RemoteProtocolError  # noqa: E402

HEARTBEAT_S: Final = 1.0
SEND_S: Final = 5.0  # the router has a loop that always reads; longer means that it is gone
CONFINEMENT_FAILED: Final = 70  # EX_SOFTWARE
_CLEAN: Final = "DORMOUSE_CLEAN"
_KEPT: Final = (
    *THREAD_VARIABLES,
    "HOME",
    "HF_HOME",
    "HF_HUB_CACHE",
    "TORCH_HOME",
    "TMPDIR",
    "DORMOUSE_READY_FD",
    "DORMOUSE_PARENT",
)


@dataclass
class Child:
    """A forked instance, and the process that is the init of its pid namespace if it has one."""

    instance: str
    pid: int
    host_pid: int
    report: int  # what the child says when its confinement fails
    owner: PacketSocket[m.ToZygote, m.FromZygote]
    init: int = 0
    lifeline: int = -1  # the init ends when this is closed, and the kernel ends its namespace with it
    status: int | None = None


class Zygote:
    """The select loop. Children are watched by pidfd, in the same wait as the sockets."""

    def __init__(self, path: str, level: sandbox.Level, seen: sandbox.View, config: NodeConfig, ready_fd: int) -> None:
        self.level = level
        self.seen = seen
        self.config = config
        self._path = path
        self._ready_fd = ready_fd
        self._children: dict[str, Child] = {}  # by instance
        self._connection: PacketSocket[m.ToZygote, m.FromZygote] | None = None
        self._selector = selectors.DefaultSelector()
        self._running = True
        self._own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._init_program = shutil.which("cat", path="/bin:/usr/bin")
        remove_path(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._wakeup, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the supervisor
        signal.set_wakeup_fd(wakeup_write)
        self._watch(self._wakeup, lambda: None)

    def _watch(self, fd: int, ready: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, ready)

    def _on_term(self, *_: object) -> None:
        self._running = False

    def run(self) -> None:
        """Serve until SIGTERM, then end all instances."""
        self._watch(self._listener.fileno(), self._accept)
        self._beat(b"ready\n")
        beat_s = time.monotonic() + HEARTBEAT_S
        while self._running:
            for key, _ in self._selector.select(max(0.0, beat_s - time.monotonic())):
                key.data()
                if not self._running:
                    break
            if time.monotonic() >= beat_s:
                self._beat(b".")
                beat_s = time.monotonic() + HEARTBEAT_S
        self._disconnect()
        for child in list(self._children.values()):
            self._finish(child)
        self._listener.close()
        remove_path(self._path)

    def _beat(self, sign: bytes) -> None:
        if self._ready_fd >= 0:
            try:
                os.write(self._ready_fd, sign)
            except OSError:
                self._running = False  # nobody supervises us any more

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(SEND_S)
        self._connection = PacketSocket(sock, m.ToZygote)
        self._selector.unregister(self._listener)  # one router at a time; its successor waits in the backlog
        self._watch(sock.fileno(), self._receive)
        import torch

        version = ".".join(map(str, sys.version_info[:3]))
        self._tell(m.ZygoteReady(confinement=str(self.level), python=version, torch=str(torch.__version__)))

    def _disconnect(self) -> None:
        """The router is gone: so are its instances."""
        if self._connection is None:
            return
        self._selector.unregister(self._connection.sock)
        self._connection.close()
        self._connection = None
        for child in self._children.values():
            self._signal(child, signal.SIGKILL)
        if self._running:
            self._watch(self._listener.fileno(), self._accept)

    def _tell(self, message: m.FromZygote) -> None:
        if self._connection is not None:
            try:
                self._connection.send(message)
            except PeerLost:
                self._disconnect()

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            packet = self._connection.recv()
        except (PeerLost, RemoteProtocolError):
            packet = None
        if packet is None:
            self._disconnect()
            return
        message, fds = packet
        try:
            if isinstance(message, m.Signal):
                child = self._children.get(message.instance)
                if child is not None and child.status is None:
                    self._signal(child, message.signal)
            else:
                self._fork(message, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _signal(self, child: Child, number: int) -> None:
        # A cancellation is for the instance's main thread; programs that the function has started would die of it.
        send = os.kill if number == signal.SIGUSR1 else os.killpg
        try:
            send(child.pid, number)
        except ProcessLookupError:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)  # it has not made its process group yet

    # ---------------------------------------------------------------------------------------------------- forking

    def _fork(self, fork: m.Fork, fds: list[int]) -> None:
        if len(fds) != 2 or fork.instance in self._children:
            self._tell(
                m.ForkFailed(instance=fork.instance, text="a Fork needs a new name and two descriptors: log, arena")
            )
            return
        if len(os.listdir("/proc/self/task")) != 1:
            raise ProcessFailed(
                "the zygote has more than one thread; instances would inherit locks that nobody releases"
            )
        assert self._connection is not None
        report, report_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        init, lifeline = 0, -1
        try:
            if self.level.pid:
                linux.unshare(linux.CLONE_NEWPID)
                init, lifeline = self._start_init()
            pid = os.fork()
        except OSError as error:
            os.close(report)
            self._end_init(init, lifeline)
            self._tell(
                m.ForkFailed(instance=fork.instance, text=f"cannot fork: {error}; close other programs or allow more")
            )
            return
        finally:
            if self.level.pid and os.getpid() == _zygote_pid:
                linux.setns(self._own_pid_namespace, linux.CLONE_NEWPID)
            if os.getpid() == _zygote_pid:
                os.close(report_write)
        if pid == 0:
            self._become(fork, fds[0], fds[1], report_write)
        pidfd = os.pidfd_open(pid)
        child = Child(fork.instance, pid, linux.host_pid(pidfd), report, self._connection, init, lifeline)
        self._children[fork.instance] = child
        self._watch(pidfd, lambda: self._exited(child, pidfd))
        self._tell(m.Forked(instance=fork.instance, pid=child.host_pid))

    def _start_init(self) -> tuple[int, int]:
        """A pid namespace needs an init; if it were the instance, signals would not have their usual effect on it.

        ``cat`` waits for the end of a pipe of which we hold the other side, so it also ends when we are killed.
        """
        if self._init_program is None:
            return 0, -1
        stdin, lifeline = os.pipe2(os.O_CLOEXEC)
        actions = [(os.POSIX_SPAWN_DUP2, stdin, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, self._wakeup, fd) for fd in (1, 2)]  # it never writes
        init = os.posix_spawn(self._init_program, ["dormouse-init"], {}, file_actions=actions, setpgroup=0)
        os.close(stdin)
        return init, lifeline

    def _end_init(self, init: int, lifeline: int) -> None:
        if init:
            os.close(lifeline)
            os.kill(init, signal.SIGKILL)
            os.waitpid(init, 0)  # returns when the whole namespace is gone

    def _become(self, fork: m.Fork, log_fd: int, arena_fd: int, report: int) -> NoReturn:
        """In the child. This frame keeps our sockets' objects referenced: none closes a descriptor that is not its."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            with open(fork.path, "rb") as file:
                source = file.read()
            cell = sandbox.Cell(
                directory=fork.directory, uid=fork.uid, limits=fork.limits, origin=fork.origin, zygote_pid=_zygote_pid
            )
            unseen = sandbox.confine(self.level, self.seen, cell, log_fd, [arena_fd, report])
        except (OSError, DormouseError) as error:
            os.write(report, f"cannot confine the instance: {error}".encode())
            os._exit(CONFINEMENT_FAILED)
        except BaseException:
            os.write(report, traceback.format_exc().encode()[-4000:])
            os._exit(CONFINEMENT_FAILED)
        os.close(report)
        try:
            from dormouse.client_shim import runner

            runner.run_instance(fork, source, arena_fd, str(self.level), self.config.sandbox.threads, unseen)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(CONFINEMENT_FAILED)

    def _exited(self, child: Child, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._finish(child)

    def _finish(self, child: Child) -> None:
        """Reap a dead (or killed) child with all that it started, and say so."""
        del self._children[child.instance]
        status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
        self._end_init(child.init, child.lifeline)
        if not child.init:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        try:
            failure = os.read(child.report, 8192)
        except BlockingIOError:
            failure = b""
        os.close(child.report)
        if child.owner is not self._connection:
            return
        if failure:
            self._tell(m.ForkFailed(instance=child.instance, text=failure.decode(errors="replace")))
        else:
            self._tell(m.Exited(instance=child.instance, pid=child.host_pid, status=status))


_zygote_pid = 0


def _stand_by(child: int) -> NoReturn:
    """What the supervisor sees is the parent of the zygote, which is the init of a pid namespace: mirror its life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def main() -> int:
    global _zygote_pid
    if _CLEAN not in os.environ:
        # An instance can read the memory in which its ancestor's environment was put: start anew without secrets.
        environment = sandbox.scrubbed_environment(dict(os.environ), _KEPT) | {_CLEAN: "1"}
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    del os.environ[_CLEAN]
    arguments = parse_arguments()
    die_with_parent(signal.SIGKILL, dumpable=True)  # else the files that make a user namespace are not ours to write
    ready_fd = int(os.environ.pop("DORMOUSE_READY_FD", "-1"))
    paths = RunPaths(arguments.run)
    config = read_node_config(arguments.run) if paths.node_json.exists() else NodeConfig()
    level = sandbox.become_authority()
    signal.signal(
        signal.SIGTERM, lambda *_: os._exit(0)
    )  # an init without a handler would not hear it while it imports
    if level.pid and (child := os.fork()):
        if ready_fd >= 0:
            os.close(ready_fd)
        linux.set_dumpable(False)
        _stand_by(child)
    linux.die_with_parent_signal(signal.SIGKILL)
    linux.set_dumpable(False)
    os.environ.pop("DORMOUSE_PARENT", None)
    _zygote_pid = os.getpid()
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    state = str(config.state_directory)
    uid = config.sandbox.uid_base if config.sandbox.uid == "auto" else None
    level = sandbox.probe(level, arguments.run, state, uid)
    warm.import_everything(config.sandbox.warm)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page that holds an object
    gc.disable()
    Zygote(paths.zygote(arguments.epoch), level, sandbox.view(arguments.run, state, level), config, ready_fd).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
