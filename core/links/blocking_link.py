"""The end of a link for a process without an event loop: an instance's, which connects."""

import math
import select
import socket
import time
from collections import deque
from contextlib import suppress
from typing import Final

from dormouse.core.links import zmtp
from dormouse.core.links.ends import MAX_MESSAGE_NBYTES
from dormouse.core.links.link import MAX_RECONNECT_S, RECONNECT_S
from dormouse.core.links.sockets import READ_NBYTES, checked_path, connected
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

SEND_S: Final = 30.0
"""A sender's wait for the peer to listen, and then for room."""


class BlockingLink:
    """One end of a link. Not thread-safe: one lock per stream.

    Args:
        sock: a connection that was accepted at ``path``; without one this end connects.
    """

    def __init__(self, path: str, *, max_nbytes: int = MAX_MESSAGE_NBYTES, sock: socket.socket | None = None) -> None:
        self.path = checked_path(path)
        self._reader = zmtp.Reader(max_nbytes)
        self._heard: deque[bytes] = deque()
        self.lost = False
        """The peer has hung up, or is not to be heard any more."""

        self._sock = sock
        if sock is None:
            with suppress(PeerLost):  # who sends or waits is told
                self._try_connect()
        else:
            self._push(zmtp.OPENING, SEND_S)

    def _try_connect(self) -> bool:
        if self._sock is None:
            self._sock = connected(self.path)
            if self._sock is not None:
                self._sock.setblocking(True)
                self._push(zmtp.OPENING, SEND_S)
        return self._sock is not None

    def _connect(self, timeout_s: float) -> bool:
        """Is the peer there, or comes within the time?"""
        deadline_s, pause_s = time.monotonic() + timeout_s, RECONNECT_S
        while not self._try_connect():
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(pause_s)  # nothing tells when a path appears
            pause_s = min(2 * pause_s, MAX_RECONNECT_S)
        return True

    def send(self, data: bytes, timeout_s: float = SEND_S) -> None:
        """Send; waits at most ``timeout_s`` for the peer to listen, and for room. Raises PeerLost."""
        if not self.met and not self.meet(timeout_s):
            raise PeerLost(f"{self.path}: nobody has answered for {timeout_s:g} s")
        self._push(zmtp.framed(data), timeout_s)

    @property
    def met(self) -> bool:
        """Whether the peer has sent its opening. ZeroMQ's library does not receive what is sent before that."""
        return self._reader.greeted

    def meet(self, timeout_s: float) -> bool:
        """Wait until the peer listens and has said its opening. Raises PeerLost."""
        deadline_s = time.monotonic() + timeout_s
        if not self._connect(timeout_s):
            return False
        while not self.met and (left_s := deadline_s - time.monotonic()) > 0:
            if wait_readable([self], left_s):
                self._read(socket.MSG_DONTWAIT)
        return self.met

    def _push(self, frame: bytes, timeout_s: float) -> None:
        assert self._sock is not None
        if self.lost:
            raise PeerLost(f"{self.path}: the peer has hung up")
        try:
            sent = self._sock.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            raise self._hung_up(str(error)) from error
        if sent < len(frame):
            self._push_rest(memoryview(frame)[sent:], time.monotonic() + timeout_s)

    def _push_rest(self, rest: memoryview, deadline_s: float) -> None:
        assert self._sock is not None
        room = select.poll()
        room.register(self._sock, select.POLLOUT)
        while rest:
            if not room.poll(_ms(deadline_s - time.monotonic())):
                raise self._hung_up("no room to send in time")  # half a message is on its way: there is no next one
            try:
                rest = rest[self._sock.send(rest, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise self._hung_up(str(error)) from error

    def recv(self, timeout_s: float) -> bytes | None:
        """The next message, or None after ``timeout_s`` seconds (0: do not wait; infinity: as long as it takes).
        Raises PeerLost, RemoteProtocolError.
        """
        if self._heard:
            return self._heard.popleft()
        if self._sock is None and not self._connect(timeout_s):
            return None
        if timeout_s == math.inf:
            while not self._heard:
                self._read(0)
        else:
            self._read(socket.MSG_DONTWAIT)
            deadline_s = time.monotonic() + timeout_s if timeout_s > 0 else 0.0
            while not self._heard and (left_s := deadline_s - time.monotonic()) > 0:
                if wait_readable([self], left_s):
                    self._read(socket.MSG_DONTWAIT)
        return self._heard.popleft() if self._heard else None

    def _read(self, flags: int) -> None:
        assert self._sock is not None
        if self.lost:
            raise PeerLost(f"{self.path}: the peer has hung up")
        try:
            data = self._sock.recv(READ_NBYTES, flags)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._hung_up(str(error)) from error
        if not data:
            raise self._hung_up("the peer has hung up")
        try:
            self._heard.extend(self._reader.feed(data))
        except RemoteProtocolError as error:
            self.lost = True
            raise RemoteProtocolError(f"{self.path}: {error}") from error
        if self._reader.answer:
            self._push(self._reader.answer, SEND_S)
            self._reader.answer = b""

    def _hung_up(self, text: str) -> PeerLost:
        self.lost = True
        return PeerLost(f"{self.path}: {text}")

    def fileno(self) -> int:
        """The socket's descriptor, -1 while nobody listens."""
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def waiting(self) -> bool:
        """Is there a message that was read already?"""
        return bool(self._heard)

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()


def wait_readable(links: list[BlockingLink], timeout_s: float, fds: tuple[int, ...] = ()) -> list[BlockingLink]:
    """Those of ``links`` that have something to read, a part of a message or the end included, after at most
    ``timeout_s`` seconds, or as soon as one of ``fds`` can be read.
    """
    if any(link.waiting for link in links):
        return [link for link in links if link.waiting]
    poll = select.poll()
    by_fd = {link.fileno(): link for link in links if link.fileno() >= 0}
    for fd in (*by_fd, *fds):
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(_ms(timeout_s)) if fd in by_fd]


def _ms(seconds: float) -> int:
    return max(0, math.ceil(min(seconds, 1e6) * 1000))
