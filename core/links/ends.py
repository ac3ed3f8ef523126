"""Common parts of all ends of links that a loop serves: their arguments, their limits, and typed messages."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgspec

from dormouse.core.rate import Bucket
from dormouse.schemas.errors import RemoteProtocolError

In = TypeVar("In")
Out = TypeVar("Out")

HIGH_WATER_MARK: Final = 10_000
"""Messages queued per direction before sending fails: two orders above what a busy node has in flight on one link."""

MAX_MESSAGE_NBYTES: Final = 64 << 20
"""Largest message between trusted processes: a catalogue with the sources of a few thousand functions."""

READ_BURST: Final = 64
"""Messages handled before other callbacks of the loop get a turn."""

STRANGER_BURST: Final = 16
"""The same from a peer that has a pace: half a millisecond of the router's time."""

STRANGER_RATE_S: Final = 10_000
"""Limit on the cost of all instances of a tenant to a process in a second, beside the work that they are given."""


class End(ABC):
    """An end of a link of undecoded messages.

    Args:
        on_message: called with each message's bytes, in order, never re-entrantly from :meth:`send_raw`.
        on_garbage: called when there is something that must not be; without it that is fatal.
        hwm: messages that may wait to be sent.
        hwm_nbytes: and their bytes; a `RawLink` counts them.
        owner: the user who alone may connect, by default this process's.
        pace: what a stranger may cost, whose messages this process would else do nothing but read. A message costs one,
            and so does data that completes none. A peer that has spent it all is not read for a while; nothing is
            lost. A `RawLink` has it.
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
        hwm_nbytes: int = sys.maxsize,
        owner: int | None = None,
        pace: Bucket | None = None,
    ) -> None:
        self.path = path
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._hwm, self._hwm_nbytes = hwm, hwm_nbytes
        self._owner, self._pace = owner, pace
        self._open(bind, max_nbytes)

    @abstractmethod
    def _open(self, bind: bool, max_nbytes: int) -> None:
        """Begin to bind or connect. Raises PeerLost, LocalProtocolError."""

    @abstractmethod
    def send_raw(self, data: bytes) -> None:
        """Queue one message. Raises PeerLost when the peer does not drain its queue."""

    def garbage(self, text: str) -> None:
        """Report a message that must not be; without a handler it is fatal, because trusted peers never send one."""
        error = RemoteProtocolError(f"{self.path}: {text}")
        if self._on_garbage is None:
            raise error
        self._on_garbage(error)


class Typed(End, Generic[In, Out]):
    """Makes a link of bytes one of messages that are members of a tagged union of ``msgspec.Struct``.

    Args:
        incoming: the union that may arrive; anything else is garbage.
    """

    def __init__(self, path: str, *, incoming: Any, on_message: Callable[[In], None], **how: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._on_typed = on_message
        super().__init__(path, on_message=self._decode, **how)

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
