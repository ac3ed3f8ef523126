"""The scheduling core: a scripted test per rule, and one property test over any sequence of events."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from dormouse.controller.scheduling import events as ev
from dormouse.controller.scheduling.functions import LastWake
from dormouse.controller.scheduling.keeping import EVICTION_CLASSES
from dormouse.controller.scheduling.leaving import LEAVE_S
from dormouse.controller.scheduling.orders import ORDER_CLASSES
from dormouse.controller.scheduling.placement import PLACEMENT_CLASSES
from dormouse.controller.scheduling.queueing import LOOK
from dormouse.controller.scheduling.scheduler import Scheduler
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.messages import Done, PoolStats
from dormouse.schemas.policy import DEFAULT, EVICTIONS, FIXED, ORDERS, PLACEMENTS, Policy, changed

GIB = 1 << 30


def pool(total_nbytes: int, used_nbytes: int = 0) -> PoolStats:
    free = total_nbytes - used_nbytes
    return PoolStats(weights_nbytes=used_nbytes, free_nbytes=free, largest_nbytes=free)


def scheduler(
    gpus: int = 2, total_nbytes: int = 4 * GIB, max_waiting: int = 100, policy: Policy = DEFAULT
) -> Scheduler:
    made = Scheduler(seed=1, revoke_s=5.0, max_waiting=max_waiting, policy=policy)
    for gpu in range(gpus):
        made.handle(ev.ExecutorUp(gpu, 1, pool(total_nbytes)), 0.0)
    return made


def add_model(core: Scheduler, instance: str, nbytes: int) -> None:
    core.handle(ev.InstanceKnown(instance, instance.split("-")[0]), 0.0)
    core.handle(ev.ModelSized(instance, 1, nbytes), 0.0)


def ask(core: Scheduler, request: int, instance: str, now_s: float = 0.0) -> list[ev.Action]:
    return core.handle(ev.Asked(request, instance, now_s + 1.0, 1), now_s)


def over(
    wake: ev.WakeOn,
    *,
    outcome: str = "ended",
    resident: int = GIB,
    others: dict[str, int] | None = None,
    copied: int = 0,
    peer: int = 0,
    file: int = 0,
    peak: int = 0,
    free: int = 0,
) -> ev.LeaseOver:
    """The executor's Done: ``resident`` bytes of the lease's own instance, and what has changed of ``others``."""
    done = Done(
        serial=wake.lease.serial,
        outcome=outcome,
        gpu_us=10,
        copied_nbytes=copied,
        peer_nbytes=peer,
        file_nbytes=file,
        resident=[(wake.instance, resident), *(others or {}).items()],
        peak_activation_nbytes=peak,
        version=wake.version,
        stats=PoolStats(free_nbytes=free, largest_nbytes=free),
    )
    return ev.LeaseOver(wake.lease.gpu, wake.lease.epoch, done)


def only_wake(actions: list[ev.Action]) -> ev.WakeOn:
    (wake,) = [action for action in actions if isinstance(action, ev.WakeOn)]
    return wake


def test_a_request_goes_to_the_gpu_that_has_its_model() -> None:
    core = scheduler()
    add_model(core, "a", GIB)
    first = only_wake(ask(core, 1, "a"))
    assert first.wake_nbytes == GIB
    core.handle(over(first), 0.1)
    again = only_wake(ask(core, 2, "a"))
    assert again.lease.gpu == first.lease.gpu
    assert again.wake_nbytes == 0


def test_another_model_goes_to_the_gpu_with_most_room() -> None:
    core = scheduler()
    add_model(core, "a", GIB)
    add_model(core, "b", GIB)
    first = only_wake(ask(core, 1, "a"))
    core.handle(over(first), 0.1)
    assert only_wake(ask(core, 2, "b")).lease.gpu != first.lease.gpu


def test_requests_are_served_in_order_of_arrival() -> None:
    core = scheduler(gpus=1)
    for name in "abc":
        add_model(core, name, GIB)
    first = only_wake(ask(core, 1, "a"))
    assert ask(core, 2, "b") == []
    assert ask(core, 3, "c") == []
    second = only_wake(core.handle(over(first), 0.1))
    assert second.request == 2
    assert only_wake(core.handle(over(second), 0.2)).request == 3


def test_another_order_is_for_those_who_wait_too() -> None:
    """Also for one that is parked behind its instance's lease, and for one that is held for a busy GPU."""
    core = scheduler(gpus=2, policy=Policy(order="fifo"))
    for name in "abcd":
        add_model(core, name, GIB)
    first, second = (only_wake(ask(core, number, name)) for number, name in enumerate("ab"))
    core.handle(over(second), 0.1)  # its model stays there, and how long it runs is known
    second = only_wake(ask(core, 2, "b", 0.2))
    deadlines_s = {3: ("a", 9.0), 4: ("b", 8.0), 5: ("c", 7.0), 6: ("d", 6.0)}
    for request, (name, deadline_s) in deadlines_s.items():
        assert core.handle(ev.Asked(request, name, deadline_s, 1), 0.3) == []
    assert core.handle(ev.PolicyChosen(Policy(order="edf")), 0.3) == []
    core.check()
    served, running = [], [second, first]
    while running:
        wakes = [action for action in core.handle(over(running.pop()), 0.4) if isinstance(action, ev.WakeOn)]
        served += [wake.request for wake in wakes]
        running += wakes
    assert served == [6, 5, 3, 4], "a's and b's wait for their own leases"
    assert not core.waiting


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


