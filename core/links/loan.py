"""A link's connection in the hands of a thread that is not the loop's."""

import socket
from collections import deque
from typing import Protocol

from dormouse.core.links import zmtp
from dormouse.core.links.sockets import received, sent
from dormouse.schemas.errors import RemoteProtocolError


class Lender(Protocol):
    """The link that the connection is of."""

    def take_back(self, loan: "Loan") -> None: ...


class Loan:
    """That thread alone uses it, and waits for messages itself. It ends with :meth:`Lender.take_back`, on the loop's
    thread.

    Attributes:
        heard: messages that have arrived and were not taken.
        unsent: the part of a message that the peer's socket had no room for.
        trouble: why nothing more can be read; the peer's end is seen by the loop, which reads it again.
    """

    def __init__(self, link: Lender, peer: socket.socket, reader: zmtp.Reader) -> None:
        self.link = link
        self.heard: deque[bytes] = deque()
        self.unsent = b""
        self.trouble: str | None = None
        self._peer = peer
        self._reader = reader
        self._over = False

    @property
    def over(self) -> bool:
        """Whether the connection is to be given back: nothing more can be read from it, or the last message is not
        wholly sent.
        """
        return self._over or bool(self.unsent)

    def fileno(self) -> int:
        return self._peer.fileno()

    def read(self) -> None:
        """Take in what is there."""
        data = received(self._peer)
        if data is None:
            return
        if not data:
            self._over = True
            return
        try:
            self.heard.extend(self._reader.feed(data))
        except RemoteProtocolError as error:
            self._over, self.trouble = True, str(error)

    def send(self, data: bytes) -> None:
        """Send one message; the part that does not go at once is sent when the loan ends."""
        frame = zmtp.framed(data)
        taken = sent(self._peer, frame)
        if taken is None:
            self._over = True
        else:
            self.unsent = frame[taken:]
