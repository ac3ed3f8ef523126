"""Order in which waiting requests are considered for a GPU: pure. `ORDER_CLASSES` has those that a policy may name. An
order holds requests of instances that have no lease; one that is taken out is granted, set aside or put back by the
scheduler.
"""

from abc import ABC, abstractmethod
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Final, Protocol

from dormouse.core.decisions.scheduling.functions import Function
from dormouse.core.decisions.scheduling.state import Waiting
from dormouse.core.decisions.scheduling.topology import Bandwidths

UPDATE_S: Final = 2.0
"""Interval of ranking functions anew (Torpor's prototype: 2 s)."""


class Order(Protocol):
    gives_up: bool
    """Whether functions may be given up while links are too slow for all (rationing.py)."""

    def add(self, waiting: Waiting, now_s: float) -> None:
        """Take in a request."""

    def add_late(self, waiting: Waiting) -> None:
        """Take in a request that cannot meet its deadline any more."""

    def pop(self, now_s: float) -> tuple[Waiting | None, bool]:
        """The next live request, and whether it is known to be late; None if there is none."""

    def update(self, now_s: float, functions: list[Function]) -> None:
        """Rank functions anew."""

    def standing(self, waiting: Waiting, now_s: float) -> tuple[float, ...]:
        """Its position, for people: the least comes first. The first number separates late ones from others."""


PRUNE: Final = 64
"""Entries below which those that wait no more are not looked for."""


class Heaped(ABC):
    """Requests by a key that is fixed when they are added; with ``feasible``, late ones after all others. Requests that
    wait no more stay until they are met, or half of all are such; so do entries of a lease that wanted a turn, had it,
    and wants the next one: that is as if it came then.
    """

    feasible = False
    gives_up = False

    def __init__(self, topology: Bandwidths) -> None:
        self._topology = topology
        self._heap: list[tuple[float, float, int, float, Waiting]] = []
        self._late: list[tuple[float, int, Waiting]] = []
        self._prune_at = PRUNE

    @abstractmethod
    def key(self, waiting: Waiting) -> tuple[float, float]:
        """Least first."""

    def add(self, waiting: Waiting, now_s: float) -> None:
        if self.feasible and self._late_by_now(waiting, now_s):
            self.add_late(waiting)
            return
        first, second = self.key(waiting)
        heappush(self._heap, (first, second, waiting.request, waiting.arrived_s, waiting))
        self._grown()

    def add_late(self, waiting: Waiting) -> None:
        heappush(self._late, (waiting.arrived_s, waiting.request, waiting))
        self._grown()

    def _grown(self) -> None:
        if len(self._heap) + len(self._late) > self._prune_at:
            self._heap[:] = [entry for entry in self._heap if _waits(entry[4], entry[3])]
            heapify(self._heap)
            self._late[:] = [entry for entry in self._late if _waits(entry[2], entry[0])]
            heapify(self._late)
            self._prune_at = max(PRUNE, 2 * (len(self._heap) + len(self._late)))

    def pop(self, now_s: float) -> tuple[Waiting | None, bool]:
        heap = self._heap
        while heap:
            _, _, _, arrived_s, waiting = heappop(heap)
            if not _waits(waiting, arrived_s):
                continue
            if self.feasible and self._late_by_now(waiting, now_s):
                self.add_late(waiting)
                continue
            return waiting, False
        late = self._late
        while late:
            arrived_s, _, waiting = heappop(late)
            if _waits(waiting, arrived_s):
                return waiting, True
        return None, False

    def update(self, now_s: float, functions: list[Function]) -> None:  # noqa: B027 (most orders need none)
        """These need none: their keys never change."""

    def standing(self, waiting: Waiting, now_s: float) -> tuple[float, ...]:
        if self.feasible and self._late_by_now(waiting, now_s):
            return (1.0, waiting.arrived_s, 0.0, waiting.request)
        return (0.0, *self.key(waiting), waiting.request)

    def _late_by_now(self, waiting: Waiting, now_s: float) -> bool:
        """Whether it cannot be in time even if it runs at once where most of its model is, or is copied from."""
        function, model = waiting.function, waiting.model
        left_s = waiting.deadline_s - now_s
        if waiting.resumes is not None and waiting.resumes.due is not None:
            return left_s < 0.0
        if function.best_s > left_s:
            return True
        there = max(model.resident.values(), default=0)
        return there < model.nbytes and function.predicted_s((model.nbytes - there) / self._topology.host_bps) > left_s

    def _rekey(self) -> None:
        self._heap[:] = [(*self.key(w), w.request, at_s, w) for _, _, _, at_s, w in self._heap if _waits(w, at_s)]
        heapify(self._heap)


