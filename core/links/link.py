"""Links: ordered, typed, point-to-point channels; with core/links/fds.py the only code that knows a socket.

A link is a ZeroMQ DEALER on each side of an ``ipc://`` path. It owns its socket, an outbox for what the peer has yet to
take, and nothing else: it does not reconnect to successors (an endpoint names an epoch) and never looks at a routing
id. A peer is identified by the path alone, so a path must lie where only that peer can reach it.

Three ends speak the same protocol and meet in any pair: `Link` here, served by the loop itself, for what lies on a
request's path; `BlockingLink` (core/links/blocking_link.py) for a process without a loop; `ZmqLink`
(core/links/zmq_link.py), served by ZeroMQ's library, for links that no request waits for.
"""

import asyncio
import contextlib
import socket
from collections import deque
from typing import Final, TypeVar

from dormouse.core.links import zmtp
from dormouse.core.links.ends import READ_BURST, STRANGER_BURST, End, Typed
from dormouse.core.links.loan import Loan
from dormouse.core.links.sockets import checked_path, connected, listener_at, received, remove_path, sent
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

In = TypeVar("In")
Out = TypeVar("Out")

LATE_S: Final = 0.001
RECONNECT_S: Final = 0.0005  # at first: a peer is mostly about to listen
MAX_RECONNECT_S: Final = 0.1


