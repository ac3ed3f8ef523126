"""Numbers per function for `dormouse status`: outcomes since the start, latencies over a bounded window. No I/O."""

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, Final

WINDOW: Final = 1024
"""Latest latencies kept per function: enough for a p99 that ten requests stand behind."""

NO_ERRORS: Final = ("ok", "cancelled", "bad_json")
"""Outcomes that are none of the function's errors: what clients do is theirs."""


@dataclass(slots=True)
class FunctionStats:
    """The counts of one function's name, across its versions."""

    outcomes: Counter[str] = field(default_factory=Counter)  # "ok" or an error's code
    latencies_ms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # of answered requests

    def add(self, outcome: str, latency_ms: float | None = None) -> None:
        self.outcomes[outcome] += 1
        if latency_ms is not None:
            self.latencies_ms.append(latency_ms)

    def summary(self) -> dict[str, Any]:
        return {
            "requests": self.outcomes.total(),
            "errors": self.outcomes.total() - sum(self.outcomes[each] for each in NO_ERRORS),
            "outcomes": {name: count for name, count in self.outcomes.items() if count},
            "p50_ms": quantile(self.latencies_ms, 0.50),
            "p99_ms": quantile(self.latencies_ms, 0.99),
        }


def quantile(values: deque[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of all do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)