def test_what_a_running_node_cannot_change_is_named() -> None:
    assert changed(DEFAULT, {}) == DEFAULT
    assert changed(DEFAULT, {"order": "edf", "passed_over_ms": 5}) == Policy(order="edf", passed_over_ms=5)
    for name in FIXED:
        with pytest.raises(ConfigError, match=rf"^{name} cannot be changed while the node runs: write it into"):
            changed(DEFAULT, {name: 2})
    for changes, complaint in (
        ({"speed": 2}, "there is no setting 'speed'; write one of order, placement, "),
        ({"order": "alphabet"}, "policy: order is 'alphabet'; write one of fifo, "),
        ({"order": 5}, "Expected `str`, got `int` - at `$.order`"),
        ({"passed_over_ms": -1}, "policy: passed_over_ms is -1; write a number from 0 to "),
        ({"passed_over_share": float("nan")}, "policy: passed_over_share is nan; write a number above 0 "),
    ):
        with pytest.raises(ConfigError) as told:
            changed(DEFAULT, changes)
        assert str(told.value).startswith(complaint)


def test_each_name_that_a_policy_may_have_is_a_class() -> None:
    assert tuple(ORDER_CLASSES) == ORDERS
    assert tuple(PLACEMENT_CLASSES) == PLACEMENTS
    assert tuple(EVICTION_CLASSES) == EVICTIONS
    for kind in (*ORDER_CLASSES.values(), *PLACEMENT_CLASSES.values(), *EVICTION_CLASSES.values()):
        assert kind.__doc__, "says why one would want it"
    assert len({kind.rule for kind in EVICTION_CLASSES.values()}) == len(EVICTIONS)


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
    core = scheduler(total_nbytes=4 * GIB)
    for name in "abcd":
        add_model(core, name, GIB)
    first = only_wake(ask(core, 1, "a", now_s=0.0))
    second = only_wake(ask(core, 2, "b", now_s=0.0))
    core.handle(over(first, others={"c": GIB, "b": GIB}, free=3 * GIB), 0.1)
    core.handle(over(second, free=2 * GIB), 0.2)
    assert only_wake(ask(core, 3, "d", now_s=0.3)).lease.gpu == first.lease.gpu


def test_worth_falls_with_the_rate_of_use() -> None:
    core = scheduler(gpus=1)
    for name in "abcd":
        add_model(core, name, GIB)
    for request, name in enumerate("abca"):
        core.handle(over(only_wake(ask(core, request, name, float(request)))), float(request))
    only_wake(ask(core, 9, "d", 3.0))
    worth = core.worth(0)
    assert sorted(worth, key=lambda name: worth[name]) == ["b", "c", "a"]


