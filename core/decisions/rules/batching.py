"""Rules under which streams wait for others of their function before a batch takes them, whether the GPU is idle or
not: those that ServerlessLoRA compares itself with, and its Eq. 3 as it stands. Pure: the time is an argument.

Runtimes wait by BatchRule (decisions/batches/gathering.py), and so do those of the simulator. With ``now``, the
default, there is no rule: a prompt is computed as soon as its runtime has a turn, with all that have come by then.
Requests of other functions wait by RequestBatches (core/decisions/scheduling/gathering.py).
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf
from statistics import median_low
from typing import Final, Generic, NamedTuple, TypeVar

FILL_OR_EXPIRE: Final = "fill-or-expire"
FIXED: Final = "fixed"

FULL: Final = "full"
EXPIRED: Final = "expired"
UNTIMED: Final = "untimed"
"""Why a batch begins: its last stream was the one that it waited for; it has waited for long enough; nobody knows yet
what prompts take here, and so nothing waits.
"""

Stream = TypeVar("Stream")

PromptsTime = Callable[[int], float]
"""T: seconds that so many tokens of prompts take."""


class BatchRule(NamedTuple):
    """``fill-or-expire``: a batch of N prompts waits until its first one has SLO - T(N) behind it, or that is nothing.
    ``fixed``: until there are ``size``, or the first one has waited for ``delay_s``.
    """

    kind: str
    size: int = 1
    delay_s: float = 0.0

    @classmethod
    def of(cls, kind: str, size: int, delay_ms: int) -> "BatchRule | None":
        """As settings have it; None: nobody waits."""
        return cls(kind, size, delay_ms / 1000) if kind in (FILL_OR_EXPIRE, FIXED) else None

    def wait_s(self, count: int, tokens: int, ttft_s: float, prompts_s: PromptsTime) -> float:
        """The whole wait of the first of so many streams, with so many tokens of prompts."""
        if self.kind == FIXED:
            return 0.0 if count >= self.size else self.delay_s
        return ttft_s - prompts_s(tokens)


class GatheringBatch(Generic[Stream]):
    """Of one function, whose first tokens are wanted within ``ttft_s``."""

    def __init__(self, rule: BatchRule, ttft_s: float) -> None:
        self._rule, self.ttft_s = rule, ttft_s
        self._streams: dict[Stream, int] = {}  # tokens of each prompt
        self._tokens = 0  # of all
        self._first_s = self._last_s = 0.0

    def add(self, stream: Stream, tokens: int, now_s: float) -> None:
        if not self._streams:
            self._first_s = now_s
        self._last_s = now_s
        self._streams[stream] = tokens
        self._tokens += tokens

    def discard(self, stream: Stream) -> None:
        """Nobody waits for it any more; what it has been waited for counts for the others."""
        self._tokens -= self._streams.pop(stream, 0)

    def due_s(self, prompts_s: PromptsTime | None) -> float:
        """When it begins if nothing comes any more; ``prompts_s`` is None as long as that is not known."""
        if not self._streams:
            return float("inf")
        if self._rule.kind != FIXED and prompts_s is None:
            return self._first_s
        count, tokens = len(self._streams), self._tokens
        return self._first_s + self._rule.wait_s(count, tokens, self.ttft_s, prompts_s or _nothing)

    def take(self, now_s: float, prompts_s: PromptsTime | None) -> tuple[list[Stream], str]:
        """Its streams, and why they begin, if it has waited for long enough."""
        due_s = self.due_s(prompts_s)
        if now_s < due_s:
            return [], ""
        why = FULL if due_s <= self._last_s else EXPIRED
        if self._rule.kind != FIXED and prompts_s is None:
            why = UNTIMED
        found, self._streams, self._tokens = list(self._streams), {}, 0
        return found, why


def _nothing(_: int) -> float:
    return 0.0


LEARNS: Final = 0.2
"""Share of the old mean that gives way to a new measurement: a change shows after five arrivals."""

RECENT: Final = 5
"""Of so many batches of a size the median counts: two of them may have waited for copies of the model, which nobody
here can tell, and three tell of a change.
"""


class BatchTimes:
    """T(b), the seconds that a batch of so many requests takes, as measured."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}  # by count
        self._counts: list[int] = []  # of which something is known, in order
        self.known: dict[int, float] = {}  # medians, by count

    def took(self, count: int, seconds: float) -> None:
        if count not in self._recent:
            self._recent[count] = deque(maxlen=RECENT)
            insort(self._counts, count)
        recent = self._recent[count]
        recent.append(seconds)
        self.known[count] = median_low(recent)  # of an even number, the one that has waited for no copy

    def of(self, count: int) -> float | None:
        """Between two that are known, on the line between them. Beyond the largest, as if nothing were gained by more;
        below the smallest, as if nothing were by fewer. None: nothing is known.
        """
        if (known := self.known.get(count)) is not None or not self._counts:
            return known
        at = bisect_left(self._counts, count)
        if not 0 < at < len(self._counts):
            found = self._counts[min(at, len(self._counts) - 1)]
            return self.known[found] * max(1.0, count / found)
        less, more = self._counts[at - 1 : at + 1]
        part = (count - less) / (more - less)
        return self.known[less] + part * (self.known[more] - self.known[less])


