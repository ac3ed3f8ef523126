"""A session's tie to the node: the identity that the router gave it, and the notice that it is over.

The router ends a session by closing this socket, after a message with the reason; the kernel closes it for a router
that is killed. So each wait of a session also watches it. It does not know leases or streams.
"""

import os
import threading
from typing import Final

from dormouse.client_shim.stream.failures import SessionEnded
from dormouse.core.links.fds import PacketSocket
from dormouse.core.paths import RunPaths
from dormouse.core.shm import SharedMemory
from dormouse.core.version import expect_same_version
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

ATTACH_S: Final = 10.0  # the router answers at once, or is not there

WITHOUT_A_WORD: Final = (
    "the node has ended this session: one of its processes died and all are started anew, or it was killed; "
    "run the program again, after `dormouse up` if `dormouse status` finds no node"
)

Connection = PacketSocket[m.FromAttach, m.AttachSession]


class Attachment:
    """The identity that the router has given this session. It lasts until `check` raises."""

    def __init__(self, connection: Connection, attached: m.Attached, memory: SharedMemory) -> None:
        self.directory = attached.directory
        self.device = attached.device
        self.stream_area = memory.view[attached.arena.stream_offset : attached.arena.control_offset]
        self.over = ""  # the reason, once it was reported
        self._connection = connection
        self._connection.sock.setblocking(False)
        self._memory = memory
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._connection.sock.fileno()

    def check(self) -> None:
        """Raises SessionEnded if the session is over."""
        with self._lock:
            if not self.over:
                self.over = self._news()
        if self.over:
            raise SessionEnded(self.over)

    def _news(self) -> str:
        try:
            packet = self._connection.recv()
        except BlockingIOError:
            return ""
        except (PeerLost, RemoteProtocolError):
            return WITHOUT_A_WORD
        if packet is not None and isinstance(packet[0], m.SessionEnd):
            return f"the node has ended this session: {packet[0].text}"
        return WITHOUT_A_WORD

    def close(self) -> None:
        self._connection.close()


def attach(run: str) -> Attachment:
    """Ask the node's router for an identity. Raises PeerLost when there is none to be had now, ConfigError when
    the node runs another Dormouse; both say what to do.
    """
    try:
        expect_same_version(run)
        connection: Connection = PacketSocket.connect(RunPaths(run).attach, m.FromAttach, ATTACH_S)
        connection.send(m.AttachSession(name=f"run-{os.getpid()}", pid=os.getpid()))
        answer = connection.recv()
    except (PeerLost, OSError) as error:
        raise PeerLost(f"no node runs in {run} ({error}); start one with `dormouse up`") from error
    if answer is None:
        raise PeerLost(f"the node in {run} is shutting down; start it again with `dormouse up`")
    message, fds = answer
    if not isinstance(message, m.Attached):
        raise PeerLost(f"the node refused this session: {message.text}")
    return Attachment(connection, message, SharedMemory.adopt(fds[0], message.arena.nbytes))
