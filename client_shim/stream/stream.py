"""The instance's end of the command stream: recording, leases, uploads and downloads.

Owns the lease that is held. `LiveStorages` knows the reachable storages, `Answers` the reported failures. One lock
covers everything, so that a function's threads may compute. There is no timer: a frame is sent when somebody waits,
when it is full, at once when the executor has nothing to do, and when a look at the replies (one command in sixteen)
shows that it has caught up.
"""

import ctypes
import gc
from typing import Any, Final

import torch

from dormouse.client_shim.commands import recorder
from dormouse.client_shim.commands.handles import cpp
from dormouse.client_shim.commands.metas import Meta
from dormouse.client_shim.commands.plans import Plan
from dormouse.client_shim.commands.room import Room, expect_allowed
from dormouse.client_shim.stream import remote_storage
from dormouse.client_shim.stream.answers import Answers
from dormouse.client_shim.stream.backend import Backend
from dormouse.client_shim.stream.bulk import Bulk
from dormouse.client_shim.stream.call_sites import call_site
from dormouse.client_shim.stream.connection import FREE_NUMBERS, REPLY_TIMEOUT_S, Connections, StreamConnection
from dormouse.client_shim.stream.failures import ExecutorLost, LeaseLost
from dormouse.client_shim.stream.live_storages import LiveStorages
from dormouse.client_shim.stream.numerics import NUMERICS
from dormouse.client_shim.stream.remote_storage import RemoteStorage
from dormouse.client_shim.stream.seeds import Seeds
from dormouse.client_shim.stream.tape import StreamLock, Tape
from dormouse.schemas import stream as wire
from dormouse.schemas.messages import Lease
from dormouse.schemas.numerics import Setting

FREE_BATCH: Final = 3
"""Dead storages that may wait for the next command: reporting each at once costs a microsecond per command, reporting
many late costs the GPU's memory."""

POLL_MASK: Final = 15
"""Replies are looked for at one command in sixteen: a look costs about as much as recording a command."""

EAGER_NBYTES: Final = 1 << 16
"""An executor that has nothing to do is sent a command with so large a result at once: it will take a while."""


