"""Links: ordered, typed, point-to-point channels over ZeroMQ; with core/fds.py the only code that knows a socket.

A link is one DEALER on each side of an ``ipc://`` path. It owns its socket, an outbox for the time before the peer has
connected, and nothing else: it does not reconnect to successors (an endpoint names an epoch) and never looks at a
routing id. A peer is identified by the path alone, so a path must lie where only that peer can reach it.
"""

import asyncio
import contextlib
import math
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec
import zmq
from zmq.backend import Socket as PlainSocket

from dormouse.schemas.errors import LocalProtocolError, PeerLost, RemoteProtocolError

In = TypeVar("In")
Out = TypeVar("Out")

HIGH_WATER_MARK: Final = 10_000
"""Messages queued per direction before sending fails: two orders above what a busy node has in flight on one link."""

MAX_MESSAGE_NBYTES: Final = 64 << 20
"""Largest message between trusted processes: a catalogue with the sources of a few thousand functions."""

READ_BURST: Final = 64
"""Messages handled before other callbacks of the loop get a turn."""

HEARTBEAT_MS: Final = 2_000
RECONNECT_MS: Final = 5

MAX_SOCKETS: Final = 16_384
MAX_PATH_NBYTES: Final = 107  # sun_path, less its terminating zero

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
    if len(os.fsencode(path)) > MAX_PATH_NBYTES:
        raise LocalProtocolError(
            f"{path}: a socket path may have at most {MAX_PATH_NBYTES} bytes; choose a shorter run directory"
        )
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


class RawLink:
    """A link of undecoded messages, served by the running asyncio loop.

    ``on_message`` is called with each message's bytes, in order, never re-entrantly from :meth:`send`.
    """

    def __init__(
        self,
        path: str,
        *,
        bind: bool,
        on_message: Callable[[bytes], None],
        on_garbage: Callable[[RemoteProtocolError], None] | None = None,
        max_nbytes: int = MAX_MESSAGE_NBYTES,
        hwm: int = HIGH_WATER_MARK,
    ) -> None:
        self.path = path
        self._bound = bind
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._hwm = hwm
        self._outbox: deque[bytes] = deque()
        self._closed = False
        self._scheduled = False
        self._socket = _dealer(path, bind, max_nbytes, hwm)
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

    def garbage(self, text: str) -> None:
        """Report a message that must not be; without a handler it is fatal, because trusted peers never send one."""
        error = RemoteProtocolError(f"{self.path}: {text}")
        if self._on_garbage is None:
            raise error
        self._on_garbage(error)

    def close(self, linger_s: float = 0.0) -> None:
        """Close now; what was not sent is lost, unless there is time for it: then `close_context` waits for it, at most
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


class Link(RawLink, Generic[In, Out]):
    """A link whose messages are members of a tagged union of ``msgspec.Struct``.

    Args:
        incoming: the union that may arrive; anything else is garbage.
    """

    def __init__(
        self,
        path: str,
        *,
        bind: bool,
        incoming: Any,
        on_message: Callable[[In], None],
        on_garbage: Callable[[RemoteProtocolError], None] | None = None,
        max_nbytes: int = MAX_MESSAGE_NBYTES,
        hwm: int = HIGH_WATER_MARK,
    ) -> None:
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._on_typed = on_message
        super().__init__(
            path, bind=bind, on_message=self._decode, on_garbage=on_garbage, max_nbytes=max_nbytes, hwm=hwm
        )

    def send(self, message: Out) -> None:
        """Queue one message; never blocks. Raises PeerLost when the peer does not drain its queue."""
        self.send_raw(self._encoder.encode(message))

    def _decode(self, data: bytes) -> None:
        try:
            message = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter: a text that is not UTF-8
            self.garbage(str(error))
            return
        self._on_typed(message)


class BlockingLink:
    """An end of a link for a process without an event loop: an instance's, which connects. Not thread-safe: one lock
    per stream.
    """

    def __init__(
        self, path: str, *, bind: bool = False, max_nbytes: int = MAX_MESSAGE_NBYTES, hwm: int = HIGH_WATER_MARK
    ) -> None:
        self.path = path
        self._socket = _dealer(path, bind, max_nbytes, hwm)

    def send(self, data: bytes, timeout_s: float = 30.0) -> None:
        """Send; waits at most ``timeout_s`` for room. Raises PeerLost."""
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            if not self._socket.poll(int(timeout_s * 1000), zmq.POLLOUT):
                raise PeerLost(f"{self.path}: no room to send for {timeout_s:g} s") from None
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise PeerLost(f"{self.path}: {error}") from error

    def recv(self, timeout_s: float) -> bytes | None:
        """The next message, or None after ``timeout_s`` seconds (0: do not wait; infinity: as long as it takes)."""
        if timeout_s == math.inf:
            return self._blocking()
        try:
            return self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            pass
        except zmq.ZMQError as error:
            raise PeerLost(f"{self.path}: {error}") from error
        if timeout_s <= 0 or not self._socket.poll(int(timeout_s * 1000), zmq.POLLIN):
            return None
        return self._socket.recv(zmq.NOBLOCK)

    def _blocking(self) -> bytes:
        try:
            return self._socket.recv()
        except zmq.ZMQError as error:
            raise PeerLost(f"{self.path}: {error}") from error

    def close(self) -> None:
        self._socket.close()


def wait_readable(links: "list[BlockingLink]", timeout_s: float, fds: tuple[int, ...] = ()) -> "list[BlockingLink]":
    """Those of ``links`` that have a message, after at most ``timeout_s`` seconds, or as soon as one of ``fds`` can be
    read.
    """
    waited: list[tuple[Any, int]] = [(link._socket, zmq.POLLIN) for link in links]
    waited += ((fd, zmq.POLLIN) for fd in fds)
    ready = {socket for socket, _ in zmq.zmq_poll(waited, int(timeout_s * 1000))}
    return [link for link in links if link._socket in ready]


def close_context() -> None:
    """Terminate the process's context after all its links are closed."""
    global _context
    if _context is not None and _context_pid == os.getpid():
        _context.destroy(linger=0)
        _context = None


def remove_path(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
