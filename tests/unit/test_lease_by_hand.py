"""The machine of leases, told everything by hand: what its played world has found, as short as it could be made."""

from typing import TypeVar

import msgpack
import pytest
from lease_compute import SECRET, Orders
from lease_memory import POOLS, UNIT, size
from msgspec import structs

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.machine import Machine
from dormouse.core.decisions.leases.turns import VERSION_S
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

T = TypeVar("T")


class Hand:
    """A machine that is told everything by hand."""

    def __init__(self, pool: str = "regions", turns: int = 1, share: bool = False) -> None:
        self.machine = Machine(POOLS[pool](), share=share, turns=turns, turn_s=1.0)
        self.now_s = 0.0

    def __call__(self, event: e.Event) -> list[o.Effect]:
        self.now_s += 1.0
        effects = self.machine.handle(event, self.now_s)
        self.machine.check()
        return effects

    def model(self, name: str, *units: int, first: int = 100, version: int = 1) -> list[o.Effect]:
        """Storage n is a segment of so many units; its number is ``first`` + n."""
        entries = [m.Entry(storage=n, segment=first + n, offset=0, nbytes=size(each)) for n, each in enumerate(units)]
        segments = [(entry.segment, entry.nbytes) for entry in entries]
        return self(m.Manifest(instance=name, version=version, entries=entries, segments=segments))

    def attach(self, name: str, *units: int, first: int = 100) -> None:
        self(e.InstanceAttached(name, "t"))
        self.model(name, *units, first=first)

    def wake(self, serial: int, name: str) -> list[o.Effect]:
        effects = self(e.WakeAsked(wake_of(serial, name), e.WakeRates(1.0, 0.0)))
        missing = [segment for begin in effects if isinstance(begin, o.Begin) for segment, _, _ in begin.missing]
        self(e.Came(serial, missing))
        if of(o.Listen, effects):  # there are no connections here
            self(e.NotLent(serial))
        return effects

    def frame(self, serial: int, number: int, name: str) -> list[o.Effect]:
        return self(e.Heard(name, msgpack.packb([serial, SECRET, number, [[], []], []])))

    def executed(self, serial: int, ended: e.Ended | None = None) -> list[o.Effect]:
        return self(e.Executed(serial, [], 0.0, e.Use(), ended))

    def leaves(self, serial: int, *storages: int) -> list[o.Effect]:
        """It was told to; what comes of that."""
        lease = self.machine.leases[serial]
        left = e.WakeRemains(list(lease.missing_nbytes) if lease.copies else [])
        asked = self(e.Owned(serial, [(storage, size(1)) for storage in storages], left))
        for ask in asked:
            if isinstance(ask, m.AskPlace):
                self(m.Placed(ticket=ask.ticket, places=[place(1000 + number) for number in storages]))
        return self(e.CopiedOut(serial, True, [], e.Use()))


def wake_of(serial: int, name: str) -> m.Wake:
    lease = m.Lease(gpu=0, epoch=1, serial=serial, secret=SECRET)
    return m.Wake(lease=lease, instance=name, version=0, worth={}, peers=[], activation_nbytes=0)


def place(segment: int) -> m.Place:
    return m.Place(segment=segment, slab=0, offset=0, nbytes=size(1))


