"""Leases of runtimes: seats, turns of steps, KV that grows; every end in every state. The runtime is a script here."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from played_leases import GRANULE, SEAT_IDLE_S, Played, kinds

from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease import runtimes
from dormouse.gpuserver.lease.held import GOING, SEATED, TURN, LeaseState
from dormouse.schemas import messages as m


def test_a_runtime_hears_of_its_turn_its_granules_and_its_seat() -> None:
    played = Played()
    played.wake("a")
    assert kinds(played.told["a"]) == ["TurnBegins", "SegmentsCame", "GranulesGiven", "SeatGiven"]
    *_, granules, seat = played.told["a"]
    assert [(each.nbytes, granules.writable) for each in granules.granules] == [(GRANULE, False)]
    assert [(each.storage, each.nbytes) for each in seat.storages] == [(1, GRANULE)]


def test_what_a_seat_takes_is_told_when_it_begins() -> None:
    """It may last for minutes."""
    played = Played()
    played.wake("a")
    assert played.pressed[-1].resident == [("a", GRANULE), ("b", 0)]
    assert played.pressed[-1].stats.weights_nbytes == GRANULE
    assert played.pressed[-1].seated


def test_after_its_first_step_the_turn_may_be_anothers() -> None:
    played = Played()
    first = played.wake("a")
    assert played.controller == []
    for _ in range(3):
        played.say("a", m.Stepped(busy_us=1000))
    assert played.controller == [m.Idle(serial=first)]
    played.do(m.Pause(serial=first))
    assert played.lease("a").state is LeaseState.PAUSED
    assert played.controller[1:] == [m.WantsTurn(serial=first)]
    second = played.wake("b")
    assert played.turn == {"b"}
    played.do(e.SeatUnwanted(second))
    played.do(m.Turn(serial=first))
    assert played.turn == {"a"}
    assert played.outcomes() == ["ended"]


def test_a_turn_in_the_same_seat_may_be_anothers_at_once() -> None:
    """A new seat is not to be had for nothing: two models that need each other's room would never compute."""
    played = Played(granules=2, models="ab", nbytes=2 * GRANULE)
    first = played.wake("a")
    played.say("a", m.Stepped(busy_us=1))
    played.do(m.Pause(serial=first))
    played.controller.clear()
    played.do(m.Turn(serial=first))
    assert played.controller == [m.Idle(serial=first)]
    played.say("a", m.Stepped(busy_us=1))
    played.do(m.Pause(serial=first))
    second = played.wake("b")  # it has left for this one
    played.do(e.SeatUnwanted(second))
    played.controller.clear()
    played.do(m.Turn(serial=first))
    assert played.controller == []
    assert played.pressed[-1].resident == [("a", 2 * GRANULE), ("b", 0)]  # known before the lease is over
    played.say("a", m.Stepped(busy_us=1))
    assert played.controller == [m.Idle(serial=first)]


def test_who_has_the_turn_says_when_it_has_nothing_to_do() -> None:
    played = Played()
    first = played.wake("a")
    played.say("a", m.Stepped(busy_us=1))
    assert played.controller == [m.Idle(serial=first)]
    for _ in range(2):
        played.rests("a")
    assert played.controller[1:] == [m.Idle(serial=first, rests=True)]


def test_steps_are_brief_while_functions_come() -> None:
    played = Played()
    played.do(e.InstanceAttached("f", "t", llm=False))
    played.do(m.Manifest(instance="f", version=1, entries=[], segments=[]))

    def brief_ms(name: str) -> int:
        began = [message.brief_ms for message in played.told[name] if isinstance(message, m.TurnBegins)]
        return int(began[-1])

    first = played.wake("a")
    assert brief_ms("a") == 0
    played.do(m.Pause(serial=first))
    ordinary = played.wake("f")
    played.now_s = 1.0
    played.do(m.Over(serials=[ordinary]))
    played.now_s = 4.0
    played.do(m.Turn(serial=first))
    assert brief_ms("a") == 7000  # it is likely to come again
    played.now_s = 11.0
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    assert brief_ms("b") == 0  # the other model wants to go on: prompts in pieces would cost both a turn for each
    played.obeys = False
    played.do(m.Pause(serial=second))
    played.give_turn_back("b", wants=False)
    played.do(m.Turn(serial=first))
    assert brief_ms("a") == 0


def test_a_step_that_is_told_with_the_turn_is_metered() -> None:
    """And before what that ends: here the lease, whose executor is told to give it up while it has the turn."""
    played = Played()
    first = played.wake("a")
    played.obeys = False
    played.do(m.Revoke(serial=first))
    played.say("a", m.TurnGivenBack(wants=False, stepped=m.Stepped(busy_us=7000)))
    played.give_turn_back("a", wants=False)
    played.leave("a")
    (done,) = [each for each in played.controller if isinstance(each, m.Done)]
    assert done.gpu_us == 7000


def waiting_step(played: Played) -> tuple[int, list[int]]:
    """Leases of b, whose step waits for weights, and of a and c, which have had steps and want the next ones."""
    others = []
    for name in "ac":
        others.append(played.wake(name))
        played.now_s += 1.0
        played.say(name, m.Stepped(busy_us=1))
        played.do(m.Pause(serial=others[-1]))
    played.comes = played.obeys = False
    own = played.wake("b")
    played.controller.clear()
    for told in played.told.values():
        told.clear()
    played.say("b", m.StepWaits())
    return own, others


