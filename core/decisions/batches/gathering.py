"""Sequences that wait for others of their lease, that is, of their function, where a node has a rule for that
(core/decisions/rules/batching.py): the set of them, and until when they wait. Pure: the time is an argument.

A sequence that has begun once never waits here again.
"""

from collections import Counter
from functools import partial

from dormouse.core.decisions.rules.batching import BatchRule, GatheringBatch
from dormouse.core.decisions.rules.step_times import first_token_s
from dormouse.schemas.messages import StepTimes


class Gathering:
    """``times``, an argument of each query, are the durations of this runtime's steps as far as they are known."""

    def __init__(self, rule: BatchRule | None) -> None:
        self._rule = rule
        self._batches: dict[int, GatheringBatch[int]] = {}  # by lease
        self._ttfts_s: dict[int, float] = {}  # wanted, by lease
        self._leases: dict[int, int] = {}  # by the number of a sequence that waits
        self.begun: Counter[str] = Counter()  # sequences, by why

    @property
    def waits(self) -> bool:
        return bool(self._leases)

    def wanted(self, lease: int, ttft_s: float) -> None:
        """Sets the wanted time of a lease's first tokens. Until it is known, its sequences wait for it."""
        self._ttfts_s[lease] = ttft_s
        if (batch := self._batches.get(lease)) is not None:
            batch.ttft_s = ttft_s

    def add(self, number: int, lease: int, tokens: int, now_s: float) -> bool:
        """Adds a sequence; returns whether it waits."""
        if self._rule is None:
            return False
        batch = self._batches.get(lease)
        if batch is None:
            batch = self._batches[lease] = GatheringBatch(self._rule, self._ttfts_s.get(lease, float("inf")))
        batch.add(number, tokens, now_s)
        self._leases[number] = lease
        return True

    def discard(self, number: int) -> None:
        """The sequence is over."""
        if (lease := self._leases.pop(number, None)) is not None:
            self._batches[lease].discard(number)

    def dismiss(self, lease: int) -> None:
        """The lease is over, and so are its sequences."""
        self._ttfts_s.pop(lease, None)
        self._batches.pop(lease, None)

    def due_s(self, times: StepTimes | None) -> float:
        """Time at which the next batch begins."""
        prompts_s = _prompts_s(times)
        return min((batch.due_s(prompts_s) for batch in self._batches.values()), default=float("inf"))

    def take(self, now_s: float, times: StepTimes | None) -> list[int]:
        """Removes and returns the sequences whose wait is over."""
        found: list[int] = []
        for batch in self._batches.values():
            numbers, why = batch.take(now_s, _prompts_s(times))
            if numbers:
                self.begun[why] += len(numbers)
                found += numbers
        for number in found:
            del self._leases[number]
        return found


def _prompts_s(times: StepTimes | None) -> partial[float] | None:
    return None if times is None else partial(_first_token_s, times)


def _first_token_s(times: StepTimes, tokens: int) -> float:
    return first_token_s(times, tokens, 0)