def of(kind: type[T], effects: list[o.Effect]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def a_seat_that_left(hand: Hand, *storages: int) -> None:
    """Lease 1 of a has left, and its turn is free: lease 2 of b, which has its room, is paused and has no command."""
    hand.attach("a", 8)
    hand.attach("b", 8, first=200)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    hand.executed(1)
    hand(m.Pause(serial=1))
    assert of(o.Own, hand.wake(2, "b"))
    hand.leaves(1, *storages)
    hand(e.Came(2, [200]))
    hand(m.Pause(serial=2))


def test_what_only_an_older_version_had_goes_wherever_its_instance_is() -> None:
    hand = Hand()
    hand.attach("a", 1)
    hand.model("b", 1)
    hand.wake(1, "a")
    hand(m.Over(serials=[1]))
    hand(e.Closed(1, [], [], [], [], e.Counts(), e.WakeRemains([100]), e.Use()))
    hand(m.Dropped(instance="a"))
    assert 100 in hand.machine.residency.pool
    hand.model("b", 1, first=200, version=2)
    assert 100 not in hand.machine.residency.pool


@pytest.mark.parametrize("ended", [False, True])
def test_what_a_lease_wrote_that_is_cut_off_is_bound_again(ended: bool) -> None:
    """compute.py takes what it wrote, or freed, out of reach: the next lease has to be told where that is."""
    hand = Hand()
    hand.attach("a", 1)
    hand.wake(1, "a")
    hand(m.Over(serials=[1]))
    hand(e.Closed(1, [], [], [], [], e.Counts(), e.WakeRemains([100]), e.Use()))
    for serial in (2, 3):
        hand.wake(serial, "a")
        [begin] = of(o.Begin, hand.frame(serial, 1, "a"))
        assert (begin.missing, begin.places) == ([], {100: (0, size(1))})
        if not ended:
            hand.executed(serial)
        hand(m.Revoke(serial=serial))
        if ended:  # its END was under way
            hand.executed(serial, e.Ended([], {}, [0], [], False, True, [], e.Counts(), e.WakeRemains()))
        hand(e.Closed(serial, [], [], [], [100], e.Counts(), e.WakeRemains(), e.Use()))


def test_a_seat_whose_model_was_changed_behind_its_back_does_not_come_back() -> None:
    hand = Hand()
    a_seat_that_left(hand)
    hand.model("a", 8, first=300, version=2)
    effects = hand(m.Turn(serial=1))
    [told] = [reply for each in of(o.Reply, effects) for reply in wire.replies(each.message)]
    assert told[0] == wire.REFUSED
    assert told[3] == wire.SEAT_LOST
    assert of(o.Close, effects)
    assert not of(o.Return, effects)


def test_a_lease_without_its_model_writes_what_it_has_made() -> None:
    hand = Hand()
    hand.attach("a", 20)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    [ask] = of(
        m.AskPlace, hand.executed(1, e.Ended([(7, size(1))], {}, [], [], False, False, [], e.Counts(), e.WakeRemains()))
    )
    hand(m.Placed(ticket=ask.ticket, places=[place(1000)]))
    hand(e.CopiedOut(1, False, [], e.Use()))
    entries = [m.Entry(storage=7, segment=1000, offset=0, nbytes=size(1))]
    hand(m.Manifest(instance="a", version=2, entries=entries, segments=[(1000, size(1))]))  # KeyError


@pytest.mark.parametrize("refused", [False, True])
def test_who_waits_for_a_seat_to_be_left_is_answered_when_that_lease_ends(refused: bool) -> None:
    """Its Close is one of the orders that are carried out while the compute thread waits."""
    hand, given = Hand(), Orders()
    for serial, name in ((1, "a"), (2, "b")):
        hand.attach(name, 1, first=100 * serial)
        hand.wake(serial, name)
        hand.frame(serial, 1, name)
        if serial == 1:
            hand.executed(1)
            hand(m.Pause(serial=1))
    given.heard(relieve := e.Relieve(2, 0, 0))
    [own] = of(o.Own, hand(relieve))
    given.give(own)
    [ask] = of(m.AskPlace, hand(e.Owned(1, [(0, size(1))], e.WakeRemains([100]))))
    [close] = of(o.Close, hand(m.PlaceRefused(ticket=ask.ticket, text="full") if refused else m.Revoke(serial=1)))
    given.give(close)
    assert list(given.urgent) == [own, close]
    assert of(o.ComputeAnswer, hand(e.Closed(1, [], [], [], [], e.Counts(), e.WakeRemains(), e.Use())))


@pytest.mark.parametrize("begun", [False, True])
def test_a_lease_is_asked_what_it_owns_once_it_has_begun_though_it_has_given_no_frame(begun: bool) -> None:
    """The compute thread is in a frame of another, which asks for room: before, it would know nothing of the lease."""
    hand = Hand(turns=2)
    hand.attach("a", 1)
    hand.attach("b", 1, first=200)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    assert of(o.Begin, hand.wake(2, "b"))
    hand(m.Pause(serial=2))
    if begun:
        hand(e.Begun(2))
    effects = hand(e.Relieve(1, 0, 0))
    assert [own.serial for own in of(o.Own, effects)] == ([2] if begun else [])
    assert bool(of(o.ComputeAnswer, effects)) == (not begun)


def test_a_seat_that_the_device_had_refused_comes_back() -> None:
    """Its model begins to come, is not told to, and is for ever on its way for others."""
    hand = Hand()
    for name, first in (("a", 100), ("b", 200), ("c", 300), ("d", 100)):
        hand.attach(name, 8, first=first)
    hand.wake(1, "a")
    hand(e.Unmapped(1, "the GPU refused memory", []))
    hand(m.Pause(serial=1))
    hand.wake(2, "b")
    hand(m.Pause(serial=2))
    hand.wake(3, "c")
    hand.leaves(1)
    hand.leaves(2)
    hand(m.Over(serials=[3]))
    hand(e.Closed(3, [], [], [], [], e.Counts(), e.WakeRemains([300]), e.Use()))
    effects = hand(m.Turn(serial=1))
    assert of(o.Return, effects) or not hand.machine.residency.coming("d")


def test_who_waits_for_seats_that_have_had_no_command_is_answered() -> None:
    hand = Hand(share=True)
    for serial, name in ((1, "a"), (2, "b")):
        hand.attach(name)
        hand.wake(serial, name)
        hand(m.Pause(serial=serial))
    hand.attach("c")
    hand.wake(3, "c")
    hand.frame(3, 1, "c")
    assert of(o.ComputeAnswer, hand(e.Relieve(3, 20 * UNIT, 0)))


def test_a_revoke_of_a_wake_that_waits_is_no_end_of_those_before_it() -> None:
    hand = Hand()
    for serial, name in enumerate("abc", 1):
        hand.attach(name)
        hand.wake(serial, name)
    hand.frame(2, 1, "b")
    assert not of(o.Reply, hand(m.Revoke(serial=3)))


def test_a_version_that_the_store_never_tells_of_holds_nobody_up_for_long() -> None:
    """An instance names the version, so one that nobody ever makes kept the GPU from all others."""
    hand = Hand()
    hand.attach("liar", 1)
    hand.attach("honest", 1, first=200)
    hand.attach("other", 1, first=300)
    for serial, name, version in ((1, "liar", 1 << 40), (2, "honest", 2), (3, "other", 1)):
        wake = structs.replace(wake_of(serial, name), version=version)
        assert hand(e.WakeAsked(wake, e.WakeRates(1.0, 0.0))) == []
    assert hand.machine.next_deadline_s == 7.0 + VERSION_S
    hand.now_s = 5.0 + VERSION_S
    assert hand(e.Tick()) == [], "it may still come"
    hand.now_s = 6.0 + VERSION_S
    done, expelled = hand(e.Tick())
    assert isinstance(done, m.Done)
    assert (done.serial, done.outcome) == (1, "violated")
    text = "version 1099511627776 of its model, which the store does not know"
    assert expelled == o.Expel("liar", text, "")
    assert hand.machine.leases == {}, "the next one waits for its own"
    hand.model("honest", 1, first=200, version=2)
    assert [lease.instance for lease in hand.machine.leases.values()] == ["honest"]
    hand.now_s = 7.0 + 2 * VERSION_S
    assert not any(isinstance(effect, o.Expel) for effect in hand(e.Tick())), "it has come in time"


# waits for a mend: the wake was planned on memory that is refused now
@pytest.mark.xfail(strict=True)
def test_memory_that_the_device_has_refused_is_nobodys() -> None:
    """Another wake was planned meanwhile, behind addresses that the books said were mapped."""
    hand = Hand("pages", turns=2)
    hand.attach("a", 1)
    hand.attach("b", 1, first=200)
    [plan] = of(o.Arrange, hand.wake(1, "a"))
    assert plan.plans[0].mapped
    assert of(o.Begin, hand.wake(2, "b"))
    assert 200 in hand.machine.residency.pool
    effects = hand(e.Unmapped(1, "the GPU refused memory", []))
    mapped = [each for arrange in of(o.Arrange, effects) for each in arrange.plans if each.mapped]
    assert mapped or 200 not in hand.machine.residency.pool


def test_over_ends_a_wake_that_waits() -> None:
    """Else it has a turn later of which the controller knows nothing, and keeps it."""
    hand = Hand()
    hand.attach("a")
    hand.attach("b")
    hand.wake(1, "a")
    hand.wake(2, "b")
    hand(m.Over(serials=[2]))
    hand(m.Over(serials=[1]))
    assert not hand.machine.leases


def test_what_another_seat_holds_is_not_written_in_place() -> None:
    """Though its instance has another manifest by now, which has not reached it."""
    hand = Hand(turns=2)
    hand.attach("a", 1)
    hand.attach("b", 1)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    hand.model("a", 1, first=200, version=2)
    hand.wake(2, "b")
    hand.frame(2, 1, "b")
    assert hand(e.MayWrite(2, 100)) == [o.ComputeAnswer(None)]


def test_an_instance_dies_when_its_write_back_is_done() -> None:
    """Nobody waits for the manifest then; the lease ends."""
    hand = Hand()
    hand.attach("a", 1)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    [ask] = of(
        m.AskPlace,
        hand.executed(1, e.Ended([(7, size(1))], {}, [], [], False, False, [], e.Counts(), e.WakeRemains([100]))),
    )
    hand(m.Placed(ticket=ask.ticket, places=[place(1000)]))
    assert of(m.Written, hand(e.CopiedOut(1, False, [], e.Use())))
    effects = hand(e.Detached("a"))
    assert of(o.Close, effects)


def test_what_was_written_in_place_goes_if_the_end_is_too_late() -> None:
    """It was under way when the lease was cut off: the compute thread has named what it wrote with it, once."""
    hand = Hand()
    hand.attach("a", 1)
    hand.wake(1, "a")
    hand.frame(1, 1, "a")
    [answer] = of(o.ComputeAnswer, hand(e.MayWrite(1, 100)))
    assert answer.value in hand.machine.residency.pool
    assert of(o.Close, hand(m.Revoke(serial=1)))
    hand.executed(
        1, e.Ended([(0, size(1))], {0: answer.value}, [], [], True, False, [100], e.Counts(), e.WakeRemains([100]))
    )
    hand(e.Closed(1, [], [], [], [100], e.Counts(), e.WakeRemains(), e.Use()))
    assert hand.machine.residency.occupied_nbytes == 0


def test_what_only_a_version_in_between_had_goes() -> None:
    """Its instance had a lease all the while, and was never bound to it."""
    hand = Hand()
    hand.attach("a", 1)
    hand.attach("b", 1, first=200)
    hand.wake(1, "a")
    hand(m.Over(serials=[1]))
    hand(e.Closed(1, [], [], [], [], e.Counts(), e.WakeRemains([100]), e.Use()))
    hand.wake(2, "b")
    hand.model("b", 1, first=100, version=2)
    hand(m.Dropped(instance="a"))
    assert 100 in hand.machine.residency.pool
    hand.model("b", 1, first=200, version=3)
    assert 100 not in hand.machine.residency.pool


def test_what_did_not_come_is_bound_again_after_a_lease_that_left_and_came_back() -> None:
    """To that lease it stays lost, though others have brought it meanwhile."""
    hand = Hand()
    hand.attach("a", 1, 1)
    hand.attach("b", 12, first=200)
    hand.attach("c", 1, 1)
    hand(e.WakeAsked(wake_of(1, "a"), e.WakeRates(1.0, 0.0)))
    hand(e.Came(1, [100], lost=True))
    hand(e.Came(1, [101]))
    hand.frame(1, 1, "a")
    hand.executed(1)
    hand(m.Pause(serial=1))
    assert of(o.Own, hand.wake(2, "b"))
    hand(e.Owned(1, [], e.WakeRemains([101], [100])))
    assert of(o.Begin, hand(e.CopiedOut(1, True, [], e.Use())))
    hand(m.Over(serials=[2]))
    hand(e.Closed(2, [], [], [], [], e.Counts(), e.WakeRemains([200]), e.Use()))
    hand.wake(3, "c")
    hand(m.Over(serials=[3]))
    hand(e.Closed(3, [], [], [], [], e.Counts(), e.WakeRemains([100, 101]), e.Use()))
    [back] = of(o.Return, hand(m.Turn(serial=1)))
    assert not back.begin.missing
    hand(e.SeatReturned(1, e.Use()))
    hand.frame(1, 2, "a")
    hand.executed(1, e.Ended([], {}, [], [], False, False, [], e.Counts(), e.WakeRemains()))
    hand.wake(4, "a")
    [begin] = of(o.Begin, hand.frame(4, 1, "a"))
    assert begin.places is not None
