"""`Tape`: what recording a command touches: the frame that is being filled, and what the lease has made so far.

`commands/recorder.cpp` has the same in C++, with the same fields, where it is built.
"""

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


class Tape:
    def __init__(self) -> None:
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
        self.created = 0  # in this lease, but for those that an executor was told are dead
        self.wrote_persistent = False

    def take_sites(self) -> list[Site | None]:
        """The sites of the frame that leaves."""
        taken, self.sites = self.sites, []
        return taken
