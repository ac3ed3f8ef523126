"""Several leases of one runtime: seats and turns that they share, and what ends for one or for all."""

import pytest
from played_leases import GRANULE, Played, kinds, states_of

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import LeaseState
from dormouse.schemas import messages as m


def test_a_second_lease_of_a_runtime_has_a_seat_there_and_no_turn_is_asked_for_twice() -> None:
    played = Played(models="ab", shared="ab")
    first = played.paused("a")
    assert m.WantsTurn(serial=first) in played.controller
    played.do(m.Turn(serial=first))
    played.controller.clear()
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    seats = [each for each in played.told["g"] if isinstance(each, m.SeatGiven)]
    assert [each.serial for each in seats] == [first, second]
    assert seats[0].storages == seats[1].storages
    played.controller.clear()
    played.say("g", m.Stepped(busy_us=5))
    assert kinds(played.controller) == ["Idle"]
    assert played.machine.leases[second].idle


def test_one_that_wants_its_turn_while_another_of_its_runtime_is_about_to_have_one_is_not_asked_for() -> None:
    """And it is, when that one has gone after all."""
    played = Played(models="abc", shared="ab")
    first = played.wake("a")
    third_waits = played.wake("c")  # no turn is free: it waits
    second_waits = played.wake("b")
    played.controller.clear()
    played.do(m.Pause(serial=first))  # "c" has the turn now
    assert m.WantsTurn(serial=first) not in played.controller
    played.do(m.Revoke(serial=second_waits))
    assert m.WantsTurn(serial=first) in played.controller
    assert played.machine.leases[third_waits].state is LeaseState.RUNNING


@pytest.mark.parametrize(("ends", "new"), [(False, False), (False, True), (True, False)])
def test_a_turn_of_a_runtime_begins_when_the_one_that_has_ended_is_back(ends: bool, new: bool) -> None:
    """Heard in one step, they would be one turn, and the first never be given back: its runtime would be ended."""
    played = Played(models="ab", shared="ab", turns=2)
    second = 0
    if not new:
        second = played.wake("b")
        played.do(m.Pause(serial=second))
    first = played.wake("a")
    played.obeys = False
    played.told["g"].clear()
    played.do(e.SeatUnwanted(first) if ends else m.Pause(serial=first))
    if new:
        played.wake("b")
    else:
        played.do(m.Turn(serial=second))
    assert [each for each in kinds(played.told["g"]) if each != "MemberLeaves"] == ["TurnEnds"]
    played.give_turn_back("g")
    assert kinds(played.told["g"]).count("TurnBegins") == 1
    assert played.lease("b").state is LeaseState.RUNNING
    assert states_of(played).get("a") == (None if ends else "paused")


@pytest.mark.parametrize("turn", ["a", "b"])
def test_one_ends_and_the_other_goes_on_with_its_kv_and_its_turn(turn: str) -> None:
    played = Played(models="ab", shared="ab")
    first = played.paused("a")
    second = played.wake("b")
    if turn == "a":
        played.do(m.Pause(serial=second))
        played.do(m.Turn(serial=first))
    played.say("g", m.KvWanted(extents=2, nbytes=GRANULE))
    kv = list(played.kv["g"])
    assert len(kv) == 2
    played.told["g"].clear()
    played.controller.clear()
    played.do(e.SeatUnwanted(first))
    assert played.outcomes() == ["ended"]
    assert kinds(played.told["g"]) == ["MemberLeaves", "TurnEnds"] if turn == "a" else ["MemberLeaves"]
    assert (m.WantsTurn(serial=second) in played.controller) == (turn == "a")
    assert set(kv) <= set(played.machine.residency.pool.segments())
    played.do(e.SeatUnwanted(second))
    assert played.outcomes() == ["ended", "ended"]
    assert [number for number in played.machine.residency.pool.segments() if number < 0] == []


def test_all_leave_a_shared_seat_together_and_come_back_one_by_one() -> None:
    played = Played(granules=3, models="abc", nbytes=2 * GRANULE, shared="ab")
    first = played.paused("a")
    second = played.paused("b")
    third = played.wake("c")
    states = {serial: lease.state for serial, lease in played.machine.leases.items()}
    assert states == {first: LeaseState.AWAY, second: LeaseState.AWAY, third: LeaseState.RUNNING}
    assert kinds(played.told["g"]).count("SeatEnds") == 1
    played.do(e.SeatUnwanted(third))
    played.do(m.Turn(serial=second))
    states = {serial: lease.state for serial, lease in played.machine.leases.items()}
    assert states == {first: LeaseState.AWAY, second: LeaseState.RUNNING}


def test_who_has_another_model_has_a_runtime_of_its_own_also_in_the_same_group() -> None:
    played = Played(models="ab", shared="ab")
    played.model("b", 77)
    played.paused("a")
    played.wake("b")
    assert {lease.instance: lease.runtime for lease in played.machine.leases.values()} == {"a": "g", "b": "b"}
    assert "SeatGiven" in kinds(played.told["b"])


def test_the_death_of_a_shared_runtime_ends_all_of_its_leases_and_no_other() -> None:
    played = Played(models="abc", shared="ab")
    first = played.wake("a")
    played.say("g", m.KvWanted(extents=2, nbytes=GRANULE))
    played.do(m.Pause(serial=first))
    played.paused("b")
    third = played.wake("c")
    played.dies("g")
    assert played.outcomes() == ["revoked", "revoked"]
    assert list(played.machine.leases) == [third]
    assert [number for number in played.machine.residency.pool.segments() if number < 0] == []


def test_a_runtime_does_not_leave_the_seat_that_it_computes_in() -> None:
    """Though one of its leases has no turn: it is told that there is no room."""
    played = Played(granules=3, models="ab", shared="ab")
    first = played.paused("a")
    second = played.wake("b")
    played.say("g", m.KvWanted(extents=2, nbytes=GRANULE))
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    assert played.told["g"][-1] == m.KvGiven(extents=[])
    states = [played.machine.leases[serial].state for serial in (first, second)]
    assert states == [LeaseState.PAUSED, LeaseState.RUNNING]
