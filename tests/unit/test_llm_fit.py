"""What benchmarks tell the simulator of a language model's steps is right."""

from pathlib import Path

import pytest

from benchmarks.live_llm import world_of
from benchmarks.live_llm_fit import base_of, steps
from benchmarks.live_llm_node import Heard, Measured
from benchmarks.llm_fit import MeasuredStep, as_toml, errors, fit, grid, learned, least
from dormouse.controller.simulator.streams.cost import StepCost

COST = StepCost(fixed_s=0.02, per_sequence_s=0.001, per_context_s=2e-6, per_prompt_s=0.0005, free_tokens=14)


def measured(cost: StepCost, factor: float = 1.0) -> list[MeasuredStep]:
    points = [(b, b * context, prompt) for b, context, prompt in grid()]
    return [MeasuredStep(*point, factor * cost.step_s(*point)) for point in points]


def test_the_fit_finds_what_steps_were_made_of() -> None:
    found = fit(measured(COST))
    for name in COST.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(COST, name))
    assert max(errors(found, measured(COST))) < 1e-9
    assert min(errors(found, measured(COST, 1.25))) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("sequences", "prompt", "paid"), [(0, 14, 0), (0, 15, 1), (4, 10, 0), (4, 12, 2), (16, 10, 10)]
)
def test_sequences_have_the_free_tokens_first(sequences: int, prompt: int, paid: int) -> None:
    assert COST.step_s(sequences, 0, prompt) == pytest.approx(0.02 + 0.001 * sequences + 0.0005 * paid)


def test_what_a_runtime_learns_is_judged_by_other_steps() -> None:
    """It knows nothing of contexts: here there are none."""
    cost = StepCost(fixed_s=0.02, per_sequence_s=0.001, per_prompt_s=0.0005)
    steps = measured(cost)
    assert max(learned([steps], steps)) < 1e-3
    assert min(learned([steps], measured(cost, 1.25))) == pytest.approx(0.2, abs=1e-3)


def test_no_coefficient_is_below_zero() -> None:
    """Steps that are shorter the longer contexts are."""
    odd = [step._replace(seconds=step.seconds - 1e-7 * step.context) for step in measured(COST)]
    odd = [step._replace(seconds=step.seconds - 2e-6 * step.context) for step in odd]
    found = fit(odd)
    assert found.per_context_s == 0.0
    assert min(getattr(found, name) for name in found.__struct_fields__) >= 0.0


def test_the_least_of_all_rounds_counts() -> None:
    assert least([measured(COST, 1.5), measured(COST), measured(COST, 3.0)]) == measured(COST)


def test_it_is_written_as_a_scenario_has_it() -> None:
    assert as_toml(COST).splitlines()[0] == 'step = "20000.0000us"'
    assert as_toml(COST).splitlines()[2] == 'per_context = "2.0000us"'
    assert as_toml(COST).splitlines()[-1] == "free_tokens = 14"


def heard(prompt: int, *tokens_s: float, name: str = "chat") -> Heard:
    return Heard(name, 0.0, prompt, len(tokens_s), list(tokens_s), True)


def test_steps_follow_from_the_times_of_tokens() -> None:
    """The second stream has its first token with the first one's third; the times of a step differ by 1 ms."""
    alone = heard(10, 100.0, 100.1, 100.2)
    first, second = heard(20, 1.0, 1.1, 1.3, 1.42), heard(50, 1.301, 1.421)
    found = steps(Measured([alone], [first, second], [], []), {"chat": "chat"})["chat"]
    assert [(step.sequences, step.context, step.prompt) for step in found] == [
        (1, 21, 0),
        (1, 22, 50),
        (2, 23 + 51, 0),
        (1, 11, 0),
        (1, 12, 0),
    ]
    assert [step.seconds for step in found] == pytest.approx([0.1, 0.2, 0.12, 0.1, 0.1])


def test_a_change_of_the_turn_is_what_steps_take_longer_after_anothers() -> None:
    """Steps take twice what they take an engine alone, and 0.01 s after those of another runtime."""
    world = world_of(Path("x"), 1, "function")
    chat, math = (model.name for model in world.models)
    cost = StepCost(fixed_s=0.05, per_prompt_s=0.001)
    alone = []
    for at_s, name, prompt in ((100.0, chat, 20), (200.0, math, 20), (300.0, chat, 200), (400.0, math, 200)):
        firsts = 0.013 + 0.1 + prompt * 0.002  # the turn was the other's
        alone.append(Heard(name, at_s, prompt, 3, [at_s + firsts + 0.1 * n for n in range(3)], True))
    one = Heard(chat, 0.0, 20, 3, [1.0, 1.22, 1.44], True)
    other = Heard(math, 0.0, 20, 3, [1.11, 1.33, 1.55], True)
    found = base_of(world, chat, [Measured(alone, [one, other], [], [])], cost)
    assert found.factor == pytest.approx(2.0)
    assert found.turn_s == pytest.approx(0.01)
    assert found.before_s == pytest.approx(0.003)
    assert found.cost.per_prompt_s == pytest.approx(0.002)


def test_steps_of_runtimes_that_take_turns_begin_where_the_other_ones_ended() -> None:
    """Steps of 0.1 s, in turn: a stream has a token each 0.2 s."""
    alone = heard(10, 100.0, 100.1)
    one, other = heard(20, 1.0, 1.2, 1.4), heard(30, 1.1, 1.3, 1.5, name="math")
    part = Measured([alone], [one, other], [], [])
    apart = steps(part, {"chat": "chat", "math": "math"})
    assert {name: [step.seconds for step in some] for name, some in apart.items()} == {
        "chat": pytest.approx([0.1, 0.1, 0.1]),
        "math": pytest.approx([0.1, 0.1]),
    }
    assert [step.sequences for step in apart["math"]] == [1, 1]
    assert [step.own for step in apart["chat"]] == [False, False, True]  # the last one was alone
    together = steps(part, {"chat": "chat", "math": "chat"})["chat"]
    assert [step.sequences for step in together][:3] == [1, 2, 2]
