"""Unix sockets: those at paths, and reads and writes of one that never blocks."""

import contextlib
import os
import socket
from typing import Final

from dormouse.schemas.errors import LocalProtocolError, PeerLost

MAX_PATH_NBYTES: Final = 107  # sun_path, less its terminating zero
BACKLOG: Final = 128
READ_NBYTES: Final = 64 << 10


def checked_path(path: str) -> str:
    """Raises LocalProtocolError if no socket can have it."""
    if len(os.fsencode(path)) > MAX_PATH_NBYTES:
        raise LocalProtocolError(
            f"{path}: a socket path may have at most {MAX_PATH_NBYTES} bytes; choose a shorter run directory"
        )
    return path


def connected(path: str) -> socket.socket | None:
    """A connection, which never blocks, to the listener at ``path``; None if nobody listens there. Raises PeerLost if
    there is something else.
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


def listener_at(
    path: str, kind: int = socket.SOCK_STREAM, *, owner: int | None = None, mode: int | None = None
) -> socket.socket:
    """Listens at ``path``, whatever socket or file was there, and never blocks. The path appears when it has its owner,
    a user id, and its mode: who finds it and may ever connect may connect now. Raises PeerLost.
    """
    listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    early = path[:-1] + "~"
    try:
        remove_path(early)
        listener.bind(early)
        if owner is not None:
            os.chown(early, owner, -1, follow_symlinks=False)  # the directory may be the owner's already
        if mode is not None:
            os.chmod(early, mode)
        listener.listen(BACKLOG)
        os.rename(early, path)
    except OSError as error:
        listener.close()
        raise PeerLost(f"cannot bind {path}: {error}") from error
    return listener


def received(peer: socket.socket) -> bytes | None:
    """The bytes that have come: None if none have, and no bytes when the peer has hung up."""
    try:
        return peer.recv(READ_NBYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def sent(peer: socket.socket, frame: bytes) -> int | None:
    """The number of its bytes that the socket has taken; None when the peer has hung up."""
    try:
        return peer.send(frame)
    except BlockingIOError:
        return 0
    except OSError:
        return None


def remove_path(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
