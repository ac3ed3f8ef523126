"""The node's listening TCP socket: made and held by the supervisor, inherited by each router that it starts.

A connection that a router has not accepted waits in the kernel's queue of this socket, which outlives the router, so
that its successor serves it. Knows nothing of HTTP.
"""

import errno
import os
import socket
from typing import Final

from dormouse.schemas.errors import ConfigError

BACKLOG: Final = 1024
LISTEN_FD: Final = "DORMOUSE_LISTEN_FD"
"""Names the inherited descriptor in the router's environment."""


def bind_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigError saying what to do."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"node.host {host!r} is not an address of this machine ({error.strerror}); write 127.0.0.1 or 0.0.0.0"
        ) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop the other program, or give this node another one: port in "
                "[node] of its node file (0 takes any)"
            ) from error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; set another node.host or node.port"
        ) from error
    return sock


def expect_same_address(sock: socket.socket, host: str, port: int) -> None:
    """Whether the node that has this socket may be replaced by one with this address. Raises ConfigError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    found = sock.getsockname()
    if sock.family != family or found[0] != address[0] or port not in (0, found[1]):
        raise ConfigError(
            f"the running node listens on {found[0]} port {found[1]}, this one is to listen on {host} port {port}: "
            "`dormouse down` and `up` change that, `--replace` does not"
        )


HEIR_FD: Final = "DORMOUSE_HEIR_FD"
"""The descriptor by which a router, or a store, hands over to its successor of a newer version; in its environment."""

LEGACY_FD: Final = "DORMOUSE_LEGACY_FD"
"""The descriptor by which such a successor receives it."""

MAX_FDS: Final = 200
"""In one packet; the kernel takes 253."""


def inherited() -> socket.socket:
    """The supervisor's socket, in a router."""
    found = inherited_at(LISTEN_FD)
    assert found is not None
    return found


def inherited_at(name: str) -> socket.socket | None:
    """The socket whose number the environment has under this name, if any."""
    fd = os.environ.pop(name, "")
    if not fd:
        return None
    os.set_inheritable(int(fd), False)
    return socket.socket(fileno=int(fd))


class HandedSockets:
    """Open connections that go over to a successor, which has nothing of them but their sockets. ``end``: of a pair."""

    def __init__(self, end: socket.socket | None) -> None:
        self._end = end
        self._collected: list[int] = []
        if end is not None:
            end.setblocking(False)

    def give(self, fd: int) -> bool:
        """It is the successor's at the next :meth:`flush`; ours stays open. False if there is no room: the kernel takes
        some hundred packets, so each has many.
        """
        if self._end is None or (len(self._collected) >= MAX_FDS and not self.flush()):
            return False
        try:
            self._collected.append(os.dup(fd))
        except OSError:
            return False
        return True

    def flush(self) -> bool:
        """False if there was no room: then who had connected hears that the connection is closed."""
        collected, self._collected = self._collected, []
        try:
            if self._end is not None and collected:
                socket.send_fds(self._end, [b"c"], collected)
        except OSError:
            return False
        finally:
            for fd in collected:
                os.close(fd)
        return True

    def take(self) -> list[int]:
        """Those that a predecessor has given, in the order in which it did."""
        found: list[int] = []
        while self._end is not None:
            try:
                data, fds, _, _ = socket.recv_fds(self._end, 16, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return found
            if not data:
                return found
            found += fds
        return found

    def close(self) -> None:
        self.flush()
        if self._end is not None:
            self._end.close()
