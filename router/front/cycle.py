"""One request and its answer, in bytes. connection.py makes it, exchange.py uses it.

Unlike ASGI, a body comes in the pieces in which it was read, an answer is one write, and the answering side is called
when the client departs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from dormouse.router.front.receiver import ReceivingConnection

UNREAD_NBYTES: Final = 64 << 10
"""Of a body that nobody has taken yet: then its socket is not read."""

ONE_WRITE_NBYTES: Final = 64 << 10
"""An answer up to this size is copied behind its head: one packet, and one record of TLS."""


class ClientLeft(Exception):
    """Nobody to answer."""


Headers = Iterable[tuple[bytes, bytes]]


class Cycle:
    """One request and its answer. ``scope`` has its method, path, query_string, headers and client, as ASGI does."""

    def __init__(
        self,
        connection: ReceivingConnection,
        scope: dict[str, Any],
        keep_alive: bool,
        awaited: bool,
        chunked: bool = True,
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self._chunked = chunked  # else a body without a length ends with its connection, as HTTP/1.0 has it
        self.response_started = False
        self.response_complete = False
        self.disconnected = False
        self.endless = False  # nobody waits for the end of its answer
        self._connection = connection
        self._awaited = awaited  # the client waits for the word that its body is wanted
        self._more = True  # of the body
        self._pieces: list[bytes] = []
        self._unread_nbytes = 0
        self._news: asyncio.Future[None] | None = None
        self._on_left: Callable[[], object] | None = None

    async def run_asgi(self, app: Callable[["Cycle"], Awaitable[None]]) -> None:
        await app(self)
        if not self.response_complete and not self.disconnected:
            self._connection.transport.close()

    # --- the request

    def asks_for(self, owner: str) -> bool:
        """The caller is known; "": somebody without a key. Whether this is to be answered."""
        return self._connection.asks_for(owner)

    def came(self, piece: bytes, last: bool = False) -> None:
        """``piece``: of its body, as it was read; ``last``: there is no more."""
        if piece:
            self._pieces.append(piece)
            self._unread_nbytes += len(piece)
            if self._unread_nbytes > UNREAD_NBYTES:
                self._connection.flow.pause_reading()
        self._more = not last
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def read(self) -> list[bytes]:
        """The pieces of the body that have come since the last call, if need be after waiting; none at its end. Raises
        ClientLeft.
        """
        while not self._pieces and self._more and not self.disconnected:
            transport = self._connection.transport
            if self._awaited and not transport.is_closing():
                transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._awaited = False
            self._connection.flow.resume_reading()
            await self._next_news()
        if self.disconnected:
            raise ClientLeft
        pieces, self._pieces, self._unread_nbytes = self._pieces, [], 0
        return pieces

    async def _next_news(self) -> None:
        self._news = self._connection.loop.create_future()
        await self._news

    async def fill(self, room: memoryview) -> bool:
        """Have the rest of the body, of announced length, received straight into ``room``, which it will fill. False,
        and nothing has been done, where that cannot be: read it. Raises ClientLeft.
        """
        if self._pieces or not self._more or self.disconnected:
            return False
        if (receiver := self._connection.receive_into(room)) is None:
            return False
        try:
            while self._more and not self.disconnected:
                await self._next_news()
        finally:
            receiver.close()
        if self.disconnected:
            raise ClientLeft
        return True

    def when_left(self, call: Callable[[], object] | None) -> None:
        """Have ``call`` called when the client leaves before its answer is complete; at once if it has. Its body must
        have been read.
        """
        if self.disconnected and call is not None:
            call()
            return
        self._on_left = call
        if not self._connection.pipeline:
            self._connection.flow.resume_reading()  # else nobody would see it leave

    def lost(self) -> None:
        """The client has left, or nothing that it sends is listened to any more."""
        if self.response_complete or self.disconnected:
            return
        self.disconnected = True
        self._wake()
        if self._on_left is not None:
            self._on_left()

    # --- the answer

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """All of it."""
        if self._connection.flow.write_paused:
            await self._connection.flow.drain()
        if self.disconnected:
            return
        head = self._head(status, [*headers, (b"content-length", b"%d" % len(body))])
        transport = self._connection.transport
        if self.scope["method"] == "HEAD":
            transport.write(head)
        elif len(body) <= ONE_WRITE_NBYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        self._complete()

    def answer_empty(self, status: int, headers: Headers) -> None:
        """A status that has no body."""
        if not self.disconnected:
            self._connection.transport.write(self._head(status, headers))
            self._complete()

    def begin(self, status: int, headers: Headers) -> None:
        """An answer of unknown length; :meth:`chunk` follows. Not for HEAD."""
        if not self.disconnected:
            coding = ((b"transfer-encoding", b"chunked"),) if self._chunked else ()
            self._connection.transport.write(self._head(status, [*headers, *coding]))

    def chunk_now(self, data: bytes) -> bool:
        """False, and nothing is done, if the client has to read first."""
        if self._connection.flow.write_paused:
            return False
        self._chunk(data)
        return True

    async def chunk(self, data: bytes) -> None:
        if self._connection.flow.write_paused:
            await self._connection.flow.drain()
        self._chunk(data)

    def _chunk(self, data: bytes) -> None:
        if data and not self.disconnected:
            self._connection.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def end(self) -> None:
        """After the last chunk."""
        if not self.disconnected:
            if self._chunked:
                self._connection.transport.write(b"0\r\n\r\n")
            self._complete()

    def cut(self) -> None:
        """Instead of the end: its client sees that the answer is not whole."""
        transport = self._connection.transport
        if self._chunked:
            transport.close()
        else:
            transport.abort()

    def _head(self, status: int, headers: Headers) -> bytes:
        self.response_started = True
        lines = [b"%b: %b\r\n" % header for header in (*self._connection.server_state.default_headers, *headers)]
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        return b"%b%b\r\n" % (STATUS_LINE[status], b"".join(lines))

    def _complete(self) -> None:
        self.response_complete = True
        if not self.keep_alive:
            self._connection.finish()
        self._connection.on_response_complete()
