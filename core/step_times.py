"""What steps of a language model take, learned from steps, and what a first token takes by that. Pure.

    step = step_us + prompt_token_us * prompt tokens + sequence_us * sequences that get a token

Runtimes learn it of their own steps, and the simulator of its; the scheduler reads it (margins.py there).
It is ServerlessLoRA's Eq. 2 by tokens: its b - 1 further prompts of a batch are as long as they are.
"""

from collections.abc import Sequence
from typing import Final

from dormouse.schemas.messages import StepTimes

FORGET: Final = 0.98
"""Weight of what was known at each step with prompts: some fifty of them matter."""

PLAIN: Final = 0.05
"""Weight of a step without prompts: there is one for each token, and they tell nothing of prompts."""

NEWS: Final = 0.1
"""By what share a first token must be expected to take longer or shorter for that to be told again."""

PROBES: Final = ((16, 1), (256, 1), (256, 16))
"""Tokens and sequences of steps by which two sets of times are compared."""

_Row = list[float]


def step_s(times: StepTimes, tokens: int, sequences: int) -> float:
    """One step with so many prompt tokens, of the budget at most, and sequences that get a token."""
    us = times.step_us + times.prompt_token_us * min(tokens, times.step_tokens) + times.sequence_us * sequences
    return us / 1e6


def first_token_s(times: StepTimes, tokens: int, sequences: int) -> float:
    """T: until so many tokens of prompts are computed, beside sequences that get a token in each step."""
    steps = max(1, -(-tokens // max(1, times.step_tokens)))
    return (steps * (times.step_us + times.sequence_us * sequences) + times.prompt_token_us * tokens) / 1e6


def news(times: StepTimes, told: StepTimes | None) -> bool:
    """Whether these differ from what was told last."""
    if told is None or times.step_tokens != told.step_tokens:
        return True
    pairs = [(step_s(times, *probe), step_s(told, *probe)) for probe in PROBES]
    return any(abs(one - other) > NEWS * other for one, other in pairs)


class StepTimer:
    """Least squares of relative errors over the steps of lately; no coefficient is below 0. ``step_tokens``: prompt
    tokens in one step at most.
    """

    def __init__(self, step_tokens: int) -> None:
        self.step_tokens = step_tokens
        self._sums = [[0.0] * 4 for _ in range(3)]  # of the normal equations; the last column is their right side
        self._known = False

    def learn(self, tokens: int, sequences: int, took_us: float) -> None:
        """A step with so many tokens of prompts, in which so many sequences got a token."""
        if took_us <= 0.0:
            return
        self._known = self._known or tokens > 0
        keep, weight = (FORGET, 1.0) if tokens else (1.0 - (1.0 - FORGET) * PLAIN, PLAIN)
        one, two, three = 1.0 / took_us, tokens / took_us, sequences / took_us  # each step's error counts by its share
        features = (one, two, three)
        for mine, row in zip(features, self._sums, strict=True):
            part = weight * mine
            row[0] = row[0] * keep + part * one
            row[1] = row[1] * keep + part * two
            row[2] = row[2] * keep + part * three
            row[3] = row[3] * keep + part

    def learn_tokens(self, sequences: int, took_us: Sequence[float]) -> None:
        """As `learn`, of several steps without prompts one after the other, of the same sequences: to the last bit."""
        keep = 1.0 - (1.0 - FORGET) * PLAIN
        (a, b, c, d), (e, f, g, h), (i, j, k, m) = self._sums
        for took in took_us:
            one, three = 1.0 / took, sequences / took
            part, parts = PLAIN * one, PLAIN * three
            a, b, c, d = a * keep + part * one, b * keep, c * keep + part * three, d * keep + part
            e, f, g, h = e * keep, f * keep, g * keep, h * keep
            i, j, k, m = i * keep + parts * one, j * keep, k * keep + parts * three, m * keep + parts
        self._sums = [[a, b, c, d], [e, f, g, h], [i, j, k, m]]

    @property
    def times(self) -> StepTimes | None:
        """None before there was a step with prompts."""
        if not self._known:
            return None
        kept = [0, 1, 2]
        while True:
            found = _solved([[self._sums[one][two] for two in (*kept, 3)] for one in kept])
            if min(found) >= 0.0:
                break
            kept.remove(kept[found.index(min(found))])  # what would be negative is nothing
        each = dict(zip(kept, found, strict=True))
        return StepTimes(
            step_us=each.get(0, 0.0), prompt_token_us=each.get(1, 0.0), sequence_us=each.get(2, 0.0),
            step_tokens=self.step_tokens,
        )  # fmt: skip


def _solved(rows: list[_Row]) -> _Row:
    """Of linear equations, the right side last. What the samples leave open is as small as can be, by its own scale."""
    size = len(rows)
    scale = [max(rows[i][i], 1e-300) ** 0.5 for i in range(size)]
    table = [[rows[i][j] / scale[i] / scale[j] for j in range(size)] + [rows[i][size] / scale[i]] for i in range(size)]
    for i in range(size):
        table[i][i] += 1e-9
    for i in range(size):
        pivot = table[i][i]
        for k in range(i + 1, size):
            factor = table[k][i] / pivot
            for j in range(i, size + 1):
                table[k][j] -= factor * table[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (table[i][size] - sum(table[i][j] * found[j] for j in range(i + 1, size))) / table[i][i]
    return [value / scale[i] for i, value in enumerate(found)]
