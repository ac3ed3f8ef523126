"""Models that come to a GPU before anybody asks for them: decisions of its leases. The compute thread is a script."""

from typing import Any

import pytest
from played_leases import GRANULE, Played

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.held import LeaseState
from dormouse.schemas import messages as m

RATES = e.WakeRates(1e9, 0.0)


class Preloading(Played):
    """Copies of preloads end when a test says so."""

    def __init__(
        self, granules: int = 4, models: str = "abc", functions: str = "", shared: str = "", adapters: str = ""
    ) -> None:
        self.brought: list[o.Bring] = []
        self.stopped: list[int] = []
        self.opened: list[tuple[str, str]] = []
        self.answered: list[m.Preloaded] = []
        super().__init__(granules=granules, models=models, shared=shared, adapters=adapters)
        for number, name in enumerate(functions):
            self.do(e.InstanceAttached(name, "t"))
            self.model(name, 200 + number)

    def perform(self, effect: Any) -> None:
        match effect:
            case o.Bring():
                self.brought.append(effect)
            case o.StopBringing(serial=serial):
                self.stopped.append(serial)
            case o.OpenRuntime(instance=instance, runtime=runtime):
                self.opened.append((instance, runtime))
            case m.Preloaded():
                self.answered.append(effect)
            case _:
                super().perform(effect)

    def preload(self, name: str, worth: dict[str, float] | None = None, version: int = 1) -> None:
        asked = m.Preload(instance=name, version=version, worth=worth or {}, peers=[])
        self.do(e.PreloadAsked(asked, RATES))

    def come(self, *segments: int) -> None:
        self.do(e.Came(self.brought[-1].serial, list(segments)))

    def end(self) -> None:
        """No copy is under way any more."""
        bring = self.brought[-1]
        held = self.machine._state.preload
        left = held.left_nbytes if held is not None else {}
        self.do(e.Brought(bring.serial, e.WakeRemains(lost=list(left))))

    def outcome(self) -> tuple[str, int]:
        return self.answered[-1].outcome, self.answered[-1].copied_nbytes

    def runs(self, name: str, worth: dict[str, float] | None = None) -> bool:
        """A wake, and whether it has begun."""
        self.wake(name, worth)
        return self.lease(name) is not None


def test_what_has_come_is_there_for_the_wake_which_copies_nothing() -> None:
    played = Preloading()
    played.preload("a")
    (bring,) = played.brought
    assert [(segment, nbytes) for segment, _, nbytes in bring.missing] == [(100, GRANULE)]
    assert played.opened == [("a", "a")]  # its runtime
    played.come(100)
    played.end()
    (answer,) = played.answered
    assert (answer.instance, answer.outcome, answer.copied_nbytes) == ("a", "there", GRANULE)
    assert dict(answer.resident)["a"] == GRANULE
    assert answer.stats.free_nbytes == 3 * GRANULE
    played.wake("a")
    assert played.lease("a").missing_nbytes == {}
    assert played.machine.residency.missing_nbytes("a") == 0
    played.do(e.SeatUnwanted(played.serials))
    (done,) = [each for each in played.controller if isinstance(each, m.Done)]
    assert done.copied_nbytes == 0


def test_a_wake_that_needs_room_waits_for_the_copy_under_way_and_no_longer() -> None:
    played = Preloading()
    played.preload("a")
    assert not played.runs("b")
    assert played.stopped == [played.brought[0].serial]
    played.end()
    assert played.outcome() == ("yielded", 0)
    assert played.lease("b").state is LeaseState.RUNNING
    assert 100 not in played.machine.residency.pool
    assert dict(played.answered[-1].resident).get("a", 0) == 0


def test_a_wake_of_the_same_model_keeps_what_has_come() -> None:
    played = Preloading(models="")
    played.do(e.InstanceAttached("f", "t"))
    segments = [(1, GRANULE), (2, GRANULE)]
    played.do(m.Manifest(instance="f", version=1, entries=[], segments=segments))
    played.preload("f")
    assert played.opened == []  # no runtime computes for a function
    played.come(1)
    assert not played.runs("f")
    played.end()
    assert played.outcome() == ("yielded", GRANULE)
    assert list(played.lease("f").missing_nbytes) == [2]


def test_a_wake_whose_model_is_here_does_not_wait() -> None:
    played = Preloading()
    played.do(e.SeatUnwanted(played.wake("b")))
    played.preload("a")
    assert played.runs("b")
    assert played.stopped == [-1]
    played.come(100)
    played.end()
    assert played.outcome() == ("yielded", GRANULE)  # all of it had come by then


def test_nothing_comes_while_somebody_computes() -> None:
    played = Preloading()
    played.wake("b")
    played.say("b", m.Stepped(busy_us=5))
    played.preload("a")
    assert (played.brought, played.outcome()) == ([], ("busy", 0))
    played.rests("b")
    played.preload("a")
    assert len(played.brought) == 1
    played.preload("c")
    assert (len(played.brought), played.outcome()) == (1, ("busy", 0))  # one at a time
    played.preload("b")
    assert played.outcome() == ("busy", 0)  # it has a lease


def test_a_runtime_that_computes_again_comes_first() -> None:
    played = Preloading()
    played.wake("b")
    played.rests("b")
    played.preload("a")
    played.say("b", m.Stepped(busy_us=5))
    assert played.stopped == [-1]


