"""ZMTP 3.0, the protocol of two ZeroMQ DEALER sockets on a stream: greeting, handshake, frames. No I/O.

ZeroMQ's own library serves a socket from a thread of its own: each message then costs both processes two more handovers
between threads, about 30 µs of processor time each. On a request's path the process's own thread speaks the protocol
instead; the other end may be the library or this module. (ZeroMQ RFC 23.)
"""

from typing import Final

from dormouse.schemas.errors import RemoteProtocolError

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4

GREETING_NBYTES: Final = 64
SHORT_HEADER_NBYTES: Final = 2  # flags, length
LONG_HEADER_NBYTES: Final = 9  # flags, length in eight bytes
MAX_SHORT_NBYTES: Final = 255
MAX_COMMAND_NBYTES: Final = 512

_PONG: Final = b"\x04PONG"
_PING: Final = b"\x04PING"
_PING_TTL_NBYTES: Final = 2


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4) + value


def _command(body: bytes) -> bytes:
    return bytes([COMMAND, len(body)]) + body


GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY: Final = _command(b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""))
OPENING: Final = GREETING + READY
"""Sent first by either end, without waiting for the other."""


def framed(message: bytes) -> bytes:
    """``message`` as it stands on the stream."""
    length = len(message)
    if length <= MAX_SHORT_NBYTES:
        return b"\0%c%b" % (length, message)
    return b"\x02%b%b" % (length.to_bytes(8), message)


class Reader:
    """Cuts what a peer says into messages. It holds at most one message that is not whole.

    Args:
        max_nbytes: the longest message that the peer may send.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._kept = bytearray()
        self._wanted = GREETING_NBYTES  # bytes that must be there before it is worth looking
        self.greeted = False
        self.commands = 0  # heard; who counts them clears it
        self.answer = b""
        """The reply that the peer has asked for; the sender clears it."""

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes. Raises RemoteProtocolError: nothing more can be read."""
        if self._kept:
            self._kept += data
            if len(self._kept) < self._wanted:
                return []
            data = bytes(self._kept)
        at, end = 0, len(data)
        if not self.greeted:
            if end < GREETING_NBYTES:
                self._kept = bytearray(data)
                return []
            self._greet(data)
            at = GREETING_NBYTES
        messages: list[bytes] = []
        self._wanted = SHORT_HEADER_NBYTES
        while end - at >= SHORT_HEADER_NBYTES:
            flags = data[at]
            if flags & LONG:
                start = at + LONG_HEADER_NBYTES  # beyond the end if the length is not whole
                length = int.from_bytes(data[at + 1 : start])
            else:
                start = at + SHORT_HEADER_NBYTES
                length = data[at + 1]
            if flags & ~LONG or length > self._max_nbytes:
                self._check(flags, length)
            stop = start + length
            if stop > end:
                self._wanted = stop - at
                break
            if flags & COMMAND:
                self._obey(data[start:stop])
            else:
                messages.append(data[start:stop])
            at = stop
        if at < end:
            self._kept = bytearray(data[at:])
        elif self._kept:
            self._kept = bytearray()
        return messages

    def _greet(self, data: bytes) -> None:
        if data[0] != 0xFF or not data[9] & 1 or data[10] < 3 or data[12:32] != GREETING[12:32]:
            raise RemoteProtocolError("the peer does not speak ZMTP 3 without a password")
        self.greeted = True

    def _check(self, flags: int, length: int) -> None:
        if flags & MORE:
            raise RemoteProtocolError("a message of several parts")
        if flags & COMMAND and length <= MAX_COMMAND_NBYTES:
            return
        if flags & ~(LONG | COMMAND):
            raise RemoteProtocolError(f"a frame with the flags {flags:#x}, which ZMTP does not know")
        limit = MAX_COMMAND_NBYTES if flags & COMMAND else self._max_nbytes
        raise RemoteProtocolError(f"a message of {length} bytes; at most {limit}")

    def _obey(self, body: bytes) -> None:
        self.commands += 1
        if body.startswith(_PING):
            self.answer = _command(_PONG + body[len(_PING) + _PING_TTL_NBYTES :])
