"""GPUs that are lost in the middle of a simulation: who runs again, who fails, and what is read from them."""

import numpy as np
import pytest

from dormouse.controller.simulator.building import read_faults
from dormouse.controller.simulator.checks import Checks
from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.tree import FaultAt
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import Policy

MB = 1_000_000
GB = 1_000.0 * MB
NAN = float("nan")

PEER = Topology(host_bps=GB, peer_bps=((0.0, 1.2 * GB), (1.2 * GB, 0.0)))


def model(nbytes: int, run_s: float, idempotent: bool = False) -> ModelSpec:
    return ModelSpec(name="m", nbytes=nbytes * MB, run_s=run_s, idempotent=idempotent)


def run(
    models: list[ModelSpec], gpus: int, arrivals: list[tuple[float, int]], *faults: Fault
) -> tuple[Simulation, list[float]]:
    policy = Policy(order="fifo", placement="tangram")
    made = Simulation(policy, PEER, gpus, 1000 * MB, models, [9.0] * len(models), 0.9, 0, faults)
    times_s = np.array([at_s for at_s, _ in arrivals])
    return made, made.run(times_s, np.array([function for _, function in arrivals])).tolist()


def lost(at_s: float, back_s: float | None = None, gpu: int = 0) -> Fault:
    return Fault(gpu=gpu, at_s=at_s, back_s=back_s)


def drained(at_s: float, back_s: float | None = None, gpu: int = 0) -> Fault:
    return Fault(gpu=gpu, at_s=at_s, back_s=back_s, drain=True)


def test_what_runs_on_a_gpu_that_is_drained_ends_and_who_waits_is_served_when_it_is_back() -> None:
    """The first ends at 1.0, and nothing began beside it; from 3.0 the GPU is there, empty: copy 0.5 s, run 1 s."""
    made, found = run([model(500, 1.0), model(500, 1.0)], 1, [(0.0, 0), (0.9, 1), (5.0, 1)], drained(0.95, 3.0))
    assert found == pytest.approx([1.0, 3.1, 1.0])
    assert made.core.gpus[0].epoch == 2


def test_other_gpus_serve_while_one_is_drained() -> None:
    """From 2.0 GPU 1 has what GPU 0 had: from the host, for it has gone."""
    spec = model(500, 0.1)
    made, found = run([spec], 2, [(0.0, 0), (1.0, 0), (2.5, 0), (3.5, 0)], drained(2.0))
    assert found == pytest.approx([0.5, 0.1, 0.5, 0.1])
    assert list(made.core.gpus) == [1]


def test_a_gpu_that_is_drained_no_more_before_its_last_lease_ended_has_never_been_gone() -> None:
    made, found = run([model(500, 1.0), model(500, 1.0)], 1, [(0.0, 0), (0.7, 1), (5.0, 0)], drained(0.6, 0.8))
    assert found == pytest.approx([1.0, 1.3, 1.0])
    assert made.core.gpus[0].epoch == 1


def test_gpus_are_drained_at_once_and_each_comes_back_at_its_time() -> None:
    arrivals = [(0.0, 0), (2.0, 0), (8.0, 0)]
    made, found = run([model(500, 0.1)], 2, arrivals, drained(1.0, 4.0), drained(1.0, 6.0, gpu=1))
    assert found == pytest.approx([0.5, 2.5, 0.1])
    assert sorted(made.core.gpus) == [0, 1]


def test_a_scenario_says_whether_a_gpu_is_lost_or_drained() -> None:
    said = [FaultAt(gpu=0, at="2s", back="3s", drain=True), FaultAt(gpu=1, at="1s")]
    assert read_faults(Checks("s.toml"), said, 2, 10.0) == [lost(11.0, gpu=1), drained(12.0, 13.0)]


def test_a_lease_is_lost_with_its_gpu_and_who_waits_is_served_when_it_is_back() -> None:
    """The second has waited since 1.0 for the GPU that is back, empty, at 3.0: copy 0.5 s, run 1 s."""
    made, found = run([model(500, 1.0), model(500, 1.0)], 1, [(0.0, 0), (0.9, 1), (5.0, 1)], lost(0.95, 3.0))
    assert found == pytest.approx([NAN, 3.1, 1.0], nan_ok=True)
    assert made.busy_s == pytest.approx([0.95 + 1.0 + 1.0])
    assert made.host_nbytes == 500 * MB
    assert made.core.gpus[0].epoch == 2


def test_an_idempotent_request_runs_once_more_but_not_twice() -> None:
    spec = model(500, 1.0, idempotent=True)
    _, once = run([spec], 1, [(0.0, 0)], lost(0.5, 2.0))
    assert once == pytest.approx([3.0])
    _, twice = run([spec], 1, [(0.0, 0)], lost(0.5, 2.0), lost(2.5, 4.0))
    assert twice == pytest.approx([NAN], nan_ok=True)


def test_other_gpus_take_over() -> None:
    """GPU 0 is lost at 0.2, in the copy; GPU 1 has what is asked again at once."""
    _, found = run([model(500, 0.1, idempotent=True)], 2, [(0.0, 0), (1.0, 0)], lost(0.2))
    assert found == pytest.approx([0.7, 0.1])


def test_requests_for_gpus_that_never_come_back_are_never_answered() -> None:
    made, found = run([model(500, 0.1)], 1, [(0.0, 0), (2.0, 0), (3.0, 0)], lost(1.0))
    assert found == pytest.approx([0.5, NAN, NAN], nan_ok=True)
    assert list(made.core.waiting) == [1, 2]


def test_what_was_being_read_from_a_lost_gpu_comes_from_the_host() -> None:
    """600 MB over 1.2 GB/s from 10.1; at 10.35 half are there, the rest comes over 1 GB/s."""
    arrivals = [(0.0, 0), (5.0, 1), (10.0, 1), (10.1, 0), (12.0, 0)]
    made, found = run([model(600, 0.1), model(100, 0.3)], 2, arrivals, lost(10.35))
    assert found == pytest.approx([0.6, 0.3, 0.3, 0.55, 0.1])
    assert made.host_nbytes == pytest.approx(1000 * MB, abs=1)  # 600, 100, and half of 600


def test_a_copy_from_a_gpu_whose_reader_is_lost_lets_go_of_it() -> None:
    """GPU 1 reads GPU 0, and is lost at 10.35; the model that needs the room on GPU 0 since 10.4 need not wait."""
    arrivals = [(0.0, 0), (5.0, 1), (10.0, 1), (10.1, 0), (10.4, 2)]
    made, found = run([model(600, 0.1), model(100, 0.2), model(900, 0.1)], 2, arrivals, lost(10.35, gpu=1))
    assert found == pytest.approx([0.6, 0.2, 0.2, NAN, 0.9], nan_ok=True)
    assert made.gpus[0].residency.seats.none
    arrivals[-1] = (10.3, 2)  # it waits since then, until the reader is gone
    assert run([model(600, 0.1), model(100, 0.2), model(900, 0.1)], 2, arrivals, lost(10.35, gpu=1))[1][-1] == (
        pytest.approx(0.95)
    )
