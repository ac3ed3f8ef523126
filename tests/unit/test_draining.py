"""GPUs that are drained while the node runs: what the scheduling core does with them, and what is kept of it."""

from pathlib import Path

import msgspec
import pytest
from scheduler_rig import GIB, add_model, ask, only_wake, over, pool, scheduler

from dormouse.controller.draining import DrainedGpus
from dormouse.core.config import GpuSection, NodeConfig, NodeSection
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.reasons import Reasons
from dormouse.core.decisions.scheduling.scheduler import Scheduler
from dormouse.core.paths import RunPaths
from dormouse.core.startup import keep_drained_gpus, read_drained_gpus
from dormouse.schemas import messages as m
from dormouse.schemas.policy import PLACEMENTS, Policy


def drained(core: Scheduler, *gpus: int, now_s: float = 1.0) -> list[ev.Action]:
    actions = core.handle(ev.DrainChosen(gpus), now_s)
    core.check()
    return actions


def test_a_gpu_on_which_nothing_runs_is_given_up_at_once_and_comes_back() -> None:
    core = scheduler(gpus=2, models="ab")
    assert drained(core, 1) == [ev.DrainOn(1, True), ev.DismissExecutor(1)]
    assert drained(core, 1) == []
    assert only_wake(ask(core, 1, "a", 1.0)).lease.gpu == 0
    assert ask(core, 2, "b", 1.0) == []
    assert core.handle(ev.ExecutorDown(1), 2.0) == []
    assert drained(core, now_s=3.0) == [ev.WantExecutor(1)]
    wake = only_wake(core.handle(ev.ExecutorUp(1, 2, pool(4 * GIB)), 4.0))
    assert (wake.request, wake.lease.gpu, wake.lease.epoch) == (2, 1, 2)


def test_what_runs_has_as_long_as_it_takes_and_nothing_begins_beside_it() -> None:
    core = scheduler(gpus=1, models="ab")
    first = only_wake(ask(core, 1, "a"))
    assert drained(core, 0) == [ev.DrainOn(0, True)]
    assert core.handle(ev.TurnIdle(0, 1, first.lease.serial), 2.0) == []
    assert ask(core, 2, "b", 2.0) == []
    assert core.next_deadline_s is None, "no time limit"
    assert core.handle(ev.TurnWanted(0, 1, first.lease.serial), 900.0) == []
    assert core.handle(over(first), 901.0) == [ev.FinishLease(1, "a", 10, 0), ev.DismissExecutor(0)]
    core.handle(ev.ExecutorDown(0), 902.0)
    core.check()
    (waits,) = Reasons(core, 903.0).told()["oldest"]
    assert waits["reason"] == "no GPU's executor is up; GPU 0 is drained (`dormouse gpu undrain N`)"


def test_one_that_is_undrained_before_its_last_lease_ended_goes_on() -> None:
    core = scheduler(gpus=1, models="ab")
    first = only_wake(ask(core, 1, "a"))
    drained(core, 0)
    core.handle(ev.TurnIdle(0, 1, first.lease.serial), 2.0)
    assert ask(core, 2, "b", 2.0) == []
    actions = drained(core, now_s=3.0)
    assert actions[:2] == [ev.WantExecutor(0), ev.DrainOn(0, False)]
    assert [action.request for action in actions if isinstance(action, ev.WakeOn)] == [2]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_who_waits_for_one_that_drains_takes_the_next_that_there_is(placement: str) -> None:
    """Its lease wants its turn again, so that GPU has a turn to give; the other one comes up meanwhile."""
    core = scheduler(gpus=1, models="ab", policy=Policy(placement=placement))
    first = only_wake(ask(core, 1, "a"))
    core.handle(ev.TurnIdle(0, 1, first.lease.serial), 0.5)
    second = only_wake(ask(core, 2, "b", 0.5))
    drained(core, 0)
    core.handle(ev.TurnWanted(0, 1, first.lease.serial), 2.0)
    add_model(core, "c", GIB)
    assert ask(core, 3, "c", 2.0) == []
    core.handle(over(second), 2.5)
    core.check()
    wake = only_wake(core.handle(ev.ExecutorUp(1, 1, pool(4 * GIB)), 3.0))
    assert (wake.request, wake.lease.gpu) == (3, 1)
    core.check()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_waits_for_its_model_there_goes_elsewhere(placement: str) -> None:
    core = scheduler(models="ab", policy=Policy(placement=placement))
    first = only_wake(ask(core, 1, "a"))
    home = first.lease.gpu
    core.handle(over(first, copied=GIB), 0.1)
    core.handle(ev.Evicted(home, 1, (("b", GIB),), pool(4 * GIB)), 0.2)
    assert only_wake(ask(core, 2, "b", 1.0)).lease.gpu == home
    waits = ask(core, 3, "a", 1.0)
    moved = waits or [each for each in drained(core, home) if isinstance(each, ev.WakeOn)]
    assert only_wake(moved).lease.gpu == 1 - home


