"""Simulated functions of which several instances may run at once: where their requests run, and what they share."""

from unittest.mock import patch

import numpy as np
import pytest

from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.scenario import parse_scenario
from dormouse.controller.simulator.tree import MAX_INSTANCES
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.policy import Policy

GB = 1_000_000_000
LINK = Topology(host_bps=float(GB))


def made(instances: int, gpus: int = 2, models: int = 1, faults: tuple[Fault, ...] = ()) -> Simulation:
    spec = ModelSpec(name="m", nbytes=GB // 10, run_s=0.2, instances=instances, idempotent=True)
    policy = Policy(order="fifo", placement="torpor", eviction="cost")
    return Simulation(policy, LINK, gpus, GB, [spec] * models, [9.0] * models, 0.9, 3, faults)


def latencies(simulation: Simulation, times_s: list[float]) -> list[float]:
    found: list[float] = simulation.run(np.array(times_s), np.zeros(len(times_s), dtype=np.int64)).tolist()
    simulation.core.check()
    return found


def test_one_instance_runs_one_by_one() -> None:
    assert latencies(made(1), [0.0, 0.0, 0.0]) == pytest.approx([0.2, 0.4, 0.6])


def test_two_instances_run_on_two_gpus() -> None:
    assert latencies(made(2), [0.0, 0.0]) == pytest.approx([0.2, 0.2])


def test_a_request_without_an_idle_instance_waits_for_the_first() -> None:
    simulation = made(2, gpus=3)
    assert latencies(simulation, [0.0, 0.0, 0.0, 0.0, 0.45]) == pytest.approx([0.2, 0.2, 0.4, 0.6, 0.2])


def test_a_sibling_needs_no_copy_where_one_has_run() -> None:
    simulation = made(2)
    latencies(simulation, [0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
    assert (simulation.wakes, simulation.host_nbytes) == (2, 2 * (GB // 10))
    resident = simulation.core.gpus[0].resident
    assert resident == simulation.core.gpus[1].resident == {"f0": GB // 10, "f0.1": GB // 10}


def test_a_lost_gpu_frees_the_instance() -> None:
    simulation = made(2, faults=(Fault(gpu=0, at_s=0.1, back_s=0.2),))
    assert all(np.isfinite(latencies(simulation, [0.0, 0.0, 1.0, 1.0])))
    assert simulation.latency_s[2:].tolist() == pytest.approx([0.2, 0.2])


def test_a_refused_request_frees_the_instance() -> None:
    """Function 0 has GPU 0 for good, and function 1 no room, however often it asks."""
    spec = ModelSpec(name="m", nbytes=GB * 6 // 10, run_s=0.2, instances=2)
    policy = Policy(order="fifo", placement="bound", passed_over_ms=0)
    simulation = Simulation(policy, LINK, 1, GB, [spec] * 2, [9.0] * 2, 0.9)
    asked: list[str] = []

    def watched(event: ev.Event, now_s: float) -> list[ev.Action]:
        if isinstance(event, ev.Asked):
            asked.append(event.instance)
        return handle(event, now_s)

    handle = simulation.core.handle
    with patch.object(simulation.core, "handle", watched):
        latency_s = simulation.run(np.array([0.0, 1.0, 2.0, 3.0]), np.array([0, 1, 1, 1]))
    assert np.isnan(latency_s).tolist() == [False, True, True, True]
    assert asked == ["f0", "f1", "f1", "f1"]


@pytest.mark.parametrize("count", [0, MAX_INSTANCES + 1])
def test_a_number_of_instances_that_cannot_be(count: int) -> None:
    tree = {
        "gpus": {"count": 1, "memory": "1GB"},
        "arrivals": {"rate": 1},
        "models": [{"name": "m", "size": "1GB", "run": "20ms", "instances": count}],
    }
    with pytest.raises(ConfigError, match=f"models\\[0\\].instances.*{count}.*1 to {MAX_INSTANCES}"):
        parse_scenario(tree, "s.toml")
