"""Turns that go round are simulated at once, and nothing comes out that step by step would not."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from streams_world import MB, function, kinds, llm, made, watched

from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.streams.cost import StepCost
from dormouse.controller.simulator.streams.model import Lengths
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import Policy

Log = list[tuple[float, ev.Event, list[ev.Action]]]


def models(count: int, kv: int = 1000, turn_s: float = 0.001) -> list[ModelSpec]:
    """Of different sizes, steps, wanted times and lengths."""
    found = []
    for number in range(count):
        spec = llm(prompt=20 + 30 * number, output=90 + 7 * number, nbytes=80, kv=kv)
        assert spec.llm is not None
        cost = StepCost(fixed_s=0.01 + 0.003 * number, per_sequence_s=0.001, per_context_s=1e-5, per_prompt_s=0.0005)
        wanted = {"tpot_s": 0.2 * (1 + number % 3), "ttft_s": 0.5 + number % 2}
        changed = msgspec.structs.replace(spec.llm, cost=cost, turn_s=turn_s * (1 + number % 2), **wanted)
        found.append(msgspec.structs.replace(spec, llm=changed))
    return found


def both(make: Callable[[], Simulation], asked: list[tuple[float, int]]) -> tuple[list[Simulation], list[Log]]:
    """The same, step by step and at once."""
    simulations, logs = [], []
    for rotates in (False, True):
        simulation = make()
        simulation.executors.runtimes.rotates = rotates
        logs.append(watched(simulation))
        simulation.run(np.array([at_s for at_s, _ in asked]), np.array([who for _, who in asked], np.int64))
        simulations.append(simulation)
    slow, fast = (simulation.streams for simulation in simulations)
    assert slow is not None
    assert fast is not None
    for name in ("first_s", "over_s", "preempted"):
        np.testing.assert_array_equal(getattr(slow, name), getattr(fast, name))
    assert simulations[0].busy_s == pytest.approx(simulations[1].busy_s)
    assert simulations[0].host_nbytes == simulations[1].host_nbytes
    return simulations, logs


@pytest.mark.parametrize("order", ["margin", "fifo"])
def test_nothing_differs_and_the_core_is_asked_for_few_of_the_turns(order: str) -> None:
    asked = [(0.02 * number, number % 5) for number in range(10)]
    _, (slow, fast) = both(lambda: made(models(5), policy=Policy(turn_order=order)), asked)
    assert len(kinds(slow, ev.TurnWanted)) > 400
    assert len(kinds(fast, ev.TurnWanted)) < len(kinds(slow, ev.TurnWanted)) / 15


def test_streams_that_end_do_not_end_a_round() -> None:
    """Nor KV that grows: the core hears of nothing once all prompts are computed, but when it wants to (Tick)."""
    asked = [(0.02 * number, number % 5) for number in range(10)]
    simulations, (_, fast) = both(lambda: made(models(5), policy=Policy(turn_order="fifo")), asked)
    streams = simulations[1].streams
    assert streams is not None
    assert max(kinds(fast, ev.TurnWanted)) < streams.over_s.min() / 4


def test_a_lease_that_ends_does_not_end_a_round() -> None:
    """It had nothing to do: those who take turns do not notice."""
    short, *long = models(4)
    assert short.llm is not None
    brief = msgspec.structs.replace(short.llm, output=Lengths(mean=2, most=2), idle_s=0.5)
    specs = [msgspec.structs.replace(short, llm=brief), *long]
    asked = [(0.02 * number, number) for number in range(4)]
    simulations, (_, fast) = both(lambda: made(specs, policy=Policy(turn_order="fifo")), asked)
    streams = simulations[1].streams
    assert streams is not None
    first_s, *_ = kinds(fast, ev.LeaseOver)
    assert max(kinds(fast, ev.TurnWanted)) < first_s < streams.over_s[1:].min()


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    count=st.integers(2, 6),
    gpus=st.integers(1, 2),
    order=st.sampled_from(["margin", "fifo"]),
    mb=st.sampled_from([300, 500, 1000]),
    lost=st.booleans(),
    turn_s=st.sampled_from([0.0, 0.002]),
)
@example(seed=0, count=3, gpus=1, order="fifo", mb=300, lost=False, turn_s=0.0)  # steps that were lent
def test_nothing_differs_whatever_comes(
    seed: int, count: int, gpus: int, order: str, mb: int, lost: bool, turn_s: float
) -> None:
    """Functions between, memory that is short, a GPU that is lost."""
    rng = np.random.default_rng(seed)
    times_s = np.sort(rng.uniform(0.0, 12.0, 30)).tolist()
    who = rng.integers(0, count + 1, 30).tolist()
    faults = [Fault(gpu=0, at_s=2.0, back_s=3.0)] if lost else []

    def make() -> Simulation:
        every = [*models(count, 50_000, turn_s), function(100, 0.05)]
        return made(every, *faults, policy=Policy(turn_order=order), gpus=gpus, mb=mb)

    both(make, list(zip(times_s, who, strict=True)))


def test_tenants_shares_are_counted_step_by_step() -> None:
    """Who is next depends on more than margins then."""
    specs = [msgspec.structs.replace(spec, tenant=f"t{number % 2}") for number, spec in enumerate(models(4))]
    asked = [(0.1 * number, number % 4) for number in range(12)]

    def make() -> Simulation:
        shares = (("t0", 1.0), ("t1", 3.0))
        return Simulation(Policy(), Topology(host_bps=1e9), 1, 1000 * MB, specs, [9.0] * 4, 0.9, 0, shares=shares)

    _, (slow, fast) = both(make, asked)
    assert kinds(slow, ev.TurnWanted) == kinds(fast, ev.TurnWanted)