class Stream:
    """Everything but `record` and the downloads is called by the runner or by `transfers`."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.questions = 0  # of the round trips: results whose shape had to be asked for
        self.shape_misses = 0
        self.last_used = True  # the last lease: its executor was given commands
        self.loading = True  # uploads without a lease join the model
        self._connection: StreamConnection | None = None
        self.tape: Tape = cpp.module.Tape() if cpp.module is not None else Tape()
        self.lock = StreamLock(self.tape)
        self._storages = LiveStorages(self.tape)
        self.answers = Answers(self._storages.remains)
        self._seeds = Seeds()
        self.bulk = Bulk(backend)
        self.connections = Connections(backend, self.tape, self.bulk.ring.settle, self.lose_lease)

    @property
    def commands_recorded(self) -> int:
        return self.tape.recorded

    # --- memory

    @property
    def held_nbytes(self) -> int:
        """Bytes of all storages that the program can still reach, whether a GPU holds them now or not."""
        with self.lock:
            return self._storages.reachable_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most that was held since the start or the last `reset_peak`, dead storages included until they are
        reported to an executor."""
        return self._storages.peak_nbytes

    def reset_peak(self) -> None:
        with self.lock:
            self._storages.reset_peak()

    def hold(self, nbytes: int) -> None:
        """A storage is about to grow."""
        with self.lock:
            self._storages.expect_room(nbytes)
            self._storages.hold(nbytes)

    def may_not_fit(self, nbytes: int) -> bool:
        """Whether so much more must be created at once, to learn whether there is room for it."""
        return nbytes > Room.large_nbytes or self.tape.held_nbytes + nbytes > Room.allowed_nbytes

    def allow(self) -> None:
        """The program has changed its own limit."""
        with self.lock:
            self._storages.grown()

    # --- leases

    @property
    def leased(self) -> bool:
        return self._connection is not None

    @property
    def to_store(self) -> bool:
        """Whether an upload into a new storage goes to the store now."""
        return self.loading and self._connection is None

    @property
    def used(self) -> bool:
        """Whether the executor of the lease that is held has been given anything."""
        return self._connection is not None and not self._connection.untouched

    def begin_lease(self, lease: Lease) -> None:
        """A request (or the backend) brought a lease: commands go to its executor from now on."""
        with self.lock:
            assert self._connection is None, "a lease is held already"
            self._park_frees()
            connection = self.connections.of(lease)
            connection.begin(lease)
            self.bulk.ring.clear()
            self._connection = connection
            self.tape.open = True
            self._storages.begin_lease()
            self.answers.begin_lease(self.commands_recorded)
            for command in self._seeds.begin(lease):
                connection.say(command)
            connection.tell_numerics(NUMERICS)

    def end_lease(self) -> int | None:
        """Give the GPU back. Storages that are still alive join the model, whether the request failed or not.

        Returns the manifest version after the write-back; None if there was nothing to wait for. Raises the first
        unreported error, and the reason if new storages cannot join; in both cases the lease has ended.
        """
        with self.lock:
            connection = self._connection
            if connection is None:
                return None
            try:
                version, error = self._end(connection)
            except (LeaseLost, ExecutorLost):
                self.lose_lease()
                raise
            except BaseException as refusal:
                # The executor has ended the lease without keeping anything: no room on the host, beyond the quota.
                self._storages.lose(f"could not keep it ({refusal or type(refusal).__name__})")
                self._drop_lease()
                self.backend.lease_ended(connection.lease, None)
                raise
            self._drop_lease()
        self.backend.lease_ended(connection.lease, version)
        if error is not None:
            raise error
        return version

    def _end(self, connection: StreamConnection) -> tuple[int | None, Exception | None]:
        # Autocast's cached casts are of this lease; a program that never leaves autocast would keep them.
        torch.clear_autocast_cache()
        connection.free(self._storages.died())
        if self.tape.created:
            gc.collect()
            connection.free(self._storages.died())
        self.last_used = not connection.untouched
        if not self.last_used:
            return None, None  # whatever took the lease reports instead
        # Without an answer, the failure of a command after the last answer would go unreported.
        unheard = self.answers.unheard(self.commands_recorded)
        wait = bool(self.tape.created or self.tape.wrote_persistent or unheard)
        token = self.answers.next_token()
        quiet = wire.END_QUIET if self.bulk.ring.empty else wire.END_ACK
        connection.commands += (wire.END, token, wire.END_WAIT if wait else quiet)
        if not wait:
            connection.flush()
            while not self.bulk.ring.empty:  # an upload that the executor has not read yet
                connection.pump(REPLY_TIMEOUT_S)
            return None, None
        version, failure, poisoned = self._answer(connection, token)
        for *told, storages in poisoned:
            self._storages.remains.poison(storages, self.answers.error(connection, *told))
        return int(version), None if failure is None else self.answers.error(connection, *failure)

    def _drop_lease(self) -> None:
        if self._connection is not None:
            self._connection.open = self.tape.open = False
            self._connection = None

    def remains(self) -> str:
        """A description of unusable storages that this process still holds; usually empty."""
        with self.lock:
            if self._storages.remains:
                gc.collect()
                self._park_frees()
            return self._storages.remains.story()

    def lose_lease(self, why: str = "lost its GPU") -> None:
        """The lease is over without an END: the executor died or refused it, or the request was interrupted. Storages
        made in it are gone, and its writes to older storages too: they are as they were when it began.
        """
        with self.lock:
            if self._connection is not None:
                self._storages.lose(why)
                self._connection.suspect = self.last_used = True
            torch.clear_autocast_cache()
            self._drop_lease()

    def commit(self) -> int | None:
        """Make uploads without a lease part of the model; under a lease, its end does that."""
        with self.lock:
            if self._connection is not None:
                return self.end_lease()
            self._park_frees()
            version = self.backend.commit()
            self._storages.committed()
            return version

    def _park_frees(self) -> None:
        if dead := self._storages.died_unleased():
            self.backend.store_free(dead)

    def _ready(self) -> StreamConnection:
        """The connection to record on, acquiring a lease if none is held."""
        connection = self._connection
        if connection is None:
            self._park_frees()
            self.begin_lease(self.backend.acquire())
            connection = self._connection
            assert connection is not None
        if remote_storage.freed:
            connection.free(self._storages.died())
        return connection

    # --- recording

    def connect(self) -> None:
        """C++ appends its commands here."""
        settings = recorder.RecorderSettings(wire.FRAME_COMMANDS, EAGER_NBYTES, POLL_MASK, FREE_BATCH, FREE_NUMBERS)
        calls = self.record, self.recorded, self._tell_template, self._flush
        recorder.connect(self.tape, *calls, settings)

    def record(self, plan: Plan, operands: list[Any]) -> int:
        """Append a command; the id of its first fresh storage."""
        with self.lock:
            connection = self._connection
            if connection is None or len(remote_storage.freed) > FREE_BATCH:
                connection = self._ready()
            if plan.id not in connection.told_keys:
                connection.tell(plan)
            tape = self.tape
            if plan.writes and not tape.wrote_persistent:
                self._storages.note_writes(plan, operands)
            fresh = [remote_storage.next_id() for _ in plan.fresh_nbytes]
            try:
                tape.commands.extend((plan.id, *operands, *fresh))
            except (OverflowError, ValueError, TypeError) as error:
                raise RuntimeError(f"an operation's arguments cannot be sent: {error}") from error
            tape.created += len(fresh)
            tape.held_nbytes += sum(plan.fresh_nbytes)
            tape.sites.append(call_site())
            tape.recorded += 1
            number = fresh[0] if fresh else 0
            self.recorded(plan, number)
            return number

    def recorded(self, plan: Plan, number: int) -> None:
        """Of the command that was recorded last, whose first fresh storage has this id: send the frame if it is due,
        and wait if the results may not fit.
        """
        with self.lock:
            connection, tape = self._connection, self.tape
            if connection is None:
                return  # another thread has ended the lease since
            count = len(tape.sites)
            if tape.held_nbytes > tape.watched_nbytes and self._storages.grown():
                self._answer_for(plan, number)
            elif count >= wire.FRAME_COMMANDS:
                connection.flush()
            elif tape.idle and (count >= tape.worth or any(nbytes >= EAGER_NBYTES for nbytes in plan.fresh_nbytes)):
                connection.send_early()
            elif not count & POLL_MASK and count >= tape.worth:
                connection.poll()

    def _tell_template(self, number: int, words: list[Any], plans: list[Plan]) -> bool:
        """Whether the executor will know these commands by this number."""
        with self.lock:
            connection = self._connection
            return connection is not None and connection.tell_template(number, words, plans)

    def _flush(self) -> None:
        with self.lock:
            if self._connection is not None:
                self._connection.send_early()

    def _answer_for(self, plan: Plan, number: int) -> None:
        """Of a command whose results have no owner yet."""
        made = sum(plan.fresh_nbytes)
        try:
            self.answer_for_all()
            expect_allowed(self._storages.reachable_nbytes - made, made)
        except BaseException:
            remote_storage.freed.extend(enumerate(plan.fresh_nbytes, number))
            raise

    def ask(self, plan: Plan, operands: list[Any]) -> tuple[list[Any], int]:
        """Run a command whose results cannot be predicted; returns the executor's report of them, and the first fresh
        storage's id."""
        with self.lock:
            connection = self._ready()
            if plan.bulky:
                connection.flush()
            if plan.id not in connection.told_keys:
                connection.tell(plan)
            if plan.writes and not self.tape.wrote_persistent:
                self._storages.note_writes(plan, operands)
            first = remote_storage.next_id()
            self.tape.sites.append(call_site())
            self.tape.recorded += 1
            self.questions += 1
            payload: list[Any] = self._asked(connection, wire.RESULT_META, plan.id, *operands, first)
            sizes = {result[2]: result[3] for result in payload[0] if result[0] == wire.FRESH}
            self._storages.made_by_answer(payload[3], sum(sizes.values()))
            if self.tape.held_nbytes > Room.allowed_nbytes:
                self._allow_asked(sizes, first)
            return payload, first

    def _allow_asked(self, sizes: dict[int, int], first: int) -> None:
        """Of an answer's results, which have no owner yet."""
        made = sum(sizes.values())
        try:
            expect_allowed(self._storages.reachable_nbytes - made, made)
        except torch.OutOfMemoryError:
            remote_storage.freed.extend((first + slot, nbytes) for slot, nbytes in sizes.items())
            raise

    def record_alone(self, plan: Plan, operands: list[Any]) -> int:
        """`record`, with a frame for the command itself, whatever other threads record meanwhile."""
        with self.lock:
            connection = self._ready()
            connection.flush()
            number = self.record(plan, operands)
            connection.flush()
            return number

    def create(self, storage: RemoteStorage) -> None:
        """Bring an empty storage into being on the executor, before a command names it."""
        with self.lock:
            if not storage.born:
                self._storages.expect_room(storage.nbytes)
                connection = self._ready()
                storage.id = self._storages.make(storage.nbytes)
                self.answers.unanswered = True
                connection.say((wire.CREATE, storage.id, storage.nbytes))
                if self._storages.grown():
                    self.answer_for_all()

    def wait(self, command: int, *operands: Any) -> Any:
        """Send a control command that has an answer and no effect on shapes (SYNC, MEMORY, RNG_GET)."""
        with self.lock:
            return self._asked(self._ready(), command, *operands, covers=command == wire.SYNC)

    def graph(self, digest: str, definition: bytes) -> str | None:
        """See `StreamConnection.tell_graph`. None also where there is no lease."""
        with self.lock:
            connection = self._connection
            return None if connection is None else connection.tell_graph(digest, definition)

    def answer_for_all(self) -> None:
        """Wait for all commands recorded under the lease, if some may have failed unreported. Raises the first
        unreported error.
        """
        with self.lock:
            connection = self._connection
            if connection is not None and not connection.untouched and self.answers.unheard(self.commands_recorded):
                self._asked(connection, wire.SYNC, covers=True)

    def seed(self, generator: int, seed: int) -> None:
        with self.lock:
            connection = self._connection
            command = self._seeds.seed(generator, seed, None if connection is None else connection.lease)
            if connection is not None and command is not None:
                connection.say(command)

    def set_numerics(self, setting: Setting, values: list[Any]) -> None:
        with self.lock:
            NUMERICS.set(setting, values)
            if self._connection is not None:
                self._connection.tell_numerics(NUMERICS)

    def set_rng_state(self, generator: int, state: bytes) -> None:
        with self.lock:
            connection = self._ready()
            self.answers.unanswered = True
            connection.commands += (wire.RNG_SET, generator, state)

    def _asked(self, connection: StreamConnection, command: int, *operands: Any, covers: bool = True) -> Any:
        token = self.answers.next_token()
        connection.commands += (command, token, *operands)
        return self._answer(connection, token, covers)

    def _answer(self, connection: StreamConnection, token: int, covers: bool = True) -> Any:
        try:
            answer = self.answers.wait(connection, token, self.commands_recorded, covers)
        except LeaseLost:
            self.lose_lease()
            raise
        if covers:
            self._storages.heard()
        return answer

    # --- bytes

    def upload(self, storage: RemoteStorage, offset: int, address: int, nbytes: int) -> None:
        """Copy host memory into a storage; the memory may change as soon as this returns."""
        with self.lock:
            to_store = self.to_store and self._storages.of_store(storage)
            connection = None if to_store else self._ready()
            if not storage.born:
                self._storages.expect_room(storage.nbytes)
            self._storages.put(storage, nbytes, leased=connection is not None)
            self.answers.unanswered = True
            if connection is None:
                self.bulk.to_store(storage, offset, address, nbytes)
            elif nbytes <= wire.INLINE_NBYTES:
                connection.upload_inline(storage, offset, ctypes.string_at(address, nbytes))
            else:
                self.bulk.to_executor(connection, storage, offset, address, nbytes)
            if connection is not None and self._storages.grown():
                self.answer_for_all()

    def download(self, storage: RemoteStorage, pieces: list[Meta], address: int) -> None:
        """Copy contiguous pieces of a storage, one after the other, to host memory."""
        with self.lock:
            connection = self._ready()
            while regions := self.bulk.regions(connection, pieces):
                tokens = []
                for piece, region in zip(pieces, regions, strict=False):
                    connection.tell_meta(piece)
                    tokens.append(self.answers.next_token())
                    connection.commands += (wire.DOWNLOAD, tokens[-1], storage.id, piece.id, region)
                    connection.flush()
                for token, region, piece in zip(tokens, regions, pieces, strict=False):
                    self.bulk.copy_out(self._answer(connection, token), region, address)
                    address += piece.nbytes()
                pieces = pieces[len(regions) :]
