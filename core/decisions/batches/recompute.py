"""Worth of the KV of finished prompts to a runtime: the time to recompute it, if its prompt is asked for again. Pure.

Both factors are learned: the time per prompt token from steps that consist mostly of such tokens, and the probability
of reuse from the share of all prompts' tokens whose KV was there already.
"""

from typing import Final

SMOOTHING: Final = 0.2
"""Weight of the newest step."""

PRIOR: Final = (16.0, 64.0)
"""Tokens that were there, of those asked for, before anything is known: a quarter."""

FORGET: Final = 1 << 16
"""Tokens of prompts after which old ones count half."""


class RecomputeCost:
    """See the module."""

    def __init__(self) -> None:
        self._token_us = 0.0
        self._reused, self._asked = PRIOR

    def stepped(self, busy_us: int, prompt_tokens: int, others: int) -> None:
        """A step has computed ``prompt_tokens`` tokens of prompts, and one token of each of ``others`` sequences."""
        if prompt_tokens <= others:
            return
        token_us = busy_us / (prompt_tokens + others)
        self._token_us += (token_us - self._token_us) * (SMOOTHING if self._token_us else 1.0)

    def began(self, prompt_tokens: int, reused: int) -> None:
        """A sequence has begun; ``reused`` of its prompt's tokens had their KV already."""
        self._asked += prompt_tokens
        self._reused += reused
        if self._asked > FORGET:
            self._asked /= 2
            self._reused /= 2

    def expected_us(self, tokens: int) -> int:
        return int(self._token_us * tokens * self._reused / self._asked)
