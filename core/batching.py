"""Streams that wait for others of their function before a batch takes them, whether the GPU is idle or not: what
ServerlessLoRA compares itself with, and what its Eq. 3 says as it stands. Pure: it is told the time.

Runtimes wait by it (gpuserver/runtime/gathering.py), and so do those of the simulator. With ``now``, which is the
default, there is no rule: a prompt is computed as soon as its runtime has a turn, with all that have come by then.
"""

from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

FILL_OR_EXPIRE: Final = "fill-or-expire"
FIXED: Final = "fixed"

FULL: Final = "full"
EXPIRED: Final = "expired"
UNTIMED: Final = "untimed"
"""Why a batch begins: its last stream was the one that it waited for; it has waited for long enough; nobody knows yet
what prompts take here, and so nothing waits.
"""

Stream = TypeVar("Stream")

PromptsTime = Callable[[int], float]
"""T: seconds that so many tokens of prompts take."""


class BatchRule(NamedTuple):
    """``fill-or-expire``: a batch of N prompts waits until its first one has SLO - T(N) behind it, or that is nothing.
    ``fixed``: until there are ``size``, or the first one has waited for ``delay_s``.
    """

    kind: str
    size: int = 1
    delay_s: float = 0.0

    @classmethod
    def of(cls, kind: str, size: int, delay_ms: int) -> "BatchRule | None":
        """As settings have it; None: nobody waits."""
        return cls(kind, size, delay_ms / 1000) if kind in (FILL_OR_EXPIRE, FIXED) else None

    def wait_s(self, count: int, tokens: int, ttft_s: float, prompts_s: PromptsTime) -> float:
        """How long the first of so many streams, with so many tokens of prompts, waits in all."""
        if self.kind == FIXED:
            return 0.0 if count >= self.size else self.delay_s
        return ttft_s - prompts_s(tokens)


class GatheringBatch(Generic[Stream]):
    """Of one function, whose first tokens are wanted within ``ttft_s``."""

    def __init__(self, rule: BatchRule, ttft_s: float) -> None:
        self._rule, self.ttft_s = rule, ttft_s
        self._streams: dict[Stream, int] = {}  # tokens of each prompt
        self._tokens = 0  # of all
        self._first_s = self._last_s = 0.0

    def add(self, stream: Stream, tokens: int, now_s: float) -> None:
        if not self._streams:
            self._first_s = now_s
        self._last_s = now_s
        self._streams[stream] = tokens
        self._tokens += tokens

    def discard(self, stream: Stream) -> None:
        """Nobody waits for it any more; what it has been waited for counts for the others."""
        self._tokens -= self._streams.pop(stream, 0)

    def due_s(self, prompts_s: PromptsTime | None) -> float:
        """When it begins if nothing comes any more; ``prompts_s`` is None as long as that is not known."""
        if not self._streams:
            return float("inf")
        if self._rule.kind != FIXED and prompts_s is None:
            return self._first_s
        count, tokens = len(self._streams), self._tokens
        return self._first_s + self._rule.wait_s(count, tokens, self.ttft_s, prompts_s or _nothing)

    def take(self, now_s: float, prompts_s: PromptsTime | None) -> tuple[list[Stream], str]:
        """Its streams, and why they begin, if it has waited for long enough."""
        due_s = self.due_s(prompts_s)
        if now_s < due_s:
            return [], ""
        why = FULL if due_s <= self._last_s else EXPIRED
        if self._rule.kind != FIXED and prompts_s is None:
            why = UNTIMED
        found, self._streams, self._tokens = list(self._streams), {}, 0
        return found, why


def _nothing(_: int) -> float:
    return 0.0
