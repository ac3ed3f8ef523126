"""`Tape`: the state that recording a command touches: the frame that is being filled, and the lease's results so far.

`commands/recorder.cpp` has the same in C++, with the same fields, where it is built.
"""

import threading
from typing import Any

import msgpack

from dormouse.client_shim.stream import remote_storage
from dormouse.client_shim.stream.call_sites import Site


class CommandArray(list[Any]):
    """The command array of a frame."""

    def framed(self, head: list[Any]) -> bytes:
        """The frame ``[*head, commands]``."""
        frame: bytes = msgpack.packb([*head, self])
        return frame


class StreamLock:
    """The lock of a stream, reentrant. The tape says who holds it: C++ records without it while that is nobody else,
    as it holds Python's own lock, the GIL, from the first to the last step.
    """

    def __init__(self, tape: Any) -> None:
        self._tape = tape
        self._lock = threading.RLock()
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        if not self._lock.acquire(blocking):
            return False
        self._tape.holder = threading.get_ident()
        self._depth += 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._tape.holder = 0
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exception: object) -> None:
        self.release()


class Tape:
    def __init__(self) -> None:
        self.holder = 0  # the thread whose turn it is
        self.commands = CommandArray()
        self.sites: list[Site | None] = []  # of the operations among them
        self.recorded = 0  # operations, ever
        self.open = False  # a lease is held
        self.epoch = 0  # changes when the lease's executor knows less, or is another
        self.idle = False  # that executor has answered all frames
        self.worth = 0  # commands that make a frame for an idle executor
        self.held_nbytes = 0  # of storages, those in `freed` included
        self.watched_nbytes = 0  # to hold more is a new peak, or may not fit
        self.heard_nbytes = 0  # the least that was held since an answer covered all
        self.first_id: int = remote_storage.next_id()  # a stream before this one may have had storages
        self.lease_first_id = 1
        self.created = 0  # in this lease, but for those reported dead to an executor
        self.wrote_persistent = False

    def take_sites(self) -> list[Site | None]:
        """Take the sites of the frame that is sent."""
        taken, self.sites = self.sites, []
        return taken

    def begin_lease(self) -> None:
        """Sequences of commands begin here."""

    def wait(self) -> None:
        """And here: the program is about to wait for an answer."""

    def lose(self) -> None:
        """Drop the commands that wait to be sent."""

    def stalls(self, template: int, position: int) -> None:
        """The executor never computes the command there ahead."""