def test_while_a_step_waits_for_weights_others_have_steps() -> None:
    """One after the other, and each is told to the controller. The turn stays where it is."""
    played = Played(models="abc")
    own, (first, _) = waiting_step(played)
    assert (kinds(played.told["a"]), kinds(played.told["c"])) == (["TurnBegins", "TurnEnds"], [])
    due = m.StepsDue(prompts=[], decoding=2)
    played.now_s += 1.0
    played.say("a", m.TurnGivenBack(wants=True, due=due, stepped=m.Stepped(busy_us=5)))
    assert played.controller == [m.WantsTurn(serial=first, due=due)]
    assert played.lease("a").busy_us == 6
    assert kinds(played.told["c"]) == ["TurnBegins", "TurnEnds"]  # a has had one since
    played.do(e.Came(own, [101]))
    played.say("c", m.TurnGivenBack(wants=True, stepped=m.Stepped(busy_us=5)))
    assert [kinds(played.told[name]).count("TurnBegins") for name in "abc"] == [1, 0, 1]
    assert [played.lease(name).state for name in "abc"] == [LeaseState.PAUSED, LeaseState.RUNNING, LeaseState.PAUSED]


def test_nobody_gets_the_turn_while_another_has_a_step_in_it() -> None:
    played = Played(models="abc")
    own, (_, second) = waiting_step(played)
    played.do(e.Came(own, [101]))
    played.say("b", m.Stepped(busy_us=9))
    played.do(m.Pause(serial=own))
    played.give_turn_back("b")
    played.do(m.Turn(serial=second))
    assert kinds(played.told["c"]) == []
    played.give_turn_back("a")
    assert kinds(played.told["c"]) == ["TurnBegins"]


@pytest.mark.parametrize("asks", [False, True])
def test_a_runtime_that_dies_in_anothers_turn_keeps_nobody_from_it(asks: bool) -> None:
    """Though the compute thread has not let go of its leases."""
    played = Played(models="abc")
    waiting_step(played)
    played.asks = asks
    played.dies("a")
    assert len(played.closes) == asks
    assert kinds(played.told["c"]) == ["TurnBegins", "TurnEnds"]


def test_kv_in_anothers_turn_waits_for_nobody() -> None:
    """Its own seat is not to be left for it. In its own turn others make room; until then it has no other step."""
    played = Played(granules=3, models="abc")
    own, (first, _) = waiting_step(played)
    assert played.told["a"] == [m.TurnBegins(lent=True), m.TurnEnds()]
    played.say("a", m.KvWanted(extents=1, nbytes=GRANULE))
    assert played.told["a"][2:] == [m.KvGiven(extents=[])]
    assert [played.lease(name).state.value for name in "abc"] == ["paused", "running", "paused"]
    played.told["a"].clear()
    played.give_turn_back("a")
    assert (kinds(played.told["a"]), kinds(played.told["c"])) == ([], ["TurnBegins", "TurnEnds"])
    played.obeys = True
    played.obey("c")
    played.do(e.Came(own, [101]))
    played.say("b", m.Stepped(busy_us=9))
    played.do(m.Pause(serial=own))
    played.do(m.Turn(serial=first))
    played.say("a", m.KvWanted(extents=1, nbytes=GRANULE))
    assert kinds(played.told["a"]) == ["TurnBegins", "GranulesGiven", "KvGiven"]
    assert len(played.kv["a"]) == 1


def test_kv_of_who_has_the_turn_waits_for_the_step_that_another_has_in_it() -> None:
    """Whose seat can be left then."""
    played = Played(granules=2, models="ab")
    first = played.wake("a")
    played.say("a", m.Stepped(busy_us=1))
    played.do(m.Pause(serial=first))
    played.comes = played.obeys = False
    played.wake("b")
    played.say("b", m.StepWaits())
    for told in played.told.values():
        told.clear()
    played.say("b", m.KvWanted(extents=1, nbytes=GRANULE))
    assert [kinds(played.told[name]) for name in "ab"] == [[], []]
    played.give_turn_back("a")
    assert [kinds(played.told[name]) for name in "ab"] == [["SeatEnds"], []]
    played.leave("a")
    assert kinds(played.told["b"]) == ["GranulesGiven", "KvGiven"]
    assert len(played.kv["b"]) == 1


def test_a_runtime_with_nothing_to_do_does_not_want_its_turn_back() -> None:
    played = Played()
    first = played.wake("a")
    played.obeys = False
    played.do(m.Pause(serial=first))
    played.give_turn_back("a", wants=False)
    assert played.controller == []
    played.say("a", m.StepsWanted())
    played.say("a", m.StepsWanted())
    assert played.controller == [m.WantsTurn(serial=first)]


def test_what_is_due_goes_with_the_wish_for_a_turn_and_again_when_it_is_news() -> None:
    """Of its own leases only: a runtime is not trusted with others."""
    played = Played()
    first = played.wake("a")
    played.obeys = False
    played.do(m.Pause(serial=first))
    played.give_turn_back("a", wants=False)
    mine = m.PromptsDue(serial=first, tokens=10, waited_us=5)
    others = [m.PromptsDue(serial=first + 1, tokens=10, waited_us=5), m.PromptsDue(serial=first, tokens=0, waited_us=5)]
    for prompts in ([], [mine]):
        played.say("a", m.StepsWanted(due=m.StepsDue(prompts=[*others, *prompts], decoding=2)))
    told = [m.StepsDue(prompts=prompts, decoding=2) for prompts in ([], [mine])]
    assert played.controller == [m.WantsTurn(serial=first, due=due) for due in told]


def test_kv_is_writable_and_its_own_and_comes_back() -> None:
    played = Played()
    played.wake("a")
    played.say("a", m.KvWanted(extents=3, nbytes=GRANULE))
    granules = played.told["a"][-2]
    assert granules.writable
    assert len(granules.granules) == len(played.kv["a"]) == 3
    weights = {each.physical for each in played.told["a"][2].granules}
    assert weights.isdisjoint(each.physical for each in granules.granules)
    stats = played.machine.stats()
    assert (stats.weights_nbytes, stats.kv_nbytes, stats.free_nbytes) == (GRANULE, 3 * GRANULE, 4 * GRANULE)
    played.say("a", m.KvReturned(extents=played.kv["a"][:2]))
    stats = played.machine.stats()
    assert (stats.weights_nbytes, stats.kv_nbytes, stats.free_nbytes) == (GRANULE, GRANULE, 6 * GRANULE)
    played.say("a", m.KvReturned(extents=[100, 101, -999]))  # weights, or nobody's
    assert played.machine.stats().free_nbytes == 6 * GRANULE
    assert 100 in played.machine.residency.pool


