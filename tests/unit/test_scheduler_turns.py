"""The scheduling core's seats and turns: a scripted test per rule."""

from typing import Any

import pytest
from msgspec import structs
from scheduler_rig import GIB, add_model, ask, only_wake, over, pool, scheduler, turn, wake_of

from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.schemas.messages import PoolStats
from dormouse.schemas.policy import Policy


def test_a_turn_that_is_not_used_goes_to_one_who_waits_and_comes_back() -> None:
    core = scheduler(gpus=1, models="abc")
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
    core = scheduler(models=("a-1", "a-2"))
    first = only_wake(ask(core, 1, "a-1"))
    core.handle(ev.Evicted(first.lease.gpu, 1, (("a-1", GIB), ("a-2", GIB)), pool(4 * GIB, GIB)), 0.1)
    core.handle(turn(ev.TurnIdle, first), 0.2)
    assert only_wake(ask(core, 2, "a-2", 0.3)).lease.gpu != first.lease.gpu


def test_a_turn_that_is_used_again_is_nobody_elses() -> None:
    core = scheduler(gpus=1, models="ab")
    first = only_wake(ask(core, 1, "a"))
    assert core.handle(turn(ev.TurnIdle, first), 0.03) == []
    assert core.handle(turn(ev.TurnBusy, first), 0.04) == []
    assert ask(core, 2, "b", 0.05) == []
    core.check()


KEEP_S = 5.0


def computing(models: str, **settings_: Any) -> tuple[Scheduler, ev.WakeOn]:
    """The first of these computes since 10.0, with all of its model there, and never pauses."""
    core = scheduler(gpus=1, models=models, keep_s=KEEP_S, **settings_)
    for request, model in enumerate(models, 100):
        core.handle(over(only_wake(ask(core, request, model)), copied=GIB), 0.0)
    return core, only_wake(ask(core, 1, models[0], 10.0))


def test_who_computes_for_long_gives_its_turn_to_who_waits_and_goes_on_after_that() -> None:
    core, first = computing("ab")
    assert ask(core, 2, "b", 10.1) == []
    assert core.next_deadline_s == 10.0 + KEEP_S
    assert core.handle(ev.Tick(), 9.9 + KEEP_S) == []
    paused, wake = core.handle(ev.Tick(), 10.0 + KEEP_S)
    assert paused == ev.PauseOn(0, first.lease.serial)
    assert isinstance(wake, ev.WakeOn)
    assert wake.request == 2
    assert core.handle(turn(ev.TurnWanted, first), 15.1) == []
    actions = core.handle(over(wake), 15.2)
    assert ev.TurnOn(0, first.lease.serial) in actions
    core.check()


def test_who_computes_for_long_keeps_its_turn_while_nobody_waits_and_not_when_somebody_comes() -> None:
    core, first = computing("ab")
    assert core.handle(ev.Tick(), 10.0 + KEEP_S) == []
    assert core.handle(turn(ev.TurnBusy, first), 60.0) == []
    paused, _ = ask(core, 2, "b", 70.0)
    assert paused == ev.PauseOn(0, first.lease.serial)
    core.check()


@pytest.mark.parametrize("woken", [True, False])
def test_a_turn_counts_from_when_its_model_has_come(woken: bool) -> None:
    core = scheduler(gpus=1, models="ab", keep_s=KEEP_S)
    first = only_wake(ask(core, 1, "a", 10.0))
    assert ask(core, 2, "b", 10.0) == []
    if woken:
        core.handle(ev.Woken(0, 1, first.lease.serial, 7_000_000), 17.0)
        assert core.next_deadline_s == 17.0 + KEEP_S
    else:  # it may have been there, or never come
        copied_s = core.gpus[0].leases[first.lease.serial].copies_until_s
        assert core.next_deadline_s == copied_s + 2 * KEEP_S
    assert isinstance(core.handle(ev.Tick(), 30.0)[0], ev.PauseOn)


@pytest.mark.parametrize("order", ["effort", "edf", "fifo", "feasible"])
def test_many_that_never_pause_keep_nobody_out(order: str) -> None:
    """They have a turn each, again and again; one that comes later, with a later deadline, has its own among them."""
    core, first = computing("abcz", policy=Policy(order=order))
    turns, now_s = {first.lease.serial}, 10.0
    ask(core, 2, "b", 10.0)
    ask(core, 3, "c", 10.0)
    core.handle(ev.Asked(4, "z", 40.0, 1), 11.0)
    served: list[int] = []
    for _ in range(12):
        now_s += KEEP_S
        for action in core.handle(ev.Tick(), now_s):
            match action:
                case ev.PauseOn(serial=serial):
                    turns.discard(serial)
                    core.handle(ev.TurnWanted(0, 1, serial), now_s + 0.01)
                case ev.WakeOn(request=request):
                    served.append(request)
                case _:
                    pass
        core.check()
    assert sorted(served) == [2, 3, 4]


def test_a_request_is_judged_by_when_it_came_though_its_turn_was_taken() -> None:
    core, first = computing("ab")
    ask(core, 2, "b", 10.1)
    core.handle(ev.Tick(), 10.0 + KEEP_S)
    wake = wake_of(core, "b")
    core.handle(turn(ev.TurnWanted, first), 15.1)
    waiting = core.waiting[1]
    assert (waiting.arrived_s, waiting.deadline_s) == (15.1, 15.1), "it is late, and comes after others that are"
    core.handle(over(wake), 15.2)
    assert (waiting.arrived_s, waiting.deadline_s) == (10.0, 11.0)


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
    core = scheduler(gpus=1, policy=Policy(turns=2), models="abc")
    first, second = only_wake(ask(core, 1, "a")), only_wake(ask(core, 2, "b"))
    assert first.lease.gpu == second.lease.gpu == 0
    assert ask(core, 3, "c") == []
    assert only_wake(core.handle(over(second, copied=GIB), 0.1)).request == 3
    core.check()


def test_time_without_a_turn_is_no_time_of_the_function() -> None:
    core = scheduler(gpus=1, models="ab")
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
    core = scheduler(gpus=1, models="ab")
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
    core = scheduler(gpus=1, total_nbytes=8 * GIB, models="abcd")
    for request, name in enumerate("abcd", 1):
        wake = only_wake(ask(core, request, name))
        if request < 4:
            core.handle(turn(ev.TurnIdle, wake), 0.01)
    core.handle(turn(ev.TurnWanted, wake_of(core, "b")), 0.02)
    assert core.handle(ev.ExecutorDown(0), 0.03) == [ev.LoseLease(request) for request in (1, 2, 3, 4)]
    assert not core.waiting
    core.check()


def test_a_request_that_wanted_its_turn_when_its_gpu_was_lost_is_asked_again() -> None:
    core = scheduler(gpus=1, models="ab")
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
    core = scheduler(gpus=1, policy=Policy(turns=2), models="abc")
    core.handle(over(only_wake(ask(core, 1, "c"))), 0.1)
    for request, expected in ((2, "a"), (3, "")):
        ask(core, request, "ab"[request - 2])
        core.handle(ev.Evicted(0, 1, (("c", GIB // request),), pool(4 * GIB)), 0.2)
        last = core.counts("c").last_eviction
        assert last is not None
        assert last.function == expected
