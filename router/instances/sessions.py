"""`dormouse run` processes: each gets an instance's identity over RUN/t/attach and has it until its socket ends.

A session is an instance whose process we did not start: it runs as the user, is trusted with nothing more than an
instance, and is ended by closing its socket, after a word of why. There are ``limits.sessions`` at most. A client
that does not ask for a session has ASK_S, and there are SILENT of these.
"""

import asyncio
import contextlib
from typing import Any, Final, NamedTuple, Protocol

from dormouse.core import procfs
from dormouse.core.config import NodeConfig
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.policy import RequestPolicy
from dormouse.core.decisions.requests.state import SESSION_TENANT
from dormouse.core.links.fds import Listener, PacketSocket, close_all
from dormouse.router.instances.instances import Instances
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

Connection = PacketSocket[m.AttachSession, m.FromAttach]

ASK_S: Final = 10.0
"""A program asks as soon as it is connected."""

SILENT: Final = 16

REASON_CHARS: Final = 4000
"""Of why a session ends: it may quote what the session sent, and must fit into a packet."""

PROGRAM_CHARS: Final = 200
"""Of its command line, for people."""


class KnownSession(NamedTuple):
    """``pid`` is the process that connected, as the kernel says."""

    pid: int
    program: str
    since_s: float


class Node(Protocol):
    """The part of the router that this module uses."""

    config: NodeConfig
    device: m.DeviceInfo | None
    instances: Instances
    leaving: bool
    loop: asyncio.AbstractEventLoop
    log: Any
    orderly: bool
    policy: RequestPolicy

    def dispatch(self, event: e.Event) -> None: ...


class Sessions:
    """Sockets of living sessions, by instance."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._listener: Listener[m.AttachSession, m.FromAttach] | None = None
        self._silent: dict[Connection, asyncio.TimerHandle] = {}  # which have not asked
        self._by_instance: dict[str, Connection] = {}
        self._known: dict[str, KnownSession] = {}  # of these

    def open(self, path: str) -> None:
        self._listener = Listener(path, m.AttachSession, self._connected)

    def _connected(self, connection: Connection) -> None:
        instance = ""

        def asked(message: m.AttachSession, fds: list[int]) -> None:
            nonlocal instance
            close_all(fds)
            if instance:
                return
            self._silent.pop(connection).cancel()
            instance = self._attach(connection, message)
            if not instance:
                connection.close()

        def ended() -> None:
            if (timer := self._silent.pop(connection, None)) is not None:
                timer.cancel()
            self._known.pop(instance, None)
            if self._by_instance.pop(instance, None) is not None:
                self._node.dispatch(e.InstanceExited(instance, "ended"))

        while len(self._silent) >= SILENT:
            self._hang_up(next(iter(self._silent)))
        self._silent[connection] = asyncio.get_running_loop().call_later(ASK_S, self._hang_up, connection)
        connection.serve(asked, ended)

    def _hang_up(self, connection: Connection) -> None:
        """It has not asked."""
        self._silent.pop(connection).cancel()
        connection.close()

    def _attach(self, connection: Connection, message: m.AttachSession) -> str:
        """Returns the instance's name, or "" if the session was refused."""
        node = self._node
        if node.device is None or not node.instances.store_attached:
            self._say(
                connection,
                m.AttachRefused(text="the node has no GPU or no store at the moment; try again in a moment"),
                [],
            )
            return ""
        if len(self._by_instance) >= (most := node.config.limits.sessions):
            text = (
                f"{len(self._by_instance)} programs of `dormouse run` are linked to it, and limits.sessions allows "
                f"{most}; end one (`dormouse status` lists them), or raise it in the node file"
            )
            self._say(connection, m.AttachRefused(text=text), [])
            return ""
        name = node.policy.picture.new_name()
        try:
            host = node.instances.open_session(name)
        except (OSError, PeerLost) as error:
            text = f"the session has no place ({error}); free space, and inodes, in [node] run"
            self._say(connection, m.AttachRefused(text=text), [])
            return ""
        pid, _ = connection.peer  # its own statement is not asked for
        host.pid = pid
        self._by_instance[name] = connection
        self._known[name] = KnownSession(pid, _program(pid), node.loop.time())
        node.dispatch(e.SessionOpened(name, f"run:{message.name}"))
        answer = m.Attached(instance=name, directory=host.directory, arena=host.layout, device=node.device, gpus=1)
        self._say(connection, answer, [host.arena.fd])
        node.log.info("session_starts", instance=name, name=message.name, pid=pid)
        return name

    def rows(self, now_s: float) -> list[dict[str, Any]]:
        """Of those that live, the oldest first."""
        return [
            {
                "session": name,
                "program": known.program,
                "pid": known.pid,
                "since_ms": round(1000 * (now_s - known.since_s)),
                "tenant": SESSION_TENANT,
            }
            for name, known in self._known.items()
        ]

    def _say(self, connection: Connection, message: m.FromAttach, fds: list[int]) -> None:
        with contextlib.suppress(PeerLost, BlockingIOError):  # its end of file follows, or it never reads: its loss
            connection.send(message, fds)

    def end(self, instance: str, why: str) -> bool:
        """Close a session's socket; False if there is no such session. ``why`` completes "this session ..."."""
        connection = self._by_instance.pop(instance, None)
        self._known.pop(instance, None)
        if connection is None:
            return False
        self._node.log.info("session_ends", instance=instance, why=why[:REASON_CHARS])
        self._say(connection, m.SessionEnd(text=f"this session {why}"[:REASON_CHARS]), [])
        connection.close()
        self._node.dispatch(e.InstanceExited(instance, "ended"))
        return True

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        text = "the node's router failed and all is started anew; run the program again"
        if self._node.leaving:
            text = "the node was replaced (`dormouse up --replace`); run the program again"
        elif self._node.orderly:
            text = "the node was stopped; start it again with `dormouse up`, then run the program again"
        for connection in self._by_instance.values():
            self._say(connection, m.SessionEnd(text=text), [])
            connection.close()
        for connection in [*self._silent]:
            self._hang_up(connection)
        self._by_instance.clear()
        self._known.clear()


def _program(pid: int) -> str:
    """Its program, in its own words: `dormouse run` makes the process the program's."""
    words = procfs.words(pid)
    if "run" in words:
        words = words[words.index("run") + 1 :]
    return " ".join(words).strip()[:PROGRAM_CHARS]