@pytest.mark.parametrize(("extents", "nbytes"), [(0, 1), (-1, 1), (1, 0), (1 << 40, 1), (1, 1 << 60)])
def test_kv_that_cannot_be_is_refused(extents: int, nbytes: int) -> None:
    played = Played()
    played.wake("a")
    played.say("a", m.KvWanted(extents=extents, nbytes=nbytes))
    assert played.told["a"][-1] == m.KvGiven(extents=[])


def test_kv_evicts_idle_weights_and_then_has_idle_seats_left() -> None:
    played = Played(granules=3, models="abc")
    played.do(e.SeatUnwanted(played.wake("c")))  # its weights stay, idle
    paused = played.wake("b")
    played.say("b", m.KvWanted(extents=1, nbytes=GRANULE))
    played.do(m.Pause(serial=paused))
    played.wake("a")
    assert 102 not in played.machine.residency.pool
    played.say("a", m.KvWanted(extents=2, nbytes=GRANULE))
    assert played.lease("b").state is LeaseState.AWAY
    assert len(played.kv["a"]) == 2
    assert played.kv["b"] == []
    assert "b" not in played.seat


def idle_beside(granules: int, models: str, extents: int, recompute_us: int = 0) -> Played:
    """Model b has a seat, no turn, and idle KV; the last of ``models`` has weights that nobody uses."""
    played = Played(granules=granules, models=models)
    if len(models) > 2:
        played.do(e.SeatUnwanted(played.wake(models[-1])))
    paused = played.wake("b")
    played.say("b", m.KvWanted(extents=extents, nbytes=GRANULE))
    played.step("b", idle=extents, recompute_us=recompute_us)
    played.do(m.Pause(serial=paused))
    return played


def test_idle_kv_goes_before_a_seat_is_left() -> None:
    played = idle_beside(5, "ab", 3)
    played.wake("a")
    played.say("a", m.KvWanted(extents=2, nbytes=GRANULE))
    assert kinds(played.told["b"])[-1] == "KvReclaim"
    assert played.told["b"][-1].nbytes == 2 * GRANULE  # as much as is lacking
    assert (len(played.kv["a"]), len(played.kv["b"])) == (2, 1)
    assert played.lease("b").state is LeaseState.PAUSED


def test_a_wake_has_the_room_of_idle_kv() -> None:
    played = idle_beside(3, "ab", 2)
    played.wake("a")
    assert played.told["b"][-1].nbytes == GRANULE
    assert played.seat == {"a", "b"}
    assert len(played.kv["b"]) == 1


def test_an_operation_has_the_room_of_idle_kv() -> None:
    played = idle_beside(4, "ab", 3)
    played.do(e.Relieve(0, 2 * GRANULE, 0))
    assert played.told["b"][-1].nbytes == 2 * GRANULE
    assert played.answers == [None]
    assert played.machine.stats().free_nbytes == 2 * GRANULE
    assert played.seat == {"b"}


