"""The storages that the program can still reach, their bytes, and the recipients of reports of their deaths.

Owns the set made by the current lease and whether it wrote to older ones, the set that the store has but no manifest
yet, and the unusable remains of earlier leases. Sends nothing: the stream does, under whose lock this is used.
"""

from collections.abc import Iterator
from typing import Any

from dormouse.client_shim.commands.plans import Plan
from dormouse.client_shim.commands.room import Room, expect_allowed
from dormouse.client_shim.stream import remote_storage
from dormouse.client_shim.stream.remains import Remains
from dormouse.client_shim.stream.remote_storage import RemoteStorage
from dormouse.client_shim.stream.tape import Tape


class LiveStorages:
    """A command's results are counted on the tape where it is recorded: a call for each would cost too much."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.peak_nbytes = 0
        self.remains = Remains()
        self._uncommitted: set[int] = set()  # uploaded to the store since the last commit or lease
        self._parked: list[int] = []  # died while no lease was held

    @property
    def reachable_nbytes(self) -> int:
        """Bytes of all storages that the program can still reach, whether a GPU holds them now or not."""
        dead: int = sum(nbytes for number, nbytes in list(remote_storage.freed) if number >= self._tape.first_id)
        return self._tape.held_nbytes - dead

    def expect_room(self, nbytes: int) -> None:
        """Refuse growth beyond the program's own limit."""
        if self._tape.held_nbytes + nbytes > Room.allowed_nbytes:
            expect_allowed(self.reachable_nbytes, nbytes)

    def hold(self, nbytes: int) -> None:
        """A storage has come into being, or has grown."""
        self._tape.held_nbytes += nbytes
        self.grown()

    def grown(self) -> bool:
        """Whether so much has come since an answer that it may not fit."""
        self.peak_nbytes = max(self.peak_nbytes, self._tape.held_nbytes)
        heard = self._tape.heard_nbytes + Room.large_nbytes
        self._tape.watched_nbytes = min(self.peak_nbytes, heard, Room.allowed_nbytes)
        return self._tape.held_nbytes > min(heard, Room.allowed_nbytes)

    def heard(self) -> None:
        """An answer covers all that is held."""
        self._tape.heard_nbytes = self._tape.held_nbytes
        self.grown()

    def reset_peak(self) -> None:
        self.peak_nbytes = self.reachable_nbytes
        self._tape.watched_nbytes = min(self._tape.watched_nbytes, self.peak_nbytes)

    def make(self, nbytes: int, leased: bool = True) -> int:
        """The id of a new storage: of the lease, or of the store."""
        number: int = remote_storage.next_id()
        self.hold(nbytes)
        if leased:
            self._tape.created += 1
        else:
            self._uncommitted.add(number)
        return number

    def made_by_answer(self, count: int, nbytes: int) -> None:
        """New storages of the lease, of which one at least had its id before their number was known."""
        for _ in range(count - 1):
            remote_storage.next_id()
        self._tape.created += count
        self.hold(nbytes)

    def of_store(self, storage: RemoteStorage) -> bool:
        """Whether its new content may go to the store if no lease is held: no manifest has it."""
        return not storage.born or storage.id in self._uncommitted

    def put(self, storage: RemoteStorage, nbytes: int, leased: bool) -> None:
        """So much is about to be put into it from outside."""
        if not storage.born:
            storage.id = self.make(storage.nbytes, leased)
        elif storage.id < self._tape.lease_first_id:
            self._tape.wrote_persistent = True
            if self.remains and (error := self.remains.error(storage.id)) is not None:
                if nbytes < storage.nbytes:
                    raise error
                self.remains.free(storage.id)  # all of it is written: it has a value again

    def note_writes(self, plan: Plan, operands: list[Any]) -> None:
        if any(operands[position] < self._tape.lease_first_id for position in plan.written_at):
            self._tape.wrote_persistent = True

    def begin_lease(self) -> None:
        self._uncommitted.clear()
        self._tape.lease_first_id = remote_storage.next_id()
        self._tape.wrote_persistent, self._tape.created = False, 0
        self.heard()
        remote_storage.freed.extendleft((number, 0) for number in self._parked)
        self._parked = []

    def lose(self, why: str) -> None:
        """The live storages that were made in this lease have lost their values."""
        if self._tape.created > 0:
            self.remains.lose(self._tape.lease_first_id, remote_storage.next_id(), self._tape.created, why)
            self._tape.created = 0

    def committed(self) -> None:
        self._uncommitted.clear()

    def died(self) -> list[int]:
        """Ids for the executor of the lease that is held."""
        numbers = []
        for number in self._died():
            numbers.append(number)
            if number >= self._tape.lease_first_id:
                self._tape.created -= 1
            elif self.remains:
                self.remains.free(number)
        return numbers

    def died_unleased(self) -> list[int]:
        """Ids for the store, which alone knows these; the others are reported to executors at the next lease."""
        dead = []
        for number in self._died():
            if self.remains:
                self.remains.free(number)
            if number in self._uncommitted:
                self._uncommitted.discard(number)
                dead.append(number)
            else:
                self._parked.append(number)
        return dead

    def _died(self) -> Iterator[int]:
        while remote_storage.freed:
            number, nbytes = remote_storage.freed.popleft()
            if number >= self._tape.first_id:
                self._tape.held_nbytes -= nbytes
                self._tape.heard_nbytes = min(self._tape.heard_nbytes, self._tape.held_nbytes)
            yield number