def test_worth_names_what_is_on_that_gpu_and_no_more() -> None:
    core = scheduler()
    for name in "abc":
        add_model(core, name, GIB)
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
    core = scheduler(gpus=1)
    for name in ("a-1", "b-1"):
        add_model(core, name, GIB)
    core.handle(over(only_wake(ask(core, 1, "a-1"))), 0.0)
    core.handle(over(only_wake(ask(core, 2, "b-1")), others={"a-1": GIB // 2}), 0.0)
    assert core.gpus[0].resident == {"a-1": GIB // 2, "b-1": GIB}
    assert (core.counts("a").evicted, core.counts("b").evictions) == ({"wake": 1}, 0)
    core.handle(over(only_wake(ask(core, 3, "b-1")), resident=0), 0.0)
    assert core.gpus[0].resident == {"a-1": GIB // 2}
    assert core.counts("b").evictions == 0


def test_an_operation_out_of_memory_evicts_others() -> None:
    core = scheduler(gpus=1)
    for name in "ab":
        add_model(core, name, GIB)
    core.handle(over(only_wake(ask(core, 1, "a"))), 0.0)
    ask(core, 2, "b")
    core.handle(ev.Evicted(0, 9, (("a", 0),), pool(8 * GIB)), 0.0)  # of another epoch
    assert core.gpus[0].resident == {"a": GIB}
    core.handle(ev.Evicted(0, 1, (("a", 0), ("gone", 5)), pool(8 * GIB)), 0.0)
    assert core.gpus[0].resident == {}
    assert core.counts("a").evicted == {"memory": 1}


def test_a_lease_that_lasts_says_at_its_begin_for_what_others_made_room() -> None:
    core = scheduler(gpus=1)
    for name in "ab":
        add_model(core, name, GIB)
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
    assert f"{2 * GIB:,}" in refusal.failure.text
    assert f"{GIB:,}" in refusal.failure.text
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


def test_an_instance_has_one_lease_and_lets_others_pass() -> None:
    core = scheduler()
    add_model(core, "a", GIB)
    add_model(core, "b", GIB)
    first = only_wake(ask(core, 1, "a"))
    assert ask(core, 2, "a") == []
    assert only_wake(ask(core, 3, "b")).request == 3
    assert only_wake(core.handle(over(first), 0.1)).request == 2


def test_a_released_lease_is_revoked_and_a_silent_executor_killed() -> None:
    core = scheduler(gpus=1)
    add_model(core, "a", GIB)
    wake = only_wake(ask(core, 1, "a"))
    assert core.handle(ev.Released(1), 1.0) == [ev.RevokeOn(0, wake.lease.serial)]
    assert core.next_deadline_s == 6.0
    assert core.handle(ev.Tick(), 5.9) == []
    (kill,) = core.handle(ev.Tick(), 6.0)
    assert isinstance(kill, ev.KillExecutor)
    assert (kill.gpu, kill.epoch) == (0, 1)
    assert core.handle(ev.Tick(), 7.0) == []


def test_a_released_waiting_request_is_forgotten() -> None:
    core = scheduler(gpus=1)
    add_model(core, "a", GIB)
    add_model(core, "b", GIB)
    wake = only_wake(ask(core, 1, "a"))
    ask(core, 2, "b")
    assert core.handle(ev.Released(2), 0.0) == []
    assert all(not isinstance(action, ev.WakeOn) for action in core.handle(over(wake), 0.1))


def test_a_dead_executor_loses_its_lease_and_the_model_wakes_elsewhere() -> None:
    core = scheduler()
    add_model(core, "a", GIB)
    wake = only_wake(ask(core, 1, "a"))
    assert core.handle(ev.ExecutorDown(wake.lease.gpu), 0.1) == [ev.LoseLease(1)]
    again = only_wake(ask(core, 2, "a"))
    assert again.lease.gpu != wake.lease.gpu
    assert again.wake_nbytes == GIB


def test_a_successor_executor_ignores_its_predecessors_done() -> None:
    core = scheduler(gpus=1)
    add_model(core, "a", GIB)
    wake = only_wake(ask(core, 1, "a"))
    core.handle(ev.ExecutorUp(0, 2, pool(4 * GIB)), 0.1)
    assert core.handle(over(wake), 0.2) == []
    assert core.gpus[0].resident == {}


def test_a_full_queue_refuses() -> None:
    core = scheduler(gpus=0, max_waiting=1)
    add_model(core, "a", GIB)
    add_model(core, "b", GIB)
    assert ask(core, 1, "a") == []
    (refusal,) = ask(core, 2, "b")
    assert isinstance(refusal, ev.RefuseAsk)
    assert refusal.failure.code == "queue_full"
    assert refusal.failure.retryable


def test_requests_behind_others_that_leave_are_not_forgotten() -> None:
    """Of many requests of an instance only some are considered when its lease is over; then all of these leave."""
    core = scheduler(gpus=1, max_waiting=999)
    for instance in ("a", "b"):
        add_model(core, instance, GIB)
    first = only_wake(ask(core, 1, "a"))
    assert ask(core, 2, "b") == []
    requests = range(3, 3 + 4 * LOOK)
    for request in requests:
        assert ask(core, request, "a") == []
    second = only_wake(core.handle(over(first, copied=GIB), 0.1))
    assert second.instance == "b"
    behind = requests[2 * LOOK]
    for request in requests:
        if request != behind:
            core.handle(ev.Released(request), 0.2)
            core.check()
    assert only_wake(core.handle(over(second, copied=GIB), 0.3)).request == behind


def test_a_function_is_forgotten_with_its_last_instance() -> None:
    core = scheduler()
    core.handle(ev.FunctionKnown("a", 1.0, 0.98, 1.0), 0.0)
    for instance in ("a-1", "a-2"):
        add_model(core, instance, GIB)
    core.handle(ev.FunctionGone("a"), 0.0)
    core.handle(ev.InstanceLost("a-1"), 0.0)
    assert core.functions["a"].deadline_s == 1.0
    core.handle(ev.InstanceLost("a-2"), 0.0)
    assert "a" not in core.functions
    core.handle(ev.FunctionKnown("a", 2.0, 0.98, 1.0), 0.0)  # deployed again
    add_model(core, "a-3", GIB)
    core.handle(ev.InstanceLost("a-3"), 0.0)
    assert core.functions["a"].deadline_s == 2.0, "a function that is deployed keeps its books without an instance"
    core.check()


def held_for_a_busy_gpu() -> tuple[Scheduler, int]:
    """Request 3 waits for this GPU, the only one that has its model, although the other is free."""
    core = scheduler()
    add_model(core, "a", GIB)
    add_model(core, "b", GIB)
    first = only_wake(ask(core, 1, "a"))
    home = first.lease.gpu
    core.handle(over(first, copied=GIB), 0.1)
    core.handle(ev.Evicted(home, 1, (("b", GIB),), pool(4 * GIB)), 0.2)
    assert only_wake(ask(core, 2, "b", 1.0)).lease.gpu == home
    assert ask(core, 3, "a", 1.0) == []
    return core, home


def test_an_executor_that_leaves_gets_no_lease_and_ends_after_its_last() -> None:
    """What comes meanwhile waits for its successor; nothing fails."""
    core = scheduler(gpus=1)
    add_model(core, "a", GIB)
    add_model(core, "b", GIB)
    first = only_wake(ask(core, 1, "a"))
    assert core.handle(ev.ExecutorLeaves(0, 2), 0.1) == []  # not this one
    assert core.handle(ev.ExecutorLeaves(0, 1), 0.1) == []
    assert ask(core, 2, "b") == []
    assert core.handle(over(first), 0.2) == [ev.RetireExecutor(0, 1), ev.FinishLease(1, "a", 10, 0)][::-1]
    assert core.handle(ev.ExecutorLeaves(0, 1), 0.3) == []  # said once
    assert core.handle(ev.ExecutorDown(0), 0.4) == []
    core.check()
    wake = only_wake(core.handle(ev.ExecutorUp(0, 2, pool(4 * GIB)), 0.5))
    assert (wake.request, wake.lease.epoch) == (2, 2)


def test_leases_of_an_executor_that_leaves_have_turns_and_an_end() -> None:
    core = scheduler(gpus=1)
    add_model(core, "a", GIB)
    add_model(core, "b", GIB)
    first = only_wake(ask(core, 1, "a"))
    core.handle(ev.TurnIdle(0, 1, first.lease.serial), 0.1)
    second = only_wake(ask(core, 2, "b"))
    core.handle(ev.ExecutorLeaves(0, 1), 1.0)
    add_model(core, "c", GIB)
    assert ask(core, 3, "c", 1.0) == []
    assert core.handle(ev.TurnWanted(0, 1, first.lease.serial), 1.0) == []
    assert ev.TurnOn(0, first.lease.serial) in core.handle(over(second), 1.1)
    core.check()
    assert core.next_deadline_s == 1.0 + LEAVE_S
    assert core.handle(ev.Tick(), 1.0 + LEAVE_S) == [ev.RetireExecutor(0, 1)]
    assert core.handle(ev.ExecutorDown(0), 40.0) == [ev.LoseLease(1)]
    assert only_wake(core.handle(ev.ExecutorUp(0, 2, pool(4 * GIB)), 41.0)).request == 3


def test_other_gpus_serve_what_came_to_one_that_leaves() -> None:
    core = scheduler(gpus=2)
    add_model(core, "a", GIB)
    home = only_wake(ask(core, 1, "a")).lease.gpu
    core.handle(ev.ExecutorLeaves(home, 1), 0.1)
    add_model(core, "b", GIB)
    other = only_wake(ask(core, 2, "b"))
    assert other.lease.gpu == 1 - home
    add_model(core, "c", GIB)
    assert ask(core, 3, "c") == []
    assert only_wake(core.handle(over(other), 0.2)).lease.gpu == 1 - home


@pytest.mark.parametrize("policy", [Policy(await_resident=False), Policy(placement="random")])
def test_another_placement_is_for_those_who_wait_too(policy: Policy) -> None:
    core, home = held_for_a_busy_gpu()
    assert core.handle(ev.PolicyChosen(DEFAULT), 1.0) == []
    wake = only_wake(core.handle(ev.PolicyChosen(policy), 1.0))
    assert (wake.request, wake.lease.gpu) == (3, 1 - home)
    assert core.next_deadline_s is None


def test_a_request_waits_for_a_busy_gpu_only_while_its_end_is_expected() -> None:
    """The only GPU that has the model runs another's request without end: once that shows, a free one is taken."""
    core, home = held_for_a_busy_gpu()
    due_s = core.next_deadline_s
    assert due_s is not None
    assert 1.0 < due_s < 1.1
    assert only_wake(core.handle(ev.Tick(), due_s)).lease.gpu == 1 - home
    assert core.next_deadline_s is None


INSTANCES = [f"f{n % 3}-{n}" for n in range(5)]
STEP = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(INSTANCES)),
    st.tuples(st.just("batch"), st.sampled_from(INSTANCES), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("grew"), st.integers(0, 30), st.integers(0, 4)),
    st.tuples(st.just("done"), st.integers(0, 9), st.integers(0, 3), st.booleans(), st.sampled_from(INSTANCES)),
    st.tuples(st.just("answered"), st.integers(0, 9), st.booleans()),
    st.tuples(st.just("idle"), st.integers(0, 9)),
    st.tuples(st.just("busy"), st.integers(0, 9)),
    st.tuples(st.just("wanted"), st.integers(0, 9)),
    st.tuples(st.just("release"), st.integers(0, 30)),
    st.tuples(st.just("lost"), st.sampled_from(INSTANCES)),
    st.tuples(st.just("size"), st.sampled_from(INSTANCES), st.integers(0, 5)),
    st.tuples(st.just("up"), st.integers(0, 2)),
    st.tuples(st.just("down"), st.integers(0, 2)),
    st.tuples(st.just("leaves"), st.integers(0, 2)),
    st.tuples(st.just("evicted"), st.integers(0, 2), st.sampled_from(INSTANCES), st.integers(0, 2)),
    st.tuples(st.just("tick"), st.integers(1, 10)),
    st.tuples(st.just("deployed"), st.sampled_from(INSTANCES)),
    st.tuples(st.just("removed"), st.sampled_from(INSTANCES)),
    st.tuples(
        st.just("policy"),
        st.sampled_from(ORDERS),
        st.sampled_from(PLACEMENTS),
        st.sampled_from(EVICTIONS),
        st.booleans(),
    ),
)


class Seats:
    """What executors are told, and may tell: leases by serial; those with a turn, without commands, and those whose
    commands wait.
    """

    def __init__(self, turns: int) -> None:
        self.leases: dict[int, ev.WakeOn] = {}
        self.turns: set[int] = set()
        self.idle: set[int] = set()
        self.wanting: set[int] = set()
        self.revoked: set[int] = set()  # which end without a turn too
        self.retired: set[int] = set()  # GPUs whose executors are to end
        self._most = turns

    def of(self, gpu: int) -> set[int]:
        return {serial for serial, wake in self.leases.items() if wake.lease.gpu == gpu}

    def pick(self, number: int, among: set[int]) -> ev.WakeOn | None:
        choices = sorted(among)
        return self.leases[choices[number % len(choices)]] if choices else None

    def begin(self, wake: ev.WakeOn) -> None:
        for serial in wake.over:
            self.end(serial)
        self.leases[wake.lease.serial] = wake
        self._take(wake.lease.gpu, wake.lease.serial)

    def _take(self, gpu: int, serial: int) -> None:
        self.turns.add(serial)
        assert len(self.turns & self.of(gpu)) <= self._most, "more turns than there are"

    def told(self, action: ev.Action) -> None:
        match action:
            case ev.RetireExecutor(gpu=gpu):
                self.retired.add(gpu)
            case ev.WakeOn():
                self.begin(action)
            case ev.PauseOn(serial=serial):
                assert serial in self.turns & self.idle, "a turn was taken from one who uses it"
                self.turns.discard(serial)
                self.idle.discard(serial)
            case ev.TurnOn(gpu=gpu, serial=serial):
                assert serial in self.wanting
                self.wanting.discard(serial)
                self._take(gpu, serial)
            case ev.RevokeOn(serial=serial):
                self.revoked.add(serial)
            case ev.OverOn(serials=serials):
                for serial in serials:
                    self.end(serial)
            case _:
                pass

    def end(self, serial: int) -> None:
        self.leases.pop(serial, None)
        for some in (self.turns, self.idle, self.wanting, self.revoked):
            some.discard(serial)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(STEP, max_size=60), st.sampled_from([1, 2]))
def test_every_request_meets_exactly_one_fate(steps: list[tuple[object, ...]], turns: int) -> None:
    """Granted requests end by Done, by an answer without use, loss or release; refused ones end at once; nothing waits
    for a free turn, and nothing for ever. A wake names what its GPU holds, and no peer but those that hold some of it.
    """
    policy = Policy(turns=turns)
    core = Scheduler(seed=7, revoke_s=5.0, max_waiting=8, policy=policy)
    twin = Scheduler(seed=7, revoke_s=5.0, max_waiting=8, policy=policy)
    now_s, requests, epochs = 0.0, 0, Counter[int]()
    seats = Seats(turns)
    fates: Counter[int] = Counter()
    open_requests: set[int] = set()
    asked_of: dict[int, str] = {}
    answered: set[int] = set()

    def judge(wake: ev.WakeOn) -> None:
        gpu = core.gpus[wake.lease.gpu]
        worth = core.worth(wake.lease.gpu)
        assert set(worth) == set(gpu.resident)
        assert all(value > 0.0 for value in worth.values())
        have = [core.gpus[peer].resident[wake.instance] for peer in wake.peers]
        assert have == sorted(have, reverse=True)
        assert wake.lease.gpu not in wake.peers

    def send(event: ev.Event) -> None:
        actions = core.handle(event, now_s)
        assert actions == twin.handle(event, now_s), "equal events must give equal actions"
        core.check()
        for action in actions:
            seats.told(action)
            match action:
                case ev.WakeOn(request=request):
                    assert request in open_requests
                    judge(action)
                case ev.RefuseAsk(request=request) | ev.LoseLease(request=request) | ev.FinishLease(request=request):
                    fates[request] += 1
                    open_requests.discard(request)
                case ev.RevokeOn(serial=serial) if (request := seats.leases[serial].request) in answered:
                    fates[request] += request in open_requests  # it has its answer, and its lease was not given back
                    open_requests.discard(request)
                case _:
                    pass

    def turn(kind: type[ev.TurnIdle | ev.TurnBusy | ev.TurnWanted], wake: ev.WakeOn) -> None:
        send(kind(wake.lease.gpu, wake.lease.epoch, wake.lease.serial))

    def done(wake: ev.WakeOn, outcome: str, size: int, others: dict[str, int]) -> None:
        seats.end(wake.lease.serial)
        send(over(wake, outcome=outcome, resident=size * GIB, others=others, copied=size, free=size))

    def lost(gpu: int) -> None:
        seats.retired.discard(gpu)
        for serial in seats.of(gpu):
            seats.end(serial)

    def asks(instance: str, batch: ev.BatchWanted | None) -> None:
        nonlocal requests
        requests += 1
        open_requests.add(requests)
        asked_of[requests] = instance
        send(ev.InstanceKnown(instance, instance.split("-")[0]))
        send(ev.Asked(requests, instance, now_s + 1, 0, True, batch))

    for step in steps:
        match step:
            case ("ask", str(instance)):
                asks(instance, None)
            case ("batch", str(instance), int(count), bool(waits)):
                asks(instance, ev.BatchWanted((now_s + 1,) * count, 4, 0.5 if waits else 0.0))
            case ("grew", int(request), int(count)) if request in open_requests:
                send(ev.BatchGrew(request, (now_s + 1,) * count))
            case ("done", int(number), int(size), bool(ended), str(other)):
                if (wake := seats.pick(number, set(seats.leases))) is not None:
                    others = {} if other == wake.instance else {other: size * GIB // 2}
                    done(wake, "ended" if ended else "revoked", size, others)
            case ("answered", int(number), bool(used)):
                if (wake := seats.pick(number, set(seats.leases))) is not None:
                    answered.add(wake.request)
                    send(ev.Answered(wake.request, used))
            case ("idle", int(number)):
                if (wake := seats.pick(number, seats.turns - seats.idle)) is not None:
                    seats.idle.add(wake.lease.serial)
                    turn(ev.TurnIdle, wake)
            case ("busy", int(number)):
                if (wake := seats.pick(number, seats.turns & seats.idle)) is not None:
                    seats.idle.discard(wake.lease.serial)
                    turn(ev.TurnBusy, wake)
            case ("wanted", int(number)):
                if (wake := seats.pick(number, seats.leases.keys() - seats.turns - seats.wanting)) is not None:
                    seats.wanting.add(wake.lease.serial)
                    turn(ev.TurnWanted, wake)
            case ("release", int(request)) if request in open_requests:
                open_requests.discard(request)
                fates[request] += 1
                send(ev.Released(request))
            case ("lost", str(instance)):
                gone = {request for request in open_requests if asked_of[request] == instance}
                for request in gone:
                    fates[request] += 1
                open_requests -= gone
                send(ev.InstanceLost(instance))
            case ("size", str(instance), int(size)):
                send(ev.ModelSized(instance, 1, size * GIB))
            case ("up", int(gpu)):
                lost(gpu)
                epochs[gpu] += 1
                send(ev.ExecutorUp(gpu, epochs[gpu], pool(4 * GIB)))
            case ("down", int(gpu)):
                lost(gpu)
                send(ev.ExecutorDown(gpu))
            case ("leaves", int(gpu)):
                send(ev.ExecutorLeaves(gpu, epochs[gpu]))
            case ("evicted", int(gpu), str(instance), int(size)):
                if all(seats.leases[serial].instance != instance for serial in seats.of(gpu)):
                    send(ev.Evicted(gpu, epochs[gpu], ((instance, size * GIB),), pool(8 * GIB)))
            case ("deployed", str(instance)):
                send(ev.FunctionKnown(instance.split("-")[0], 1.0, 0.98, 1.0))
            case ("removed", str(instance)):
                send(ev.FunctionGone(instance.split("-")[0]))
            case ("policy", str(order), str(placement), str(eviction), bool(awaits)):
                chosen = Policy(order=order, placement=placement, eviction=eviction, await_resident=awaits, turns=turns)
                send(ev.PolicyChosen(chosen))
            case ("tick", int(seconds)):
                now_s += seconds
                send(ev.Tick())
            case _:
                pass
    assert all(count == 1 for count in fates.values()), fates
    assert set(fates) | open_requests == set(range(1, requests + 1))
    if core.gpus:  # who has a turn uses it to the end: everybody else comes to theirs
        now_s += 60.0
        send(ev.Tick())
        while seats.leases or seats.retired:
            for gpu in sorted(seats.retired):
                lost(gpu)
                epochs[gpu] += 1
                send(ev.ExecutorUp(gpu, epochs[gpu], pool(4 * GIB)))
            if not seats.leases:
                continue
            for serial in sorted(seats.leases.keys() - seats.turns - seats.wanting):
                seats.wanting.add(serial)
                turn(ev.TurnWanted, seats.leases[serial])
            wake = seats.pick(0, seats.turns | seats.revoked)
            assert wake is not None, "nobody has a turn, and somebody has a seat"
            done(wake, "revoked" if wake.lease.serial in seats.revoked else "ended", 1, {})
        assert not core.waiting
        assert not open_requests
        assert all(count == 1 for count in fates.values()), fates


# --- seats and turns


def turn(kind: type[ev.TurnIdle | ev.TurnBusy | ev.TurnWanted], wake: ev.WakeOn) -> ev.Event:
    return kind(wake.lease.gpu, wake.lease.epoch, wake.lease.serial)


def test_a_turn_that_is_not_used_goes_to_one_who_waits_and_comes_back() -> None:
    core = scheduler(gpus=1)
    for name in "abc":
        add_model(core, name, GIB)
    first = only_wake(ask(core, 1, "a"))
    assert ask(core, 2, "b", 0.01) == []
    paused, wake = core.handle(turn(ev.TurnIdle, first), 0.03)
    assert paused == ev.PauseOn(0, first.lease.serial)
    assert isinstance(wake, ev.WakeOn)
    assert wake.request == 2
    assert core.handle(turn(ev.TurnWanted, first), 0.04) == []  # b uses its turn
    assert [w.request for w in core.waiting.values()] == [1]
    assert ask(core, 3, "c", 0.05) == []
    actions = core.handle(over(wake, copied=GIB), 0.06)
    assert [a for a in actions if not isinstance(a, ev.FinishLease)] == [ev.TurnOn(0, first.lease.serial)]
    assert only_wake(core.handle(over(first, copied=GIB), 0.08)).request == 3
    core.check()


@pytest.mark.parametrize(("placement", "small_nbytes"), [("completion", 2 * GIB), ("bound", 6 * GIB)])
def test_a_turn_is_taken_where_the_only_room_is(placement: str, small_nbytes: int) -> None:
    """GPU 0 is free and has no room; on GPU 1, a lease does not use its turn. Waiting for it would be for ever."""
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=100, policy=Policy(placement=placement))
    core.handle(ev.ExecutorUp(0, 1, PoolStats(weights_nbytes=small_nbytes - GIB, free_nbytes=GIB)), 0.0)
    core.handle(ev.ExecutorUp(1, 1, pool(16 * GIB)), 0.0)
    add_model(core, "first", 4 * GIB)
    add_model(core, "second", 5 * GIB)
    first = only_wake(ask(core, 1, "first"))
    assert first.lease.gpu == 1
    core.handle(turn(ev.TurnIdle, first), 0.03)
    paused, wake = ask(core, 2, "second", 0.05)
    assert paused == ev.PauseOn(1, first.lease.serial)
    assert isinstance(wake, ev.WakeOn)
    assert wake.lease.gpu == 1
    core.check()


def test_another_instance_of_a_function_computes_on_another_gpu() -> None:
    """Though the first does not use its turn just now, and its GPU has the whole model already."""
    core = scheduler()
    for name in ("a-1", "a-2"):
        add_model(core, name, GIB)
    first = only_wake(ask(core, 1, "a-1"))
    core.handle(ev.Evicted(first.lease.gpu, 1, (("a-1", GIB), ("a-2", GIB)), pool(4 * GIB, GIB)), 0.1)
    core.handle(turn(ev.TurnIdle, first), 0.2)
    assert only_wake(ask(core, 2, "a-2", 0.3)).lease.gpu != first.lease.gpu


def test_a_turn_that_is_used_again_is_nobody_elses() -> None:
    core = scheduler(gpus=1)
    for name in "ab":
        add_model(core, name, GIB)
    first = only_wake(ask(core, 1, "a"))
    assert core.handle(turn(ev.TurnIdle, first), 0.03) == []
    assert core.handle(turn(ev.TurnBusy, first), 0.04) == []
    assert ask(core, 2, "b", 0.05) == []
    core.check()


def test_no_turn_is_taken_while_another_gpu_has_one() -> None:
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=100)
    core.handle(ev.ExecutorUp(0, 1, pool(8 * GIB)), 0.0)
    core.handle(ev.ExecutorUp(1, 1, pool(4 * GIB)), 0.0)
    for name in "ab":
        add_model(core, name, GIB)
    first = only_wake(ask(core, 1, "a"))
    assert first.lease.gpu == 0  # it has most room
    core.handle(turn(ev.TurnIdle, first), 0.03)
    (wake,) = ask(core, 2, "b", 0.04)
    assert isinstance(wake, ev.WakeOn)
    assert wake.lease.gpu == 1
    core.check()


def test_two_turns_on_one_gpu() -> None:
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=100, policy=Policy(turns=2))
    core.handle(ev.ExecutorUp(0, 1, pool(4 * GIB)), 0.0)
    for name in "abc":
        add_model(core, name, GIB)
    first, second = only_wake(ask(core, 1, "a")), only_wake(ask(core, 2, "b"))
    assert first.lease.gpu == second.lease.gpu == 0
    assert ask(core, 3, "c") == []
    assert only_wake(core.handle(over(second, copied=GIB), 0.1)).request == 3
    core.check()


