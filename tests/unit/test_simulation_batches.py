"""Simulated functions whose requests come in batches: what the scheduling core hears, how many it takes, how long."""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.main import simulation_of
from dormouse.controller.simulator.scenario import POLICIES, parse_scenario
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

GB = 1_000_000_000
LINK = Topology(host_bps=float(GB))
BATCHED = ModelSpec(name="m", nbytes=GB // 10, run_s=0.1, batch=4, per_request_s=0.02)


def made(
    spec: ModelSpec = BATCHED, deadline_s: float = 9.0, gpus: int = 1, faults: tuple[Fault, ...] = (), others: int = 0
) -> Simulation:
    """Functions beside it have single requests of half a second."""
    models = [spec, *[ModelSpec(name="other", nbytes=GB // 10, run_s=0.5)] * others]
    return Simulation(Policy(), LINK, gpus, GB, models, [deadline_s] * len(models), 0.9, 3, faults)


class Told:
    """What a simulation has told its core of batches, and what that has answered."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.asked: list[int] = []  # how many waited
        self.came: list[int] = []  # of them later
        self.sizes: list[int] = []

    def run(self, times_s: list[float], functions: list[int] | None = None) -> list[float]:
        handle = self.simulation.core.handle

        def watched(event: ev.Event, now_s: float) -> list[ev.Action]:
            if isinstance(event, ev.Asked) and event.batch is not None:
                self.asked.append(len(event.batch.requests))
            if isinstance(event, ev.BatchChanged):
                assert event.left == ()
                self.came.append(len(event.came))
            actions = handle(event, now_s)
            self.simulation.core.check()
            self.sizes += [each.requests for each in actions if isinstance(each, ev.WakeOn) and each.requests]
            return actions

        with patch.object(self.simulation.core, "handle", watched):
            who = np.array(functions or [0] * len(times_s), dtype=np.int64)
            found: list[float] = self.simulation.run(np.array(times_s), who).tolist()
        return found


def test_what_comes_while_a_batch_runs_is_the_next_one() -> None:
    """The first one waits for the copy as well; a batch of b takes 80 ms and 20 ms for each of its requests."""
    told = Told(made())
    latencies_s = told.run([0.0, 0.01, 0.02, 0.03, 0.04, 0.05])
    assert (told.asked, told.sizes) == ([1, 5, 1], [1, 4, 1])
    assert latencies_s == pytest.approx([0.1, 0.25, 0.24, 0.23, 0.22, 0.31])


def test_what_comes_while_a_batch_waits_for_its_gpu_is_in_it() -> None:
    told = Told(made(others=1))
    told.run([0.0, 0.1, 0.2, 0.3], [1, 0, 0, 0])
    assert (told.asked, told.came, told.sizes) == ([1], [1, 1], [3])


def test_the_core_is_told_of_no_more_than_two_batches() -> None:
    told = Told(made(others=1))
    told.run([0.0] + [0.1] * 16, [1] + [0] * 16)
    assert (told.asked, told.came, told.sizes) == ([1, 8, 8, 4], [1] * 7, [4] * 4)


def test_each_request_is_told_once_while_it_waits() -> None:
    """Twice as many take twice as much telling."""
    for batch in (4, 128):
        spec = ModelSpec(name="m", nbytes=GB // 10, run_s=0.1, batch=batch, per_request_s=0.0)
        told = Told(made(spec, others=1))
        told.run([0.0] + [0.1] * batch, [1] + [0] * batch)
        assert (sum(told.asked) + sum(told.came), told.sizes) == (batch, [batch])


def test_the_core_learns_what_batches_take() -> None:
    told = Told(made())
    told.run([0.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    assert told.sizes == [1, 1, 1, 4]
    batches = told.simulation.core.functions["f0"].batches
    assert batches is not None
    assert batches.times.known == pytest.approx({1: 0.1, 4: 0.16})


@pytest.mark.parametrize(("deadline_s", "sizes"), [(9.0, [1, 1, 1, 4]), (0.3, [1, 1, 1, 2, 1, 1])])
def test_a_batch_is_no_larger_than_its_deadlines_allow(deadline_s: float, sizes: list[int]) -> None:
    """As far as the core knows, four take as long as one by one."""
    told = Told(made(deadline_s=deadline_s))
    told.run([0.0, 1.0, 2.0, 2.01, 2.02, 2.03, 2.04])
    assert told.sizes == sizes


def test_by_batch_wait_they_wait_for_more() -> None:
    """Ten pairs teach the core that two take little longer than one, and that the next one comes soon."""
    spec = ModelSpec(name="m", nbytes=GB // 10, run_s=0.1, batch=2, batch_wait_s=0.05, per_request_s=0.001)
    told = Told(made(spec))
    pairs = [0.25 + 0.1 * number + more for number in range(10) for more in (0.0, 0.01)]
    latencies_s = told.run([0.0, 0.2, *pairs, 1.32, 1.35, 1.47])
    assert told.sizes == [1, 1, *[2] * 10, 2, 1]
    assert latencies_s[-3:] == pytest.approx([0.131, 0.101, 0.15])


def test_without_batches_beside_it_nothing_changes() -> None:
    told = Told(made(others=1))
    assert told.run([0.0, 0.0], [1, 1]) == pytest.approx([0.5, 1.0])
    assert told.sizes == []


@pytest.mark.parametrize(("idempotent", "answered"), [(True, True), (False, False)])
def test_a_gpu_that_is_lost_takes_a_whole_batch_with_it(idempotent: bool, answered: bool) -> None:
    spec = ModelSpec(name="m", nbytes=GB // 10, run_s=0.1, batch=4, per_request_s=0.02, idempotent=idempotent)
    told = Told(made(spec, faults=(Fault(gpu=0, at_s=0.15, back_s=0.5),)))
    latencies_s = told.run([0.0, 0.01, 0.02, 0.12, 0.9])
    assert np.isfinite(latencies_s).tolist() == [True, answered, answered, True, True]
    assert told.sizes == ([1, 2, 3, 1] if idempotent else [1, 2, 1, 1])


def test_requests_that_are_refused_let_the_next_ones_ask() -> None:
    large = ModelSpec(name="large", nbytes=GB * 6 // 10, run_s=0.1)
    spec = ModelSpec(name="m", nbytes=GB * 6 // 10, run_s=0.1, batch=2, per_request_s=0.02)
    policy = Policy(order="fifo", placement="bound", passed_over_ms=0)
    simulation = Simulation(policy, LINK, 1, GB, [spec, large], [9.0] * 2, 0.9)
    told = Told(simulation)
    latencies_s = told.run([0.0, 1.0, 2.0], [1, 0, 0])
    assert np.isfinite(latencies_s).tolist() == [True, False, False]
    assert told.asked == [1, 1]


def tree(**keys: Any) -> dict[str, Any]:
    model = {"name": "m", "size": "100MB", "run": "100ms", **keys}
    return {"gpus": {"count": 1, "memory": "1GB"}, "arrivals": {"rate": 600, "minutes": 1}, "models": [model]}


def test_a_scenario_has_batches() -> None:
    (spec,) = parse_scenario(tree(batch=8, batch_wait="5ms", per_request="10ms"), "s.toml").models
    assert (spec.batch, spec.batch_wait_s, spec.per_request_s) == (8, 0.005, 0.01)
    (spec,) = parse_scenario(tree(batch=8), "s.toml").models
    assert spec.per_request_s == spec.run_s
    (spec,) = parse_scenario(tree(), "s.toml").models
    assert (spec.batch, spec.per_request_s) == (0, 0.0)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"batch": 129}, "batch is 129; write 1 to 128"),
        ({"batch": -1}, "batch is -1; write 1 to 128"),
        ({"batch_wait": "5ms"}, "batch_wait is '5ms'; write batch = 8"),
        ({"per_request": "5ms"}, "per_request is '5ms'; write batch = 8"),
        ({"batch": 8, "per_request": "101ms"}, "per_request is '101ms'; one request takes 100ms"),
        ({"batch": 8, "host": "1ms"}, "host is 1ms; leave it out"),
        ({"batch": 8, "instances": 2}, "instances is 2; leave it out"),
    ],
)
def test_batches_that_cannot_be_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_scenario(tree(**keys), "s.toml")
    assert f"s.toml: models[0].{said}" in str(refused.value)


@pytest.mark.parametrize("policy", ["native", "torpor-drop"])
def test_policies_that_know_single_requests_only_are_refused(policy: str) -> None:
    scenario = parse_scenario(tree(batch=8, native="200MB", cold_start="1s"), "s.toml")
    with pytest.raises(ConfigError, match="m has batches, and the policy has"):
        simulation_of(scenario, POLICIES[policy], 1)
