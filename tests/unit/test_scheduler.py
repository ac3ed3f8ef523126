"""The scheduling core: a scripted test per rule on who is served next, where, and how leases end."""

import pytest
from scheduler_rig import GIB, add_model, ask, only_wake, over, pool, scheduler

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.keeping import EVICTION_CLASSES
from dormouse.core.decisions.scheduling.leaving import LEAVE_S
from dormouse.core.decisions.scheduling.orders import ORDER_CLASSES
from dormouse.core.decisions.scheduling.placement import PLACEMENT_CLASSES
from dormouse.core.decisions.scheduling.queueing import LOOK
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import DEFAULT, EVICTIONS, FIXED, ORDERS, PLACEMENTS, Policy, changed


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
    core = scheduler(gpus=1, models="abc")
    first = only_wake(ask(core, 1, "a"))
    assert ask(core, 2, "b") == []
    assert ask(core, 3, "c") == []
    second = only_wake(core.handle(over(first), 0.1))
    assert second.request == 2
    assert only_wake(core.handle(over(second), 0.2)).request == 3


def test_another_order_is_for_those_who_wait_too() -> None:
    """Also for one that is parked behind its instance's lease, and for one that is held for a busy GPU."""
    core = scheduler(gpus=2, policy=Policy(order="fifo"), models="abcd")
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


def test_what_a_running_node_cannot_change_is_named() -> None:
    assert changed(DEFAULT, {}) == DEFAULT
    assert changed(DEFAULT, {"order": "edf", "passed_over_ms": 5}) == Policy(order="edf", passed_over_ms=5)
    for name in FIXED:
        with pytest.raises(ConfigError) as told:
            changed(DEFAULT, {name: 2})
        assert str(told.value) == (
            f"{name} cannot be changed while the node runs: write it into [schedule] of the node file, then "
            "`dormouse up NODE.toml --replace`"
        )
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


@pytest.mark.parametrize(("ends_s", "in_time"), [(0.05, 1), (0.5, 1), (1.5, 0)])
@pytest.mark.parametrize("runs", [True, False])
def test_a_call_is_due_with_its_caller_and_judged_by_its_own_function(ends_s: float, in_time: int, runs: bool) -> None:
    """It is due at 0.1, before one that has come before it; its function has until 1.0."""
    core = scheduler(gpus=1, models="abc", policy=Policy(order="edf"))
    first = only_wake(ask(core, 1, "a"))
    ask(core, 2, "b")
    core.handle(ev.Asked(3, "c", 0.1, 1, beyond_s=0.9), 0.0)
    if runs:
        wake = only_wake(core.handle(over(first), 0.02))
        assert wake.request == 3
        core.handle(over(wake), ends_s)
    else:
        core.handle(ev.Released(3), ends_s)
    known = core.functions["c"]
    assert (known.served, known.served - known.late) == ((1, in_time) if runs or not in_time else (0, 0))