def test_time_without_a_turn_is_no_time_of_the_function() -> None:
    core = scheduler(gpus=1)
    for name in "ab":
        add_model(core, name, GIB)
    core.handle(over(only_wake(ask(core, 1, "a")), copied=0), 0.0)
    first = only_wake(ask(core, 2, "a", 10.0))
    ask(core, 3, "b", 10.0)
    wake = only_wake(core.handle(turn(ev.TurnIdle, first), 10.02))
    core.handle(turn(ev.TurnWanted, first), 15.0)
    core.handle(over(wake, copied=GIB), 20.0)
    core.handle(over(first), 20.01)
    run_s = core.functions["a"].run_s
    assert run_s is not None
    assert run_s == pytest.approx(0.2 * 0.03, abs=1e-6)  # a fifth of the newest: 20 ms and 10 ms


@pytest.mark.parametrize("missing", [False, True])
def test_a_lease_without_a_command(missing: bool) -> None:
    """Its executor is told with the next that it hears, and says Done only if a model had to be brought."""
    core = scheduler(gpus=1)
    add_model(core, "a", GIB)
    if not missing:
        core.handle(over(only_wake(ask(core, 1, "a")), copied=GIB), 0.1)
    wake = only_wake(ask(core, 2, "a", 0.2))
    serial = wake.lease.serial
    actions = core.handle(ev.Answered(2, False), 0.3)
    if missing:
        assert actions == [ev.OverOn(0, (serial,))]
        (finished,) = core.handle(over(wake, copied=GIB), 0.4)
    else:
        (finished,) = actions
        assert core.handle(turn(ev.TurnIdle, wake), 0.35) == [ev.OverOn(0, (serial,))]
        assert only_wake(ask(core, 3, "a", 0.4)).over == ()
        core.handle(ev.Answered(3, False), 0.5)
        assert only_wake(ask(core, 4, "a", 0.6)).over == (serial + 1,)
    assert isinstance(finished, ev.FinishLease)
    assert finished.request == 2
    core.check()