def test_an_operation_has_the_room_that_a_seat_holds_beside_its_bytes() -> None:
    """By bytes there is room; the granules are all of seats."""
    played = Played(granules=2, models="ab", nbytes=GRANULE // 2)
    first = played.wake("a")
    played.step("a")
    played.do(m.Pause(serial=first))
    played.wake("b")
    played.step("b")
    assert played.seat == {"a", "b"}
    played.do(e.Relieve(0, 512, 0))
    assert played.answers == [None]
    assert played.seat == {"b"}
    assert played.machine.stats().free_nbytes == GRANULE


def test_an_operation_does_not_wait_for_a_runtime_that_died() -> None:
    """The compute thread has to let go of its lease, and cannot while it waits."""
    played = Played(granules=2, models="ab", nbytes=GRANULE // 2)
    first = played.wake("a")
    played.step("a")
    played.do(m.Pause(serial=first))
    played.wake("b")
    played.step("b")
    played.obeys = False
    played.do(e.Relieve(0, 512, 0))
    assert (played.owes["a"], played.answers) == (["seat"], [])
    played.dies("a")
    assert played.answers == [None]
    assert played.outcomes() == ["revoked"]


def test_nobody_has_a_seat_before_one_that_is_being_left() -> None:
    """Else what it computes found no room, though there will be some in a moment."""
    played = Played(granules=7, models="ab", nbytes=2 * GRANULE)
    played.do(e.InstanceAttached("c", "t"))
    played.model("c", 200)
    first = played.wake("a")
    played.step("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.step("b")
    played.obeys = False
    played.do(e.SaidByRuntime(second, m.KvWanted(extents=4, nbytes=GRANULE)))
    assert played.owes["a"] == ["seat"]
    played.do(m.Pause(serial=second))
    played.obey("b")
    played.wake("c")
    assert played.lease("c") is None
    played.obey("a")
    assert played.lease("c").state is LeaseState.RUNNING


@pytest.mark.parametrize(("recompute_us", "first"), [(1_000, "kv"), (100_000, "weights")])
def test_the_cheapest_idle_bytes_go_first(recompute_us: int, first: str) -> None:
    """The weights of c, 2 MiB at 1 GB/s, would be back in 2 ms, and are worth as much per byte as those of b."""
    played = idle_beside(4, "abc", 1, recompute_us)
    played.wake("a", worth={"b": 1.0, "c": 1.0})
    played.say("a", m.KvWanted(extents=1, nbytes=GRANULE))
    assert ("KvReclaim" in kinds(played.told["b"])) == (first == "kv")
    assert (102 in played.machine.residency.pool) == (first == "kv")
    assert len(played.kv["a"]) == 1


def test_idle_kv_is_worth_less_and_less() -> None:
    played = idle_beside(4, "abc", 1, 100_000)
    played.now_s += 600
    played.wake("a", worth={"b": 1.0, "c": 1.0})
    played.say("a", m.KvWanted(extents=1, nbytes=GRANULE))
    assert "KvReclaim" in kinds(played.told["b"])


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


def test_a_runtime_that_gives_nothing_of_its_idle_kv_leaves_its_seat() -> None:
    played = idle_beside(4, "ab", 2)
    played.obeys = False
    played.wake("a")
    played.say("a", m.KvWanted(extents=1, nbytes=GRANULE))
    assert "KvReclaim" in kinds(played.told["b"])
    played.obeys = True
    played.say("b", m.KvReturned(extents=[]))
    assert played.seat == {"a"}
    assert len(played.kv["a"]) == 1


def test_one_that_dies_instead_of_giving_back_frees_all() -> None:
    played = idle_beside(4, "ab", 2)
    played.obeys = False
    played.wake("a")
    played.say("a", m.KvWanted(extents=1, nbytes=GRANULE))
    assert played.kv["a"] == []
    serial = played.lease("b").serial
    played.do(e.SeatUnwanted(serial, "revoked"))
    played.leave("b")
    assert len(played.kv["a"]) == 1
    assert played.machine.stats().free_nbytes == GRANULE


def test_kv_waits_for_a_runtime_that_takes_its_time_to_leave() -> None:
    played = Played(granules=3)
    paused = played.wake("b")
    played.do(m.Pause(serial=paused))
    played.wake("a")
    played.obeys = False
    played.say("a", m.KvWanted(extents=2, nbytes=GRANULE))
    assert played.kv["a"] == []
    played.leave("b")
    assert len(played.kv["a"]) == 2


def test_a_lease_that_was_away_has_a_seat_again() -> None:
    played = Played(granules=3)
    paused = played.wake("b")
    played.do(m.Pause(serial=paused))
    second = played.wake("a")
    played.say("a", m.KvWanted(extents=2, nbytes=GRANULE))
    assert played.lease("b").state is LeaseState.AWAY
    played.do(e.SeatUnwanted(second))
    played.do(m.Turn(serial=paused))
    assert played.seat == played.turn == {"b"}


@pytest.mark.parametrize("state", ["running", "yielding", "paused", "leaving", "away"])
@pytest.mark.parametrize("end", ["unwanted", "dies", "revoked", "detached"])
def test_every_end_in_every_state_gives_all_memory_back(state: str, end: str) -> None:
    played = Played(granules=4)
    serial = played.wake("a")
    played.say("a", m.KvWanted(extents=2, nbytes=GRANULE))
    if state in ("leaving", "away"):
        played.do(m.Pause(serial=serial))
        played.obeys = state == "away"
        played.wake("b")
        played.say("b", m.KvWanted(extents=2, nbytes=GRANULE))
    elif state == "yielding":
        played.obeys = False
        played.do(m.Pause(serial=serial))
    elif state == "paused":
        played.do(m.Pause(serial=serial))
    assert played.lease("a").state.value == state
    played.obeys = end != "dies"
    if end == "unwanted":
        played.do(e.SeatUnwanted(serial))
    elif end == "dies":
        played.dies("a")
    elif end == "revoked":
        played.do(m.Revoke(serial=serial))
    else:
        played.do(e.Detached("a"))
    if state == "leaving" and end != "dies":
        played.leave("a")  # it was told before it was to obey again
    assert played.lease("a") is None
    assert played.outcomes() == ["ended" if end == "unwanted" else "revoked"]
    own = [number for number in played.machine.residency.pool.segments() if number < 0]
    assert sorted(own) == sorted(played.kv["b"])


class AnyOrder(RuleBasedStateMachine):
    """Whatever is said in whatever order: books hold, nobody has memory or a turn that is another's."""

    shared = adapters = ""

    def __init__(self) -> None:
        super().__init__()
        self.played = Played(granules=6, models="abc", shared=self.shared, adapters=self.adapters)

    def of(self, name: str) -> str:
        """Its runtime."""
        return "g" if name in self.shared else name

    @rule(name=st.sampled_from("abc"))
    def wake(self, name: str) -> None:
        if self.played.lease(name) is None and not any(
            isinstance(first, e.WakeAsked) and first.wake.instance == name for first in self._coming()
        ):
            self.played.wake(name)

    def _coming(self) -> list[Any]:
        return list(self.played.machine._state.coming)

    @rule(name=st.sampled_from("abc"), kind=st.sampled_from(["pause", "turn", "revoke"]))
    def controller(self, name: str, kind: str) -> None:
        if (lease := self.played.lease(name)) is not None:
            message = {"pause": m.Pause, "turn": m.Turn, "revoke": m.Revoke}[kind]
            self.played.do(message(serial=lease.serial))

    @rule(name=st.sampled_from("abc"), extents=st.integers(1, 4))
    def grow(self, name: str, extents: int) -> None:
        if (name := self.of(name)) in self.played.turn and name not in self.played.asked:
            self.played.say(name, m.KvWanted(extents=extents, nbytes=GRANULE))

    @rule(name=st.sampled_from("abc"), count=st.integers(1, 3))
    def shrink(self, name: str, count: int) -> None:
        name = self.of(name)
        gone, self.played.kv[name] = self.played.kv[name][:count], self.played.kv[name][count:]
        if gone:
            self.played.say(name, m.KvReturned(extents=gone))

    @rule(name=st.sampled_from("abc"), wants=st.booleans())
    def want(self, name: str, wants: bool) -> None:
        self.played.say(self.of(name), m.Stepped(busy_us=5) if wants else m.StepsWanted())

    @rule(name=st.sampled_from("abc"), idle=st.integers(0, 4), recompute_us=st.sampled_from([0, 5, 10**6]))
    def step(self, name: str, idle: int, recompute_us: int) -> None:
        if (name := self.of(name)) not in self.played.reclaims:
            self.played.step(name, idle, recompute_us)

    @rule(name=st.sampled_from("abc"))
    def wait(self, name: str) -> None:
        if (name := self.of(name)) in self.played.turn:
            self.played.say(name, m.StepWaits())

    @rule(name=st.sampled_from("abc"), after_s=st.sampled_from([0.0, 3.0, SEAT_IDLE_S]))
    def rest(self, name: str, after_s: float) -> None:
        self.played.rests(self.of(name))
        self.played.now_s += after_s
        self.played.do(e.Tick())

    @rule(nbytes=st.integers(1, 6))
    def relieve(self, nbytes: int) -> None:
        if self.played.machine._state.relieving is None:
            self.played.do(e.Relieve(0, nbytes * GRANULE, 0))

    @precondition(lambda self: self.played.obeys)
    @rule()
    def stop_obeying(self) -> None:
        self.played.obeys = False

    @rule(name=st.sampled_from("abc"))
    def obey_late(self, name: str) -> None:
        self.played.obeys = True
        name = self.of(name)
        self.played.obey(name)
        if name in self.played.reclaims:
            self.played.give_back(name)

    @rule(name=st.sampled_from("abc"), dies=st.booleans())
    def end(self, name: str, dies: bool) -> None:
        if (lease := self.played.lease(name)) is None:
            return
        if dies:
            self.played.dies(self.of(name))
        else:
            self.played.do(e.SeatUnwanted(lease.serial))

    @invariant()
    def what_is_mapped_is_what_its_leases_have(self) -> None:
        """Else it could become another's, and be read there."""
        residency = self.played.machine.residency
        for name, offsets in self.played.mapped.items():
            members = self.played.machine._state.members(name)
            seated = [lease.instance for lease in members if residency.seated(lease.instance)]
            segments = {segment for instance in seated for segment in residency.places(instance)}
            assert offsets <= {granule.offset for granule in residency.pool.granules(segments)}

    @invariant()
    def kv_is_the_runtimes(self) -> None:
        residency = self.played.machine.residency
        for name, extents in self.played.kv.items():
            if extents:
                assert set(extents) <= set(residency.claimed(f"kv of {name}")), (
                    "KV that is given away while it is mapped"
                )
        going = [lease for lease in self.played.machine.leases.values() if lease.state in GOING]
        lent = [books for books in self.played.machine._state.runtimes.values() if books.lent]
        if not going and not self.played.reclaims and not lent:
            books = self.played.machine._state.runtimes.values()
            waiting = [each.name for each in books if each.kv_wanted is not None]
            assert not waiting, "KV waits for nobody"
            assert self.played.machine._state.relieving is None, "an operation waits for nobody"
        running = [lease for lease in self.played.machine.leases.values() if lease.state is LeaseState.RUNNING]
        assert len(running) <= 1
        assert len(lent) <= 1
        assert all("turn" in self.played.owes[books.name] for books in lent), "a step that will not be given back"

    @rule(seconds=st.floats(0.001, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.played.now_s += seconds
        self.played.do(e.Tick())

    def teardown(self) -> None:
        self.played.check_metered()


def test_in_any_order_books_agree_and_nobody_waits_for_nothing() -> None:
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=120, stateful_step_count=40, deadline=None))


class AnyOrderShared(AnyOrder):
    """The same of a runtime that computes for two."""

    shared = "ab"

    @invariant()
    def who_has_a_seat_has_it_at_the_runtime(self) -> None:
        seated = [each for each in self.played.machine._state.members("g") if each.state in SEATED and not each.refused]
        if seated:
            assert "g" in self.played.seat, "all was unmapped under one who has a seat"
            assert "seat" not in self.played.owes["g"]

    @invariant()
    def somebody_is_asked_for_what_is_to_be_computed(self) -> None:
        machine = self.played.machine
        books = machine._state.runtimes.get("g")
        if books is None or not books.wanting or self.played.owes["g"]:
            return
        members = machine._state.members("g")
        asked = any(lease.wants or lease.state in TURN or lease.state is LeaseState.CLOSING for lease in members)
        assert asked or self._coming(), "steps that nobody will compute"


class AnyOrderAdapters(AnyOrderShared):
    """Each of the two has an adapter, of which its runtime lets go when it comes to that."""

    adapters = "ab"

    def __init__(self) -> None:
        super().__init__()
        self.played.slow = True

    @invariant()
    def who_has_sequences_and_no_seat_asks_for_it(self) -> None:
        state = self.played.machine._state
        for lease in state.members("g"):
            if lease.state is LeaseState.AWAY and lease.rests_s is None:
                assert lease.wants or lease.serial in state.coming, "sequences that nobody will compute"


def test_in_any_order_an_adapter_is_unmapped_before_it_is_anothers() -> None:
    run_state_machine_as_test(
        AnyOrderAdapters, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )


def test_in_any_order_a_shared_runtime_is_let_go_of_by_one_and_kept_by_the_other() -> None:
    run_state_machine_as_test(
        AnyOrderShared, settings=settings(max_examples=120, stateful_step_count=40, deadline=None)
    )


def test_a_second_lease_of_a_runtime_has_a_seat_there_and_no_turn_is_asked_for_twice() -> None:
    played = Played(models="ab", shared="ab")
    first = played.wake("a")
    played.do(m.Pause(serial=first))
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
    first = played.wake("a")
    played.do(m.Pause(serial=first))
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
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.do(m.Pause(serial=second))
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
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    played.wake("b")
    assert {lease.instance: lease.runtime for lease in played.machine.leases.values()} == {"a": "g", "b": "b"}
    assert "SeatGiven" in kinds(played.told["b"])


def test_functions_with_adapters_share_a_runtime_with_their_base_and_each_other() -> None:
    played = Played(models="abc", shared="abc", adapters="bc", nbytes=2 * GRANULE)
    serials = []
    for name in "abc":
        serials.append(played.wake(name))
        played.do(m.Pause(serial=serials[-1]))
    assert {lease.runtime for lease in played.machine.leases.values()} == {"g"}
    given = [each for each in played.told["g"] if isinstance(each, m.SeatGiven)]
    assert [[place.segment for place in each.storages] for each in given] == [[99], [99, 201], [99, 202]]
    assert played.machine.stats().free_nbytes == 4 * GRANULE
    played.model("b", 77, adapter=201)  # another base, when its lease is over
    played.do(e.SeatUnwanted(serials[1]))
    played.wake("b")
    assert played.lease("b").runtime == "b"


def test_an_adapter_is_unmapped_before_its_lease_is_over() -> None:
    played = Played(models="ab", shared="ab", adapters="b")
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.do(m.Pause(serial=second))
    played.obeys = False
    played.do(e.SeatUnwanted(second))
    (leaves,) = [each for each in played.told["g"] if isinstance(each, m.MemberLeaves)]
    assert leaves.serial == second
    assert len(leaves.granules) == 1
    assert played.lease("b").state is LeaseState.CLOSING
    assert played.outcomes() == []
    played.part("g")
    assert played.lease("b") is None
    assert played.outcomes() == ["ended"]
    played.do(e.SeatUnwanted(first))
    assert played.told["g"][-1] == m.SeatEnds()


def test_an_adapter_whose_lease_rests_makes_room_for_another_while_a_third_is_computed() -> None:
    """The one that has rested for longest; the runtime keeps its seat."""
    played = Played(granules=4, models="abcd", shared="abcd", adapters="bcd")
    serials = {}
    for name in "abc":
        serials[name] = played.wake(name)
        played.do(m.Pause(serial=serials[name]))
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    assert played.machine.stats().free_nbytes == 0
    played.rests("g", serials["a"], serials["c"])
    played.now_s = 1.0
    played.rests("g", serials["a"])
    serials["d"] = played.wake("d")
    assert played.over == [("b", m.SeatOver(serial=serials["b"], unneeded=True))]
    assert sorted(lease.instance for lease in played.machine.leases.values()) == ["a", "c", "d"]
    assert played.lease("d").state is LeaseState.RUNNING
    assert played.kv["g"]
    assert "SeatEnds" not in kinds(played.told["g"])


def test_of_two_that_have_the_same_adapter_the_last_to_end_names_its_memory() -> None:
    """Though the first has the turn, and is let go of after it."""
    played = Played(models="abc", shared="abc", adapters="ab")
    for name in "ab":
        played.model(name, 99, adapter=200)
    third = played.wake("c")
    played.do(m.Pause(serial=third))
    second = played.wake("b")
    played.do(m.Pause(serial=second))
    first = played.wake("a")
    played.obeys = False
    played.do(e.SeatUnwanted(first))
    played.do(e.SeatUnwanted(second))
    leaves = [each.granules for each in played.told["g"] if isinstance(each, m.MemberLeaves)]
    assert [len(granules) for granules in leaves] == [0, 1]
    played.obeys = True
    played.obey("g")
    assert played.outcomes() == ["ended", "ended"]
    assert len(played.mapped["g"]) == 1


def test_a_turn_that_comes_back_lets_go_of_no_adapter() -> None:
    """It crosses with what asks for that."""
    played = Played(models="ab", shared="ab", adapters="a")
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.obeys = False
    played.do(m.Pause(serial=second))
    played.do(e.SeatUnwanted(first))
    played.turn.discard("g")
    played.owes["g"].remove("turn")
    played.say("g", m.TurnGivenBack(wants=False))
    assert played.outcomes() == [], "its memory is mapped still"
    played.part("g")
    assert played.outcomes() == ["ended"]


def test_a_lease_that_ends_while_it_leaves_names_its_memory_once() -> None:
    """Else what was given to it anew meanwhile would be unmapped."""
    played = Played(granules=3, models="abc", shared="abc", adapters="bc")
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.do(m.Pause(serial=second))
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    played.obeys = False
    played.wake("c")
    assert played.lease("b").state is LeaseState.LEAVING
    played.do(m.Revoke(serial=second))
    leaves = [each.granules for each in played.told["g"] if isinstance(each, m.MemberLeaves)]
    assert [len(granules) for granules in leaves] == [1, 0]
    played.part("g")
    assert played.outcomes() == ["revoked"]


def test_an_adapter_that_does_not_come_ends_its_own_lease_only() -> None:
    played = Played(models="abc", shared="abc", adapters="bc")
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    played.comes = False
    second = played.wake("b")
    free_nbytes = played.machine.stats().free_nbytes
    played.do(e.Came(second, [201], lost=True))
    assert played.outcomes() == ["revoked"]
    assert [lease.instance for lease in played.machine.leases.values()] == ["a"]
    assert not [each for each in played.told["g"] if isinstance(each, m.SegmentsCame) and each.lost]
    assert played.machine.stats().free_nbytes == free_nbytes + GRANULE


def test_a_lease_ends_though_some_of_the_base_is_lost() -> None:
    """Until its runtime has died of that."""
    played = Played(models="abc", shared="ab", adapters="b")
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.machine._state.leases[first].copies = True
    played.do(e.Came(first, [99], lost=True))
    assert played.told["g"][-1] == m.SegmentsCame(segments=[99], lost=True)
    played.do(e.SeatUnwanted(second))
    assert played.outcomes() == ["ended"]


def test_a_runtime_has_so_many_members_and_the_next_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "MOST_MEMBERS", 50)
    names = list(map(str, range(50 + 1)))
    played = Played(models=names, shared=names, adapters=names[1:], granules=len(names) + 8)
    for name in names:
        played.do(m.Pause(serial=played.wake(name)))
    assert [lease.runtime for lease in played.machine.leases.values()] == ["g"] * 50 + [names[-1]]


def test_adapters_that_do_not_all_fit_are_there_in_turn() -> None:
    """That leaves which has been there for longest; the base, the other adapters and KV stay."""
    played = Played(granules=4, models="abcd", shared="abcd", adapters="bcd")
    serials = {}
    for name in "abc":
        serials[name] = played.wake(name)
        played.now_s += 1.0
        played.do(m.Pause(serial=serials[name]))
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    played.controller.clear()
    serials["d"] = played.wake("d")
    (leaves,) = [each for each in played.told["g"] if isinstance(each, m.MemberLeaves)]
    assert (leaves.serial, leaves.stays, len(leaves.granules)) == (serials["b"], True, 1)
    states = {lease.instance: lease.state.value for lease in played.machine.leases.values()}
    assert states == {"a": "paused", "b": "away", "c": "paused", "d": "running"}
    assert played.over == []
    assert played.kv["g"]
    assert "SeatEnds" not in kinds(played.told["g"])
    assert m.WantsTurn(serial=serials["b"]) in played.controller  # it may have sequences
    played.now_s += 1.0
    played.do(m.Pause(serial=serials["d"]))
    played.do(m.Turn(serial=serials["b"]))
    states = {lease.instance: lease.state.value for lease in played.machine.leases.values()}
    assert states == {"a": "paused", "b": "running", "c": "away", "d": "paused"}


def test_a_hundred_adapters_where_twenty_fit() -> None:
    """Each has its turn, again and again; the base and the runtime's KV stay."""
    names = ["base", *map(str, range(100))]
    played = Played(granules=22, models=names, shared=names, adapters=names[1:])
    serials = {"base": played.wake("base")}
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    played.do(m.Pause(serial=serials["base"]))
    for name in names[1:]:
        serials[name] = played.wake(name)
        played.do(m.Pause(serial=serials[name]))
    states = [lease.state for lease in played.machine.leases.values()]
    assert (len(states), states.count(LeaseState.AWAY)) == (101, 80)
    for name in names[1:]:
        assert m.WantsTurn(serial=serials[name]) in played.controller or played.lease(name).state in SEATED
        played.do(m.Turn(serial=serials[name]))
        assert played.lease(name).state is LeaseState.RUNNING
        played.do(m.Pause(serial=serials[name]))
    assert "SeatEnds" not in kinds(played.told["g"])
    assert played.outcomes() == []


def test_kv_of_who_computes_has_the_room_of_an_adapter_that_does_not() -> None:
    """Else a GPU full of adapters would compute none of them."""
    played = Played(granules=3, models="abc", shared="abc", adapters="bc")
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.do(m.Pause(serial=second))
    played.wake("c")
    assert played.machine.stats().free_nbytes == 0
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    assert played.lease("b").state is LeaseState.AWAY
    assert len(played.kv["g"]) == 1


def small_adapters(granules: int) -> tuple[Played, dict[str, int]]:
    """Of half a granule each: two share one. The last of them has the turn; nobody's sequences are over."""
    played = Played(granules=granules, models="abcde", shared="abcde", adapters="bcde")
    for number, name in enumerate("bcde"):
        played.model(name, 99, adapter=201 + number, adapter_nbytes=GRANULE // 2)
    serials = {}
    for name in "abcde":
        serials[name] = played.wake(name)
        played.now_s += 1.0
        if name != "e":
            played.do(m.Pause(serial=serials[name]))
    return played, serials


def test_as_many_adapters_are_there_as_their_bytes_allow() -> None:
    """Twenty of a third of a granule each, beside the base and an extent of KV, whichever of sixty are asked for."""
    names = ["base", *map(str, range(60))]
    played = Played(granules=9, models=names, shared=names, adapters=names[1:])
    for number, name in enumerate(names[1:], 1):
        played.model(name, 99, adapter=200 + number, adapter_nbytes=GRANULE * 7 // 20 // 512 * 512)
    serials = {"base": played.wake("base")}
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    played.do(m.Pause(serial=serials["base"]))
    for name in names[1:]:
        serials[name] = played.wake(name)
        played.do(m.Pause(serial=serials[name]))
    for name in [*names[1::3], *names[2::3], *names[3::3]]:
        played.do(m.Turn(serial=serials[name]))
        assert played.lease(name).state is LeaseState.RUNNING
        played.do(m.Pause(serial=serials[name]))
        states = [lease.state for lease in played.machine.leases.values()]
        assert (states.count(LeaseState.AWAY), states.count(LeaseState.PAUSED)) == (40, 21)
    assert len(played.kv["g"]) == 1
    told = {each.serial: each.storages[-1].offset for each in played.told["g"] if isinstance(each, m.SeatGiven)}
    seated = [name for name in names[1:] if played.lease(name).state is LeaseState.PAUSED]
    pool = played.machine.residency.pool
    assert [told[serials[name]] for name in seated] == [pool.offset(200 + int(name) + 1) for name in seated]


def states_of(played: Played) -> dict[str, str]:
    return {lease.instance: lease.state.value for lease in played.machine.leases.values()}


def test_those_that_share_a_granule_make_room_together() -> None:
    """Else KV for which others would have to leave had no room at all, and its sequence was told so."""
    played, serials = small_adapters(3)
    assert played.machine.stats().free_nbytes == 0
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    leaves = [each for each in played.told["g"] if isinstance(each, m.MemberLeaves)]
    assert [(each.serial, each.stays, len(each.granules)) for each in leaves] == [
        (serials["b"], True, 0), (serials["c"], True, 1),
    ]  # fmt: skip
    assert states_of(played) == {"a": "paused", "b": "away", "c": "away", "d": "paused", "e": "running"}
    assert len(played.kv["g"]) == 1


def test_who_leaves_a_shared_granule_while_another_is_about_to_names_it() -> None:
    """Else it stays mapped when it is another's."""
    played, serials = small_adapters(granules=4)
    played.slow = True
    played.say("g", m.KvWanted(extents=2, nbytes=GRANULE))
    assert states_of(played)["b"] == "leaving"
    played.do(e.SeatUnwanted(serials["c"]))
    parted = [(each.serial, each.granules) for each in played.parts["g"]]
    assert parted == [(serials["b"], []), (serials["c"], [GRANULE])]
    assert GRANULE in played.mapped["g"]
    assert played.kv["g"] == []
    played.slow = False
    played.part("g")
    assert GRANULE not in played.mapped["g"]
    assert states_of(played) == {"a": "paused", "b": "away", "d": "paused", "e": "running"}
    assert len(played.kv["g"]) == 2


def test_what_an_adapter_had_is_nobodys_before_its_runtime_has_let_go_of_it() -> None:
    """Though nothing is to be unmapped: a step may be reading it."""
    played, _ = small_adapters(3)
    played.slow = True
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    assert states_of(played)["b"] == "leaving"
    played.part("g")
    assert states_of(played)["b"] == "away"


def test_a_wish_for_kv_takes_what_is_free_and_no_adapter_of_which_there_are_sequences() -> None:
    played, _ = small_adapters(5)
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE, wish=3))
    assert len(played.kv["g"]) == 1, "there is room for one more, and not for three"
    assert set(states_of(played).values()) == {"paused", "running"}
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE, wish=0))
    assert len(played.kv["g"]) == 2
    assert played.machine.stats().free_nbytes == 0


