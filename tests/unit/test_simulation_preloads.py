"""Simulated GPUs are given models before anybody asks, by the core's word and in the link's time."""

from typing import Any

import numpy as np
import pytest

from dormouse.controller.simulator.devices import Fault, ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.controller.simulator.streams.cost import StepCost
from dormouse.controller.simulator.streams.model import Lengths, LlmSpec
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.preloading import PLAN_S, REST_S
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import Policy

MB = 1_000_000
RUN_S = 0.01
COPY_S = 0.1  # of a model of 100 MB


def function(mb: int = 100, segment_mb: int = 0) -> ModelSpec:
    return ModelSpec(name="function", nbytes=mb * MB, run_s=RUN_S, segment_nbytes=segment_mb * MB)


def language_model(start_s: float = 0.0) -> ModelSpec:
    lengths = Lengths(mean=10.0, most=10)
    llm = LlmSpec(
        kv_nbytes=1000,
        cost=StepCost(fixed_s=0.02),
        ttft_s=1.0,
        tpot_s=1.0,
        prompt=lengths,
        output=lengths,
        idle_s=5.0,
        start_s=start_s,
    )
    return ModelSpec(name="llm", nbytes=50 * MB, run_s=0.2, llm=llm)


class Run:
    """``heard`` are the preloads that are over, with their times; ``ordered`` those that began."""

    def __init__(
        self, models: list[ModelSpec], *asked: tuple[float, int], preload: bool = True, mb: int = 200, gpus: int = 1,
        faults: tuple[Fault, ...] = (), peer_bps: float = 0.0,
    ) -> None:  # fmt: skip
        peers = tuple(tuple(peer_bps if a != b else 0.0 for b in range(gpus)) for a in range(gpus))
        topology = Topology(host_bps=1e9, peer_bps=peers if peer_bps else ())
        deadlines = [1.0] * len(models)
        self.simulation = Simulation(
            Policy(preload=preload), topology, gpus, mb * MB, models, deadlines, 0.98, faults=faults
        )
        self.heard: list[tuple[float, ev.PreloadOver]] = []
        self.ordered: list[tuple[float, str]] = []
        core = self.simulation.core
        handle = core.handle

        def watched(event: ev.Event, now_s: float) -> Any:
            actions = handle(event, now_s)
            core.check()
            for gpu in self.simulation.gpus:
                gpu.residency.check()
            if isinstance(event, ev.PreloadOver):
                self.heard.append((now_s, event))
            self.ordered += [(now_s, each.instance) for each in actions if isinstance(each, ev.PreloadOn)]
            return actions

        core.handle = watched  # type: ignore[method-assign]
        times = np.array([at_s for at_s, _ in asked])
        self.latency_s = self.simulation.run(times, np.array([who for _, who in asked]))

    def outcomes(self) -> list[tuple[str, str, int]]:
        return [(over.instance, over.outcome, over.copied_nbytes // MB) for _, over in self.heard]


OFTEN = [(float(second), who) for second in range(1, 6) for who in (0, 1)]
"""Two models that fill the GPU, five times each."""


@pytest.mark.parametrize("preload", [False, True])
def test_what_a_rare_one_has_evicted_is_there_again(preload: bool) -> None:
    run = Run([function(), function(), function()], *OFTEN, (6.0, 2), (9.0, 0), (9.5, 1), preload=preload)
    late_s = sorted(run.latency_s[-2:].tolist())
    if preload:
        assert late_s == pytest.approx([RUN_S, RUN_S])
        ((at_s, over),) = run.heard
        assert over.outcome == "there"
        assert at_s == pytest.approx(run.ordered[0][0] + COPY_S)
        assert 6.0 + COPY_S + REST_S <= run.ordered[0][0] <= 6.0 + COPY_S + PLAN_S
    else:
        assert late_s == pytest.approx([RUN_S, COPY_S])
        assert run.heard == []


def test_a_request_comes_in_the_middle_and_has_what_has_arrived() -> None:
    """Four segments of 25 MB; 60 % of the copy is done: two of them have arrived."""
    models = [function(segment_mb=25), function(), function()]
    at_s = Run(models, *OFTEN, (6.0, 1), (6.5, 2)).ordered[0]
    assert at_s[1] == "f0"
    begins_s = at_s[0]
    run = Run(models, *OFTEN, (6.0, 1), (6.5, 2), (begins_s + 0.6 * COPY_S, 0))
    assert run.outcomes()[0] == ("f0", "yielded", 50)
    assert run.latency_s[-1] == pytest.approx(0.5 * COPY_S)


def test_another_request_takes_the_link_and_the_room_at_once() -> None:
    models = [function(segment_mb=25), function(), function(), function()]
    before = [*OFTEN, (6.0, 1), (6.5, 2)]
    begins_s = Run(models, *before).ordered[0][0]
    run = Run(models, *before, (begins_s + 0.6 * COPY_S, 3))
    assert run.outcomes()[0] == ("f0", "yielded", 50)
    assert run.latency_s[-1] == pytest.approx(COPY_S)


def test_streams_come_first_too() -> None:
    """A language model that rests in its seat computes again: what comes is given up, and it loses nothing."""
    models = [function(segment_mb=25), language_model(), function(mb=150)]
    before = [(1.0, 0), (1.2, 0), (1.4, 0), (1.6, 1), (2.0, 2), (2.16, 1)]
    alone = Run(models, *before)
    assert alone.outcomes()[-1] == ("f0", "there", 50)  # the rest is there; one before was given up for the stream
    at_s, _ = alone.ordered[-1]
    run = Run(models, *before, (at_s + 0.3 * COPY_S, 1))
    assert run.outcomes()[-2:] == [("f0", "yielded", 25), ("f0", "there", 25)]
    assert run.latency_s[-1] == pytest.approx(0.02)  # a step


def test_a_gpu_that_comes_back_is_filled_and_one_that_is_lost_brings_nothing() -> None:
    fault = Fault(gpu=0, at_s=6.0, back_s=7.0)
    run = Run([function(), function()], *OFTEN, (9.0, 0), (9.5, 1), faults=(fault,))
    assert run.latency_s[-2:].tolist() == pytest.approx([RUN_S, RUN_S])
    assert [over.outcome for _, over in run.heard] == ["there", "there"]
    begins_s = run.ordered[0][0]
    again = Fault(gpu=0, at_s=begins_s + 0.05, back_s=8.0)
    run = Run([function(), function()], *OFTEN, (9.0, 0), (9.5, 1), faults=(fault, again))
    assert len(run.ordered) > len(run.heard)
    assert run.latency_s[-2:].tolist() == pytest.approx([RUN_S, RUN_S])


def test_nothing_is_copied_that_is_on_another_gpu() -> None:
    run = Run([function(), function()], *OFTEN, gpus=2, peer_bps=1e10)
    assert run.ordered == []


@pytest.mark.parametrize("preload", [False, True])
def test_the_runtime_of_a_language_model_is_there_too(preload: bool) -> None:
    """A process takes 0.4 s to be there, the copy 0.05 s, a step 0.02 s."""
    fault = Fault(gpu=0, at_s=6.0, back_s=7.0)
    asked = ((1.0, 0), (2.0, 0), (3.0, 0), (9.0, 0))
    run = Run([language_model(start_s=0.4)], *asked, faults=(fault,), preload=preload)
    assert run.latency_s.tolist() == pytest.approx([0.42, 0.02, 0.02, 0.02 if preload else 0.42])
    assert run.ordered == ([run.ordered[0]] if preload else [])  # the core knows that it is there


def test_a_runtime_that_is_asked_for_meanwhile_takes_its_time() -> None:
    fault = Fault(gpu=0, at_s=6.0, back_s=7.0)
    begins_s = Run([language_model(start_s=0.4)], (1.0, 0), (2.0, 0), (9.0, 0), faults=(fault,)).ordered[0][0]
    run = Run([language_model(start_s=0.4)], (1.0, 0), (2.0, 0), (begins_s + 0.2, 0), faults=(fault,))
    assert run.outcomes() == [("f0", "there", 50)]
    assert run.latency_s[-1] == pytest.approx(0.42)