def test_what_load_writes_is_no_change_by_a_request() -> None:
    core = scheduler(gpus=1)
    add_model(core, "a", GIB)
    for counts in (False, True):
        (wake,) = core.handle(ev.Asked(int(counts), "a", 9.0, 1, counts), 0.0)
        assert isinstance(wake, ev.WakeOn)
        event = over(wake)
        wrote = ev.LeaseOver(event.gpu, event.epoch, structs.replace(event.done, wrote=True))
        (finished,) = core.handle(wrote, 0.1)
        assert isinstance(finished, ev.FinishLease)
        assert finished.wrote == counts


def test_a_lease_that_is_answered_and_not_given_back_is_revoked() -> None:
    core = scheduler(gpus=1)
    add_model(core, "a", GIB)
    wake = only_wake(ask(core, 1, "a"))
    assert core.handle(ev.Answered(1, True), 1.0) == []
    assert core.next_deadline_s == 6.0
    assert core.handle(ev.Tick(), 6.0) == [ev.RevokeOn(0, wake.lease.serial)]
    core.handle(over(wake, outcome="revoked"), 6.1)
    assert core.next_deadline_s is None


def test_an_instance_that_dies_without_its_turn_gives_its_seat_back() -> None:
    core = scheduler(gpus=1)
    for name in "ab":
        add_model(core, name, GIB)
    first = only_wake(ask(core, 1, "a"))
    ask(core, 2, "b")
    core.handle(turn(ev.TurnIdle, first), 0.03)
    core.handle(turn(ev.TurnWanted, first), 0.04)
    actions = core.handle(ev.InstanceLost("a"), 0.05)
    assert actions == [ev.RevokeOn(0, first.lease.serial), ev.ForgetInstance("a")]
    assert not core.waiting
    core.check()
    core.handle(over(first, outcome="revoked"), 0.06)
    core.check()


