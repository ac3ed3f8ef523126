"""Step times that a simulated runtime has learned, as in gpuserver/runtime/engine.py: pure. Steps without prompts are
taken in when somebody asks: a lease without another prompt ends before that, and they are most of all steps.
"""

from collections.abc import Sequence
from typing import Final

from dormouse.controller.simulator.streams.cost import EqualSteps
from dormouse.core.decisions.rules.pace import Pace
from dormouse.core.decisions.rules.step_times import StepTimer
from dormouse.schemas.messages import StepTimes

MAX_LATER: Final = 256
"""Runs of steps that are not taken in yet."""


class StepsLearned:
    """``step_tokens``: prompt tokens in one step at most."""

    __slots__ = ("_later", "_pace", "_timer")

    def __init__(self, step_tokens: int) -> None:
        self._pace, self._timer = Pace(), StepTimer(step_tokens)
        # how many sequences had a token in each of them, and so many equal steps, or what each took
        self._later: list[tuple[int, tuple[EqualSteps, int] | Sequence[float]]] = []

    def learn(self, prompt_tokens: int, sequences: int, steps: EqualSteps, count: int) -> None:
        """So many of these steps, with so many tokens of prompts and others each."""
        if not prompt_tokens:
            self._put(sequences, (steps, count))
            return
        self._take_in()
        for step in range(count):
            self._pace.learn(prompt_tokens, (steps.first_s + steps.more_s * step) * 1e3)
        self._timer.learn(prompt_tokens, sequences, steps.first_s * 1e6)

    def learn_tokens(self, sequences: int, took_s: Sequence[float]) -> None:
        """Times of steps without prompts, one after the other."""
        self._put(sequences, took_s)

    def pieces(self, most: int) -> int:
        """Tokens of a long prompt in the next step, or of all prompts in a brief one."""
        self._take_in()
        return self._pace.tokens(most)

    @property
    def times(self) -> StepTimes | None:
        self._take_in()
        return self._timer.times

    def _put(self, sequences: int, took: tuple[EqualSteps, int] | Sequence[float]) -> None:
        self._later.append((sequences, took))
        if len(self._later) > MAX_LATER:
            self._take_in()

    def _take_in(self) -> None:
        later, self._later = self._later, []
        pace, timer = self._pace, self._timer
        for sequences, took in later:
            if isinstance(took, tuple):
                steps, count = took
                pace.learn_plain(steps.first_s * 1e3, steps.more_s * 1e3, count)
                timer.learn(0, sequences, steps.first_s * 1e6)
            else:
                timer.learn_tokens(sequences, [each_s * 1e6 for each_s in took])
                pace.learn_tokens([each_s * 1e3 for each_s in took])
