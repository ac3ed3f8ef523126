"""Histograms of times, as `/metrics` has them: a count for each bucket, and the sum. No I/O."""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Final

from dormouse.schemas import messages as m

BOUNDS_S: Final = m.BOUNDS_S


@dataclass(slots=True)
class Times:
    """Grows for as long as the router lives."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, spent_s: float) -> None:
        self.counts[bisect_left(BOUNDS_S, spent_s)] += 1
        self.sum_s += spent_s

    def told(self) -> m.Spread:
        return m.Spread(counts=self.counts, sum_s=self.sum_s)
