"""The simulator with what was measured of a real node: time outside leases, and run times that vary."""

from unittest.mock import patch

import numpy as np
import pytest

from dormouse.controller.simulator.devices import Fault, ModelSpec, OutsideLease
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import Policy

OUTSIDE = OutsideLease(before_s=0.003, turn_s=0.005, after_s=0.002)


def simulation(outside: OutsideLease | None, runs_s: tuple[float, ...] = (), seed: int = 0) -> Simulation:
    """One GPU, two functions that both fit."""
    models = [ModelSpec(name="m", nbytes=1_000, run_s=0.1, runs_s=runs_s) for _ in range(2)]
    topology = Topology(host_bps=1e9)
    return Simulation(Policy(order="fifo"), topology, 1, 10_000, models, [1.0, 1.0], 0.9, seed, outside=outside)


def test_a_request_takes_time_before_and_after_its_lease() -> None:
    latency_s = simulation(OUTSIDE).run(np.array([0.0]), np.array([0]))
    assert latency_s == pytest.approx([0.105])
    assert simulation(None).run(np.array([0.0]), np.array([0])) == pytest.approx([0.1])


def test_a_functions_next_request_is_asked_for_after_the_one_before() -> None:
    """So another function's goes first, though it came later."""
    latency_s = simulation(OUTSIDE).run(np.array([0.0, 0.01, 0.02]), np.array([0, 0, 1]))
    assert latency_s == pytest.approx([0.105, 0.303 + 0.002 - 0.01, 0.203 + 0.002 - 0.02])
    alone_s = simulation(OUTSIDE).run(np.array([0.0, 0.01]), np.array([0, 0]))
    assert alone_s == pytest.approx([0.105, 0.103 + 0.005 + 0.1 + 0.002 - 0.01])


def test_run_times_are_drawn_by_the_seed() -> None:
    times_s, functions = np.arange(400.0), np.arange(400) % 2
    latency_s = simulation(None, (0.05, 0.15)).run(times_s, functions)
    assert set(np.round(latency_s, 6)) == {0.05, 0.15}
    assert 0.08 < latency_s.mean() < 0.12
    assert (latency_s == simulation(None, (0.05, 0.15)).run(times_s, functions)).all()
    assert (latency_s != simulation(None, (0.05, 0.15), seed=1).run(times_s, functions)).any()


def test_faults_are_not_simulated_with_it() -> None:
    with pytest.raises(AssertionError, match="router's queue"):
        Simulation(Policy(), Topology(), 1, 10, [], [], 0.9, faults=[Fault(gpu=0, at_s=1.0)], outside=OUTSIDE)


def test_a_refused_request_lets_the_next_of_its_function_ask() -> None:
    models = [ModelSpec(name="m", nbytes=6_000, run_s=0.1) for _ in range(2)]
    policy = Policy(order="fifo", placement="bound", passed_over_ms=0)
    made = Simulation(policy, Topology(host_bps=1e9), 1, 10_000, models, [1.0, 1.0], 0.9, outside=OUTSIDE)
    fates: list[int] = []

    def watched(event: ev.Event, now_s: float) -> list[ev.Action]:
        actions = handle(event, now_s)
        fates.extend(action.request for action in actions if isinstance(action, ev.RefuseAsk))
        return actions

    handle = made.core.handle
    with patch.object(made.core, "handle", watched):
        made.run(np.array([0.0, 1.0, 2.0]), np.array([0, 1, 1]))
    assert fates == [1, 2]
