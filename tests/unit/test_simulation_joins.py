"""Functions that share a simulated runtime: whose prompts join its batch first, by margins and in turn; exact."""

import msgspec
import pytest
from streams_world import COST, MB, made, run

from dormouse.controller.simulator.baselines import SimulatedPolicy
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.streams.model import Lengths, LlmSpec

PROMPT = 256
"""Tokens: one prompt in a step, which takes 0.276 s."""


def wanting(ttft_s: float) -> ModelSpec:
    length = Lengths(mean=PROMPT, most=PROMPT), Lengths(mean=20, most=20)
    spec = LlmSpec(
        kv_nbytes=1000, cost=COST, ttft_s=ttft_s, tpot_s=0.1, prompt=length[0], output=length[1], idle_s=60.0,
        adapter_nbytes=50 * MB, group="t",
    )  # fmt: skip
    return ModelSpec(
        name="chat", nbytes=350 * MB, base="base", base_nbytes=300 * MB, segment_nbytes=50 * MB, run_s=0.3, llm=spec
    )


@pytest.mark.parametrize(
    ("order", "patient", "others"),
    [("margin", [1, 6, 7, 8], [2, 3, 4, 5]), ("fifo", [1, 3, 5, 7], [2, 4, 6, 8])],
)
def test_who_can_wait_waits_for_those_that_cannot(order: str, patient: list[int], others: list[int]) -> None:
    """Four prompts of one that has 5 s, then four of one that has 1.5: in which step each is. In turn two of these are
    late; by margins, none is.
    """
    arrivals = [*[(10.0, 0)] * 4, *[(10.01, 1)] * 4]
    simulation = made([wanting(5.0), wanting(1.5)], policy=msgspec.structs.replace(SimulatedPolicy(), turn_order=order))
    _, streams = run(simulation, (0.0, 0), (5.0, 0), *arrivals)
    first_s = streams.first_s.tolist()[2:]
    assert first_s[:4] == pytest.approx([0.276 * step for step in patient])
    assert first_s[4:] == pytest.approx([0.276 * step - 0.01 for step in others])
    assert sum(each > 1.5 for each in first_s[4:]) == (0 if order == "margin" else 2)
