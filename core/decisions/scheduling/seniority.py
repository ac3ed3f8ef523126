"""Requests that have waited too long: pure. A request that others have overtaken for longer than the policy's bound is
overdue. Overdue requests, oldest first, get a share of the GPUs' time before all others. Without it, a policy that
serves requests first that can still be in time never serves some under lasting load; with all of the time, a backlog
would make all requests late, also those that come after it.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from dormouse.core.decisions.scheduling.state import Waiting
from dormouse.schemas.policy import Policy

LOOK: Final = 64
"""Oldest requests of which one without a lease is sought: the others of an instance that has one wait for it anyway."""


class Seniority:
    """Deficit accounting: the time granted to others while a request is overdue is owed in the share's proportion."""

    def __init__(self, policy: Policy) -> None:
        self._bound_s = policy.passed_over_ms / 1000 if policy.passed_over_ms else float("inf")
        self._share = policy.passed_over_share
        self._owed_s = 0.0

    def overdue(self, oldest: Iterable[Waiting], now_s: float) -> Waiting | None:
        """The oldest request that is overdue and could be given a lease; ``oldest`` in order of arrival."""
        for waiting in islice(oldest, LOOK):
            if now_s - waiting.arrived_s < self._bound_s:
                return None
            if not waiting.model.leased or waiting.resumes is not None:
                return waiting
        return None

    @property
    def due(self) -> bool:
        """Whether it is the turn of one that is overdue."""
        return self._owed_s >= 0.0

    def granted(self, waiting: Waiting, overdue: Waiting | None, seconds: float) -> None:
        """A lease, expected to take so long, went to ``waiting`` while ``overdue`` was the one that waited longest."""
        if overdue is None:
            self._owed_s = 0.0
        elif waiting is overdue:
            self._owed_s -= (1.0 - self._share) * seconds
        else:
            self._owed_s += self._share * seconds