def test_an_executor_that_was_on_its_way_is_given_up_too() -> None:
    core = scheduler(gpus=1)
    assert drained(core, 1) == [ev.DismissExecutor(1)], "it may be one that does not come up"
    up = core.handle(ev.ExecutorUp(1, 1, pool(4 * GIB)), 2.0)
    assert up == [ev.DrainOn(1, True), ev.DismissExecutor(1)]
    core.check()


def test_one_that_is_to_be_replaced_still_is_when_it_is_undrained() -> None:
    core = scheduler(gpus=1, models="a")
    first = only_wake(ask(core, 1, "a"))
    drained(core, 0)
    assert core.handle(ev.ExecutorLeaves(0, 1), 2.0) == []
    assert drained(core, now_s=3.0) == [ev.WantExecutor(0), ev.DrainOn(0, False)]
    assert core.handle(over(first), 4.0) == [ev.FinishLease(1, "a", 10, 0), ev.RetireExecutor(0, 1)]


class Node:
    """What the shell around the core says, of two GPUs that are up."""

    def __init__(self, path: Path) -> None:
        self.config = NodeConfig(node=NodeSection(run=str(path)), gpu=GpuSection(device="host", count=2))
        RunPaths(path).make()
        self.core = scheduler(gpus=2, models="a")
        self.said: list[m.ControllerToRouter] = []
        self.gpus = DrainedGpus(self.config, self.core, self.hears, self.said.append)

    def hears(self, event: ev.Event) -> None:
        self.core.handle(event, 1.0)
        self.gpus.look()

    def asked(self, query: int, gpu: int, **more: bool) -> list[tuple[int, str, int] | list[int]]:
        return self.told(lambda: self.gpus.asked(m.AskDrainGpu(query=query, gpu=gpu, **more)))

    def told(self, act: object) -> list[tuple[int, str, int] | list[int]]:
        self.said.clear()
        assert callable(act)
        act()
        found: list[tuple[int, str, int] | list[int]] = []
        for each in self.said:
            if isinstance(each, m.Status):
                answer = msgspec.json.decode(each.json)
                found.append((each.query, each.failure.code if each.failure else answer["state"], answer["leases"]))
            elif isinstance(each, m.GpusDrained):
                found.append([*each.gpus, each.left])
        return found


def test_a_drain_is_kept_and_who_waits_is_told_when_it_is_over(tmp_path: Path) -> None:
    node = Node(tmp_path)
    wake = only_wake(ask(node.core, 1, "a"))
    home = wake.lease.gpu
    assert node.asked(1, 2) == [(1, "unknown_gpu", 0)]
    assert node.asked(2, home, waits=True) == [(2, "serves", 1)], "there is nothing to wait for"
    assert node.asked(3, home) == [[home, 1], (3, "drains", 1)]
    assert node.asked(4, home, waits=True) == []
    assert read_drained_gpus(str(tmp_path)) == [home]
    node.hears(over(wake))
    assert node.told(lambda: node.hears(ev.ExecutorDown(home))) == [(4, "drained", 0)]
    assert node.asked(5, home) == [(5, "drained", 0)], "again"
    assert node.asked(6, home, undo=True) == [[1 + 1], (6, "missing", 0)]
    assert read_drained_gpus(str(tmp_path)) == []


def test_who_waits_is_told_that_it_was_undone(tmp_path: Path) -> None:
    node = Node(tmp_path)
    home = only_wake(ask(node.core, 1, "a")).lease.gpu
    node.asked(1, home)
    assert node.asked(2, home, waits=True) == []
    assert node.asked(3, home, undo=True) == [(2, "serves", 1), [2], (3, "serves", 1)]


def test_the_next_controller_goes_on_with_it(tmp_path: Path) -> None:
    RunPaths(tmp_path).make()
    keep_drained_gpus(str(tmp_path), {1, 7})
    node = Node(tmp_path)
    assert node.gpus.restore() == [0]
    assert node.core.drained == {1}
    assert node.gpus.told() == m.GpusDrained(gpus=[1], left=1)


def test_what_cannot_be_kept_is_not_done(tmp_path: Path) -> None:
    node = Node(tmp_path)
    RunPaths(tmp_path).drained_gpus.with_suffix(".new").mkdir()
    assert node.asked(1, 0) == [(1, "not_kept", 0)]
    assert node.core.drained == frozenset()
