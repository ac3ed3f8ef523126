"""One HTTP connection, uvicorn's, with bounds on the resources that it takes.

    idle --first byte--> head --all of it--> body --all of it--> answered, idle again
                                                \\--answered before that--> ending

* A head has at most HEAD_NBYTES and HEADERS fields (431), and so do a chunked body's trailers and extensions.
* A head comes within ``header_s`` of its first byte, a body within ``body_s`` and a second for each PACE_NBYTES of it
  (408). So must an answer be read, else the connection is cut. While we do not read, the client's clock stands still.
* The number of connections is bounded; places.py decides which one gives way to one more.
* One that has been idle for ``keep_alive_s`` is closed.
* A client that is answered while it still sends is read for a while: a close at once would be a reset, which takes the
  answer with it (RFC 9112, 9.6). Its bytes are discarded, up to LINGER_NBYTES, LINGER_S and a silence of QUIET_S.

The application is called with a Cycle (cycle.py) for each request, one after the other.

The content of requests is http.py's.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import httptools

from dormouse.router.front import heads
from dormouse.router.front.cycle import Cycle
from dormouse.router.front.heads import HEAD_NBYTES, HEADERS
from dormouse.router.front.places import ConnectionPlaces, peer_of
from dormouse.router.front.receiver import ReceivingConnection
from dormouse.schemas.messages import Failure

PACE_NBYTES: Final = 64 << 10
"""A second, at half a megabit per second: slower than any line that is worth sending a body over."""

FEED_NBYTES: Final = 8 << 10
"""To the parser at a time, so that what lies between two pieces of a body is measured, however much comes at once."""

LINGER_NBYTES: Final = 256 << 20
"""Sixteen bodies of the usual limit: clients that send all of a body before they read are read to the end."""

LINGER_HEAD_NBYTES: Final = 1 << 20
"""Of a head that does not end."""

LINGER_S: Final = 30.0
QUIET_S: Final = 5.0

SWEEP_S: Final = 1.0
"""How often the clocks are looked at: no timer per request."""


@dataclass(slots=True)
class Onward:
    """To whom connections go that are idle: to nobody, or to a successor; ``give(fd)`` is whether it will have it."""

    give: Callable[[int], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of a connection, and the wording of errors: ``render(failure)`` is a whole answer."""

    places: "ConnectionPlaces[HttpConnection]"
    header_s: float
    body_s: float
    keep_alive_s: float
    onward: Onward
    render: Callable[[Failure], bytes]


class _Refused(Exception):
    """Out of a callback of the parser."""


class _Phase(Enum):
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ENDING = "ending"