def test_a_gpu_is_lost_while_four_hold_seats() -> None:
    core = scheduler(gpus=1, total_nbytes=8 * GIB)
    for name in "abcd":
        add_model(core, name, GIB)
    for request, name in enumerate("abcd", 1):
        wake = only_wake(ask(core, request, name))
        if request < 4:
            core.handle(turn(ev.TurnIdle, wake), 0.01)
    core.handle(turn(ev.TurnWanted, wake_of(core, "b")), 0.02)
    assert core.handle(ev.ExecutorDown(0), 0.03) == [ev.LoseLease(request) for request in (1, 2, 3, 4)]
    assert not core.waiting
    core.check()


def test_a_request_that_wanted_its_turn_when_its_gpu_was_lost_is_asked_again() -> None:
    core = scheduler(gpus=1)
    for name in "ab":
        add_model(core, name, GIB)
    first = only_wake(ask(core, 1, "a"))
    ask(core, 2, "b")
    core.handle(turn(ev.TurnIdle, first), 0.03)
    core.handle(turn(ev.TurnWanted, first), 0.04)
    core.handle(ev.ExecutorDown(0), 0.05)
    assert ask(core, 1, "a") == []
    core.handle(ev.ExecutorUp(0, 2, pool(4 * GIB)), 0.06)
    assert core.gpus[0].running is not None
    assert core.gpus[0].running.request == 1
    core.check()


