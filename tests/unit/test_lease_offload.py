"""Room for KV ahead of its growth, when it is asked for, or never: decisions of a GPU's leases."""

import pytest
from played_leases import GRANULE, Played

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases import offload
from dormouse.core.decisions.leases.held import LeaseState
from dormouse.core.decisions.leases.reclaim import REST_S
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy, changed, checked


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """These pools have few granules: half of them may be kept free."""
    monkeypatch.setattr(offload, "MAX_SHARE", 2)


def grow(played: Played, name: str, extents: int = 1) -> int:
    """Extents that it has then."""
    played.say(name, m.KvWanted(extents=extents, nbytes=GRANULE))
    return len(played.kv[name])


def free(played: Played) -> int:
    return played.machine.stats().free_nbytes // GRANULE


def beside_idle_kv(how: str, granules: int = 8, extents: int = 4) -> Played:
    """Model b has a seat, no turn, and idle KV that nobody is likely to ask for; a has the turn."""
    played = Played(granules=granules, models="ab", offload=how)
    paused = played.wake("b")
    grow(played, "b", extents)
    played.step("b", idle=extents, recompute_us=1)
    played.do(m.Pause(serial=paused))
    played.now_s = 10.0  # b grows no more
    played.wake("a", {"a": 1.0, "b": 1.0})
    return played


def test_idle_kv_is_asked_for_before_the_next_question() -> None:
    played = beside_idle_kv("ahead")  # 8: weights of two, 4 of KV, 2 free
    played.obeys = False
    assert grow(played, "a", 1) == 1
    assert free(played) == 1  # as much as it asked for last, and not what it grows by until another one is here
    assert list(played.reclaims) == ["b"]
    assert grow(played, "a", 1) == 2
    assert free(played) == 0
    played.give_back("b")
    assert grow(played, "a", 1) == 3  # at once


def test_without_that_the_question_waits() -> None:
    played = beside_idle_kv("asked")
    played.obeys = False
    assert grow(played, "a", 2) == 2
    assert (free(played), played.reclaims) == (0, {})
    assert grow(played, "a", 1) == 2
    assert played.reclaims == {"b": GRANULE}
    played.give_back("b")
    assert len(played.kv["a"]) == 3


def test_idle_weights_go_ahead_the_cheapest_first_and_the_controller_hears_of_it() -> None:
    played = Played(granules=7, models="abc", offload="ahead")
    for name in "bc":
        played.do(e.SeatUnwanted(played.wake(name)))
    played.wake("a", {"c": 1.0, "b": 2.0, "a": 9.0})
    assert grow(played, "a", 2) == 2  # 7: weights of three, 2 of KV, 2 free, which is a little short
    there = played.machine.residency.pool.segments()
    assert (101 in there, 102 in there, free(played)) == (True, False, 3)
    pressed = played.pressed
    assert dict(pressed[-1].resident)["c"] == 0


def test_a_seat_that_rests_is_left_ahead_of_the_growth() -> None:
    played = Played(granules=5, models="ab", offload="ahead")
    resting = played.wake("b")
    played.rests("b")
    played.obeys = False
    played.do(m.Pause(serial=resting))
    played.give_turn_back("b", wants=False)
    played.obeys = True
    played.now_s = 10.0 + REST_S
    played.wake("a", {"b": 0.1, "a": 1.0})
    assert grow(played, "a", 2) == 2  # 5: weights of two, 2 of KV, 1 free
    assert played.lease("b") is None  # ended, and its weights with it
    assert free(played) >= 2


def test_a_seat_that_works_is_left_only_when_nothing_else_is_there() -> None:
    played = Played(granules=4, models="ab", offload="ahead")
    played.paused("b")
    played.wake("a")
    assert grow(played, "a", 1) == 1
    assert (free(played), played.lease("b").state) == (1, LeaseState.PAUSED)
    assert grow(played, "a", 1) == 2
    assert (free(played), played.lease("b").state) == (0, LeaseState.PAUSED)  # it has work, and keeps its seat so far
    assert grow(played, "a", 1) == 3
    assert played.lease("b").state is LeaseState.AWAY


def test_what_grows_no_more_keeps_no_room() -> None:
    played = Played(granules=8, models="a", offload="ahead")
    played.wake("a")
    grow(played, "a", 1)
    state = played.machine._state
    assert offload.reserve_nbytes(state) == int(GRANULE * (1 + state.room_s / offload.HALF_S))
    grow(played, "a", 5)
    assert offload.reserve_nbytes(state) == 4 * GRANULE  # bounded
    state.now_s += 4 * offload.HALF_S
    assert offload.reserve_nbytes(state) == 0
    grow(played, "a", 1)
    played.rests("a")
    assert offload.reserve_nbytes(state) == 0


def test_the_reserve_is_what_it_grows_by_until_others_have_made_room() -> None:
    played = beside_idle_kv("ahead", granules=64)  # so many that nobody is asked for any
    state = played.machine._state
    before = state.room_s
    grow(played, "a", 1)
    played.obeys = False
    state.asks()
    played.now_s += 1.0
    played.say("b", m.KvReturned(extents=[]))  # nobody was asked: it says so by itself
    state.room()
    assert state.room_s == pytest.approx(before + 0.2 * (1.0 - before))
    grow(played, "a", 2)
    grown = 1 * 0.5 + 2  # extents lately: what grew a second ago counts half
    assert offload.reserve_nbytes(state) == int(GRANULE * (2 + grown * state.room_s))


def test_with_never_kv_has_what_is_free_and_what_one_sequence_cannot_do_without() -> None:
    played = Played(granules=4, models="abc", offload="never")
    for name in "bc":
        played.do(e.SeatUnwanted(played.wake(name)))
    serial = played.wake("a")
    assert grow(played, "a", 2) == 2  # 4: weights of three; nothing says that it has several sequences
    assert 101 not in played.machine.residency.pool
    played.rests("a", serial, serial)  # it has two
    assert grow(played, "a", 1) == 2
    assert 102 in played.machine.residency.pool
    assert played.told["a"][-1] == m.KvGiven(extents=[])
    played.rests("a", serial)  # one of them was preempted
    assert grow(played, "a", 1) == 3
    assert 102 not in played.machine.residency.pool


def test_what_it_may_be_is_said() -> None:
    with pytest.raises(ConfigError, match="offload is 'sometimes'; write one of ahead, asked, never"):
        checked(Policy(offload="sometimes"))
    with pytest.raises(ConfigError, match="offload cannot be changed while the node runs"):
        changed(Policy(), {"offload": "asked"})
