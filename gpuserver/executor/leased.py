"""The state of a lease in the compute thread: its model within the interpreter's reach, its wake, the storages that its
END keeps. Compute thread only.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.gpuserver.commands.storages import StorageFailure
from dormouse.gpuserver.device.protocol import Device
from dormouse.gpuserver.executor.arrivals import Board
from dormouse.gpuserver.executor.instance import ExecutorInstance
from dormouse.gpuserver.executor.orders import Posted
from dormouse.gpuserver.executor.wakes import BeginWake, StopWake, WakeOver


class FrameOutcome(NamedTuple):
    """The outcome of a frame."""

    replies: list[bytes]
    busy_s: float
    ended: e.Ended | None


@dataclass(slots=True, eq=False)
class Leased:
    """A lease in the compute thread, from its Begin until its end."""

    serial: int
    instance: ExecutorInstance
    before: e.Counts  # of earlier leases
    device: Device
    post: Callable[[Posted], None]
    began_s: float = field(default_factory=time.perf_counter)
    board: Board | None = None  # of a wake that is not over
    writing: list[int] | None = None  # storages that its END writes back, if it waits for the store

    @property
    def counts(self) -> e.Counts:
        now, before = self.instance.counts(), self.before
        return e.Counts(now.repaired - before.repaired, now.replayed - before.replayed)

    def bind(self, begin: o.Begin, claim: Callable[[int], int | None]) -> None:
        """Bring the model within the interpreter's reach, have missing segments copied. ``claim``: see `MayWrite`."""
        instance = self.instance
        if begin.refused:
            instance.bind_none(StorageFailure("OutOfMemoryError", begin.refused))
            return
        if begin.missing:
            board = self.board = Board(self.device, [segment for segment, _, _ in begin.missing])
            after = self.device.record()
            self.post(BeginWake(self.serial, board, after, begin.missing, begin.peers, self.began_s))
        if begin.places is not None:
            instance.bind_all(self.device, begin.places, self.board, claim)

    def join(self, cancel: bool) -> e.WakeRemains:
        """No copy of its wake is under way any more; segments that did not arrive are out of reach."""
        board = self.board
        if board is None:
            return e.WakeRemains()
        self.board = self.instance.board = None
        if not cancel:
            board.await_sources()
        self.post(StopWake(self.serial, cancel))
        there, lost = board.join(cancel)
        self.post(WakeOver(self.serial))
        self.instance.unbind_segments(lost)
        return e.WakeRemains(there, lost, board.sources)

    def end(self) -> e.Ended:
        """Its END: its effects on the model. If there is something to write or to free, it waits for the store."""
        instance = self.instance
        interpreter, request = instance.interpreter, instance.interpreter.ending
        assert request is not None
        left = self.join(False)  # before anything is dropped: late bytes must not land there
        report = interpreter.report()
        freed = [storage for storage in report.freed if storage in instance.known]
        gone = [*report.spoiled, *freed, *(() if request.wait else report.dirty)]
        storages: list[tuple[int, int]] = []
        if request.wait:
            storages = [(storage, interpreter.storage(storage).nbytes()) for storage in report.dirty]
            storages += report.created
        claims = ((storage, instance.claim_of(storage)) for storage, _ in storages)
        claimed = {storage: claim for storage, claim in claims if claim is not None}
        instance.unbind(gone)
        kept = set(claimed.values())
        dropped = [claim for claim in instance.over() if claim not in kept]
        ended = e.Ended(
            storages=storages,
            claimed=claimed,
            freed=freed,
            dropped=dropped,
            wrote=bool(request.wait and report.dirty),
            rebind=bool(gone),
            used=list(instance.used),
            counts=self.counts,
            left=left,
        )
        self.writing = None if ended.over else [storage for storage, _ in storages]
        return ended

    def transient_nbytes(self) -> int:
        """Bytes that it holds outside the pool, as far as its interpreter knows."""
        total = 0
        table = self.instance.interpreter.table
        for stored in (*table.by_id.values(), *table.ahead.values()):
            if not stored.persistent and stored.error is None:
                storage = stored.storage if stored.tensor is None else stored.tensor.untyped_storage()
                total += storage.nbytes() if storage is not None else 0
        return total

    def spill(self, storages: Sequence[int]) -> list[int]:
        """Its own storages are elsewhere; returns claimed segments that nobody needs here any more."""
        instance = self.instance
        dropped = list(instance.claimed.values())
        instance.claimed = {}
        for storage in instance.interpreter.table.spill(storages):
            instance.keep(storage)
        return dropped


def brought_ahead(device: Device, bring: o.Bring, refused: str) -> BeginWake:
    """A copy for no lease: only its place in the device's order matters. If memory was ``refused``, nothing comes."""
    board = Board(device, [segment for segment, _, _ in bring.missing])
    missing = [] if refused else bring.missing
    return BeginWake(bring.serial, board, device.record(), missing, bring.peers, time.perf_counter(), ahead=True)
