"""The instance's end of its link to the store: uploads and commits, one at a time."""

from typing import Final

import msgspec

from dormouse.client_shim.backend import Tie
from dormouse.client_shim.failures import StoreRefused
from dormouse.core.link import BlockingLink, wait_readable
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

STORE_S: Final = 120.0  # a store that evicts to disk may take its time; a silent one is dead
FILE_NBYTES_PER_S: Final = 16 << 20  # the slowest disk that one would keep a model on


class StorePort:
    """The typed link to the store; one message is unanswered at most, because the arena region is wanted back."""

    def __init__(self, path: str, tie: Tie | None) -> None:
        self._link = BlockingLink(path)
        self._tie = tie
        self._decoder: msgspec.msgpack.Decoder[m.StoreToInstance] = msgspec.msgpack.Decoder(m.StoreToInstance)

    def send(self, message: m.InstanceToStore) -> None:
        try:
            self._link.send(msgspec.msgpack.encode(message))
        except PeerLost as error:
            raise ConnectionError(str(error)) from error

    def answer(self, file_nbytes: int = 0) -> m.Uploaded | m.Committed:
        """``file_nbytes`` is what the store reads from a file first. Raises StoreRefused with the store's words,
        ConnectionError when it is silent, SessionEnded when the node is gone.
        """
        limit_s = STORE_S + file_nbytes / FILE_NBYTES_PER_S
        # Not interruptible: an answer that nobody takes would be taken for the next one.
        ready = wait_readable([self._link], limit_s, () if self._tie is None else (self._tie.fileno(),))
        if not ready and self._tie is not None:
            self._tie.check()
        data = self._link.recv(0) if ready else None
        if data is None:
            raise ConnectionError(f"the store has not answered for {limit_s:g} s")
        message = self._decoder.decode(data)
        if isinstance(message, m.StoreFailed):
            raise StoreRefused(message.text)
        return message
