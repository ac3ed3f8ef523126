"""Counts the deaths of a node's processes, and decides the pause before one that is replaced alone. Pure: no I/O, no
clock.

The consequences of a death for the other processes are in deaths.py.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final

RESTARTS: Final = 8  # of one role within WINDOW_S, before the supervisor gives a role that all depend on up
WINDOW_S: Final = 60.0
BACKOFF_S: Final = (0.25, 60.0)
"""Pauses before a role that is replaced alone is started again, from its second death within WINDOW_S on, or from the
first of those in a row before it was ready; they double. One that keeps dying costs the node its part, not its life.
"""


class Restarts:
    """The deaths of each role that nobody else is to blame for."""

    def __init__(self, roles: Iterable[str]) -> None:
        self._deaths: dict[str, deque[float]] = {}
        self._failures: dict[str, int] = {}  # in a row, before it was ready
        for role in roles:
            self.add(role)

    def add(self, role: str) -> None:
        """One more role; it has not died yet."""
        self._deaths[role], self._failures[role] = deque(maxlen=RESTARTS), 0

    def ready(self, role: str) -> None:
        self._failures[role] = 0

    def failed(self, role: str) -> None:
        """It has died before it was ready."""
        self._failures[role] += 1

    def too_many(self, role: str, now_s: float) -> bool:
        """Whether a role on which all depend is given up with this death."""
        return self._recent(role, now_s) == RESTARTS

    def died(self, role: str, now_s: float) -> float:
        """Note a death; the pause in seconds before the role is started again."""
        count = min(max(self._recent(role, now_s), self._failures[role]), RESTARTS + 1)
        self._deaths[role].append(now_s)
        return min(BACKOFF_S[0] * 2.0 ** (count - 1), BACKOFF_S[1]) if count else 0.0

    def _recent(self, role: str, now_s: float) -> int:
        return sum(now_s - death_s < WINDOW_S for death_s in self._deaths[role])
