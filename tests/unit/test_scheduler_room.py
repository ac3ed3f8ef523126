"""What GPUs hold, as the scheduling core knows it: room, worth, evictions, and models that fit nowhere."""

import pytest
from scheduler_rig import GIB, add_model, ask, only_wake, over, pool, scheduler

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.functions import LastWake
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas.messages import PoolStats
from dormouse.schemas.policy import EVICTIONS, PLACEMENTS, Policy


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [("lru", "tangram", "often"), ("tangram", "lru", "lately")],
)
def test_another_eviction_is_for_what_is_there_already(before: str, after: str, kept: str) -> None:
    core = scheduler(gpus=1, policy=Policy(eviction=before))
    for number, (name, now_s) in enumerate((("often", 1.0), ("often", 2.0), ("often", 3.0), ("lately", 4.0))):
        add_model(core, name, GIB)
        core.handle(over(only_wake(ask(core, number, name, now_s))), now_s)
    assert core.worth(0)[kept] < max(core.worth(0).values())
    core.handle(ev.PolicyChosen(Policy(eviction=after)), 5.0)
    assert core.worth(0)[kept] == max(core.worth(0).values())


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_worth_is_of_all_that_a_gpu_has(eviction: str) -> None:
    """Also of models with a seat: others may share their segments."""
    core = scheduler(gpus=1, policy=Policy(eviction=eviction))
    for number, name in enumerate("ab"):
        add_model(core, name, GIB)
        core.handle(over(only_wake(ask(core, number, name, float(number)))), number + 0.5)
    only_wake(ask(core, 2, "a", 3.0))
    assert set(core.worth(0)) == {"a", "b"}