class RawLink(End):
    """A link of undecoded messages, served by the running asyncio loop.

    ``on_message`` is called with each message's bytes, in order, never re-entrantly from :meth:`send_raw`. The side
    that binds takes one connection at a time. A peer that hangs up is not reported: whoever ends processes does that.
    """

    def _open(self, bind: bool, max_nbytes: int) -> None:
        checked_path(self.path)
        self._max_nbytes = max_nbytes
        self._outbox: deque[bytes] = deque()
        self._waiting_nbytes = 0  # in it
        self._heard: deque[bytes] = deque()
        self._closed = False
        self._peer: socket.socket | None = None
        self._greeted = False  # ZeroMQ's library does not hear what comes together with the opening
        self._loop = asyncio.get_running_loop()
        self._retry: asyncio.TimerHandle | None = None
        self._lent = False
        self._pause: asyncio.Handle | None = None  # meanwhile nobody is heard: see `spend`
        self._burst = READ_BURST if self._pace is None else STRANGER_BURST
        self._late = b""  # frames that go with the next one
        self._late_at: asyncio.TimerHandle | None = None
        self._listener = listener_at(self.path, owner=self._owner) if bind else None
        if self._listener is not None:
            self._look()
        else:
            self._connect(RECONNECT_S)

    # -- the connection

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        self._loop.remove_reader(self._listener.fileno())  # one peer at a time
        self._meet(peer)
        self.spend(1)

    def _connect(self, pause_s: float) -> None:
        """Try now, and again after ``pause_s`` while nobody listens: either side may start first."""
        peer = connected(self.path)
        if peer is not None:
            self._meet(peer)
            return
        self._retry = self._loop.call_later(pause_s, self._connect, min(2 * pause_s, MAX_RECONNECT_S))

    def _meet(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._peer = peer
        self._reader = zmtp.Reader(self._max_nbytes)
        self._look()
        self._sent(zmtp.OPENING)

    def _part(self) -> None:
        """The peer has hung up, or is not to be heard any more. Messages that wait for it are dropped."""
        if self._peer is None:
            return
        self._loop.remove_reader(self._peer.fileno())
        self._loop.remove_writer(self._peer.fileno())
        self._peer.close()
        self._peer = None
        self._greeted = False
        self._late = b""
        self._outbox.clear()
        self._waiting_nbytes = 0
        self._look()

    def _look(self) -> None:
        """Hear the peer, or who comes next."""
        if self._closed or self._lent or self._pause is not None:
            return
        if self._peer is not None:
            self._loop.add_reader(self._peer.fileno(), self._ready)
        elif self._listener is not None:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    @property
    def connected(self) -> bool:
        """Whether a peer is there, as far as was read."""
        return self._peer is not None and self._greeted

    # -- sending

    def send_raw(self, data: bytes, late: bool = False) -> None:
        """Queue one message; ``late``: it may go with the next one, if that comes within `LATE_S`. Raises PeerLost when
        the peer does not drain its queue.
        """
        if self._closed:
            raise PeerLost(f"{self.path} is closed")
        frame = zmtp.framed(data)
        if late:
            self._late += frame
            if self._late_at is None:
                self._late_at = self._loop.call_later(LATE_S, self._send_late)
            return
        if self._late:
            frame, self._late = self._late + frame, b""
        self._send(frame)

    def _send_late(self) -> None:
        self._late_at = None
        if self._late and not self._closed:
            frame, self._late = self._late, b""
            self._send(frame)

    def _send(self, frame: bytes) -> None:
        if self._outbox or self._peer is None or not self._greeted or self._lent:
            if len(self._outbox) >= self._hwm or self._waiting_nbytes + len(frame) > self._hwm_nbytes:
                waiting = f"{len(self._outbox)} messages wait, of {self._waiting_nbytes:,} bytes"
                raise PeerLost(f"{self.path}: the peer does not read; {waiting}")
            self._queue(frame)
        elif (taken := self._sent(frame)) < len(frame):
            self._queue(frame[taken:])
            self._loop.add_writer(self._peer.fileno(), self._flush)

    def _queue(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._waiting_nbytes += len(frame)

    def _sent(self, frame: bytes) -> int:
        """The number of its bytes that the peer's socket has taken: all, if it has hung up, as reading will report. The
        loop may not: an error that sending has met is no event any more.
        """
        assert self._peer is not None
        taken = sent(self._peer, frame)
        if taken is None:
            self._loop.call_soon(self._hangs_up, self._peer)
            return len(frame)
        return taken

    def _hangs_up(self, peer: socket.socket) -> None:
        """Read what it has said before, and its end."""
        if self._peer is peer and not self._lent and not self._closed:
            self._ready()
            if self._peer is peer:
                self._loop.call_later(RECONNECT_S, self._hangs_up, peer)

    def _drain(self) -> None:
        if self._peer is not None and self._greeted and self._outbox:
            self._loop.add_writer(self._peer.fileno(), self._flush)

    def _flush(self) -> None:
        while self._outbox:
            frame = self._outbox[0]
            taken = self._sent(frame)
            self._waiting_nbytes -= taken
            if taken < len(frame):
                self._outbox[0] = frame[taken:]
                return
            self._outbox.popleft()
        assert self._peer is not None
        self._loop.remove_writer(self._peer.fileno())

    # -- hearing

    def _ready(self) -> None:
        if self._heard or self._peer is None or self._pause is not None:
            return  # the rest of the last burst first
        data = received(self._peer)
        if data is None:
            return
        if not data:
            self._part()
            return
        try:
            messages = self._reader.feed(data)
        except RemoteProtocolError as error:
            self._part()
            self.garbage(str(error))
            return
        if self._reader.answer:
            if len(self._outbox) < self._hwm:  # one that does not read asks in vain
                self._queue(self._reader.answer)
            self._reader.answer = b""
        if not self._greeted or self._outbox:
            self._greeted = self._reader.greeted
            self._drain()
        self.spend(self._reader.commands + (not messages))
        self._reader.commands = 0
        self._heard.extend(messages)
        self._deliver()

    def _deliver(self) -> None:
        if self._pause is not None:
            return
        burst = min(self._burst, len(self._heard))
        for _ in range(burst):
            if self._closed:
                return
            self._on_message(self._heard.popleft())
        self.spend(burst)
        if self._heard and self._pause is None:
            self._loop.call_soon(self._deliver)

    def spend(self, cost: int) -> None:
        """The peer has cost so much; less than nothing is what it may cost more than its pace says."""
        if self._pace is None or self._closed:
            return
        now_s = self._loop.time()
        self._pace.charge(now_s, cost)
        wait_s = self._pace.wait_s(now_s, 0.0)
        if self._pause is None and wait_s:
            if not self._lent and (heard := self._peer or self._listener) is not None:
                self._loop.remove_reader(heard.fileno())
            self._pause = self._loop.call_later(wait_s, self._go_on)
        elif self._pause is not None and not wait_s:
            self._pause.cancel()
            self._pause = self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._look()
        self._deliver()

    # -- lending

    def lend(self) -> Loan | None:
        """The connection for another thread, until :meth:`take_back`; None if something waits to be sent or heard here.
        Meanwhile nothing is received, and sent messages wait.
        """
        if self._peer is None or not self._greeted or self._lent or self._outbox or self._heard:
            return None
        self._lent = True
        self._loop.remove_reader(self._peer.fileno())
        return Loan(self, self._peer, self._reader)

    def take_back(self, loan: Loan) -> None:
        """End the loan. Messages that the other thread has received and not taken are delivered now."""
        assert self._lent
        assert self._peer is not None
        self._lent = False
        if self._closed:
            self._peer.close()
            self._peer = None
            return
        if loan.trouble is not None:
            self._part()  # first: what is delivered now may have it lent again
        else:
            if loan.unsent:
                self._outbox.appendleft(loan.unsent)
                self._waiting_nbytes += len(loan.unsent)
            self._drain()
            self._look()
        self._heard.extend(loan.heard)
        self._deliver()
        if loan.trouble is not None and not self._closed:
            self.garbage(loan.trouble)

    def close(self) -> None:
        """Close now; data that the peer's socket has not taken is lost. The side that bound removes the path."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._retry, self._late_at, self._pause):
            if timer is not None:
                timer.cancel()
        if not self._lent:
            self._part()
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
            with contextlib.suppress(OSError):  # an instance can put anything into its own directory
                remove_path(self.path)


class Link(Typed[In, Out], RawLink):
    """A typed link, served by the running loop."""

    def send_late(self, message: Out) -> None:
        """`send` for a message that nobody waits for: it may go together with the next message."""
        self.send_raw(self._encoder.encode(message), late=True)