class HttpConnection(ReceivingConnection):
    """See the module."""

    cycle: Cycle  # type: ignore[assignment]  # the newest

    def __init__(self, bounds: Bounds, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._phase = _Phase.IDLE
        self._due_s = math.inf  # when the client must have sent the rest
        self._read_due_s = math.inf  # when it must have read its answer
        self._brought = False  # whether the bytes at hand had any of a body, or ended a message
        self._overhead_nbytes = 0  # in a row that brought nothing
        self._came_nbytes = 0  # the same with the bytes at hand: no head among them can be longer
        self._refusal: Failure | None = None
        self._asks_upgrade = False  # the head at hand: its request begins when it is read again, as ``_again``
        self._again = b""
        self._line = b""  # that the head at hand begins with, and perhaps more; the parser does not tell its protocol
        self._is_deaf = False  # its bytes are discarded
        self._left_nbytes = 0  # of what may still be thrown away, until then
        self._end_s = math.inf
        self._current: Cycle | None = None  # the one that is being answered, or was last

    # --- of the transport

    def arrives(self, transport: asyncio.Transport) -> bool:
        """It is accepted: whether there is a place for it."""
        leaves = self._bounds.places.come(self, peer_of(transport.get_extra_info("peername")), self.loop.time())
        if leaves is not None and leaves is not self:
            leaves.give_way()
        return leaves is not self

    def give_way(self) -> None:
        """To another: not a close, which would wait for a TLS client's farewell."""
        (self.below or self.transport).abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._due_s = self.loop.time() + self._bounds.header_s
        if self.below is None and not self.arrives(transport):
            self._refuse(heads.too_many_connections(self._bounds.places.most))

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._throw_away(len(data))
            return
        for start in range(0, len(data), FEED_NBYTES):
            if self._is_deaf or self.transport.is_closing():
                return
            self._take(data if len(data) <= FEED_NBYTES else data[start : start + FEED_NBYTES])

    def _take(self, data: bytes) -> None:
        if self._phase is _Phase.IDLE:
            now_s = self.loop.time()
            self._phase, self._due_s = _Phase.HEAD, now_s + self._bounds.header_s
            self._overhead_nbytes = 0
            if not self._answering and not self._unread_nbytes():
                self._bounds.places.owes(self, now_s)
            self._line = b""
        if self._phase is _Phase.HEAD and b"\n" not in self._line:
            self._line = (self._line + data).lstrip(b"\r\n")
        self._brought = False
        self._came_nbytes = self._overhead_nbytes + len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(self._refusal or heads.bad_http())
            return
        self._overhead_nbytes = 0 if self._brought else self._came_nbytes
        if self._overhead_nbytes > HEAD_NBYTES:
            self._refuse(heads.head_too_large(), LINGER_HEAD_NBYTES)

    def _feed(self, data: bytes) -> None:
        """The parser stops at a head that asks for another protocol: it reads that again, without the question."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self.new_parser()
                data = self._again + data[upgrade.args[0] :]
            else:
                return

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
        if self.below is None:
            self._bounds.places.gone(self)
        self.pipeline.clear()
        self._leave()
        self.flow.resume_writing()
        if exc is None:
            self.transport.close()
        self.parser = None  # type: ignore[assignment]

    def _leave(self) -> None:
        for cycle in (self._current, self.cycle):
            if cycle is not None:
                cycle.lost()

    # --- of the parser

    def on_message_begin(self) -> None:
        self.url, self.headers, self.expect_100_continue = b"", [], False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _Phase.BODY and name.lower() in heads.OF_HEADS:
            self._refusal = heads.bad_http(f"its trailer has {name.decode()}, which is a field of heads alone")
            raise _Refused
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        if len(self.headers) > HEADERS or self._came_nbytes > HEAD_NBYTES < self._head_nbytes():
            self._refusal = heads.head_too_large()
            raise _Refused
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if version == "1.0" and b" RTSP/1.0\r\n" in self._line:
            self._refusal = heads.bad_http("it is RTSP; send HTTP/1.1")
            raise _Refused
        scope = heads.scope_of(method, self.url, version, self.headers)
        if isinstance(scope, Failure):
            self._refusal = scope
            raise _Refused
        self._asks_upgrade = self.parser.should_upgrade()
        if self._asks_upgrade:
            self._again = heads.again(method, self.url, version, self.headers)
            return
        scope["client"] = self.client
        modern = version == "1.1"
        keep_alive = modern and self.parser.should_keep_alive()
        if self._bounds.onward.give is not None and self.below is not None:  # of TLS nothing can go over
            keep_alive = False
        awaited = modern and self.expect_100_continue
        before, self.cycle = self.cycle, Cycle(self, scope, keep_alive, awaited, modern)
        now_s = self.loop.time()
        self._bounds.places.asks(self, now_s)
        if before is None or before.response_complete:
            self._begin(self.cycle)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))  # type: ignore[arg-type]
        self.headers = []  # a trailer is no header of the request
        self._phase, self._due_s = _Phase.BODY, now_s + self._bounds.body_s

    def _begin(self, cycle: Cycle) -> None:
        self._current = cycle
        self._start_asgi_task(cycle, self.app)  # type: ignore[arg-type]

    def _head_nbytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def on_body(self, body: bytes) -> None:
        self._brought = True
        self._due_s += len(body) / PACE_NBYTES
        if not self.cycle.response_complete:
            self.cycle.came(body)

    def received(self, nbytes: int) -> None:
        self._due_s += nbytes / PACE_NBYTES

    def on_chunk_complete(self) -> None:
        self._brought = True

    def on_message_complete(self) -> None:
        if self._asks_upgrade:
            return  # it comes again
        self._brought = True
        now_s = self.loop.time()
        self._phase, self._due_s = _Phase.IDLE, math.inf
        if self.cycle.response_complete:
            self._due_s = now_s + self._bounds.keep_alive_s
            self._rests(now_s)
        else:
            self.cycle.came(b"", last=True)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing() or self._phase is _Phase.ENDING:
            return
        self.flow.resume_reading()
        now_s = self.loop.time()
        if self.pipeline:
            cycle, _ = self.pipeline.pop()
            self._begin(cycle)  # type: ignore[arg-type]
        elif self._is_deaf and self._refusal is not None:
            self._refuse(self._refusal)
        elif self._phase is _Phase.IDLE:
            self._due_s = now_s + self._bounds.keep_alive_s
            self._rests(now_s)
            if self._bounds.onward.give is not None:
                self.loop.call_soon(self.go_over)  # when its answer is on its way
        else:
            self._bounds.places.owes(self, now_s)  # the rest of a head, or of a body that nobody waits for

    def _rests(self, now_s: float) -> None:
        """It may give way, once all that was written to it is on its way."""
        if not self._unread_nbytes():
            self._bounds.places.rests(self, now_s)

    def asks_for(self, owner: str) -> bool:
        return self._bounds.places.asks_for(self, owner, self.loop.time())

    # --- a successor

    @property
    def closes(self) -> bool:
        """Whether nothing that its client sends counts any more."""
        return self.transport.is_closing() or self._phase is _Phase.ENDING

    @property
    def is_over(self) -> bool:
        """Whether all is sent, and perhaps a TLS client's farewell to come."""
        return self.closes and not self._unread_nbytes()

    @property
    def stays(self) -> bool:
        """Whether it has an answer that goes on until somebody leaves."""
        return self._answering and self.cycle.endless

    def adopted(self) -> None:
        """It was another router's, and is idle."""
        now_s = self.loop.time()
        self._due_s = now_s + self._bounds.keep_alive_s
        self._bounds.places.rests(self, now_s)

    def is_left(self) -> None:
        """A successor takes over. Of TLS nothing can go there: its client's last request is answered, and it
        is told to come back on another connection.
        """
        if self.below is not None and self.cycle is not None:
            self.cycle.keep_alive = False

    def go_over(self) -> None:
        """To the successor, if it is idle and all of its output is on its way; bytes of its client from now on
        wait in the kernel.
        """
        give = self._bounds.onward.give
        if give is None or self._phase is not _Phase.IDLE or self._answering:
            return
        if self.transport.is_closing() or self._unread_nbytes():
            return
        if self.below is not None:
            self.transport.close()
            return
        fd = self.transport.get_extra_info("socket").fileno()
        if give(fd):
            self.transport.abort()
        else:
            self.transport.close()

    # --- bounds

    @property
    def _answering(self) -> bool:
        """Whether an answer to an earlier request is still to come."""
        return self.cycle is not None and not self.cycle.response_complete

    def sweep(self, now_s: float) -> int:
        """Look at the clocks; returns how many bytes its client has not read."""
        unread_nbytes = self._unread_nbytes()
        if unread_nbytes == 0 or (self._answering and not self.flow.write_paused):
            self._read_due_s = math.inf
        elif self._read_due_s == math.inf:
            self._read_due_s = now_s + self._bounds.body_s + unread_nbytes / PACE_NBYTES
        elif now_s >= self._read_due_s:
            self.transport.abort()
        if self.flow.read_paused or (self._phase is _Phase.HEAD and self._answering):
            self._due_s += SWEEP_S
        elif now_s >= self._due_s and not self.transport.is_closing():
            if self._phase in (_Phase.IDLE, _Phase.ENDING):
                self.transport.close()
            else:
                self._refuse(heads.too_slow(self._phase.value))
        elif self._phase is _Phase.IDLE and not self._answering and self._bounds.places.is_busy(self):
            self._rests(now_s)
        return unread_nbytes

    def _unread_nbytes(self) -> int:
        below_nbytes = 0 if self.below is None else self.below.get_write_buffer_size()
        return int(self.transport.get_write_buffer_size()) + below_nbytes

    def _refuse(self, failure: Failure, linger_nbytes: int = LINGER_NBYTES) -> None:
        """Answer, if this is what the next answer is for, and close."""
        if self._phase is not _Phase.BODY and self._answering:  # what came before it is answered first
            self._refusal, self._is_deaf, self._left_nbytes = failure, True, linger_nbytes
            return
        own = self._phase is _Phase.BODY and not self.pipeline and not self.cycle.response_started
        if not self._answering or own:
            self.transport.write(self._bounds.render(failure))
        self._linger(linger_nbytes)
        self._leave()

    def finish(self) -> None:
        """All is sent, and nothing more will be."""
        if self._phase is _Phase.IDLE and not self.pipeline and not self.flow.read_paused:
            self.transport.close()
        else:
            self._linger(LINGER_NBYTES)

    def _linger(self, nbytes: int) -> None:
        """Close, once the client has had time to receive the last bytes."""
        if self.transport.is_closing():
            return
        now_s = self.loop.time()
        self._phase, self._is_deaf, self._left_nbytes = _Phase.ENDING, True, nbytes
        self._end_s, self._due_s = now_s + LINGER_S, now_s + QUIET_S
        self.pipeline.clear()
        if (oldest := self._bounds.places.ends(self, now_s)) is not None:
            oldest.give_way()
        if self.below is None:
            self.transport.set_protocol(self)  # not what receives a body
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _throw_away(self, nbytes: int) -> None:
        self._left_nbytes -= nbytes
        self._due_s = min(self._end_s, self.loop.time() + QUIET_S)
        if self._left_nbytes < 0:
            self.transport.abort()
