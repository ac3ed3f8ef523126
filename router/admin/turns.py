"""Order of the builds of environments that wait: pure. Tenants take turns, so one that has many waiting delays each
other tenant by one, and keeps none from asking.
"""

from collections import deque
from typing import Final

EACH: Final = 4
"""Builds of one tenant that wait, or run."""

ALL: Final = 256
"""A bound for many tenants at once; each that waits has its files on the disk."""


class BuildTurns:
    """See the module."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[str]] = {}  # by tenant, whose turn is next first
        self._running: tuple[str, str] | None = None  # tenant, build

    def has_room(self, tenant: str) -> bool:
        """Whether one more of this tenant may wait."""
        running = self._running is not None and self._running[0] == tenant
        own = len(self._waiting.get(tenant, ())) + running
        return own < EACH and sum(map(len, self._waiting.values())) < ALL

    def add(self, tenant: str, build: str) -> None:
        self._waiting.setdefault(tenant, deque()).append(build)

    def next(self) -> str | None:
        """The one that runs from now on; None if one runs, or none waits."""
        if self._running is not None or not self._waiting:
            return None
        tenant = next(iter(self._waiting))
        queue = self._waiting.pop(tenant)
        build = queue.popleft()
        if queue:
            self._waiting[tenant] = queue  # behind all others
        self._running = tenant, build
        return build

    def ended(self) -> None:
        """The one that ran."""
        self._running = None
