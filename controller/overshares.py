"""Tenants over their share of the GPUs' time: reported to the router, which tells callers that have waited for too
long.
"""

from collections.abc import Callable
from typing import Final

from dormouse.core.decisions.scheduling.shares import Shares
from dormouse.schemas import messages as m

TELL_S: Final = 0.5
"""Between two tellings at least: it changes with each turn."""


class OverShares:
    """``tell`` is to the router."""

    def __init__(self, tell: Callable[[m.OverShare], None]) -> None:
        self._tell = tell
        self._told: list[str] = []
        self._next_s = 0.0

    def look(self, shares: Shares, now_s: float) -> None:
        """After each event."""
        if not shares.on or now_s < self._next_s:
            return
        over = list(shares.over_by_s(now_s))
        if over != self._told:
            self._told, self._next_s = over, now_s + TELL_S
            self._tell(m.OverShare(tenants=over))