def test_kv_takes_the_room_of_what_comes() -> None:
    played = Preloading(granules=3)
    played.wake("b")
    played.rests("b")
    played.preload("a")
    played.say("b", m.KvWanted(extents=2, nbytes=GRANULE))
    assert (played.kv["b"], played.stopped) == ([], [-1])
    played.end()
    assert len(played.kv["b"]) == 2


def test_a_command_that_is_out_of_memory_has_the_room_of_what_comes() -> None:
    played = Preloading(granules=4, functions="f")
    played.wake("f")
    played.machine._state.leases[played.serials].idle = True  # it gives the GPU nothing
    played.preload("a")
    assert len(played.brought) == 1
    played.do(e.Relieve(played.serials, 3 * GRANULE, 0))
    assert (played.answers, played.stopped) == ([], [-1])
    played.end()
    assert played.answers == [None]


@pytest.mark.parametrize(("worth", "comes"), [({"a": 4.1, "b": 1.0}, True), ({"a": 3.9, "b": 1.0}, False)])
def test_only_what_is_worth_less_makes_room(worth: dict[str, float], comes: bool) -> None:
    played = Preloading(granules=1)
    played.do(e.SeatUnwanted(played.wake("b")))
    played.preload("a", worth)
    assert (len(played.brought) == 1) is comes
    assert (101 in played.machine.residency.pool) is not comes
    if comes:
        played.come(100)
        played.end()
        assert dict(played.answered[-1].resident) == {"a": GRANULE, "b": 0}
    else:
        assert played.outcome() == ("refused", 0)


def test_a_seat_makes_no_room() -> None:
    played = Preloading(granules=1)
    played.wake("b")
    played.rests("b")
    played.preload("a", {"a": 1.0})
    assert played.outcome() == ("refused", 0)


def test_what_is_here_already_is_said_so() -> None:
    played = Preloading()
    played.do(e.SeatUnwanted(played.wake("a")))
    played.preload("a")
    assert (played.brought, played.outcome()) == ([], ("there", 0))


def test_models_that_nobody_knows_fail() -> None:
    played = Preloading()
    played.preload("x")
    assert played.outcome() == ("failed", 0)
    played.preload("a", version=2)  # the store's word of it is still on its way
    assert played.outcome() == ("failed", 0)


def test_bytes_that_do_not_come_are_not_there() -> None:
    played = Preloading()
    played.preload("a")
    played.end()
    assert played.outcome() == ("failed", 0)
    assert 100 not in played.machine.residency.pool


def test_a_device_that_refuses_the_memory() -> None:
    played = Preloading()
    played.preload("a")
    played.do(e.Unmapped(-1, "none left", []))
    played.end()
    assert played.outcome() == ("refused", 0)
    assert played.machine.stats().free_nbytes == 4 * GRANULE


@pytest.mark.parametrize("gone", [e.Detached("a"), m.Dropped(instance="a")])
def test_an_instance_that_goes_takes_what_comes_with_it(gone: Any) -> None:
    played = Preloading()
    played.preload("a")
    played.come(100)
    played.do(gone)
    assert played.stopped == [-1]
    played.end()
    assert played.outcome() == ("yielded", GRANULE)
    assert 100 not in played.machine.residency.pool


def test_it_is_given_up_when_the_controller_says_so() -> None:
    played = Preloading()
    played.do(m.StopPreload())
    assert played.stopped == []
    played.preload("a")
    played.do(m.StopPreload())
    played.do(m.StopPreload())
    assert played.stopped == [-1]


def test_an_adapter_comes_alone_beside_its_base_and_joins_the_runtime_that_is_there() -> None:
    played = Preloading(granules=8, models="ab", shared="ab", adapters="ab")
    played.wake("a")
    played.rests("g")
    played.preload("b")
    (bring,) = played.brought
    assert [(segment, nbytes) for segment, _, nbytes in bring.missing] == [(201, GRANULE)]
    assert played.opened == [("b", "g")]
    played.come(201)
    played.end()
    assert played.outcome() == ("there", GRANULE)
    played.do(m.Pause(serial=1))
    assert played.runs("b")
    assert played.lease("b").runtime == "g"
    assert played.lease("b").missing_nbytes == {}


def test_a_model_that_is_to_leave_does_so_but_for_what_others_have_or_use() -> None:
    played = Preloading(granules=8, models="")
    for name, segments in (("a", [(1, GRANULE), (2, GRANULE)]), ("b", [(2, GRANULE), (3, GRANULE)])):
        played.do(e.InstanceAttached(name, "t"))
        played.do(m.Manifest(instance=name, version=1, entries=[], segments=segments))
        played.preload(name)
        played.come(*(segment for segment, _ in segments))
        played.end()

    def unloaded(*names: str) -> tuple[int, dict[str, int]]:
        played.do(m.DropModel(query=5, instances=list(names)))
        (said,) = [each for each in played.controller if isinstance(each, m.Unloaded)]
        played.controller.remove(said)
        assert said.query == 5
        return said.left_nbytes, dict(said.resident)

    assert unloaded("a") == (GRANULE, {"a": GRANULE})  # "b" has the other half
    assert played.runs("b")
    assert unloaded("b")[0] == 2 * GRANULE  # its lease holds a seat
    played.do(m.Revoke(serial=played.serials))
    assert unloaded("a", "b") == (0, {"a": 0, "b": 0})
    assert unloaded("nobody") == (0, {})
