"""One child process of the supervisor: started, watched by its sentinel, sent messages, ended.

Owns the process, its link (or, for a zygote, its pipe) and the time of its last sign of life. Decides nothing.
"""

import asyncio
import math
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from dormouse.core import openmp, procfs
from dormouse.core.links.zmq_link import ZmqLink
from dormouse.core.node.roles import MODULES, kind
from dormouse.core.standby import NEXT, STANDBY_FD, TURN
from dormouse.core.startup import END_INSTANCES
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, ProcessFailed, RemoteProtocolError

ALLOCATORS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables that would have torch allocate in another way than executors count on: with expandable segments the driver
knows an operand's memory in pieces.
"""


SILENCE_S: Final = 30.0
"""Without a heartbeat for so long a process is taken for hung. Thirty heartbeats: a busy machine must not look like a
dead one."""

START_S: Final = 120.0
"""A first `import torch` from a cold disk takes tens of seconds."""


def patience_s(*, waits: bool, ready: bool) -> float:
    """For how long a process may be silent. One whose turn has not come has nothing to say, however long others
    take.
    """
    if waits:
        return math.inf
    return SILENCE_S if ready else START_S


def sink(path: Path) -> IO[bytes]:
    """The file for output of a process that is no record. On a disk that takes no more files that is lost, and nothing
    else.
    """
    try:
        path.unlink(missing_ok=True)  # a predecessor's, or an old node's, may have it open yet
        return path.open("wb")
    except OSError:
        return open(os.devnull, "wb")


class RunningRole:
    """A running role. Callbacks run in the supervisor's loop: ``on_message(child, message)`` and, once,
    ``on_exit(child, status)``. ``inherits``: descriptors that it is given, by the variable that tells it the number.
    ``stands_by``: of a node that is not there yet: it imports all, and begins with :meth:`begin`; a zygote is ready.
    Raises ProcessFailed if it cannot be started.
    """

    def __init__(
        self,
        role: str,
        epoch: int,
        *,
        run: Path,
        link_path: str,
        python: str,
        threads: int,
        stderr: Path,
        inherits: Mapping[str, int],
        stands_by: bool = False,
        on_message: Callable[["RunningRole", m.ToSupervisor], None],
        on_exit: Callable[["RunningRole", int], None],
    ) -> None:
        self.role = role
        self.epoch = epoch
        self.ready = False
        self.ending_instances = False
        self.dismissed = False  # it ends because nobody wants it for now
        self.failure: str | None = None
        self.watchdog = ""  # why the node has killed it for what it was at
        self.stopped_s: float | None = None  # since when it has been seen stopped
        self.stderr = stderr
        self._loop = asyncio.get_running_loop()
        self.seen_s = self._loop.time()
        self._on_message = on_message
        self._on_exit = on_exit
        self._pipe = -1
        self._link: ZmqLink[m.ToSupervisor, m.FromSupervisor] | None = None
        environment = os.environ | {"DORMOUSE_PARENT": str(os.getpid())}
        environment |= {name: str(fd) for name, fd in inherits.items()}
        ready_fds: tuple[int, ...] = ()
        self.imported = not stands_by
        self._turn: socket.socket | None = None  # while it stands by
        if stands_by:
            environment[NEXT] = "1"
        if kind(role) == "zygote":
            self._pipe, theirs = os.pipe()
            os.set_blocking(self._pipe, False)
            ready_fds = (theirs,)
            environment["DORMOUSE_READY_FD"] = str(theirs)
            self._loop.add_reader(self._pipe, self._read_pipe)
        else:
            self._link = ZmqLink(
                link_path, bind=True, incoming=m.ToSupervisor, on_message=self._heard, on_garbage=self._garbage
            )
            if stands_by:
                self._turn, its = socket.socketpair()
                ready_fds = (its.detach(),)
                environment[STANDBY_FD] = str(ready_fds[0])
                self._turn.setblocking(False)
                self._loop.add_reader(self._turn.fileno(), self._has_imported)
        if kind(role) == "gpu":
            environment = {name: value for name, value in environment.items() if name not in ALLOCATORS}
            environment |= {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
            environment |= openmp.WAITING
        command = [python, "-P", "-m", MODULES[kind(role)], "--run", str(run), "--role", role, "--epoch", str(epoch)]
        try:
            with sink(stderr) as errors:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    env=environment,
                    pass_fds=(*ready_fds, *inherits.values()),
                    start_new_session=True,
                )
        except OSError as error:
            self._close()
            if error.filename != python:
                text = f"the machine does not start it ({error.strerror}); close other programs, or allow more"
                raise ProcessFailed(text) from error
            raise ProcessFailed(
                f"its interpreter {python} cannot be started ({error.strerror}); install it there, or name another "
                "([sandbox] python is that of functions)"
            ) from error
        finally:
            for fd in ready_fds:
                os.close(fd)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: m.FromSupervisor) -> None:
        """Tell the child; a zygote, which has no link, only understands Shutdown (as SIGTERM)."""
        if self._link is not None:
            try:
                self._link.send(message)
            except PeerLost:
                self.kill()
        elif isinstance(message, m.Shutdown):
            self.signal(signal.SIGTERM)

    def _has_imported(self) -> None:
        assert self._turn is not None
        self._loop.remove_reader(self._turn.fileno())
        if self._turn.recv(1):  # else it has ended, which its sentinel says
            self.imported = True
            self._heard(m.Heartbeat())

    def begin(self) -> None:
        """Its node is there."""
        self.seen_s = self._loop.time()
        if self._turn is not None:
            with suppress(OSError):
                self._turn.sendall(TURN)
            self._end_turn()

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._loop.remove_reader(self._turn.fileno())
            self._turn.close()
            self._turn = None

    @property
    def stands_by(self) -> bool:
        return self._turn is not None

    @property
    def waits(self) -> bool:
        """It stands by and has imported all."""
        return self.stands_by and self.imported

    def signal(self, number: int) -> None:
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, number)

    def end_instances(self, within_s: float) -> None:
        """Have a zygote end all; it is killed if it takes longer. One that is not ready has none."""
        if self.ready:
            self.ending_instances = True
            self.signal(END_INSTANCES)
            self._loop.call_later(within_s, self._expect_ended)

    def _expect_ended(self) -> None:
        if self.ending_instances:
            self.kill()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def look(self, now_s: float) -> float:
        """For how long it has been seen stopped (SIGSTOP), which no sentinel tells. A tracer's stop does not count."""
        if not any(procfs.state(pid) == "T" for pid in (self.pid, *self._behind())):
            self.stopped_s = None
            return 0.0
        if self.stopped_s is None:
            self.stopped_s = now_s
        return now_s - self.stopped_s

    def _behind(self) -> list[int]:
        """A zygote itself, where what was started is its stub: the init of a pid namespace, as instances are not."""
        if kind(self.role) != "zygote":
            return []
        return [pid for pid in procfs.children(self.pid) if procfs.inner_pid(pid) == 1]

    def last_words(self, nbytes: int = 2000) -> str:
        """The end of what it wrote to stderr."""
        try:
            return self.stderr.read_bytes()[-nbytes:].decode(errors="replace")
        except OSError:
            return ""

    def _heard(self, message: m.ToSupervisor) -> None:
        self.seen_s = self._loop.time()
        self._on_message(self, message)

    def _garbage(self, error: RemoteProtocolError) -> None:
        self.failure = str(error)
        self.kill()

    def _read_pipe(self) -> None:
        data = os.read(self._pipe, 4096)
        if not data:
            self._loop.remove_reader(self._pipe)
            return
        if b"ready" in data:
            self.ending_instances = False
            self.imported = True
            self._heard(m.Ready())
        else:
            self._heard(m.Heartbeat())

    def _exited(self) -> None:
        status = self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._close()
        self._on_exit(self, status)

    def _close(self) -> None:
        """Our ends of what it says."""
        self._end_turn()
        if self._pipe >= 0:
            self._loop.remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1
        if self._link is not None:
            self._link.close()
