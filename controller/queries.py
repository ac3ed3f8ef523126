"""Status queries that wait for the store's report: pure. Each is answered once: with the report, or without it when the
store has not answered in time or too many wait already.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

WAIT_S: Final = 1.0
"""A person waits for it, and a store that does not answer is news for this person."""

MAX_WAITING: Final = 64
"""More people do not ask within a second; a program that does gets the rest without the store's part."""


@dataclass(slots=True)
class Queries:
    """``asked`` gives the number to ask the store with; numbers are never used twice."""

    _number: int = 0
    _waiting: "OrderedDict[int, tuple[int, float]]" = field(default_factory=OrderedDict)  # (query, deadline), by number

    def asked(self, query: int, now_s: float) -> int | None:
        """The number under which the store is to be asked; None if this query must be answered at once without it."""
        if len(self._waiting) >= MAX_WAITING:
            return None
        self._number += 1
        self._waiting[self._number] = query, now_s + WAIT_S
        return self._number

    def reported(self, number: int) -> int | None:
        """The query that the store's report answers; None if it comes too late."""
        query, _ = self._waiting.pop(number, (None, 0.0))
        return query

    def overdue(self, now_s: float) -> list[int]:
        """Queries that must be answered now, without the store."""
        due = [number for number, (_, deadline_s) in self._waiting.items() if deadline_s <= now_s]
        return [self._waiting.pop(number)[0] for number in due]

    @property
    def next_deadline_s(self) -> float | None:
        return next((deadline_s for _, deadline_s in self._waiting.values()), None)