def test_whose_request_evicted_it_is_not_guessed_of_two() -> None:
    core = Scheduler(seed=1, revoke_s=5.0, max_waiting=100, policy=Policy(turns=2))
    core.handle(ev.ExecutorUp(0, 1, pool(4 * GIB)), 0.0)
    for name in "abc":
        add_model(core, name, GIB)
    core.handle(over(only_wake(ask(core, 1, "c"))), 0.1)
    for request, expected in ((2, "a"), (3, "")):
        ask(core, request, "ab"[request - 2])
        core.handle(ev.Evicted(0, 1, (("c", GIB // request),), pool(4 * GIB)), 0.2)
        last = core.counts("c").last_eviction
        assert last is not None
        assert last.function == expected


def wake_of(core: Scheduler, instance: str) -> ev.WakeOn:
    (running,) = [running for running in core.gpus[0].leases.values() if running.instance == instance]
    return ev.WakeOn(running.request, running.lease, instance, 1, (), 0, 0)


def service(core: Scheduler, name: str = "a") -> tuple[int, int]:
    function = core.functions[name]
    return function.served, function.late


def test_n8_what_load_does_is_no_request_of_its_function() -> None:
    core = scheduler(1)
    add_model(core, "a", GIB)
    wake = only_wake(core.handle(ev.Asked(1, "a", 9.0, 1, counts=False), 0.0))
    core.handle(over(wake), 0.1)
    assert service(core) == (0, 0)
    core.handle(over(only_wake(ask(core, 2, "a", 1.0))), 1.1)
    assert service(core) == (1, 0)


@pytest.mark.parametrize("when", ["waiting", "running", "over", "revoked", "never asked"])
def test_n8_a_request_that_failed_is_late_whenever_that_is_heard(when: str) -> None:
    core = scheduler(1)
    add_model(core, "a", GIB)
    failed = ev.RequestFailed("a", 2)
    first = only_wake(ask(core, 1, "a"))
    ask(core, 2, "a")
    if when == "waiting":
        core.handle(failed, 0.05)
        core.handle(ev.Released(2), 0.05)
        core.handle(over(first), 0.1)
    else:
        wake = only_wake(core.handle(over(first), 0.1))
        assert wake.request == 2
        if when == "running":
            core.handle(failed, 0.15)
        elif when == "revoked":
            core.handle(failed, 0.15)
            core.handle(ev.Released(2), 0.15)
        core.handle(over(wake), 0.2)
        if when == "over":
            assert service(core) == (2, 0)
            core.handle(failed, 0.2)
            core.handle(failed, 0.3)  # and no more than once
        elif when == "never asked":
            core.handle(ev.RequestFailed("a", 0), 0.2)
            assert service(core) == (3, 1)
            return
    assert service(core) == (2, 1)


def test_a_late_request_that_fails_is_late_once() -> None:
    core = scheduler(1)
    add_model(core, "a", GIB)
    core.handle(over(only_wake(ask(core, 1, "a"))), 5.0)
    core.handle(ev.RequestFailed("a", 1), 5.0)
    core.handle(ev.RequestFailed("nobody", 0), 5.0)
    assert service(core) == (1, 1)