@pytest.mark.parametrize("away", [False, True])
def test_a_wish_for_kv_takes_idle_weights_unless_an_adapter_would_have_to_come_again(away: bool) -> None:
    played = Played(granules=5, models="abcd", shared="abc", adapters="bc")
    played.do(e.SeatUnwanted(played.wake("d")))
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    if away:
        played.do(m.Pause(serial=second))
        played.machine._state.leases[second].state = LeaseState.LEAVING
        played.machine._state.leases[second].parts = True
        played.say("g", m.MemberLeft(serial=second))
        assert states_of(played)["b"] == "away"
        played.wake("c")
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE, wish=1))
    assert (103 in played.machine.residency.pool, len(played.kv["g"])) == ((True, 1) if away else (True, 2))
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE, wish=0))
    assert 103 not in played.machine.residency.pool


def test_one_that_is_away_and_has_no_sequence_asks_for_nothing() -> None:
    played = Played(granules=3, models="abc", shared="abc", adapters="bc")
    serials = [played.wake("a")]
    played.do(m.Pause(serial=serials[0]))
    serials.append(played.wake("b"))
    played.do(m.Pause(serial=serials[1]))
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    played.wake("c")
    assert played.lease("b").state is LeaseState.AWAY
    played.machine._state.leases[serials[1]].wants = False
    played.controller.clear()
    played.rests("g", serials[0])
    assert m.WantsTurn(serial=serials[1]) not in played.controller
    played.rests("g", serials[1])
    assert m.WantsTurn(serial=serials[1]) in played.controller


