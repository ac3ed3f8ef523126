"""Adapters over one base: which ones have room, and what their runtime unmaps before it is another's."""

import pytest
from played_leases import GRANULE, Played, kinds, states_of

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases import runtimes
from dormouse.core.decisions.leases.held import SEATED, LeaseState
from dormouse.schemas import messages as m


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
    first = played.paused("a")
    second = played.paused("b")
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
    played.paused("c")
    second = played.paused("b")
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
    first = played.paused("a")
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
    played.paused("a")
    second = played.paused("b")
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
    played.paused("a")
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
    first = played.paused("a")
    second = played.wake("b")
    played.machine._state.leases[first].copies = True
    played.do(e.Came(first, [99], lost=True))
    assert played.told["g"][-1] == m.SegmentsCame(segments=[99], lost=True)
    played.do(e.SeatUnwanted(second))
    assert played.outcomes() == ["ended"]


def test_a_runtime_has_so_many_members_and_the_next_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes, "MAX_MEMBERS", 50)
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
    played.paused("a")
    played.paused("b")
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
    played.paused("a")
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
    played.paused("a")
    second = played.wake("b")
    played.say("g", m.KvWanted(extents=3, nbytes=GRANULE))
    played.step("g", idle=2)
    played.do(m.Pause(serial=second))
    assert played.machine.stats().free_nbytes == 0
    played.wake("c")
    assert "MemberLeaves" not in kinds(played.told["g"])
    assert states_of(played) == {"a": "paused", "b": "paused", "c": "running"}
    assert len(played.kv["g"]) == 2, "no more than it took"
