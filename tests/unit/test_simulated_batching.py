"""Streams that wait for others of their function, as ServerlessLoRA's rule says and as its baselines do: exact."""

from typing import Any

import pytest
from streams_world import llm, made, run

from dormouse.controller.simulator.baselines import SimulatedPolicy, checked_baseline
from dormouse.schemas.errors import ConfigError


def policy(**settings: Any) -> SimulatedPolicy:
    return checked_baseline(SimulatedPolicy(order="fifo", **settings), "x")


def test_a_lone_request_waits_until_only_its_prompt_is_left_of_its_time() -> None:
    """1 s is wanted, and 0.12 s are its prompt's. The model is there by 5 s."""
    asked = (0.0, 0), (5.0, 0)
    _, streams = run(made([llm()], policy=policy(batching="fill-or-expire")), *asked)
    assert streams.first_s.tolist()[1] == pytest.approx(1.0)
    _, streams = run(made([llm()]), *asked)
    assert streams.first_s.tolist()[1] == pytest.approx(0.12)


def test_a_batch_waits_for_less_the_more_prompts_it_has() -> None:
    """Two prompts of 100 tokens take 0.22 s, so they begin 0.78 s after the first has come."""
    _, streams = run(made([llm()], policy=policy(batching="fill-or-expire")), (0.0, 0), (5.0, 0), (5.3, 0))
    assert streams.first_s.tolist()[1:] == pytest.approx([1.0, 0.7])


def test_a_fixed_batch_waits_for_its_size_or_its_delay() -> None:
    arm = policy(batching="fixed", batch_size=2, batch_delay_ms=500)
    _, streams = run(made([llm()], policy=arm), (0.0, 0), (5.0, 0), (9.0, 0), (9.1, 0))
    assert streams.first_s.tolist()[1:] == pytest.approx([0.62, 0.32, 0.22])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batching": "literal"}, "batching is 'literal'; write one of now, fill-or-expire, fixed"),
        ({"batch_size": 2}, 'batch_size is 2; write batching = "fixed"'),
        ({"batching": "fill-or-expire", "batch_delay_ms": 5}, 'batch_delay_ms is 5; write batching = "fixed"'),
        ({"batching": "fixed", "batch_size": 0}, "batch_size is 0; write a number from 1"),
        ({"batching": "fixed", "batch_delay_ms": -1}, "batch_delay_ms is -1; write a number from 0"),
        ({"batching": "fixed", "batch_size": 2}, "batch_size is 2; write how long one waits for the others, too"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        policy(**settings)
    assert says in str(refused.value)
