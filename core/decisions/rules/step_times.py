"""Times of a language model's steps, learned from steps, and the time to a first token that follows. Pure.

    step = step_us + prompt_token_us * prompt tokens + sequence_us * sequences that get a token

Runtimes learn it of their own steps, and the simulator of its; the scheduler reads it (margins.py there). It is
ServerlessLoRA's Eq. 2 by tokens: its b - 1 further prompts of a batch are as long as they are.
"""

from collections.abc import Sequence
from typing import Final

from dormouse.schemas.messages import StepTimes

FORGET: Final = 0.98
"""Weight of earlier samples at each step with prompts: some fifty of them matter."""

PLAIN: Final = 0.05
"""Weight of a step without prompts: there is one for each token, and they tell nothing of prompts."""

NEWS: Final = 0.1
"""Share by which the expected time to a first token must change to be reported again."""

PROBES: Final = ((16, 1), (256, 1), (256, 16))
"""Tokens and sequences of steps by which two sets of times are compared."""

_Row = list[float]


def step_s(times: StepTimes, tokens: int, sequences: int) -> float:
    """One step with so many prompt tokens, of the budget at most, and sequences that get a token."""
    most = tokens if tokens < times.step_tokens else times.step_tokens
    us = times.step_us + times.prompt_token_us * most + times.sequence_us * sequences
    return us / 1e6


def first_token_s(times: StepTimes, tokens: int, sequences: int) -> float:
    """T: until so many tokens of prompts are computed, beside sequences that get a token in each step."""
    steps = -(-tokens // max(1, times.step_tokens)) or 1
    return (steps * (times.step_us + times.sequence_us * sequences) + times.prompt_token_us * tokens) / 1e6


def news(times: StepTimes, told: StepTimes | None) -> bool:
    """Whether these differ from those reported last."""
    if told is None or times.step_tokens != told.step_tokens:
        return True
    for tokens, sequences in PROBES:
        before_s = step_s(told, tokens, sequences)
        if abs(step_s(times, tokens, sequences) - before_s) > NEWS * before_s:
            return True
    return False


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
        self._sums = [
            [a * keep + part * one, b * keep + part * two, c * keep + part * three, d * keep + part]
            for (a, b, c, d), part in zip(self._sums, (weight * one, weight * two, weight * three), strict=True)
        ]

    def learn_tokens(self, sequences: int, took_us: Sequence[float]) -> None:
        """As `learn`, of several steps without prompts one after the other, of the same sequences: to the last bit."""
        keep = 1.0 - (1.0 - FORGET) * PLAIN
        (a, b, c, d), (e, f, g, h), (i, j, k, m) = self._sums
        for took in took_us:
            one, three = 1.0 / took, sequences / took
            part, parts = PLAIN * one, PLAIN * three
            a, c, d = a * keep + part * one, c * keep + part * three, d * keep + part
            i, k, m = i * keep + parts * one, k * keep + parts * three, m * keep + parts
            b, e = b * keep, e * keep
            f, g = f * keep, g * keep
            h, j = h * keep, j * keep
        self._sums = [[a, b, c, d], [e, f, g, h], [i, j, k, m]]

    @property
    def times(self) -> StepTimes | None:
        """None before there was a step with prompts."""
        if not self._known:
            return None
        rows = self._sums
        while min(found := _solved(rows)) < 0.0:
            least = found.index(min(found))  # what would be negative is nothing: as if it were never there
            rows = [[0.0 if least in (one, two) else rows[one][two] for two in range(4)] for one in range(3)]
        step_us, prompt_token_us, sequence_us = found
        return StepTimes(
            step_us=step_us, prompt_token_us=prompt_token_us, sequence_us=sequence_us, step_tokens=self.step_tokens
        )


def _solved(rows: list[_Row]) -> tuple[float, float, float]:
    """Of linear equations, the right side last. Unknowns that the samples leave open are as small as can be, by their
    own scale.
    """
    (a, b, c, d), (e, f, g, h), (i, j, k, m) = rows
    x, y, z = max(a, 1e-300) ** 0.5, max(f, 1e-300) ** 0.5, max(k, 1e-300) ** 0.5
    a, b, c, d = a / x / x + 1e-9, b / x / y, c / x / z, d / x
    e, f, g, h = e / y / x, f / y / y + 1e-9, g / y / z, h / y
    i, j, k, m = i / z / x, j / z / y, k / z / z + 1e-9, m / z
    factor = e / a
    f, g, h = f - factor * b, g - factor * c, h - factor * d
    factor = i / a
    j, k, m = j - factor * b, k - factor * c, m - factor * d
    factor = j / f
    third = (m - factor * h) / (k - factor * g)
    second = (h - g * third) / f
    first = (d - (b * second + c * third)) / a
    return first / x, second / y, third / z
