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
                f"port {port} on {host} is in use; stop the other program or set another node.port (0 takes any)"
            ) from error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; set another node.host or node.port"
        ) from error
    return sock


def inherited() -> socket.socket:
    """The supervisor's socket, in a router."""
    fd = int(os.environ[LISTEN_FD])
    os.set_inheritable(fd, False)
    return socket.socket(fileno=fd)
