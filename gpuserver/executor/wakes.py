"""Carries out the decisions of wakes (wake.py): sends their questions, begins their copies, notifies the compute
thread.

On the executor's thread, so that neither an answer nor another GPU waits for a kernel. Copies are done on the copy
thread, which posts that here. Orders of the compute thread to wakes, and their questions to other GPUs, come first.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, assert_never

from msgspec import Struct

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases import wake as w
from dormouse.core.links.loan import Loan
from dormouse.gpuserver.device.protocol import Device, DeviceError, DeviceEvent
from dormouse.gpuserver.executor.arrivals import Board
from dormouse.schemas import messages as m


class Recipients(Protocol):
    """The recipients of effects, of wakes and of leases."""

    def to_controller(self, message: m.ExecutorToController) -> None: ...

    def to_store(self, message: m.ExecutorToStore) -> None: ...

    def reply(self, instance: str, message: bytes) -> None: ...

    def lend(self, instance: str) -> Loan | None:
        """Its connection for the compute thread, if it can be had."""

    def take_back(self, loan: Loan) -> None: ...

    def expel(self, instance: str, text: str, story: str) -> None:
        """Close its endpoint, and notify the controller."""

    def to_runtime(self, serial: int, instance: str, runtime: str, message: m.ExecutorToRuntime) -> None:
        """The runtime that computes for this instance, under this lease."""

    def lease_over(self, serial: int) -> None: ...

    def open_runtime(self, instance: str, runtime: str) -> None:
        """That it is there when a lease of this instance wants it."""

    def ask_peer(self, gpu: int, ticket: int, segments: list[int]) -> None: ...

    def leave_peer(self, gpu: int, ticket: int) -> None: ...


class BeginWake(Struct, frozen=True, gc=False):
    """Bring missing segments, ``(segment, offset in the pool, nbytes)`` in the order in which they are wanted, and
    report progress on the board. ``after``: the point on the compute stream after which the pool is as it has to be.
    ``ahead``: for no lease; nobody waits at the board.
    """

    serial: int
    board: Board
    after: DeviceEvent
    missing: list[tuple[int, int, int]]
    peers: list[int]
    began_s: float
    ahead: bool = False


class StopWake(Struct, frozen=True, gc=False):
    """Begin no further copy; the compute thread waits at the board for that."""

    serial: int
    cancel: bool


class WakeOver(Struct, frozen=True, gc=False):
    """No copy of it is under way any more."""

    serial: int


Post = Callable[..., object]
"""``post(work, *arguments)``: have it done on the executor's thread; from any thread, in order."""


@dataclass(slots=True)
class _Wake:
    """A wake that is not over."""

    begun: BeginWake
    decides: w.WakeCopies