def test_none_asks_for_a_seat_while_its_runtime_has_no_sequence() -> None:
    """Of a lease that is newer than that word nothing is known: two of them would take turns for ever."""
    played = Played(granules=2, models="abc", shared="abc", adapters="bc")
    serials = [played.wake("a")]
    played.do(m.Pause(serial=serials[0]))
    played.rests("g")
    for name in "bc":
        serials.append(played.wake(name))
        played.do(m.Pause(serial=serials[-1]))
    assert states_of(played) == {"a": "paused", "b": "away", "c": "paused"}
    assert m.WantsTurn(serial=serials[1]) not in played.controller
    played.rests("g", serials[1])
    assert m.WantsTurn(serial=serials[1]) in played.controller


def test_the_death_of_a_shared_runtime_ends_all_of_its_leases_and_no_other() -> None:
    played = Played(models="abc", shared="ab")
    first = played.wake("a")
    played.say("g", m.KvWanted(extents=2, nbytes=GRANULE))
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.do(m.Pause(serial=second))
    third = played.wake("c")
    played.dies("g")
    assert played.outcomes() == ["revoked", "revoked"]
    assert list(played.machine.leases) == [third]
    assert [number for number in played.machine.residency.pool.segments() if number < 0] == []


def test_a_runtime_does_not_leave_the_seat_that_it_computes_in() -> None:
    """Though one of its leases has no turn: it is told that there is no room."""
    played = Played(granules=3, models="ab", shared="ab")
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.say("g", m.KvWanted(extents=2, nbytes=GRANULE))
    played.say("g", m.KvWanted(extents=1, nbytes=GRANULE))
    assert played.told["g"][-1] == m.KvGiven(extents=[])
    states = [played.machine.leases[serial].state for serial in (first, second)]
    assert states == [LeaseState.PAUSED, LeaseState.RUNNING]