def _waits(waiting: Waiting, arrived_s: float) -> bool:
    """Whether this is an entry of its current wait."""
    return waiting.live and waiting.arrived_s == arrived_s


class Fifo(Heaped):
    """By arrival."""

    def key(self, waiting: Waiting) -> tuple[float, float]:
        return (waiting.arrived_s, 0.0)


class Edf(Heaped):
    """By deadline."""

    def key(self, waiting: Waiting) -> tuple[float, float]:
        return (waiting.deadline_s, 0.0)


class Feasible(Heaped):
    """By deadline among those that can still make it, with the wake from the best source; the others by arrival."""

    feasible = True

    def key(self, waiting: Waiting) -> tuple[float, float]:
        return (waiting.deadline_s, 0.0)


class Rrc(Heaped):
    """Torpor §5.2 with the constants of its prototype: functions sorted by their metric; those up to a boundary are
    high priority, most needy first, the others low, least needy first. The boundary is the share ``alpha`` of all
    need, which grows while more functions comply and shrinks when fewer do.
    """

    ADJUST: Final = 20  # updates between adjustments
    DIFFERENCE: Final = 0.04
    SCALE: Final = 2.0
    LOW_SCALE: Final = 1.01

    def __init__(self, topology: Bandwidths) -> None:
        super().__init__(topology)
        self._alpha = 1.0
        self._updates = 0
        self._compliant: float | None = None

    def key(self, waiting: Waiting) -> tuple[float, float]:
        function = waiting.function
        return (0.0, -function.metric) if function.group == 0 else (1.0, function.metric)

    def metric(self, function: Function) -> float:
        return function.rrc

    def update(self, now_s: float, functions: list[Function]) -> None:
        known = [f for f in functions if f.served]
        for function in known:
            function.metric = self.metric(function)
        known.sort(key=lambda f: f.metric)
        totals = list(accumulate(max(0.0, f.metric) for f in known))
        for function, total in zip(known, totals, strict=True):
            function.group = 0 if function.metric <= 0.0 or total <= self._alpha * totals[-1] else 1
        self._updates += 1
        if known and self._updates % self.ADJUST == 0:
            self._adjust(sum(f.metric <= 0.0 for f in known) / len(known))
        self._rekey()

    def _adjust(self, share: float) -> None:
        if self._compliant is None:
            self._compliant = share
            return
        change = (share - self._compliant) / self._compliant if self._compliant else self.DIFFERENCE
        if change >= self.DIFFERENCE:
            self._alpha, self._compliant = min(1.0, self._alpha * self.SCALE), share
        elif change < -self.DIFFERENCE:
            self._alpha, self._compliant = self._alpha / self.SCALE, share
        else:
            self._alpha = min(1.0, self._alpha * self.LOW_SCALE)


class RrcByLatency(Rrc):
    """As `Rrc`, but the metric is the need times the mean latency: one request counts as the time that it takes."""

    def metric(self, function: Function) -> float:
        return function.rrc * function.latency_s


class RrcByDeadline(RrcByLatency):
    """The same groups, and by deadline within one: the paper names no order there."""

    def key(self, waiting: Waiting) -> tuple[float, float]:
        return (float(waiting.function.group), waiting.deadline_s)


class Effort(Heaped):
    """Functions that would need too long to comply again, even if every request were served in time from now on, come
    after those that can: their RRC over their rate is that time. Judged when a request comes: few wait for long.
    """

    feasible = True
    gives_up = True
    RECOVERY_S: Final = 1200.0

    def add(self, waiting: Waiting, now_s: float) -> None:
        function = waiting.function
        hopeless = False
        if function.late > 2:  # two late ones: not yet a reason
            few, need = 2.0 / (1.0 - function.percentile), function.rrc
            hopeless = need > few and need > self.RECOVERY_S * function.rate(now_s)
        function.group = 1 if hopeless or function.given_up else 0
        super().add(waiting, now_s)

    def key(self, waiting: Waiting) -> tuple[float, float]:
        return (float(waiting.function.group), waiting.deadline_s)


ORDER_CLASSES: Final[dict[str, type[Heaped]]] = {
    "fifo": Fifo,
    "edf": Edf,
    "feasible": Feasible,
    "rrc": Rrc,
    "rrc-latency": RrcByLatency,
    "rrc-deadline": RrcByDeadline,
    "effort": Effort,
}
