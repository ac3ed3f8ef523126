"""Seats of runtimes that nobody needs now: how long they stay, and for whom they are left."""

import pytest
from played_leases import GRANULE, SEAT_IDLE_S, Played, kinds

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import LeaseState
from dormouse.schemas import messages as m


def test_a_seat_that_nobody_needs_stays_for_long() -> None:
    played = Played()
    first = played.wake("a")
    played.say("a", m.KvWanted(extents=1, nbytes=GRANULE))
    played.step("a", idle=1)
    played.now_s = 1.0
    assert played.due_s is None  # it may have sequences
    played.rests("a")
    assert played.due_s == SEAT_IDLE_S
    for played.now_s in (SEAT_IDLE_S - 1.0, SEAT_IDLE_S):
        assert played.over == []
        assert played.kv["a"]
        played.do(e.Tick())
    assert played.over == [("a", m.SeatOver(serial=first, unneeded=True))]
    assert played.outcomes() == ["ended"]
    assert 100 in played.machine.residency.pool  # weights stay
    assert played.machine.stats().free_nbytes == 7 * GRANULE


def rests_beside(models: str, rests_s: float, turns: int = 1, granules: int = 3) -> Played:
    """Model a rests in its seat, with its weights and some KV, so long; the last of ``models`` has idle weights."""
    played = Played(granules=granules, models=models, turns=turns)
    if len(models) > 2:
        played.do(e.SeatUnwanted(played.wake(models[-1])))
    first = played.wake("a")
    played.say("a", m.KvWanted(extents=1, nbytes=GRANULE))
    played.step("a", idle=1, recompute_us=1_000_000)
    played.rests("a")
    if turns == 1:
        played.obeys = False
        played.do(m.Pause(serial=first))
        played.obeys = True
        played.give_turn_back("a", wants=False)
    played.now_s += rests_s
    return played


@pytest.mark.parametrize(("worth", "rests_s", "goes"), [(0.5, 3.0, "a"), (2.0, 3.0, "c"), (0.5, 1.0, "c")])
def test_weights_in_a_seat_that_rests_are_in_the_order_of_all(worth: float, rests_s: float, goes: str) -> None:
    played = rests_beside("abc", rests_s)
    played.wake("b", worth=dict(sorted({"a": worth, "c": 1.0}.items(), key=lambda each: each[1])))
    assert "b" in played.seat
    assert (played.lease("a") is None) == (goes == "a")
    assert (102 in played.machine.residency.pool) == (goes == "a")


def shared_rests(granules: int, rests_s: float) -> Played:
    """Models a and b share a runtime, which rests, with idle KV and the turn of b; c has idle weights."""
    played = Played(granules=granules, models="abcd", shared="ab")
    played.do(e.SeatUnwanted(played.wake("c")))
    first = played.wake("a")
    played.obeys = False
    played.do(m.Pause(serial=first))
    played.obeys = True
    played.give_turn_back("g", wants=False)
    second = played.wake("b")
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    played.step("g", idle=1, recompute_us=1_000_000)
    played.rests("g")
    played.told["g"].clear()
    played.obeys = False
    played.do(m.Pause(serial=second))
    played.obeys = True
    if rests_s:
        played.give_turn_back("g", wants=False)
    played.now_s += rests_s
    return played


def test_on_a_gpu_that_drains_none_rests() -> None:
    played = Played()
    first = played.wake("a")
    played.step("a", idle=1)
    played.do(m.DrainSeats(on=True))
    played.do(e.Tick())
    assert played.over == [], "it may have sequences"
    played.now_s = 1.0
    played.rests("a")
    played.do(e.Tick())
    assert played.over == [("a", m.SeatOver(serial=first, unneeded=True))]


def test_when_a_shared_runtime_has_rested_all_of_its_leases_end() -> None:
    played = shared_rests(4, 0.0)
    played.now_s = SEAT_IDLE_S
    played.do(e.Tick())
    assert kinds(played.told["g"]) == ["TurnEnds", "MemberLeaves", "MemberLeaves", "SeatEnds"]
    assert [name for name, over in played.over if over.unneeded] == ["a", "b"]
    assert played.outcomes() == ["ended"] * 3
    assert not played.machine.leases
    assert played.machine.stats().free_nbytes == 2 * GRANULE  # the weights of both models stay
    assert played.due_s is None


@pytest.mark.parametrize("worth", [0.5, 2.0])
def test_weights_that_several_hold_who_rest_are_in_the_order_of_all(worth: float) -> None:
    played = shared_rests(3, 3.0)
    played.wake("d", worth=dict(sorted({"a": worth, "b": worth, "c": 1.0}.items(), key=lambda each: each[1])))
    assert "d" in played.seat
    assert (played.lease("a") is None) == (played.lease("b") is None) == (worth < 1.0)
    assert (102 in played.machine.residency.pool) == (worth < 1.0)


def test_who_asked_for_the_turn_as_it_was_given_rests_once_all_is_computed() -> None:
    """The question was on its way: no step answers it any more, and the lease would never end."""
    played = Played(granules=4, models="a")
    played.wake("a")
    played.say("a", m.StepsWanted())
    played.step("a")
    played.rests("a")
    played.now_s += SEAT_IDLE_S
    played.do(e.Tick())
    assert not played.machine.leases


def test_one_that_wants_its_turn_does_not_rest() -> None:
    played = rests_beside("abc", 3.0)
    played.say("a", m.StepsWanted())
    played.wake("b", worth={"a": 0.5, "c": 1.0})
    assert played.lease("a") is not None


def test_of_two_that_have_turns_one_that_rests_makes_room() -> None:
    played = rests_beside("ab", 0.0, turns=2, granules=4)
    played.wake("b")
    assert played.lease("a").state is LeaseState.RUNNING
    played.say("b", m.KvWanted(extents=3, nbytes=GRANULE))
    assert len(played.kv["b"]) == 3
    assert played.lease("a") is None
    assert played.over == [("a", m.SeatOver(serial=1, unneeded=True))]
