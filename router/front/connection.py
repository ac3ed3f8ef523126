"""One HTTP connection: uvicorn's, and what it may take of this process.

    idle --first byte--> head --all of it--> body --all of it--> answered, idle again

* A head has at most HEAD_NBYTES and HEADERS fields (431), and so do a chunked body's trailers and extensions.
* A head comes within ``header_s`` of its first byte, a body within ``body_s`` and a second for each PACE_NBYTES of it
  (408). So must an answer be read, else the connection is cut. While we do not read, the client's clock stands still.
* There are at most ``most`` connections; one too many takes the place of the one that is idle longest, or is refused.
* One that has been idle for ``keep_alive_s`` is closed.

The application is called with a Cycle (cycle.py) for each request, one after the other.

It does not know what is asked for; that is http.py.
"""

import asyncio
import math
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import httptools

from dormouse.router.front.cycle import Cycle
from dormouse.router.front.receiver import ReceivingConnection
from dormouse.schemas.messages import Failure

HEAD_NBYTES: Final = 64 << 10
HEADERS: Final = 128
"""Browsers and proxies send some twenty; a field costs a hundred times its bytes here."""

PACE_NBYTES: Final = 64 << 10
"""A second, at half a megabit per second: slower than any line that is worth sending a body over."""

SWEEP_S: Final = 1.0
"""How often the clocks are looked at: no timer per request."""


@dataclass(slots=True)
class Onward:
    """To whom connections go that are idle: to nobody, or to a successor; ``give(fd)`` is whether it will have it."""

    give: Callable[[int], bool] | None = None


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a connection meets, and how an error is worded: ``render(failure)`` is a whole answer."""

    most: int
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


class HttpConnection(ReceivingConnection):
    """See the module."""

    cycle: Cycle  # type: ignore[assignment]  # the newest

    def __init__(self, bounds: Bounds, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = bounds
        self._phase = _Phase.IDLE
        self._due_s = math.inf  # when the client must have sent what it is sending
        self._read_due_s = math.inf  # when it must have read its answer
        self._idle_s = 0.0  # since when it has been idle
        self._brought = False  # whether the bytes at hand had any of a body, or ended a message
        self._overhead_nbytes = 0  # in a row that brought nothing
        self._came_nbytes = 0  # the same with the bytes at hand: no head among them can be longer
        self._refusal: Failure | None = None
        self._current: Cycle | None = None  # the one that is being answered, or was last

    # --- of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_s = self.loop.time()
        self._due_s = self._idle_s + self._bounds.header_s
        if len(self.connections) > self._bounds.most and not self.displace():
            self._refuse(too_many_connections(self._bounds.most))

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._phase is _Phase.IDLE:
            self._phase, self._due_s = _Phase.HEAD, self.loop.time() + self._bounds.header_s
            self._overhead_nbytes = 0
        self._brought = False
        self._came_nbytes = self._overhead_nbytes + len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = False  # answered as if it had not been asked for; what follows is not HTTP
            return
        except httptools.HttpParserError:
            self._refuse(self._refusal or bad_http())
            return
        self._overhead_nbytes = 0 if self._brought else self._came_nbytes
        if self._overhead_nbytes > HEAD_NBYTES:
            self._refuse(head_too_large())

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)
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

    def on_headers_complete(self) -> None:
        if len(self.headers) > HEADERS or self._came_nbytes > HEAD_NBYTES < self._head_nbytes():
            self._refusal = head_too_large()
            raise _Refused
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope = {
            "method": self.parser.get_method().decode("ascii"),
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "query_string": url.query or b"",
            "headers": self.headers,
            "client": self.client,
        }
        modern = self.parser.get_http_version() not in ("0.9", "1.0")
        keep_alive = modern and self.parser.should_keep_alive()
        if self._bounds.onward.give is not None and self.below is not None:  # of TLS nothing can go over
            keep_alive = False
        before, self.cycle = self.cycle, Cycle(self, scope, keep_alive, self.expect_100_continue, modern)
        if before is None or before.response_complete:
            self._begin(self.cycle)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))  # type: ignore[arg-type]
        self.headers = []  # a trailer is no header of the request
        self._phase, self._due_s = _Phase.BODY, self.loop.time() + self._bounds.body_s

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
        self._brought = True
        self._phase, self._due_s, self._idle_s = _Phase.IDLE, math.inf, self.loop.time()
        if self.cycle.response_complete:
            self._due_s = self._idle_s + self._bounds.keep_alive_s
        else:
            self.cycle.came(b"", last=True)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, _ = self.pipeline.pop()
            self._begin(cycle)  # type: ignore[arg-type]
        elif self._phase is _Phase.IDLE:
            self._due_s = self.loop.time() + self._bounds.keep_alive_s
            if self._bounds.onward.give is not None:
                self.loop.call_soon(self.go_over)  # when its answer is on its way

    # --- a successor

    @property
    def closes(self) -> bool:
        """Whether all is said, and perhaps a TLS client's farewell to come."""
        return self.transport.is_closing() and not self._unread_nbytes()

    @property
    def stays(self) -> bool:
        """Whether it has an answer that goes on until somebody leaves."""
        return self._answering and self.cycle.endless

    def adopted(self) -> None:
        """It was another router's, and is idle."""
        self._due_s = self.loop.time() + self._bounds.keep_alive_s

    def is_left(self) -> None:
        """A successor takes over. Of TLS nothing can go there: what its client has asked for last is answered, and it
        is told to come back on another connection.
        """
        if self.below is not None and self.cycle is not None:
            self.cycle.keep_alive = False

    def go_over(self) -> None:
        """To the successor, if it is idle and all that it was told is on its way; what its client says from now on
        waits in the kernel.
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
            if self._phase is _Phase.IDLE:
                self.transport.close()
            else:
                self._refuse(too_slow(self._phase.value))
        return unread_nbytes

    def _unread_nbytes(self) -> int:
        below_nbytes = 0 if self.below is None else self.below.get_write_buffer_size()
        return int(self.transport.get_write_buffer_size()) + below_nbytes

    def displace(self) -> bool:
        """Make room for this one; False if all others are in use."""
        idle = [
            each
            for each in self.connections
            if isinstance(each, HttpConnection) and each.cycle is not None and not each._answering
            if each._phase is _Phase.IDLE and not each.transport.is_closing() and not each._unread_nbytes()
        ]
        if idle:  # not close: that would wait for a TLS client's farewell
            min(idle, key=lambda each: each._idle_s).transport.abort()
        return bool(idle)

    def _refuse(self, failure: Failure) -> None:
        """Answer, if this is what the next answer is for, and close."""
        own = self._phase is _Phase.BODY and not self.pipeline and not self.cycle.response_started
        if not self._answering or own:
            self.transport.write(self._bounds.render(failure))
        self.transport.close()
        self._leave()


def head_too_large() -> Failure:
    text = f"the request's header may have {HEAD_NBYTES} bytes and {HEADERS} fields; send what is large in the body"
    return Failure(code="header_too_large", status=431, text=text)


def too_slow(what: str) -> Failure:
    text = f"the request's {what} did not come in time; send it without pauses"
    return Failure(code="request_timeout", status=408, text=text)


def bad_http() -> Failure:
    return Failure(code="bad_http", status=400, text="this is not HTTP/1.1; send one well-formed request at a time")


def too_many_connections(most: int) -> Failure:
    text = f"{most} connections are open already (limits.connections); close some, or come back later"
    return Failure(code="too_many_connections", status=503, text=text, retryable=True)