class Wakes:
    """Of one GPU, by lease. ``tell`` is called with events for the leases."""

    def __init__(
        self,
        device: Device,
        batch_nbytes: int,
        outside: Recipients,
        tell: Callable[[e.Came | e.Brought], None],
        post: Post,
    ) -> None:
        self._device, self._batch_nbytes = device, batch_nbytes
        self._outside, self._tell, self._post = outside, tell, post
        self._wakes: dict[int, _Wake] = {}  # by serial
        self._tickets: dict[int, _Wake] = {}  # by ticket of a question that is open
        self._ahead = 0  # the last preload that has begun: their serials descend
        self._stopped: set[int] = set()  # preloads that were given up before they began
        self._numbers = itertools.count(1, 2)  # write-backs have the even ones

    # --- orders of the compute thread

    def handle(self, effect: BeginWake | StopWake | WakeOver) -> None:
        match effect:
            case BeginWake(serial=serial) if serial in self._stopped:
                self._stopped.discard(serial)
                self._ahead = serial
                self._tell(e.Brought(serial, e.WakeRemains(lost=[segment for segment, _, _ in effect.missing])))
            case BeginWake(serial=serial):
                if effect.ahead:
                    self._ahead = serial
                decides = w.WakeCopies(effect.missing, effect.peers, self._batch_nbytes, self._numbers)
                wake = self._wakes[serial] = _Wake(effect, decides)
                self._perform(wake, decides.begin())
            case StopWake(serial=serial, cancel=cancel):
                wake = self._wakes[serial]
                self._perform(wake, wake.decides.stop(cancel))
                wake.begun.board.stop(wake.decides.sources)
            case WakeOver(serial=serial):
                wake = self._wakes.pop(serial)
                self._perform(wake, wake.decides.over())
            case _:
                assert_never(effect)

    # --- preloads

    def stop_ahead(self, serial: int) -> None:
        """Give a preload up: this waits for the chunk that is being copied."""
        wake = self._wakes.get(serial)
        if wake is None:
            if serial < self._ahead:  # the compute thread has not come to it; else it is over
                self._stopped.add(serial)
            return
        self._perform(wake, wake.decides.stop(cancel=True))
        self._brought(wake)

    def _settle(self, wake: _Wake) -> None:
        if wake.begun.ahead and wake.decides.settled:
            self._brought(wake)

    def _brought(self, wake: _Wake) -> None:
        serial, board, sources = wake.begun.serial, wake.begun.board, wake.decides.sources
        if self._wakes.pop(serial, None) is None:
            return
        board.stop(sources)
        there, lost = board.join(True)
        self._perform(wake, wake.decides.over())
        self._tell(e.Brought(serial, e.WakeRemains(there, lost, sources)))

    # --- answers of others, and messages of the controller

    def fetched(self, fetched: m.Fetched) -> None:
        """The store's answer. Its slabs are mapped."""
        if (wake := self._tickets.get(fetched.ticket)) is not None:
            self._perform(wake, wake.decides.fetched(fetched))

    def fetch_failed(self, failed: m.FetchFailed) -> None:
        if (wake := self._tickets.get(failed.ticket)) is not None:
            self._perform(wake, wake.decides.fetch_failed(failed.ticket, failed.text, failed.damaged))

    def peer_answered(self, ticket: int, extents: Sequence[tuple[int, Sequence[tuple[int, int]]]] = ()) -> None:
        """The segments that another GPU has: none, if it does not answer."""
        if (wake := self._tickets.get(ticket)) is not None:
            self._perform(wake, wake.decides.peer_answered(ticket, extents))

    def peer_lost(self, gpu: int) -> None:
        for wake in list(self._wakes.values()):
            self._perform(wake, wake.decides.peer_lost(gpu))

    def interrupt(self, serial: int) -> None:
        """The lease is over, and the compute thread may be waiting for something here."""
        if (wake := self._wakes.get(serial)) is not None:
            self._perform(wake, wake.decides.stop(cancel=True))

    # --- effects

    def _perform(self, wake: _Wake, effects: list[w.Effect]) -> None:
        begun = wake.begun
        for effect in effects:
            match effect:
                case w.Ask(gpu=gpu, ticket=ticket, segments=segments):
                    self._tickets[ticket] = wake
                    if gpu is None:
                        self._outside.to_store(m.Fetch(ticket=ticket, segments=segments))
                    else:
                        self._outside.ask_peer(gpu, ticket, segments)
                case w.CopyIn():
                    self._perform(wake, self._copy(wake, effect))
                case w.LetGoOfSource(gpu=gpu, ticket=ticket):
                    del self._tickets[ticket]
                    if gpu is None:
                        self._outside.to_store(m.LetGo(ticket=ticket))
                    else:
                        self._outside.leave_peer(gpu, ticket)
                case w.GiveUp(segments=segments, text=text, damaged=damaged):
                    begun.board.give_up(segments, text, damaged)
                    if not begun.ahead:
                        self._tell(e.Came(begun.serial, segments, lost=True))
                case w.AllHere() if begun.ahead:
                    pass
                case w.AllHere():
                    nbytes = sum(nbytes for _, _, nbytes in begun.missing)
                    wake_us = int((time.perf_counter() - begun.began_s) * 1e6)
                    source = wake.decides.sources.farthest(nbytes)
                    awake = m.Awake(serial=begun.serial, copied_nbytes=nbytes, wake_us=wake_us, source=source)
                    self._outside.to_controller(awake)
                case _:
                    assert_never(effect)
        self._settle(wake)

    def _copy(self, wake: _Wake, ordered: w.CopyIn) -> list[w.Effect]:
        done: Callable[[], Any] = partial(self._post, self._copied, wake, ordered.number, ordered.owners)
        try:
            job = self._device.copy_in(ordered.copies, done, wake.begun.after)
        except DeviceError as error:
            return wake.decides.refused(ordered.number, str(error))
        wake.begun.board.issue(job, ordered.owners, wake.decides.places)
        return wake.decides.began(ordered.number)

    def _copied(self, wake: _Wake, number: int, owners: list[int]) -> None:
        if wake.begun.ahead and wake.begun.serial not in self._wakes:
            return  # it was given up, and the segments that had come are known
        self._tell(e.Came(wake.begun.serial, owners))
        self._perform(wake, wake.decides.copied(number))
