"""Search over whole numbers for the number of GPUs, or functions, that is enough: pure. main.py tries each number.

Below some number it is one way, above the other: so few GPUs do not suffice and more do, so few functions are served
and more are not. Where that is not so (compliance need not rise with every GPU), the result is one place where it
changes: both sides of it were tried, and nothing is known of numbers that were not.
"""

from typing import Final

from dormouse.controller.simulator.scenario import Scenario
from dormouse.schemas.errors import ConfigError

LIMITS: Final = {"gpus": 64, "functions": 10_000}
"""The largest number that is tried, where nothing else is set."""

TARGET: Final = 1.0
"""Share of functions that must comply, where nothing else is set: a function's percentile already says what it may
miss.
"""


class CapacitySearch:
    """Doubles or halves from ``start`` until the other side is met, then halves what is between. ``at`` is the number
    to try next, from ``least`` to ``limit``, None when it is done; ``low`` is then the largest known below the change
    (``least`` - 1: none was), ``high`` the least above (``limit`` + 1: none was), one apart.
    """

    def __init__(self, start: int, limit: int, least: int = 1) -> None:
        self.low = least - 1
        self.high = limit + 1
        self.tried = 0
        self._least = least
        self._limit = limit
        self.at: int | None = min(start, limit)

    def tell(self, below: bool) -> None:
        """The result of trying ``at``."""
        assert self.at is not None
        self.tried += 1
        if below:
            self.low = self.at
        else:
            self.high = self.at
        self.at = self._next(self.low, self.high)

    def _next(self, low: int, high: int) -> int | None:
        if high - low <= 1:
            return None
        if high > self._limit:
            return min(2 * low, self._limit)
        if low < self._least:
            return max(self._least, high // 2)
        return (low + high) // 2

    @property
    def at_most(self) -> int:
        """Tries in all, if it goes on as badly as it can."""
        return self.tried + self._worst(self.low, self.high, self.at)

    def _worst(self, low: int, high: int, at: int | None) -> int:
        if at is None:
            return 0
        if low >= self._least and high <= self._limit:
            return (high - low - 1).bit_length()
        return 1 + max(self._worst(at, high, self._next(at, high)), self._worst(low, at, self._next(low, at)))


def check_deadlines(scenario: Scenario, target: float) -> None:
    """Raises ConfigError if too many functions take longer than their deadline even on a GPU of their own."""
    pairs = zip(scenario.models, scenario.deadlines_s, strict=True)
    late = [(model, deadline_s) for model, deadline_s in pairs if model.run_s + model.host_s > deadline_s]
    best = 1.0 - len(late) / len(scenario.models)
    if best >= target:
        return
    model, deadline_s = late[0]
    run_s = model.run_s + model.host_s
    lower = f", or --target {best:.4g} at most" if best >= 0.0001 else ""
    raise ConfigError(
        f"{scenario.path}: --find-capacity: {model.name} runs for {run_s * 1000:g}ms, its deadline is "
        f"{deadline_s * 1000:g}ms, and no number of GPUs changes that; write a longer deadline{lower}"
    )
