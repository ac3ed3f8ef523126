"""The instance's end of its link to the store: uploads, several of which may be unanswered, and commits."""

import time
from collections import deque
from typing import Final, TypeVar

import msgspec

from dormouse.client_shim.stream.backend import Liveness
from dormouse.client_shim.stream.failures import StoreRefused
from dormouse.core.links.blocking_link import BlockingLink, wait_readable
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

T = TypeVar("T", m.Uploaded, m.Committed)

STORE_S: Final = 120.0  # a store that evicts to disk may take its time; a silent one is dead
FILE_NBYTES_PER_S: Final = 16 << 20  # the slowest disk that one would keep a model on


WORD_S: Final = 10.0
NOBODYS: Final = -1  # a storage that has died


def hear_why(tie: Liveness | None) -> None:
    """A process of the node has hung up: the session is over, or will be as soon as the router knows. Raises
    SessionEnded.
    """
    if tie is not None:
        wait_readable([], WORD_S, (tie.fileno(),))
        tie.check()


class StorePort:
    """The typed link to the store. A refusal of an upload that nobody waited for is raised by the next wait, and by
    each commit as long as the program has that storage, which has no value.
    """

    def __init__(self, path: str, tie: Liveness | None) -> None:
        self._link = BlockingLink(path)
        self._tie = tie
        self._uploads: deque[int] = deque()  # storages, of those that are unanswered
        self._refused: dict[int, str] = {}  # by storage
        self._decoder: msgspec.msgpack.Decoder[m.StoreToInstance] = msgspec.msgpack.Decoder(m.StoreToInstance)

    def send(self, message: m.InstanceToStore) -> None:
        try:
            self._link.send(msgspec.msgpack.encode(message))
        except PeerLost as error:
            hear_why(self._tie)
            raise ConnectionError(str(error)) from error

    @property
    def unanswered(self) -> int:
        return len(self._uploads)

    def upload(self, message: m.StoreUpload) -> None:
        self.send(message)
        self._uploads.append(message.storage)

    def free(self, storages: list[int]) -> None:
        self.send(m.StoreFree(storages=storages))
        dead = set(storages)
        self._uploads = deque(NOBODYS if storage in dead else storage for storage in self._uploads)
        for storage in dead:
            self._refused.pop(storage, None)

    def settle(self) -> None:
        """Wait for the answers to all uploads. Raises as :meth:`ask`."""
        why = ""
        while self._uploads:
            answer = self._answer(m.Uploaded, STORE_S)
            storage = self._uploads.popleft()
            if isinstance(answer, m.StoreFailed):
                self._refused[storage] = answer.text
                why = why or answer.text
        self._refused.pop(NOBODYS, None)
        if why:
            raise StoreRefused(why)

    def ask(self, message: m.InstanceToStore, kind: type[T], file_nbytes: int = 0) -> T:
        """The answer, of the ``kind`` that it must be. ``file_nbytes`` is the number of bytes that the store reads from
        a file first.

        Raises StoreRefused with the store's words, ConnectionError when it is silent, SessionEnded when the node is
        gone.
        """
        self.settle()
        if self._refused and isinstance(message, m.Commit):
            raise StoreRefused(next(iter(self._refused.values())))
        self.send(message)
        answer = self._answer(kind, STORE_S + file_nbytes / FILE_NBYTES_PER_S)
        if isinstance(answer, m.StoreFailed):
            raise StoreRefused(answer.text)
        return answer

    def _answer(self, kind: type[T], limit_s: float) -> T | m.StoreFailed:
        deadline_s = time.monotonic() + limit_s
        data = None
        while data is None:
            # Not interruptible: an answer that nobody takes would be taken for the next one.
            left_s = deadline_s - time.monotonic()
            ready = wait_readable([self._link], left_s, () if self._tie is None else (self._tie.fileno(),))
            if not ready and self._tie is not None:
                self._tie.check()
            if left_s <= 0:
                raise ConnectionError(f"the store has not answered for {limit_s:g} s")
            try:
                data = self._link.recv(0) if ready else None
            except PeerLost as error:
                hear_why(self._tie)
                raise ConnectionError(str(error)) from error
        answer = self._decoder.decode(data)
        if not isinstance(answer, kind | m.StoreFailed):
            raise RemoteProtocolError(f"the store answered {answer} where {kind.__name__} was to come")
        return answer