def test_idle_kv_makes_room_for_an_adapter_of_the_same_runtime_before_its_seat_is_left() -> None:
    """No other adapter is in the way: all is the base's, and KV that nobody needs now."""
    played = Played(granules=4, models="ab", shared="ab", adapters="b")
    first = played.wake("a")
    played.say("g", m.KvWanted(extents=3, nbytes=GRANULE))
    assert played.machine.stats().free_nbytes == 0
    played.step("g", idle=2)
    played.do(m.Pause(serial=first))
    played.wake("b")
    assert "KvReclaim" in kinds(played.told["g"])
    assert "SeatEnds" not in kinds(played.told["g"])
    assert played.lease("b").state is LeaseState.RUNNING


def test_idle_kv_of_a_runtime_goes_before_one_of_its_adapters_that_has_sequences() -> None:
    """They would stand still, and KV that nobody needs now may never be asked for."""
    played = Played(granules=5, models="abc", shared="abc", adapters="bc")
    first = played.wake("a")
    played.do(m.Pause(serial=first))
    second = played.wake("b")
    played.say("g", m.KvWanted(extents=3, nbytes=GRANULE))
    played.step("g", idle=2)
    played.do(m.Pause(serial=second))
    assert played.machine.stats().free_nbytes == 0
    played.wake("c")
    assert "MemberLeaves" not in kinds(played.told["g"])
    assert states_of(played) == {"a": "paused", "b": "paused", "c": "running"}
    assert len(played.kv["g"]) == 2, "no more than it took"
