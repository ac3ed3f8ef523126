"""Leases of runtimes: seats, turns of steps; every end in every state. The runtime is a script here."""

import pytest
from played_leases import GRANULE, Played, kinds

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import LeaseState
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


def waiting_step(played: Played, pause: bool = False) -> tuple[int, list[int]]:
    """Leases of b, whose step waits for weights, and of a and c, which have had steps and want the next ones.
    ``pause``: a is to have the turn of b after this step.
    """
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
    if pause:
        played.do(m.Pause(serial=own))
        played.do(m.Turn(serial=others[0]))
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


def test_while_the_last_step_of_a_turn_waits_for_weights_others_have_steps() -> None:
    """Then the turn is had by who was given it."""
    played = Played(models="abc")
    own, _ = waiting_step(played, pause=True)
    assert played.lease("b").state is LeaseState.YIELDING
    assert played.told["a"] == [m.TurnBegins(lent=True), m.TurnEnds()]
    played.now_s += 1.0
    played.say("a", m.TurnGivenBack(wants=True, stepped=m.Stepped(busy_us=5)))
    assert kinds(played.told["c"]) == ["TurnBegins", "TurnEnds"]
    played.do(e.Came(own, [101]))
    played.give_turn_back("b")
    assert len(played.told["a"]) == 2  # c has its step in the turn of b
    played.give_turn_back("c")
    assert played.told["a"][2:] == [m.TurnBegins()]
    assert played.lease("a").state is LeaseState.RUNNING


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
