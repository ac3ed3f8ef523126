"""The instance's end of the command stream: recording, leases, uploads and downloads.

Owns which storages exist and which lease is held. One lock covers everything, so that a function's threads may
compute. There is no timer: a frame leaves when somebody waits, when it is full, at once when the executor has nothing
to do, and when a look at the replies (one command in sixteen) shows that it has caught up.
"""

import ctypes
import gc
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any, Final

import torch

from dormouse.client_shim.commands.metas import Meta
from dormouse.client_shim.commands.plans import Plan
from dormouse.client_shim.stream.backend import Backend, DeviceSnapshot, GpuLease
from dormouse.client_shim.stream.bulk import Bulk
from dormouse.client_shim.stream.call_sites import call_site, describe
from dormouse.client_shim.stream.connection import REPLY_TIMEOUT_S, StreamConnection
from dormouse.client_shim.stream.failures import ExecutorLost, LeaseLost, exception
from dormouse.client_shim.stream.numerics import NUMERICS
from dormouse.client_shim.stream.remains import Remains
from dormouse.client_shim.stream.remote_storage import RemoteStorage, freed, next_id
from dormouse.client_shim.stream.seeds import Seeds
from dormouse.schemas import stream as wire
from dormouse.schemas.numerics import Setting

FREE_BATCH: Final = 3
"""Dead storages that may wait for the next command: telling of each at once costs a microsecond per command, telling of
many late costs the GPU's memory."""

POLL_MASK: Final = 15
"""Replies are looked for at one command in sixteen: a look costs about as much as recording a command."""

EAGER_COMMANDS: Final = 4
"""An executor that has nothing to do is sent so many; fewer are worth a frame when somebody waits for them."""

EAGER_NBYTES: Final = 1 << 16
"""Or one whose result is as large as this: it will take the executor a while."""

INLINE_FRAME_NBYTES: Final = 1 << 17
"""A frame with more small uploads than this leaves, well below the limit on frames."""

FREE_NUMBERS: Final = 1 << 14
"""Storages that one command may free: a list of a hundred thousand tensors dies at once, and a frame has a limit."""

QUIET_COMMANDS: Final = 1 << 14
"""Numbers in a frame that no operation has filled (seeds, empty storages) after which it leaves."""


