"""While a simulated runtime waits for its weights, others have steps in its turn."""

from itertools import pairwise

import numpy as np
import pytest
from streams_world import COST, GB, MB, function, kinds, llm, made, run, watched

from dormouse.controller.simulator.devices import Fault
from dormouse.core.decisions.scheduling import events as ev
from dormouse.schemas.policy import Policy

COPY_S = 300 * MB / GB
"""Of a model; a prompt takes 0.12 s of that, and a step without one 0.02."""


def test_a_runtime_has_steps_in_the_turn_of_one_that_waits_for_its_weights() -> None:
    """Function 1 begins at 0.5 and has its weights at 0.8. Its prompt is computed at 0.62, and then function 0 goes on,
    of whose 60 steps 10 are done.
    """
    simulation = made([llm(output=61), llm(output=11)])
    log = watched(simulation)
    _, streams = run(simulation, (0.0, 0), (0.5, 1))
    assert streams.first_s == pytest.approx([COPY_S, COPY_S])
    told = kinds(log, ev.TurnWanted)
    assert told[1:9] == pytest.approx([0.64 + 0.02 * number for number in range(8)])
    assert not [now_s for now_s in kinds(log, ev.TurnIdle) if 0.5 < now_s < 0.5 + COPY_S]  # the turn stays where it is
    rest = 60 - 10 - 9
    assert streams.over_s[0] == pytest.approx(0.5 + COPY_S + (rest + 10) * COST.fixed_s)
    assert streams.over_s[1] == pytest.approx(COPY_S + 20 * COST.fixed_s)


def test_the_one_without_a_step_for_longest_borrows() -> None:
    simulation = made([llm(output=200, nbytes=10), llm(output=200, nbytes=10), llm(nbytes=600)])
    log = watched(simulation)
    run(simulation, (0.0, 0), (0.3, 1), (1.0, 2))
    serials = [event.serial for now_s, event, _ in log if isinstance(event, ev.TurnWanted) and 1.2 < now_s < 1.58]
    assert len(serials) > 10
    assert all(one != other for one, other in pairwise(serials))
    assert set(serials) == {1, 2}


def test_nobody_gets_a_turn_while_a_step_is_lent() -> None:
    """The weights are there at 0.81, in the midst of a lent step: who had the turn goes on, and others wait."""
    simulation = made([llm(output=61), llm(output=11, nbytes=310)])
    simulation.executors.runtimes.rotates = False
    log = watched(simulation)
    _, streams = run(simulation, (0.0, 0), (0.5, 1))
    turns = [now_s for now_s, _, actions in log if [each for each in actions if isinstance(each, ev.TurnOn)]]
    assert turns[0] == pytest.approx(0.5 + 0.31)
    begins = [now_s for now_s in kinds(log, ev.TurnIdle) if now_s > turns[0]]
    assert begins[0] == pytest.approx(0.82)
    assert streams.over_s[0] == pytest.approx(0.82 + (40 + 10) * COST.fixed_s)


def test_a_step_that_would_cost_another_its_memory_is_not_lent() -> None:
    """That of function 0 has KV for its first stream, and not for the prompt that comes at 0.71, during a step."""
    simulation = made([llm(prompt=10, output=61, kv=1_000_000), llm(output=11)], mb=700)
    log = watched(simulation)
    run(simulation, (0.0, 0), (0.5, 1), (0.71, 0))
    told = [now_s for now_s in kinds(log, ev.TurnWanted) if 0.62 < now_s < 0.8]
    assert told == pytest.approx([0.64, 0.66, 0.68, 0.7, 0.71, 0.72])
    assert simulation.wakes == 2  # nobody had to leave


def test_a_stream_that_comes_meanwhile_is_computed_meanwhile() -> None:
    """Its runtime has its weights: the first token does not wait for another's."""
    simulation = made([llm(output=4), llm(nbytes=900)], mb=2000)
    _, streams = run(simulation, (0.0, 0), (0.5, 1), (1.0, 0))
    assert streams.first_s[2] == pytest.approx(0.12)
    assert streams.first_s[1] == pytest.approx(0.9)


def test_a_lent_step_is_lost_with_its_gpu() -> None:
    simulation = made([llm(output=61), llm(output=11)], Fault(gpu=0, at_s=0.71, back_s=0.75))
    _, streams = run(simulation, (0.0, 0), (0.5, 1))
    assert np.isfinite(streams.over_s).all()
    assert not simulation.gpus[0].lent


@pytest.mark.parametrize("preload", [False, True])
@pytest.mark.parametrize(("mb", "turns"), [(330, 1), (900, 1), (500, 2), (900, 2)])
def test_all_is_answered_and_given_back_whatever_comes(mb: int, turns: int, preload: bool) -> None:
    models = [*(llm(prompt=20 + 300 * number, output=30, nbytes=100, kv=100_000) for number in range(4)), function(90)]
    for seed in range(1000, 1003):
        rng = np.random.default_rng(seed)
        asked = [(float(at_s), int(rng.integers(0, 5))) for at_s in np.sort(rng.uniform(0.0, 4.0, 24))]
        simulation = made(models, policy=Policy(turns=turns, preload=preload), mb=mb)
        watched(simulation)
        latency_s, _ = run(simulation, *asked)
        assert np.isfinite(latency_s).all()
        gpu = simulation.gpus[0]
        assert (gpu.lent, gpu.leases) == (False, {})


@pytest.mark.parametrize("seed", [1015, 1020])
def test_a_lease_that_is_overdue_for_its_turn_asks_for_one_tick_at_a_time(seed: int) -> None:
    """It jumps the order while its turn is not worth a wake yet, and so is held for no GPU."""
    models = [*(llm(prompt=20 + 300 * number, output=30, nbytes=100, kv=100_000) for number in range(4)), function(90)]
    rng = np.random.default_rng(seed)
    asked = [(float(at_s), int(rng.integers(0, 5))) for at_s in np.sort(rng.uniform(0.0, 4.0, 24))]
    simulation = made(models, policy=Policy(), mb=500)
    watched(simulation)
    latency_s, _ = run(simulation, *asked)
    assert np.isfinite(latency_s).all()