def test_a_gpu_that_misses_less_is_taken_before_one_with_more_room() -> None:
    """Models share segments, so that one may be there in part without ever having been woken there."""
    core = scheduler()
    add_model(core, "a", GIB)
    add_model(core, "b", GIB)
    first = only_wake(ask(core, 1, "a"))
    core.handle(over(first, others={"b": GIB // 2}, free=GIB), 0.1)
    wake = only_wake(ask(core, 2, "b"))
    assert (wake.lease.gpu, wake.wake_nbytes) == (first.lease.gpu, GIB // 2)


def test_free_bytes_are_what_the_executor_says() -> None:
    """Three models on GPU 0 share most of their bytes: it has more room than one model on GPU 1 leaves."""
    core = scheduler(total_nbytes=4 * GIB, models="abcd")
    first = only_wake(ask(core, 1, "a", now_s=0.0))
    second = only_wake(ask(core, 2, "b", now_s=0.0))
    core.handle(over(first, others={"c": GIB, "b": GIB}, free=3 * GIB), 0.1)
    core.handle(over(second, free=2 * GIB), 0.2)
    assert only_wake(ask(core, 3, "d", now_s=0.3)).lease.gpu == first.lease.gpu


def test_worth_falls_with_the_rate_of_use() -> None:
    core = scheduler(gpus=1, models="abcd")
    for request, name in enumerate("abca"):
        core.handle(over(only_wake(ask(core, request, name, float(request)))), float(request))
    only_wake(ask(core, 9, "d", 3.0))
    worth = core.worth(0)
    assert sorted(worth, key=lambda name: worth[name]) == ["b", "c", "a"]


def test_worth_names_what_is_on_that_gpu_and_no_more() -> None:
    core = scheduler(models="abc")
    first = only_wake(ask(core, 1, "a"))
    second = only_wake(ask(core, 2, "b"))
    core.handle(over(first), 0.1)
    core.handle(over(second), 0.1)
    wake = only_wake(ask(core, 3, "a", 0.2))
    assert set(core.worth(wake.lease.gpu)) == {"a"}
    assert wake.peers == ()


def test_other_gpus_that_have_bytes_of_it_are_named_most_first() -> None:
    core = scheduler(gpus=4)
    add_model(core, "a", 4 * GIB)
    wakes = {}
    for number, name in enumerate("bcde"):
        add_model(core, name, GIB)
        wakes[number] = only_wake(ask(core, number, name))
    for number, nbytes in ((3, 3 * GIB), (1, GIB), (2, 2 * GIB)):
        core.handle(over(wakes[number], others={"a": nbytes}), 0.1)
    wake = only_wake(ask(core, 9, "a", 0.2))
    assert (wake.lease.gpu, wake.peers, wake.wake_nbytes) == (3, (2, 1), GIB)
    core.handle(ev.ExecutorDown(2), 0.3)
    core.handle(over(wake, resident=0), 0.4)
    assert only_wake(ask(core, 10, "a", 0.5)).peers == ()  # GPU 1 has most now, and no other has any


def test_what_others_lose_is_counted_and_what_a_lease_gives_up_itself_is_not() -> None:
    core = scheduler(gpus=1, models=("a-1", "b-1"))
    core.handle(over(only_wake(ask(core, 1, "a-1"))), 0.0)
    core.handle(over(only_wake(ask(core, 2, "b-1")), others={"a-1": GIB // 2}), 0.0)
    assert core.gpus[0].resident == {"a-1": GIB // 2, "b-1": GIB}
    assert (core.counts("a").evicted, core.counts("b").evictions) == ({"wake": 1}, 0)
    core.handle(over(only_wake(ask(core, 3, "b-1")), resident=0), 0.0)
    assert core.gpus[0].resident == {"a-1": GIB // 2}
    assert core.counts("b").evictions == 0


def test_an_operation_out_of_memory_evicts_others() -> None:
    core = scheduler(gpus=1, models="ab")
    core.handle(over(only_wake(ask(core, 1, "a"))), 0.0)
    ask(core, 2, "b")
    core.handle(ev.Evicted(0, 9, (("a", 0),), pool(8 * GIB)), 0.0)  # of another epoch
    assert core.gpus[0].resident == {"a": GIB}
    core.handle(ev.Evicted(0, 1, (("a", 0), ("gone", 5)), pool(8 * GIB)), 0.0)
    assert core.gpus[0].resident == {}
    assert core.counts("a").evicted == {"memory": 1}


def test_a_lease_that_lasts_says_at_its_begin_for_what_others_made_room() -> None:
    core = scheduler(gpus=1, models="ab")
    core.handle(over(only_wake(ask(core, 1, "a"))), 0.0)
    ask(core, 2, "b")
    core.handle(ev.Evicted(0, 1, (("a", 0), ("b", GIB)), pool(8 * GIB), seated=True), 0.0)
    assert core.counts("a").evicted == {"wake": 1}


def test_the_sources_of_a_wake_are_kept_for_people() -> None:
    core = scheduler(gpus=1)
    add_model(core, "a", GIB)
    wake = only_wake(ask(core, 1, "a"))
    core.handle(ev.Woken(0, 1, wake.lease.serial + 1, 5), 0.0)  # of no lease that there is
    core.handle(ev.Woken(0, 1, wake.lease.serial, 77), 0.0)
    core.handle(over(wake, copied=100, peer=30, file=20), 0.1)
    counts = core.counts("a")
    assert (counts.wakes, counts.copied_nbytes, counts.peer_nbytes, counts.file_nbytes) == (1, 100, 30, 20)
    assert counts.last_wake == LastWake(0, 100, 30, 20, 77)
    core.handle(over(only_wake(ask(core, 2, "a")), copied=0), 0.1)
    assert (counts.leases, counts.wakes) == (2, 1)
    assert counts.last_wake == LastWake(0, 100, 30, 20, 77)


def test_a_model_larger_than_any_gpu_is_refused_with_the_numbers() -> None:
    core = scheduler(total_nbytes=GIB)
    add_model(core, "a", 2 * GIB)
    (refusal,) = ask(core, 1, "a")
    assert isinstance(refusal, ev.RefuseAsk)
    assert refusal.failure.code == "model_too_large"
    assert "the model has 2.0 GiB and the largest GPU 1.0 GiB" in refusal.failure.text
    assert core.too_large("a") == refusal.failure
    assert core.too_large("nobody") is None


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "bound"])  # which goes by room anyway
def test_a_model_waits_for_the_gpu_that_can_hold_it(placement: str) -> None:
    """GPU 1 is busy, and GPU 0 is free and too small."""
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=8, policy=Policy(placement=placement))
    for gpu, size in ((0, GIB), (1, 10 * GIB)):
        core.handle(ev.ExecutorUp(gpu, 1, PoolStats(free_nbytes=size, largest_nbytes=size)), 0.0)
    for name, nbytes in (("first", 8 * GIB), ("big", 5 * GIB), ("small", 1)):
        core.handle(ev.InstanceKnown(name, name), 0.0)
        core.handle(ev.ModelSized(name, 1, nbytes), 0.0)
    first = only_wake(core.handle(ev.Asked(1, "first", 9.0, 1), 0.0))
    assert first.lease.gpu == 1
    assert core.handle(ev.Asked(2, "big", 9.0, 1), 0.1) == []
    core.check()
    assert only_wake(core.handle(ev.Asked(3, "small", 9.0, 1), 0.2)).lease.gpu == 0
    actions = core.handle(over(first, resident=0, free=10 * GIB), 0.3)
    wakes = [action for action in actions if isinstance(action, ev.WakeOn)]
    assert [(wake.instance, wake.lease.gpu) for wake in wakes] == [("big", 1)]
    core.check()


def test_what_an_executor_keeps_for_activations_is_not_for_models() -> None:
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=9)
    add_model(core, "a", 3 * GIB)
    assert core.too_large("a") is None  # no GPU is known yet
    stats = PoolStats(activation_nbytes=2 * GIB, free_nbytes=2 * GIB, largest_nbytes=2 * GIB)
    core.handle(ev.ExecutorUp(0, 1, stats), 0.0)
    assert core.too_large("a") is not None
