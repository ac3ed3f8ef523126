"""Unix stream sockets at paths."""

import contextlib
import os
import socket
from typing import Final

from dormouse.schemas.errors import LocalProtocolError, PeerLost

MAX_PATH_NBYTES: Final = 107  # sun_path, less its terminating zero
BACKLOG: Final = 4


def checked_path(path: str) -> str:
    """Raises LocalProtocolError if no socket can have it."""
    if len(os.fsencode(path)) > MAX_PATH_NBYTES:
        raise LocalProtocolError(
            f"{path}: a socket path may have at most {MAX_PATH_NBYTES} bytes; choose a shorter run directory"
        )
    return path


def connected(path: str) -> socket.socket | None:
    """A connection, which never blocks, to who listens at ``path``; None if nobody does. Raises PeerLost: there is
    something else.
    """
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        peer.connect(path)
    except (FileNotFoundError, ConnectionRefusedError, BlockingIOError):
        peer.close()
        return None
    except OSError as error:
        peer.close()
        raise PeerLost(f"cannot connect {path}: {error}") from error
    return peer


def listener_at(path: str) -> socket.socket:
    """Listens at ``path``, whatever socket or file was there, and never blocks. Raises PeerLost."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.setblocking(False)
    try:
        remove_path(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PeerLost(f"cannot bind {path}: {error}") from error
    return listener


def remove_path(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
