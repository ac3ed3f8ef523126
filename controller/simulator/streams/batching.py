"""Requests that wait for others of their function before a runtime hears of them, whether the GPU is idle or not: what
ServerlessLoRA compares itself with, and what its Eq. 3 says as it stands. Pure. A node does not do so: a prompt is
computed as soon as its runtime has a turn, with all that have come by then.
"""

from typing import Final, NamedTuple

from dormouse.controller.simulator.streams.model import LlmSpec

BATCHINGS: Final = ("", "fill-or-expire", "fixed")


class BatchRule(NamedTuple):
    """``fill-or-expire``: a batch of N prompts waits until its first one has SLO - T(N) behind it, or that is nothing.
    ``fixed``: until there are ``size``, or the first one has waited for ``delay_s``.
    """

    kind: str
    size: int = 0
    delay_s: float = 0.0

    def until_s(self, spec: LlmSpec, first_s: float, count: int, tokens: int) -> float:
        """How long a batch of so many requests and prompt tokens waits, whose first one came at ``first_s``."""
        if self.kind == "fixed":
            return first_s if count >= self.size else first_s + self.delay_s
        steps = -(-tokens // spec.step_tokens)
        return first_s + spec.ttft_s - (steps * spec.cost.fixed_s + tokens * spec.cost.per_prompt_s)


class WaitingBatch:
    """Of one function."""

    def __init__(self, rule: BatchRule, spec: LlmSpec) -> None:
        self._rule, self._spec = rule, spec
        self._requests: list[int] = []
        self._first_s, self._tokens = 0.0, 0
        self.due_s = float("inf")

    def add(self, request: int, tokens: int, now_s: float) -> None:
        if not self._requests:
            self._first_s, self._tokens = now_s, 0
        self._requests.append(request)
        self._tokens += tokens
        self.due_s = self._rule.until_s(self._spec, self._first_s, len(self._requests), self._tokens)

    def take(self, now_s: float) -> list[int]:
        """Its requests, if it has waited for long enough."""
        if now_s < self.due_s:
            return []
        found, self._requests, self.due_s = self._requests, [], float("inf")
        return found
