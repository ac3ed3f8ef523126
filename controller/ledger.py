"""Usage of functions over time: pure. Bounded in memory however long a node runs.

Of each account, a function of a tenant, the ledger has the total, and *marks*: the total when a minute began in which
something was added. So usage since some minute is a difference, and to forget marks loses nothing of a total, only the
resolution of queries: by minutes for two hours, by hours for two days, by days for a month.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

MINUTE_S: Final = 60
HOUR: Final = 60
DAY: Final = 24 * HOUR
"""In minutes, as marks count."""

BY_MINUTES: Final = 2 * HOUR
BY_HOURS: Final = 2 * DAY
BY_DAYS: Final = 31 * DAY

MAX_ACCOUNTS: Final = 1024
"""With 200 marks of each, some 80 MB. Of more, those of the tenant that has most are forgotten, of them the one that
has used nothing for longest: no tenant makes the node forget what others have used.
"""


class Used(msgspec.Struct, frozen=True):
    """Whole numbers only, so that sums are exact. Bytes over time in byte-milliseconds, by what they are."""

    requests: int = 0
    prompt_tokens: int = 0
    made_tokens: int = 0
    gpu_us: int = 0
    weights: int = 0
    kv: int = 0
    activations: int = 0
    adapter: int = 0
    host: int = 0

    def plus(self, other: "Used") -> "Used":
        return Used(*[a + b for a, b in zip(numbers(self), numbers(other), strict=True)])

    def minus(self, other: "Used") -> "Used":
        return Used(*[a - b for a, b in zip(numbers(self), numbers(other), strict=True)])


def numbers(usage: Used) -> tuple[int, ...]:
    return msgspec.structs.astuple(usage)


NOTHING: Final = Used()

Mark = tuple[int, Used]
"""A minute, and the total when it began."""

_minute = itemgetter(0)


class Account(NamedTuple):
    tenant: str
    function: str


@dataclass(slots=True)
class Books:
    """Of one account."""

    total: Used = NOTHING
    marks: list[Mark] = field(default_factory=list)  # minutes ascend

    @property
    def last(self) -> int:
        """The last minute in which something was added, as far as is known."""
        return self.marks[-1][0] if self.marks else 0

    def since(self, minute: int) -> Used:
        at = bisect_left(self.marks, minute, key=_minute)
        return self.total.minus(self.marks[at][1]) if at < len(self.marks) else NOTHING


def aligned(minute: int, now: int) -> int:
    """From when on usage since ``minute`` is known: that, or earlier."""
    if now - minute <= BY_MINUTES:
        return minute
    hour = minute // HOUR * HOUR
    if now - hour <= BY_HOURS:
        return hour
    return max(minute, now - BY_DAYS) // DAY * DAY


class Ledger:
    """See the module. Times are seconds of the Unix clock; one that goes back counts as if it stood still."""

    def __init__(self) -> None:
        self.books: dict[Account, Books] = {}
        self.changed: dict[Account, None] = {}  # since somebody has written them down, who clears it
        self.closed: list[Account] = []  # forgotten, likewise
        self._now = 0

    def add(self, account: Account, usage: Used, now_s: float) -> None:
        if usage == NOTHING:
            return
        now = self._now = max(self._now, int(now_s) // MINUTE_S)
        books = self.books.get(account)
        if books is None:
            self._make_room(account.tenant)
            books = self.books[account] = Books()
        if not books.marks or books.marks[-1][0] < now:
            books.marks.append((now, books.total))
            self._thin(books)
        books.total = books.total.plus(usage)
        self.changed[account] = None

    def restore(self, account: Account, books: Books) -> None:
        """As it was written down; later usage is added."""
        if (since := self.books.get(account)) is not None:
            marks = [(minute, books.total.plus(used)) for minute, used in since.marks if minute > books.last]
            books = Books(books.total.plus(since.total), [*books.marks, *marks])
            self.changed[account] = None
        self.books[account] = books
        if books.marks:
            self._now = max(self._now, books.marks[-1][0])

    def _thin(self, books: Books) -> None:
        """Of each hour, and day, that is past its time the first mark is enough."""
        now, kept = self._now, list[Mark]()
        seen: tuple[bool, bool, int] | None = None
        for mark in books.marks:
            minute = mark[0]
            if minute < (now - BY_DAYS) // DAY * DAY:
                continue
            age = now - minute
            span = minute if age <= BY_MINUTES else minute // HOUR if age <= BY_HOURS else minute // DAY
            key = (age <= BY_MINUTES, age <= BY_HOURS, span)
            if key != seen:
                kept.append(mark)
            seen = key
        books.marks = kept

    def _make_room(self, tenant: str) -> None:
        """For one more account of this tenant."""
        if len(self.books) >= MAX_ACCOUNTS:
            has = Counter(account.tenant for account in self.books)
            has[tenant] += 1
            oldest = min(self.books, key=lambda account: (-has[account.tenant], self.books[account].last))
            del self.books[oldest]
            self.changed.pop(oldest, None)
            self.closed.append(oldest)

    def since(self, since_s: float, now_s: float) -> tuple[int, Mapping[Account, Used]]:
        """Usage of each account, and the time in seconds since when: the one asked for, or somewhat earlier."""
        now = max(self._now, int(now_s) // MINUTE_S)
        minute = aligned(min(now, max(0, int(since_s) // MINUTE_S)), now)
        found = {account: books.since(minute) for account, books in self.books.items()}
        return minute * MINUTE_S, {account: usage for account, usage in found.items() if usage != NOTHING}