class Stream:
    """Everything but `record` and the downloads is called by the runner or by `transfers`."""

    def __init__(self, backend: Backend, snapshot: DeviceSnapshot) -> None:
        self.backend = backend
        self.snapshot = snapshot
        self.lock = threading.RLock()
        self.commands_recorded = 0
        self.round_trips = 0
        self.questions = 0  # of the round trips: results whose shape had to be asked for
        self.shape_misses = 0
        self.uploaded_nbytes = 0  # through the arena
        self.file_nbytes = 0  # that the store has read from files instead
        self._first_id = next_id()  # a stream before this one may have had storages
        self._held_nbytes = 0  # of storages that exist, those in `freed` included
        self._peak_nbytes = 0
        self._lease: GpuLease | None = None
        self._connection: StreamConnection | None = None
        self._connections: dict[tuple[int, int], StreamConnection] = {}  # by (gpu, epoch)
        self._ids = next_id
        self._tokens = count(1).__next__
        self._lease_first_id = 1
        self._wrote_persistent = False
        self._created = 0
        self._answered = 0  # commands recorded when an answer last covered all before it
        self._unanswered = False  # an upload or an empty storage since
        self._failed = False  # an error was told in this lease: results of what failed may be kept
        self.last_used = True  # the last lease: its executor was given commands
        self._remains = Remains()
        self._uncommitted: set[int] = set()  # uploaded to the store since the last commit or lease
        self._parked_frees: list[int] = []  # died while no lease was held
        self._seeds = Seeds()
        self._bulk = Bulk(backend.arena)

    # --- memory

    @property
    def held_nbytes(self) -> int:
        """Bytes of all storages that the program can still reach, whether a GPU holds them now or not."""
        with self.lock:
            return self._held_nbytes - sum(nbytes for number, nbytes in list(freed) if number >= self._first_id)

    @property
    def peak_nbytes(self) -> int:
        """The most that was held since the start or the last `reset_peak`, dead storages included until an executor
        is told of them."""
        return self._peak_nbytes

    def reset_peak(self) -> None:
        with self.lock:
            self._peak_nbytes = self.held_nbytes

    def hold(self, nbytes: int) -> None:
        """A storage has come into being, or has grown."""
        with self.lock:
            self._held_nbytes += nbytes
            self._peak_nbytes = max(self._peak_nbytes, self._held_nbytes)

    # --- leases

    @property
    def sent_nbytes(self) -> int:
        """Bytes of frames sent to executors so far; bulk bytes, which go through the arena, not among them."""
        return sum(connection.sent_nbytes for connection in self._connections.values())

    @property
    def leased(self) -> bool:
        return self._lease is not None

    def begin_lease(self, lease: GpuLease) -> None:
        """A request (or the backend) brought a lease: commands go to its executor from now on."""
        with self.lock:
            assert self._lease is None, "a lease is held already"
            self._park_frees()
            key = (lease.gpu, lease.epoch)
            connection = self._connections.get(key)
            if connection is None:
                # Older epochs of this GPU are dead processes.
                self._connections = {k: c for k, c in self._connections.items() if k[0] != lease.gpu}
                connection = self._connections[key] = StreamConnection(
                    self.backend.executor(lease), self._bulk.ring.settle, self.lose_lease
                )
            connection.begin(lease)
            self._bulk.ring.clear()
            self._lease, self._connection = lease, connection
            self._uncommitted.clear()
            self._lease_first_id = self._ids()
            self._wrote_persistent = self._unanswered = self._failed = False
            self._created, self._answered = 0, self.commands_recorded
            if self._parked_frees:
                freed.extendleft((number, 0) for number in self._parked_frees)
                self._parked_frees = []
            for command in self._seeds.begin(key):
                connection.commands += command
            connection.tell_numerics(NUMERICS)

    def end_lease(self) -> int | None:
        """Give the GPU back. What is still alive joins the model, whether the request failed or not.

        Returns the manifest version if there was anything to wait for: what was to be written back has been.
        Raises, the lease having ended, the first error that nobody was told; and what keeps new storages from joining.
        """
        with self.lock:
            lease, connection = self._lease, self._connection
            if lease is None or connection is None:
                return None
            try:
                version, error = self._end(connection)
            except (LeaseLost, ExecutorLost):
                self.lose_lease()
                raise
            except BaseException as refusal:
                # The executor has ended the lease without keeping anything: no room on the host, beyond the quota.
                self._note_loss(f"could not keep it ({refusal or type(refusal).__name__})")
                self._drop_lease()
                self.backend.lease_ended(lease, None)
                raise
            self._drop_lease()
        self.backend.lease_ended(lease, version)
        if error is not None:
            raise error
        return version

    def _end(self, connection: StreamConnection) -> tuple[int | None, Exception | None]:
        # What autocast remembers of weights was made in this lease; a program that never leaves autocast would keep it.
        torch.clear_autocast_cache()
        self._drain(connection)
        if self._created:
            gc.collect()
            self._drain(connection)
        self.last_used = not connection.untouched
        if not self.last_used:
            return None, None  # who took the lease says so in its place
        # Without an answer nobody would hear of a command that failed after the last one.
        unheard = self._failed or self._unanswered or self._answered != self.commands_recorded
        wait = bool(self._created or self._wrote_persistent or unheard)
        token = self._tokens()
        quiet = wire.END_QUIET if self._bulk.ring.empty else wire.END_ACK
        connection.commands += (wire.END, token, wire.END_WAIT if wait else quiet)
        if not wait:
            connection.flush()
            while not self._bulk.ring.empty:  # an upload that the executor has not read yet
                connection.pump(REPLY_TIMEOUT_S)
            return None, None
        version, failure, poisoned = self._answer(connection, token)
        for *told, storages in poisoned:
            self._remains.poison(storages, self._exception(connection, *told))
        return int(version), None if failure is None else self._exception(connection, *failure)

    def _drop_lease(self) -> None:
        if self._connection is not None:
            self._connection.open = False
        self._lease = self._connection = None

    def remains(self) -> str:
        """What this process still holds although it can never be used again, in words; usually nothing."""
        with self.lock:
            if not self._remains:
                return ""
            gc.collect()
            self._park_frees()
            return self._remains.story()

    def _note_loss(self, why: str) -> None:
        """What was made in this lease and is alive is nowhere."""
        if self._created > 0:
            self._remains.lose(self._lease_first_id, self._ids(), self._created, why)
            self._created = 0

    def lose_lease(self, why: str = "lost its GPU") -> None:
        """The lease is over without an END: the executor died or refused it, or the request was interrupted. What was
        made in it is gone, and what it wrote to older storages too: they are as they were when it began.
        """
        with self.lock:
            if self._lease is not None:
                self._note_loss(why)
            if self._connection is not None:
                self._connection.suspect = self.last_used = True
            torch.clear_autocast_cache()
            self._drop_lease()

    def commit(self) -> int | None:
        """What was uploaded without a lease becomes part of the model; under a lease, its end does that."""
        with self.lock:
            if self._lease is not None:
                return self.end_lease()
            self._park_frees()
            version = self.backend.commit()
            self._uncommitted.clear()
            return version

    def _died(self) -> Iterator[int]:
        while freed:
            number, nbytes = freed.popleft()
            if number >= self._first_id:
                self._held_nbytes -= nbytes
            yield number

    def _park_frees(self) -> None:
        """Storages that died without a lease: the store forgets those that only it knows, executors are told at the
        next lease."""
        dead = []
        for number in self._died():
            if self._remains:
                self._remains.free(number)
            if number in self._uncommitted:
                self._uncommitted.discard(number)
                dead.append(number)
            else:
                self._parked_frees.append(number)
        if dead:
            self.backend.store_free(dead)

    def _ready(self) -> StreamConnection:
        """The connection to record on, acquiring a lease if none is held."""
        connection = self._connection
        if connection is None:
            self._park_frees()
            self.begin_lease(self.backend.acquire())
            connection = self._connection
            assert connection is not None
        if freed:
            self._drain(connection)
        return connection

    def _drain(self, connection: StreamConnection) -> None:
        numbers = []
        for number in self._died():
            numbers.append(number)
            if number >= self._lease_first_id:
                self._created -= 1
            elif self._remains:
                self._remains.free(number)
        for start in range(0, len(numbers), FREE_NUMBERS):
            part = numbers[start : start + FREE_NUMBERS]
            connection.commands += (wire.FREE, len(part), *part)
            if len(part) == FREE_NUMBERS:
                connection.flush()

    # --- recording

    def record(self, plan: Plan, operands: list[Any]) -> int:
        """Append a command; the id of its first fresh storage."""
        with self.lock:
            connection = self._connection
            if connection is None or len(freed) > FREE_BATCH:
                connection = self._ready()
            if plan.id not in connection.told_keys:
                connection.tell(plan)
            if plan.writes and not self._wrote_persistent:
                self._note_writes(plan, operands)
            commands = connection.commands
            commands.append(plan.id)
            commands += operands
            number, eager = 0, len(connection.sites) >= EAGER_COMMANDS - 1
            for nbytes in plan.fresh_nbytes:
                eager = eager or nbytes >= EAGER_NBYTES
                fresh = self._ids()
                commands.append(fresh)
                number = number or fresh
                self._created += 1
                self._held_nbytes += nbytes
            if self._held_nbytes > self._peak_nbytes:
                self._peak_nbytes = self._held_nbytes
            connection.sites.append(call_site(4))
            self.commands_recorded += 1
            recorded = len(connection.sites)
            if recorded >= wire.FRAME_COMMANDS or (eager and connection.number == connection.acknowledged + 1):
                connection.flush()
            elif not recorded & POLL_MASK:
                connection.poll()
            return number

    def _note_writes(self, plan: Plan, operands: list[Any]) -> None:
        if any(operands[position] < self._lease_first_id for position in plan.written_at):
            self._wrote_persistent = True

    def ask(self, plan: Plan, operands: list[Any]) -> tuple[list[Any], int]:
        """Run a command whose results cannot be predicted: what the executor says of them, and the first fresh
        storage's id."""
        with self.lock:
            connection = self._ready()
            if plan.bulky:
                connection.flush()
            if plan.id not in connection.told_keys:
                connection.tell(plan)
            if plan.writes and not self._wrote_persistent:
                self._note_writes(plan, operands)
            token, first = self._tokens(), self._ids()
            connection.commands += (wire.RESULT_META, token, plan.id, *operands, first)
            connection.sites.append(call_site())
            self.commands_recorded += 1
            self.questions += 1
            payload: list[Any] = self._answer(connection, token)
            fresh = payload[3]
            for _ in range(fresh - 1):
                self._ids()
            self._created += fresh
            sizes = {result[2]: result[3] for result in payload[0] if result[0] == wire.FRESH}
            self.hold(sum(sizes.values()))
            return payload, first

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
                connection = self._ready()
                storage.id = self._ids()
                self.hold(storage.nbytes)
                self._created += 1
                self._unanswered = True
                connection.commands += (wire.CREATE, storage.id, storage.nbytes)
                if len(connection.commands) > QUIET_COMMANDS:
                    connection.flush()

    def wait(self, command: int, *operands: Any) -> Any:
        """Send a control command that has an answer and no effect on shapes (SYNC, MEMORY, RNG_GET)."""
        with self.lock:
            connection = self._ready()
            token = self._tokens()
            connection.commands += (command, token, *operands)
            return self._answer(connection, token, covers=command == wire.SYNC)

    def seed(self, generator: int, seed: int) -> None:
        with self.lock:
            lease, connection = self._lease, self._connection
            command = self._seeds.seed(generator, seed, None if lease is None else (lease.gpu, lease.epoch))
            if connection is not None and command is not None:
                connection.commands += command
                if len(connection.commands) > QUIET_COMMANDS:
                    connection.flush()

    def set_numerics(self, setting: Setting, values: list[Any]) -> None:
        with self.lock:
            NUMERICS.set(setting, values)
            if self._connection is not None:
                self._connection.tell_numerics(NUMERICS)
                if len(self._connection.commands) > QUIET_COMMANDS:
                    self._connection.flush()

    def set_rng_state(self, generator: int, state: bytes) -> None:
        with self.lock:
            connection = self._ready()
            self._unanswered = True
            connection.commands += (wire.RNG_SET, generator, state)

    def _answer(self, connection: StreamConnection, token: int, covers: bool = True) -> Any:
        """The answer to a waiting command, which is an error if one before it has failed, where it `covers` them."""
        self.round_trips += 1
        try:
            kind, *rest = connection.wait(token)
        except LeaseLost:
            self.lose_lease()
            raise
        if kind == wire.VALUE:
            if covers:
                self._answered, self._unanswered = self.commands_recorded, False
            return rest[0]
        self._failed = True
        raise self._exception(connection, *rest)

    def _exception(
        self, connection: StreamConnection, name: str, text: str, where: list[Any] | None, storage: int | None = None
    ) -> Exception:
        """What to raise for an executor's failure; for a storage that an earlier lease left without a value, that."""
        if storage is not None and (known := self._remains.error(storage)) is not None:
            return known
        site = connection.site(where[0], where[1]) if where else None
        return exception(name, text, where[2] if where else None, describe(site) if site else None)

    # --- bytes

    def upload(self, storage: RemoteStorage, offset: int, address: int, nbytes: int) -> None:
        """Copy host memory into a storage; the memory may change as soon as this returns."""
        with self.lock:
            to_store = self._connection is None and (not storage.born or storage.id in self._uncommitted)
            connection = None if to_store else self._ready()
            if not storage.born:
                storage.id = self._ids()
                self.hold(storage.nbytes)
                if connection is None:
                    self._uncommitted.add(storage.id)
                else:
                    self._created += 1
            elif storage.id < self._lease_first_id:
                self._wrote_persistent = True
                if self._remains:
                    self._make_anew(storage, nbytes)
            self._unanswered = True
            if connection is not None and nbytes <= wire.INLINE_NBYTES:
                content = ctypes.string_at(address, nbytes)
                connection.commands += (wire.UPLOAD_INLINE, storage.id, storage.nbytes, offset, content)
                connection.inline_nbytes += nbytes
                if connection.inline_nbytes > INLINE_FRAME_NBYTES:
                    connection.flush()
                return
            if connection is None and self.backend.store_file(storage.id, storage.nbytes, offset, address, nbytes):
                self.file_nbytes += nbytes
                return
            self.uploaded_nbytes += nbytes
            for start, region, size in self._bulk.copy_in(connection, address, nbytes):
                place = (storage.id, storage.nbytes, offset + start, region, size)
                if connection is None:
                    self.backend.store_upload(*place)
                    self._bulk.ring.settle(0)
                else:
                    connection.commands += (wire.UPLOAD, *place)
                    connection.flush()

    def _make_anew(self, storage: RemoteStorage, nbytes: int) -> None:
        """A storage without a value gets one, if all of it is written."""
        error = self._remains.error(storage.id)
        if error is not None:
            if nbytes < storage.nbytes:
                raise error
            self._remains.free(storage.id)

    def download(self, storage: RemoteStorage, pieces: list[Meta], address: int) -> None:
        """Copy contiguous pieces of a storage, one after the other, to host memory."""
        with self.lock:
            connection = self._ready()
            while regions := self._bulk.regions(connection, pieces):
                tokens = []
                for piece, region in zip(pieces, regions, strict=False):
                    connection.tell_meta(piece)
                    tokens.append(self._tokens())
                    connection.commands += (wire.DOWNLOAD, tokens[-1], storage.id, piece.id, region)
                    connection.flush()
                for token, region, piece in zip(tokens, regions, pieces, strict=False):
                    self._bulk.copy_out(self._answer(connection, token), region, address)
                    address += piece.nbytes()
                pieces = pieces[len(regions) :]

    def chunk_elements(self, itemsize: int) -> int:
        return self._bulk.chunk_nbytes // itemsize
