"""How the bytes of a wake come, decided: any order of answers, copies, deaths and ends leaves the books whole."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases import wake as w
from dormouse.gpuserver.commands.storages import CommandFailed
from dormouse.gpuserver.device.protocol import DeviceError
from dormouse.gpuserver.executor.arrivals import Board
from dormouse.gpuserver.executor.wakes import BeginWake, StopWake, WakeOver, Wakes
from dormouse.schemas import messages as m

MIB = 1 << 20
MISSING = [(10, 0, MIB), (11, MIB, MIB), (12, 2 * MIB, 2 * MIB)]


def a_wake(peers: list[int] | None = None, batch_nbytes: int = 1 << 40) -> w.WakeCopies:
    return w.WakeCopies(MISSING, peers or [], batch_nbytes, itertools.count(1))


def fetched(ticket: int, *segments: int, last: bool = True, file_nbytes: int = 0) -> m.Fetched:
    sizes = {segment: nbytes for segment, _, nbytes in MISSING}
    places = [m.Place(segment=s, slab=3, offset=s * MIB, nbytes=sizes.get(s, MIB)) for s in segments]
    return m.Fetched(ticket=ticket, places=places, file_nbytes=file_nbytes, last=last)


def test_a_wake_from_the_store() -> None:
    wake = a_wake()
    assert wake.begin() == [w.Ask(None, 1, [10, 11, 12])]
    [copy] = wake.fetched(fetched(1, 10, 12, last=False))
    assert isinstance(copy, w.CopyIn)
    assert copy.owners == [10, 12]
    assert [(each.device, each.nbytes) for each in copy.copies] == [(0, MIB), (2 * MIB, 2 * MIB)]
    assert wake.began(copy.number) == []
    [rest] = wake.fetched(fetched(1, 11, file_nbytes=MIB))
    assert isinstance(rest, w.CopyIn)
    assert wake.began(rest.number) == []
    assert wake.copied(copy.number) == []
    assert wake.copied(rest.number) == [w.LetGoOfSource(None, 1), w.AllHere()]
    assert wake.sources == w.Sources(0, MIB, [])
    assert wake.sources.farthest(MIB) == "disk"
    assert wake.stop(cancel=False) == wake.over() == []


def test_what_a_peer_has_not_is_the_next_ones() -> None:
    wake = a_wake(peers=[4, 5])
    assert wake.begin() == [w.Ask(4, 1, [10, 11, 12])]
    [copy] = wake.peer_answered(1, [(11, [(0, MIB // 2), (9 * MIB, MIB // 2)]), (10, [(0, 5)]), (99, [(0, 1)])])
    assert isinstance(copy, w.CopyIn)
    assert [(each.start, each.device, each.nbytes) for each in copy.copies] == [
        (0, MIB, MIB // 2),
        (9 * MIB, MIB + MIB // 2, MIB // 2),
    ]
    assert wake.began(copy.number) == [w.Ask(5, 2, [10, 12])]
    assert wake.peer_answered(1, [(10, [(0, MIB)])]) == [], "it has spoken"
    assert wake.peer_lost(5) == [w.LetGoOfSource(5, 2), w.Ask(None, 3, [10, 12])]
    assert wake.copied(copy.number) == [w.LetGoOfSource(4, 1)]
    assert wake.sources == w.Sources(MIB, 0, [4])
    assert (wake.sources.farthest(MIB), wake.sources.farthest(2 * MIB)) == ("peer", "host")


def test_what_has_come_is_said_piece_by_piece() -> None:
    """Whoever computes a layer does not wait for the whole model; the next source is asked once."""
    with patch.object(w, "JOB_NBYTES", MIB):
        wake = a_wake(peers=[4])
    wake.begin()
    first, second = wake.peer_answered(1, [(10, [(0, MIB // 2), (MIB, MIB // 2)]), (12, [(0, 2 * MIB)])])
    assert isinstance(first, w.CopyIn)
    assert isinstance(second, w.CopyIn)
    assert (first.owners, second.owners) == ([10, 10], [12])
    assert wake.began(first.number) == []
    assert wake.began(second.number) == [w.Ask(None, 2, [11])]
    assert wake.copied(first.number) == []
    assert wake.copied(second.number) == [w.LetGoOfSource(4, 1)]
    assert wake.sources == w.Sources(3 * MIB, 0, [4])


def test_a_peer_that_cannot_be_read_has_given_nothing() -> None:
    wake = a_wake(peers=[4])
    wake.begin()
    [copy] = wake.peer_answered(1, [(11, [(0, MIB)])])
    assert isinstance(copy, w.CopyIn)
    assert wake.refused(copy.number, "no such peer") == [w.LetGoOfSource(4, 1), w.Ask(None, 2, [11, 10, 12])]
    assert wake.sources == w.Sources()


def test_the_store_is_asked_in_batches_two_at_a_time() -> None:
    wake = a_wake(batch_nbytes=MIB)
    assert wake.begin() == [w.Ask(None, 1, [10]), w.Ask(None, 2, [11])]
    [copy] = wake.fetched(fetched(1, 10))
    assert isinstance(copy, w.CopyIn)
    assert wake.began(copy.number) == []
    assert wake.copied(copy.number) == [w.LetGoOfSource(None, 1), w.Ask(None, 3, [12])]


def test_what_is_read_where_it_lies_stays_until_the_end() -> None:
    wake = a_wake(batch_nbytes=MIB)
    wake.begin()
    [copy] = wake.fetched(fetched(1, 10))
    assert isinstance(copy, w.CopyIn)
    wake.began(copy.number)
    shown, place = wake.places[10]
    assert place.offset == 10 * MIB
    assert shown.hold()
    assert wake.copied(copy.number) == [w.Ask(None, 3, [12])], "not let go, and the rest goes on"
    wake.stop(cancel=False)
    assert w.LetGoOfSource(None, 1) in wake.over()
    late = w.Shown()
    assert late.let_go()
    assert not late.hold()


def test_a_failure_is_of_what_was_not_ordered() -> None:
    wake = a_wake()
    wake.begin()
    [copy] = wake.fetched(fetched(1, 10, last=False))
    assert isinstance(copy, w.CopyIn)
    wake.began(copy.number)
    assert wake.fetch_failed(1, "a damaged file", True) == [w.GiveUp([11, 12], "a damaged file", True)]
    assert wake.copied(copy.number) == [w.LetGoOfSource(None, 1)], "and not all is here"


def test_the_end_of_a_lease_orders_nothing_more() -> None:
    wake = a_wake(peers=[4])
    wake.begin()
    assert wake.stop(cancel=True) == [w.GiveUp([10, 11, 12], "the lease is over", False)]
    assert wake.peer_answered(1, [(10, [(0, MIB)])]) == []
    assert wake.over() == [w.LetGoOfSource(4, 1)]


# --- carried out


class Copies:
    """A device whose copies a test does, and the job of them."""

    def __init__(self) -> None:
        self.began: list[tuple[int, Callable[[], None]]] = []  # number of copies, and whom to tell
        self.refuses = self.done = self.cancelled = self.joined = False

    def copy_in(self, copies: Any, on_done: Callable[[], None], after: Any = None) -> Any:
        if self.refuses:
            raise DeviceError("no such memory")
        self.events = [Happens(self) for _ in copies]
        self.began.append((len(copies), on_done))
        return self

    def finish(self) -> None:
        self.done = True
        self.began.pop(0)[1]()

    def cancel(self) -> None:
        self.cancelled = True

    def join(self) -> None:
        self.joined = True

    def wait(self, event: Any) -> None:
        """The compute stream, for what has begun."""


class Happens:
    def __init__(self, copies: Copies) -> None:
        self._copies = copies

    def done(self) -> bool:
        return self._copies.done


def carried_out(peers: list[int] | None = None) -> tuple[Wakes, Board, Copies, list[Any]]:
    """A wake under lease 9 that has begun, and what has been said of it."""
    copies: Any = Copies()
    said: list[Any] = []
    outside: Any = SimpleNamespace(to_controller=said.append, to_store=said.append)
    wakes = Wakes(copies, 1 << 40, outside, said.append, lambda work, *arguments: work(*arguments))
    board = Board(copies, [segment for segment, _, _ in MISSING])
    wakes.handle(BeginWake(9, board, copies, MISSING, peers or [], 0.0))
    return wakes, board, copies, said


def test_what_has_come_is_said_by_lease() -> None:
    wakes, board, copies, said = carried_out()
    assert said == [m.Fetch(ticket=1, segments=[10, 11, 12])]
    wakes.fetched(fetched(1, 10, 12, last=False))
    wakes.fetched(fetched(1, 11))
    assert [number for number, _ in copies.began] == [2, 1]
    assert said[1:] == [], "nothing has come yet"
    copies.finish()
    assert said[1:] == [e.Came(9, [10, 12])]
    copies.finish()
    assert said[2:4] == [e.Came(9, [11]), m.LetGo(ticket=1)]
    assert isinstance(said[4], m.Awake)
    assert (said[4].serial, said[4].copied_nbytes) == (9, 4 * MIB)
    assert len(said) == 5
    wakes.handle(StopWake(9, cancel=False))
    assert board.join(cancel=False) == ([10, 11, 12], [])
    assert (copies.joined, copies.cancelled) == (True, False)
    wakes.handle(WakeOver(9))
    assert len(said) == 5
    assert not any(board.failed(segment) for segment in (10, 11, 12, 99))


def test_what_will_not_come_is_said_and_whoever_waits_hears_why() -> None:
    wakes, board, copies, said = carried_out()
    wakes.fetched(fetched(1, 10, last=False))
    wakes.fetch_failed(m.FetchFailed(ticket=1, text="a damaged file", damaged=True))
    assert said[1:] == [e.Came(9, [11, 12], lost=True)]
    assert [board.failed(segment) for segment in (10, 11, 12)] == [False, True, True]
    arrival = board.arrival(12)
    assert arrival is not None
    with pytest.raises(CommandFailed) as told:
        arrival.wait(copies)  # type: ignore[arg-type]
    assert told.value.failure.kind == "ModelDamaged"
    assert "a damaged file" in told.value.failure.text
    copies.finish()
    assert said[2:] == [e.Came(9, [10]), m.LetGo(ticket=1)], "and not that all is here"
    wakes.handle(StopWake(9, cancel=False))
    assert board.join(cancel=False) == ([10], [11, 12])


def test_a_lease_that_is_interrupted_gives_up_what_was_not_ordered() -> None:
    wakes, board, copies, said = carried_out()
    wakes.fetched(fetched(1, 10, last=False))
    wakes.interrupt(8)
    assert said[1:] == []
    wakes.interrupt(9)
    wakes.interrupt(9)
    assert said[1:] == [e.Came(9, [11, 12], lost=True)]
    wakes.handle(StopWake(9, cancel=True))
    assert board.join(cancel=True) == ([], [10, 11, 12])
    assert copies.cancelled
    wakes.handle(WakeOver(9))
    assert said[2:] == [m.LetGo(ticket=1)]
    copies.finish()
    assert said[3:] == [e.Came(9, [10])], "who hears of it knows that the lease is over"
    wakes.interrupt(9)
    assert len(said) == 4


def test_wakes_of_several_leases_do_not_mix() -> None:
    wakes, board, copies, said = carried_out()
    other = Board(copies, [20])  # type: ignore[arg-type]
    wakes.handle(BeginWake(10, other, copies, [(20, 0, MIB)], [], 0.0))  # type: ignore[arg-type]
    assert said[1:] == [m.Fetch(ticket=3, segments=[20])]
    place = m.Place(segment=20, slab=3, offset=0, nbytes=MIB)
    wakes.fetched(m.Fetched(ticket=3, places=[place], file_nbytes=0, last=True))
    wakes.interrupt(9)
    assert said[2:] == [e.Came(9, [10, 11, 12], lost=True)]
    copies.finish()
    assert said[3:5] == [e.Came(10, [20]), m.LetGo(ticket=3)]
    assert (said[5].serial, said[5].copied_nbytes) == (10, MIB)
    assert [board.failed(10), other.failed(20)] == [True, False]


def test_a_copy_that_the_device_refuses_is_given_up() -> None:
    wakes, board, copies, said = carried_out()
    copies.refuses = True
    wakes.fetched(fetched(1, 10, 11, 12))
    assert said[1:] == [e.Came(9, [10, 11, 12], lost=True), m.LetGo(ticket=1)]
    assert all(board.failed(segment) for segment in (10, 11, 12))


# --- any order


class AnyOrder(RuleBasedStateMachine):
    """Other GPUs, the store, the copy thread and the end of the lease, in any order."""

    @initialize(
        sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
        peers=st.lists(st.integers(1, 3), max_size=3, unique=True),
        batch=st.integers(1, 12),
        job=st.integers(1, 12),
    )
    def begin(self, sizes: list[int], peers: list[int], batch: int, job: int) -> None:
        self.sizes = {10 + number: nbytes for number, nbytes in enumerate(sizes)}
        offsets = itertools.accumulate([0, *sizes])
        self.missing = [(segment, offset, self.sizes[segment]) for segment, offset in zip(self.sizes, offsets)]  # noqa: B905
        with patch.object(w, "JOB_NBYTES", job):
            self.wake = w.WakeCopies(self.missing, peers, batch, itertools.count(1))
        self.open: dict[int, w.Ask] = {}  # asked, and not let go
        self.silent: set[int] = set()  # tickets that have said all
        self.shown: dict[int, set[int]] = {}  # segments that the store has told, by ticket
        self.jobs: dict[int, list[int]] = {}
        self.ordered: set[int] = set()
        self.there: set[int] = set()
        self.lost: set[int] = set()
        self.here = self.stopped = self.over = False
        self.perform(self.wake.begin())

    def perform(self, effects: list[w.Effect], refuse: bool = False) -> None:
        for effect in effects:
            match effect:
                case w.Ask(gpu=gpu, ticket=ticket, segments=segments):
                    assert not self.stopped
                    assert ticket not in self.open
                    assert segments
                    assert not set(segments) & (self.ordered | self.lost)
                    self.open[ticket] = effect
                    if gpu is None:
                        waiting = [t for t, ask in self.open.items() if ask.gpu is None and t not in self.silent]
                        assert len(waiting) <= w.BATCHES
                case w.CopyIn(number=number, copies=copies, owners=owners):
                    assert not self.stopped
                    fresh = set(owners)
                    assert not fresh & (self.ordered | self.lost), "copied twice"
                    for segment, offset, nbytes in self.missing:
                        spans = [copy for copy, owner in zip(copies, owners, strict=True) if owner == segment]
                        if spans:
                            assert spans[0].device == offset
                            assert sum(copy.nbytes for copy in spans) == nbytes
                    if refuse and number % 2:
                        self.perform(self.wake.refused(number, "refused"))
                    else:
                        self.jobs[number] = owners
                        self.ordered |= fresh
                        self.perform(self.wake.began(number))
                case w.LetGoOfSource(ticket=ticket):
                    del self.open[ticket]
                case w.GiveUp(segments=segments):
                    assert not set(segments) & (self.ordered | self.lost)
                    self.lost |= set(segments)
                case w.AllHere():
                    assert not self.here
                    assert self.there == set(self.sizes)
                    self.here = True

    def asks(self, of_store: bool) -> list[w.Ask]:
        return [ask for ask in self.open.values() if (ask.gpu is None) == of_store and ask.ticket not in self.silent]

    @precondition(lambda self: self.asks(False))
    @rule(data=st.data(), refuse=st.booleans())
    def a_peer_answers(self, data: Any, refuse: bool) -> None:
        ask = data.draw(st.sampled_from(self.asks(False)))
        self.silent.add(ask.ticket)
        some = data.draw(st.lists(st.sampled_from(ask.segments), unique=True))
        extents = []
        for segment in some:
            cut = data.draw(st.integers(0, self.sizes[segment]))
            wrong = data.draw(st.integers(0, 4)) == 0
            spans = [(0, cut), (50, self.sizes[segment] - cut + wrong)]
            extents.append((segment, [span for span in spans if span[1]]))
        self.perform(self.wake.peer_answered(ask.ticket, extents), refuse)

    @precondition(lambda self: self.asks(False))
    @rule(data=st.data())
    def a_peer_dies(self, data: Any) -> None:
        gpu = data.draw(st.sampled_from(self.asks(False))).gpu
        assert gpu is not None
        self.silent |= {ask.ticket for ask in self.open.values() if ask.gpu == gpu}
        self.perform(self.wake.peer_lost(gpu))

    @precondition(lambda self: self.asks(True))
    @rule(data=st.data(), last=st.booleans(), refuse=st.booleans())
    def the_store_answers(self, data: Any, last: bool, refuse: bool) -> None:
        ask = data.draw(st.sampled_from(self.asks(True)))
        told = self.shown.setdefault(ask.ticket, set())
        rest = [segment for segment in ask.segments if segment not in told]
        some = data.draw(st.lists(st.sampled_from(rest), unique=True)) if rest else []
        told |= set(some)
        if last:
            self.silent.add(ask.ticket)
        places = [m.Place(segment=s, slab=0, offset=0, nbytes=self.sizes[s]) for s in some]
        said = m.Fetched(ticket=ask.ticket, places=places, file_nbytes=0, last=last)
        self.perform(self.wake.fetched(said), refuse)

    @precondition(lambda self: self.asks(True))
    @rule(data=st.data())
    def the_store_fails(self, data: Any) -> None:
        ask = data.draw(st.sampled_from(self.asks(True)))
        self.silent.add(ask.ticket)
        self.perform(self.wake.fetch_failed(ask.ticket, "a disk", False))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def a_copy_is_done(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.jobs)))
        self.there |= set(self.jobs.pop(number))
        self.perform(self.wake.copied(number))

    @precondition(lambda self: self.there and not self.over)
    @rule(data=st.data())
    def something_is_read_where_it_lies(self, data: Any) -> None:
        segment = data.draw(st.sampled_from(sorted(self.sizes)))
        if segment in self.wake.places:
            shown, _ = self.wake.places[segment]
            ticket = next((t for t, told in self.shown.items() if segment in told), 0)
            assert shown.hold() == (ticket in self.open), "what was let go cannot be held, what is open can"

    @precondition(lambda self: not self.over)
    @rule(cancel=st.booleans())
    def the_lease_ends(self, cancel: bool) -> None:
        self.perform(self.wake.stop(cancel))
        self.stopped = True
        assert self.lost | self.ordered == set(self.sizes)
        for number in sorted(self.jobs):  # they are joined
            if not cancel:
                self.there |= set(self.jobs[number])
                self.perform(self.wake.copied(number))
        self.jobs.clear()
        self.perform(self.wake.over())
        self.over = True
        assert not self.open, "every question is let go, once"

    @precondition(lambda self: self.over)
    @rule(ticket=st.integers(0, 9))
    def something_comes_late(self, ticket: int) -> None:
        said = m.Fetched(ticket=ticket, places=[], file_nbytes=0, last=True)
        assert self.wake.fetched(said) == self.wake.fetch_failed(ticket, "late", False) == []
        assert self.wake.peer_answered(ticket, [(10, [(0, 1)])]) == []

    @invariant()
    def nothing_is_left_waiting(self) -> None:
        if not hasattr(self, "wake") or self.over:
            return
        missing = set(self.sizes) - self.ordered - self.lost
        if missing:
            assert self.asks(True) or self.asks(False) or self.jobs, "nobody will ever answer"
        elif not self.lost and not self.jobs:
            assert self.here


TestWakes = AnyOrder.TestCase
TestWakes.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
