"""Numbers of answered requests, by function, reported to the controller now and then."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Final

from dormouse.core.decisions.requests import events as e
from dormouse.router.front.streams import Outcome
from dormouse.schemas import messages as m

TELL_S: Final = 2.0
"""Between two tellings. A router that is killed takes so much with it."""


class ServedCounts:
    """``tell`` is to the controller."""

    def __init__(self, tell: Callable[[m.Served], None]) -> None:
        self._tell = tell
        self._counts: Counter[tuple[str, str]] = Counter()  # by function and tenant
        self._timer: asyncio.TimerHandle | None = None

    def add(self, function: str, tenant: str, outcome: Outcome) -> None:
        """One that was turned away does not count, nor one whose client has left before it was answered."""
        if isinstance(outcome, e.Drop) or (isinstance(outcome, e.Fail) and outcome.failure.status in (429, 503)):
            return
        self._counts[function, tenant] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TELL_S, self.flush)

    def flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        counts, self._counts = [(*name, count) for name, count in sorted(self._counts.items())], Counter()
        for start in range(0, len(counts), m.ENTRIES):
            self._tell(m.Served(functions=counts[start : start + m.ENTRIES]))
