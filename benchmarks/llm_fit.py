"""What a step of a language model takes on this machine: the coefficients that the simulator is given.

    python -m benchmarks.llm_fit [--folder build/smollm2] [--dtype bfloat16] [--threads 2] [--rounds 12]

    step = fixed + per_sequence * B + per_context * sum of contexts + per_prompt * max(0, prompt tokens - free)

An engine in this process computes steps of so many sequences, contexts and prompt tokens; what KV holds does not change
its time. Each kind of step is measured in several rounds, and the least counts: other work on the machine only makes
it longer. The coefficients are at least 0, and make the sum of squared relative errors least. They are made of every
other round, and the errors are those of predicting the rounds between.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from scipy.optimize import nnls

from dormouse.core import openmp

if __name__ == "__main__":
    os.environ |= openmp.WAITING  # as runtimes have it

import torch

from benchmarks.llm_alone import Alone, begin
from benchmarks.report import Goal, arguments, report
from dormouse.controller.simulator.streams.cost import StepCost, prompt_tokens
from dormouse.core.decisions.batches.batch import STEP_TOKENS
from dormouse.core.decisions.batches.batch import Sequence as Tokens
from dormouse.core.decisions.rules.step_times import StepTimer, first_token_s
from dormouse.gpuserver.runtime.engine import BLOCK_TOKENS, Generation
from dormouse.gpuserver.runtime.sampling import Sampling
from examples import smollm2

SEQUENCES: Final = (1, 4, 16)
CONTEXTS: Final = (16, 128, 360)  # 16 of the longest fit the memory of `Alone`
PROMPTS: Final = (0, 16, 32, 128, 256)
MAX_FREE: Final = 64
"""Tokens of prompts in a step that may be found to cost nothing."""

GOAL: Final = 0.10


class MeasuredStep(NamedTuple):
    """``sequences`` got a token each and looked back at ``context`` tokens in all; ``prompt`` tokens of prompts."""

    sequences: int
    context: int
    prompt: int
    seconds: float


def fit(steps: Sequence[MeasuredStep]) -> StepCost:
    """Non-negative least squares of relative errors, with as many free tokens as make them least."""
    return min((_fit(steps, free) for free in range(MAX_FREE)), key=lambda found: found[1])[0]


def _fit(steps: Sequence[MeasuredStep], free: int) -> tuple[StepCost, float]:
    """With the norm of the relative errors."""
    tokens = [prompt_tokens(step.prompt, step.sequences, free) for step in steps]
    rows = np.array([[1.0, step.sequences, step.context, paid] for step, paid in zip(steps, tokens, strict=True)])
    seconds = np.array([step.seconds for step in steps])
    found, error = nnls(rows / seconds[:, None], np.ones(len(steps)))
    fixed, sequence, context, prompt = (float(value) for value in found)
    cost = StepCost(
        fixed_s=fixed, per_sequence_s=sequence, per_context_s=context, per_prompt_s=prompt, free_tokens=free
    )
    return cost, float(error)


def errors(cost: StepCost, steps: Sequence[MeasuredStep]) -> list[float]:
    """Relative, of each."""
    return [abs(cost.step_s(step.sequences, step.context, step.prompt) - step.seconds) / step.seconds for step in steps]


def learned(rounds: Sequence[Sequence[MeasuredStep]], steps: Sequence[MeasuredStep]) -> list[float]:
    """Relative errors of what a runtime would expect of these prompts, after it has had all steps of these rounds."""
    timer = StepTimer(STEP_TOKENS)
    for step in (step for each in rounds for step in each):
        timer.learn(step.prompt, step.sequences, step.seconds * 1e6)
    times = timer.times
    assert times is not None
    return [abs(first_token_s(times, step.prompt, step.sequences) - step.seconds) / step.seconds for step in steps]


def as_toml(cost: StepCost) -> str:
    """As a scenario has it."""
    times = "\n".join(
        f'{key} = "{seconds * 1e6:.4f}us"'
        for key, seconds in (
            ("step", cost.fixed_s),
            ("per_sequence", cost.per_sequence_s),
            ("per_context", cost.per_context_s),
            ("per_prompt", cost.per_prompt_s),
        )
    )
    return f"{times}\nfree_tokens = {cost.free_tokens}"


class Steps:
    """Of an engine whose sequences were not computed: their KV is as it is."""

    def __init__(self, alone: Alone, seed: int) -> None:
        self._alone = alone
        self._random = torch.Generator().manual_seed(seed)

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = torch.randint(100, 40_000, (count,), generator=self._random).tolist()
        return tokens

    def measure(self, sequences: int, context: int, prompt: int) -> MeasuredStep:
        alone = self._alone
        engine = alone.engine()
        for number in range(sequences):
            sequence = Tokens(number, self._tokens(context), context, context + BLOCK_TOKENS)
            engine.generations[number] = Generation(sequence, Sampling(), frozenset())
            assert engine.blocks.extend(sequence.table, context)
            sequence.computed = context - 1
            engine.batch.running.append(sequence)
        if prompt:
            begin(engine, sequences, self._tokens(prompt), BLOCK_TOKENS)
        began_s = time.perf_counter()
        made = engine.step()
        seconds = time.perf_counter() - began_s
        assert made is not None
        assert len(made) == sequences + (prompt > 0)
        return MeasuredStep(sequences, sequences * context, prompt, seconds)


def grid() -> list[tuple[int, int, int]]:
    with_sequences = [(b, context, prompt) for b in SEQUENCES for context in CONTEXTS for prompt in PROMPTS]
    return with_sequences + [(0, 0, prompt) for prompt in PROMPTS if prompt]


def least(rounds: Sequence[Sequence[MeasuredStep]]) -> list[MeasuredStep]:
    """Of the same steps in several rounds."""
    return [same[0]._replace(seconds=min(step.seconds for step in same)) for same in zip(*rounds, strict=True)]


def measured(folder: Path, dtype: str, threads: int, rounds: int, seed: int = 0) -> list[list[MeasuredStep]]:
    """The whole grid, so many times."""
    torch.set_num_threads(threads)
    steps = Steps(Alone(folder, dtype), seed)
    assert max(PROMPTS) <= STEP_TOKENS
    points = grid()
    for point in points[:: len(points) // 8]:  # the first ones compile and allocate
        steps.measure(*point)
    return [[steps.measure(*point) for point in points] for _ in range(rounds)]


def main(args: argparse.Namespace) -> None:
    rounds = measured(smollm2.build(args.folder), args.dtype, args.threads, 2 if args.quick else args.rounds, args.seed)
    known, unknown = least(rounds[::2]), least(rounds[1::2])
    cost = fit(known)
    found = errors(cost, unknown)
    prefill = [error for error, step in zip(found, unknown, strict=True) if not step.sequences]
    decode = [error for error, step in zip(found, unknown, strict=True) if not step.prompt]
    print(as_toml(cost))
    extra: dict[str, Any] = {
        "coefficients_s": [cost.fixed_s, cost.per_sequence_s, cost.per_context_s, cost.per_prompt_s],
        "free_tokens": cost.free_tokens,
        "steps": [step._asdict() for step in known],
        "predicted": [step._asdict() for step in unknown],
    }
    goals = []
    prompts = learned([least(rounds[::2])], [step for step in unknown if step.prompt])
    for name, some in (
        ("prefill alone", prefill),
        ("decoding alone", decode),
        (f"all {len(found)} kinds", found),
        ("first tokens, as a runtime learns them", prompts),
    ):
        mean = statistics.mean(some)
        text = f"prediction error, mean, {name}"
        goals.append(Goal(name=text, goal=f"<= {GOAL:.0%}", measured=f"{mean:.1%}", met=mean <= GOAL))
    report(goals, args, extra)


if __name__ == "__main__":
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
