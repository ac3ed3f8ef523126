"""KV that grows: whose room it takes, and who has the room of idle KV. The runtime is a script here."""

import pytest
from played_leases import GRANULE, Played, kinds

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import LeaseState
from dormouse.schemas import messages as m


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
    played.paused("a", steps=True)
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
    played.paused("a", steps=True)
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
    played.paused("a", steps=True)
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
    played.paused("b")
    played.wake("a")
    played.obeys = False
    played.say("a", m.KvWanted(extents=2, nbytes=GRANULE))
    assert played.kv["a"] == []
    played.leave("b")
    assert len(played.kv["a"]) == 2


def test_a_lease_that_was_away_has_a_seat_again() -> None:
    played = Played(granules=3)
    paused = played.paused("b")
    second = played.wake("a")
    played.say("a", m.KvWanted(extents=2, nbytes=GRANULE))
    assert played.lease("b").state is LeaseState.AWAY
    played.do(e.SeatUnwanted(second))
    played.do(m.Turn(serial=paused))
    assert played.seat == played.turn == {"b"}