class BatchRequests:
    """Requests that wait for one lease, and when each is to be answered. Numbers are in order of arrival."""

    def __init__(self, came: Iterable[tuple[int, float]]) -> None:
        self._due_s: dict[int, float] = {}  # by number
        self.earliest_s = inf
        self.change(came, ())

    def change(self, came: Iterable[tuple[int, float]], left: Iterable[int]) -> None:
        """Numbers in ``left`` need not be there."""
        for number, due_s in came:
            self._due_s[number] = due_s
            self.earliest_s = min(self.earliest_s, due_s)
        gone = [self._due_s.pop(number) for number in left if number in self._due_s]
        if gone and min(gone) <= self.earliest_s:
            self.earliest_s = min(self._due_s.values(), default=inf)

    def in_order(self) -> list[float]:
        return [due_s for _, due_s in sorted(self._due_s.items())]

    def __len__(self) -> int:
        return len(self._due_s)


class RequestBatches:
    """When requests of a function begin as a batch of at most ``most``.

    With ``longest_s`` 0 at once, with all that there are: no GPU is idle while a request waits. Else one more is waited
    for, whether a GPU is idle or not, while that is expected to save more time of a GPU, T(n) + T(1) - T(n+1), than it
    takes, and none would be late for it (``deadline_s``); never longer than ``longest_s``. As long as T is not known,
    nobody waits.

    To wait for the next request takes min(gap, longest_s), and saves time only if the gap was the shorter one. So the
    recent means of these two are all that is learned of arrivals. A pause then counts as one gap without a request,
    however long it was: with the mean of gaps themselves, or a rate that decays, an hour without requests would predict
    none, when sixteen clients come back at once. Gaps are those of each instance: a request to another one is in no
    batch of this.
    """

    def __init__(self, most: int, longest_s: float, deadline_s: float) -> None:
        self.follow(most, longest_s, deadline_s)
        self.times = BatchTimes()
        self._waited_s = 0.0  # recent mean of gaps between arrivals, each as longest_s at most
        self._came = 0.0  # recent share of those that were shorter

    def follow(self, most: int, longest_s: float, deadline_s: float) -> None:
        """These from now on."""
        self.most, self.longest_s, self.deadline_s = most, longest_s, deadline_s

    def came(self, at_s: float, last_s: float | None) -> float:
        """A request in one instance, to which the last one came then, if one did; it may be heard of later. When the
        last one has come there now.
        """
        if last_s is None:
            return at_s
        if self.longest_s > 0.0:
            gap_s = at_s - last_s
            self._waited_s += LEARNS * (min(max(0.0, gap_s), self.longest_s) - self._waited_s)
            self._came += LEARNS * ((gap_s < self.longest_s) - self._came)
        return max(last_s, at_s)

    def size(self, left_s: Sequence[float]) -> int:
        """The number of these requests, the first ones, that are to be the next batch: as many as let most of all of
        them be in time, those of the batch after it too. ``left_s``: how long each has from when it begins.
        """
        some = left_s[: self.most]
        if self.times.of(1) is None:
            return len(some)
        first, rest = list[float](), sorted(some)  # both in order: one moves over for each size
        most, size = -1, 0
        for count, left in enumerate(some, 1):
            insort(first, left)
            del rest[bisect_left(rest, left)]
            took_s = self.times.of(count) or 0.0
            rest_s = took_s + (self.times.of(len(rest)) or 0.0)
            in_time = len(some) - bisect_left(first, took_s) - bisect_left(rest, rest_s)
            if in_time >= most:
                most, size = in_time, count
        return size

    def wait_s(self, count: int, waited_s: float) -> float:
        """The time that ``count`` requests, the first of which has waited so long, wait for one more."""
        now, one, more = (self.times.of(each) for each in (count, 1, count + 1))
        if count >= self.most or now is None or one is None or more is None:
            return 0.0
        if self._came * (now + one - more) <= self._waited_s:
            return 0.0
        return max(0.0, min(self.longest_s - waited_s, self.deadline_s - waited_s - more))
