"""Links that ZeroMQ's library serves, from its own thread: the supervisor's, and the one between
controller and store.

They are as a `Link` is (core/links/link.py), and a last word reaches a peer that has yet to come.
"""

import asyncio
import contextlib
import os
from collections import deque
from typing import Final, TypeVar

import zmq
from zmq.backend import Socket as PlainSocket

from dormouse.core.links.ends import READ_BURST, End, Typed
from dormouse.core.links.sockets import checked_path, remove_path
from dormouse.schemas.errors import PeerLost

In = TypeVar("In")
Out = TypeVar("Out")

HEARTBEAT_MS: Final = 2_000
RECONNECT_MS: Final = 5
MAX_SOCKETS: Final = 16_384

_context: zmq.Context[zmq.Socket[bytes]] | None = None
_context_pid = 0


def _zmq_context() -> "zmq.Context[zmq.Socket[bytes]]":
    """The process's one context; a fork gets its own, because the parent's I/O thread does not exist there."""
    global _context, _context_pid
    if _context is None or _context_pid != os.getpid():
        _context = zmq.Context(io_threads=1)
        _context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        _context_pid = os.getpid()
    return _context


def _dealer(path: str, bind: bool, max_nbytes: int, hwm: int) -> "zmq.Socket[bytes]":
    checked_path(path)
    socket: zmq.Socket[bytes] = _zmq_context().socket(zmq.DEALER)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, hwm)
    socket.set(zmq.RCVHWM, hwm)
    socket.set(zmq.MAXMSGSIZE, max_nbytes)
    socket.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, 15 * HEARTBEAT_MS)
    socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
    try:
        if bind:
            socket.bind(f"ipc://{path}")
        else:
            socket.connect(f"ipc://{path}")
    except zmq.ZMQError as error:
        socket.close()
        raise PeerLost(f"cannot {'bind' if bind else 'connect'} {path}: {error}") from error
    return socket


class RawZmqLink(End):
    """A link of undecoded messages, as `RawLink`."""

    def _open(self, bind: bool, max_nbytes: int) -> None:
        assert self._owner is None, "ZeroMQ's library makes the path: it would be seen before it had its owner"
        assert self._pace is None, "ZeroMQ's library reads ahead"
        self._bound = bind
        self._outbox: deque[bytes] = deque()
        self._closed = False
        self._scheduled = False
        self._socket = _dealer(self.path, bind, max_nbytes, self._hwm)
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._ready)
        self._schedule()  # the descriptor is edge-triggered: what came before add_reader would wait for the next edge

    def send_raw(self, data: bytes) -> None:
        """Queue one message. Raises PeerLost when the peer does not drain its queue."""
        if self._closed:
            raise PeerLost(f"{self.path} is closed")
        if self._outbox or not self._try_send(data):
            if len(self._outbox) >= self._hwm:
                raise PeerLost(f"{self.path}: the peer does not read; {self._hwm} messages wait")
            self._outbox.append(data)
        self._schedule()

    def _try_send(self, data: bytes) -> bool:
        try:
            PlainSocket.send(self._socket, data, zmq.NOBLOCK)  # zmq.Socket's own has options that cost more
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise PeerLost(f"{self.path}: {error}") from error
        return True

    def _schedule(self) -> None:
        """Look again soon: sending may have consumed the edge that announced a message."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._scheduled = False
        if not self._closed and (self._outbox or int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN):
            self._ready()

    def _ready(self) -> None:
        for _ in range(READ_BURST):
            if self._closed:
                return
            try:
                data: bytes = PlainSocket.recv(self._socket, zmq.NOBLOCK)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                raise PeerLost(f"{self.path}: {error}") from error
            if self._socket.get(zmq.RCVMORE):
                self.garbage(f"a message of {1 + len(self._socket.recv_multipart(zmq.NOBLOCK))} parts")
            else:
                self._on_message(data)
        else:
            self._schedule()
        if self._outbox and not self._closed:
            self._drain()

    def _drain(self) -> None:
        """Send what waits. An attempt may consume the edge that announced a message, and one that fails comes again
        with the next edge only: so ask what there is.
        """
        while self._outbox and self._try_send(self._outbox[0]):
            self._outbox.popleft()
        if int(self._socket.get(zmq.EVENTS)) & (zmq.POLLIN | (zmq.POLLOUT if self._outbox else 0)):
            self._schedule()

    def close(self, linger_s: float = 0.0) -> None:
        """Close now; unsent messages are lost, unless there is time for it: then `close_context` waits for it, at most
        so long. The side that bound removes the path.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=int(linger_s * 1000))
        if self._bound:
            with contextlib.suppress(OSError):  # an instance can put anything into its own directory
                remove_path(self.path)


class ZmqLink(Typed[In, Out], RawZmqLink):
    """A typed link that ZeroMQ serves."""


def close_context() -> None:
    """Terminate the process's context after all its links are closed."""
    global _context
    if _context is not None and _context_pid == os.getpid():
        _context.destroy(linger=0)
        _context = None
