"""A simulated language model: its steps, its memory, and the lengths of prompts and answers. Pure."""

from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.streams.batch import BLOCK_TOKENS, STEP_SEQUENCES, STEP_TOKENS
from dormouse.controller.simulator.streams.cost import StepCost

IDLE_S: Final = 2.0
"""A seat without requests is left after this. A real one stays, and goes in the order in which its weights would then
(core/decisions/leases/reclaim.py): a test compares.
"""

MAX_OPEN: Final = 256
"""Requests that an instance has at once (core/decisions/requests/state.py): a test compares."""

EXTENT_NBYTES: Final = 2 << 20
EXTENTS: Final = 4
"""About the size of an extent of KV, and how many are asked for at once, at least (gpuserver/runtime/extents.py)."""

Tokens = npt.NDArray[np.int64]


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Of prompts, or of outputs, in tokens: lognormal with this mean and coefficient of variation (0: all are equal),
    rounded, and at least 1 and at most ``most``.
    """

    mean: float
    variation: float = 0.0
    most: int

    def draw(self, rng: np.random.Generator, count: int) -> Tokens:
        if not self.variation:
            return np.full(count, round(self.mean), np.int64)
        deviation = np.sqrt(np.log1p(self.variation**2))
        drawn = rng.lognormal(np.log(self.mean) - deviation**2 / 2, deviation, count)
        return np.clip(np.rint(drawn), 1, self.most).astype(np.int64)


class LlmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """``kv_nbytes`` of a token. ``ttft_s`` and ``tpot_s``: wanted time to the first token, and of each further one.
    Lengths are drawn from ``prompt`` and ``output``, or are one of ``pairs`` (of prompt and output) each, drawn or,
    with ``in_turn``, one after the other. ``seat_s``: what a new seat takes before its first step, beside the copies.
    ``turn_s``: what passes between the last step of whoever has had the turn and its own first one, in a seat that it
    has.
    ``before_s`` and ``after_s``: what a request takes before its sequence is in the runtime, and a token from there to
    the client. Functions with an ``adapter_nbytes`` each and the same ``group`` have one runtime, the others each its
    own. A runtime's process needs ``context_nbytes`` of a GPU, and takes ``start_s`` to be there for the first time.
    Those of one ``family`` are instances of one function: a request for any of them goes to one that has nothing to do.
    ``closed``: nobody joins a batch that has begun.
    """

    kv_nbytes: int
    cost: StepCost
    ttft_s: float
    tpot_s: float
    prompt: Lengths
    output: Lengths
    pairs: tuple[tuple[int, int], ...] = ()
    in_turn: bool = False
    idle_s: float = IDLE_S
    seat_s: float = 0.0
    turn_s: float = 0.0
    before_s: float = 0.0
    after_s: float = 0.0
    adapter_nbytes: int = 0
    group: str = ""
    context_nbytes: int = 0
    start_s: float = 0.0
    step_tokens: int = STEP_TOKENS
    sequences: int = STEP_SEQUENCES
    family: str = ""
    closed: bool = False

    @property
    def block_nbytes(self) -> int:
        return self.kv_nbytes * BLOCK_TOKENS

    @property
    def extent_blocks(self) -> int:
        return max(1, EXTENT_NBYTES // self.block_nbytes)

    @property
    def alone_s(self) -> float:
        """A request of mean lengths, and nobody else."""
        prompt, output = self.prompt.mean, self.output.mean
        return self.cost.stream_s(max(1, round(prompt)), max(1, round(output)), self.step_tokens)

    def prompts_s(self, tokens: int) -> float:
        """T: until so many tokens of prompts are computed, and nothing else."""
        return self.cost.prompts_s(tokens, self.step_tokens)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[Tokens, Tokens]:
        """Prompts and outputs of so many requests."""
        if self.pairs:
            chosen = np.arange(count) % len(self.pairs) if self.in_turn else rng.integers(0, len(self.pairs), count)
            rows = np.asarray(self.pairs, np.int64)[chosen]
            return rows[:, 0], rows[:, 1]
        return self.prompt.draw(rng, count), self.output.draw(rng, count)
