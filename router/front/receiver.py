"""Takes the place of an HttpConnection at its socket while the rest of a large body comes: receives it straight into
its place, with neither a parser nor Python's bytes between.

No more is taken from the socket than belongs to the body. All other events of the transport go to the connection.
"""

import asyncio
from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

STEP_NBYTES: Final = 256 << 10
"""At a time, as much as is read of any other connection: the others wait no longer."""


class BodyReceiver(asyncio.BufferedProtocol):
    """Fills ``room``, then the connection goes on. Closed before that, it leaves the socket unread."""

    def __init__(self, connection: "ReceivingConnection", room: memoryview) -> None:
        self._connection, self._room, self._nbytes = connection, room, 0
        connection.transport.set_protocol(self)

    @property
    def expected_nbytes(self) -> int:
        """Still to come."""
        return len(self._room) - self._nbytes

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room[self._nbytes : self._nbytes + STEP_NBYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._connection.received(nbytes)
        if not self.expected_nbytes:
            self._connection.transport.set_protocol(self._connection)
            self._connection.received_all()

    def close(self) -> None:
        transport = self._connection.transport
        if transport.get_protocol() is self:
            self._connection.flow.pause_reading()
            transport.set_protocol(self._connection)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


class ReceivingConnection(HttpToolsProtocol):
    """A connection that bodies can be received past."""

    below: asyncio.Transport | None = None  # the socket's own, where TLS lies between it and this

    def receive_into(self, room: memoryview) -> BodyReceiver | None:
        """The rest of the body goes there; not where TLS lies between. The caller closes it."""
        if self.below is not None or self.transport.is_closing():
            return None
        receiver = BodyReceiver(self, room)
        self.flow.resume_reading()
        return receiver

    def received(self, nbytes: int) -> None:
        """So many went past the parser."""
        raise NotImplementedError

    def received_all(self) -> None:
        """The body has ended, of which the parser does not know: it would wait for the rest."""
        self.new_parser()
        self.on_message_complete()

    def new_parser(self) -> None:
        """As uvicorn makes one."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def finish(self) -> None:
        """All is sent, and nothing more will be."""
        raise NotImplementedError

    def asks_for(self, owner: str) -> bool:
        """The caller is known; "": somebody without a key. Whether its request is to be answered."""
        raise NotImplementedError
