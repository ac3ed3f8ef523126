"""Decides how many tokens a step takes of a long prompt beside sequences that go on, and a brief step of all prompts:
about as many as cost as much as a step without prompts. So a step is twice as long as that at most. Pure: the times of
steps are arguments.
"""

from collections.abc import Iterable
from typing import Final

MIN: Final = 4
"""Tokens in any case: a prompt always gets on. Beside eight sequences on two cores the last of 2,000 tokens cost as
much as a fifth of a step each.
"""

SHARED_S: Final = 10.0
"""So long after an ordinary function has computed on a GPU, it is likely to come again, and steps there are brief.
Pieces of prompts cost a little; one that comes less often meets a long step now and then.
"""

FEW: Final = 16
"""While nothing is known."""

_SHARE: Final = 0.8
"""Of the cost of a step without prompts: the next piece costs more than those before, for it looks back on them."""

_NEWEST: Final = 0.3
"""Weight of the newest step in the means: some five steps matter."""

_MOST: Final = 1.5
"""So many times what it was expected to cost, or what half a piece may, a step's prompts count for at most. Others on
the machine may have held it up: a few tokens would be told to cost as much as many, and pieces would become small.
"""


class Pace:
    """Means of what steps cost, in ms."""

    def __init__(self) -> None:
        self._plain_ms = 0.0  # a step without prompts
        self._more_ms = 0.0  # what prompts add to the others
        self._tokens = 0.0  # of prompts in those

    def learn(self, prompt_tokens: int, took_ms: float) -> None:
        """A step with so many tokens of prompts."""
        if not prompt_tokens:
            self._plain_ms = _mean(self._plain_ms, took_ms)
            return
        more_ms = max(took_ms - self._plain_ms, 0.0)
        if self._tokens:
            expected_ms = self._more_ms / self._tokens * prompt_tokens
            more_ms = min(more_ms, _MOST * max(expected_ms, _SHARE * self._plain_ms / 2))
            more_ms = self._more_ms + _NEWEST * (more_ms - self._more_ms)
        self._more_ms, self._tokens = more_ms, _mean(self._tokens, prompt_tokens)

    def learn_tokens(self, took_ms: Iterable[float]) -> None:
        """As `learn`, of steps without prompts one after the other: to the last bit."""
        plain_ms = self._plain_ms
        for each_ms in took_ms:
            plain_ms = plain_ms + _NEWEST * (each_ms - plain_ms) if plain_ms else each_ms
        self._plain_ms = plain_ms

    def learn_plain(self, first_ms: float, more_ms: float, steps: int) -> None:
        """As `learn`, of so many steps without prompts one after the other, each longer than the one before by
        ``more_ms``.
        """
        if not self._plain_ms:
            self.learn(0, first_ms)
            first_ms, steps = first_ms + more_ms, steps - 1
        behind_ms = more_ms * (1 - _NEWEST) / _NEWEST  # that the mean is, after many
        off_ms = self._plain_ms - (first_ms - more_ms - behind_ms)
        self._plain_ms = first_ms + more_ms * (steps - 1) - behind_ms + off_ms * (1 - _NEWEST) ** steps

    def tokens(self, most: int) -> int:
        """In the next step."""
        if not self._plain_ms or not self._more_ms:
            return min(most, FEW)
        return min(most, max(MIN, int(_SHARE * self._plain_ms * self._tokens / self._more_ms)))


def _mean(old: float, new: float) -> float:
    return new if not old else old + _NEWEST * (new - old)
