"""The scheduler's picture of functions, models, GPUs and waiting requests; plain data that only it changes. No I/O."""

from collections import deque
from dataclasses import dataclass, field
from math import log, log2
from operator import attrgetter
from typing import Final, NamedTuple

from dormouse.schemas.messages import Lease, PoolStats

SMOOTHING: Final = 0.2
"""Weight of the newest measurement in a mean."""

UNKNOWN_RUN_S: Final = 0.02
"""How long a function is taken to run before it ever has."""

OVERRUN: Final = 0.5
"""By what share of its expected time a lease may be late before it is not expected any more."""


IN_TIME: Final = 16
"""A lease ends a few milliseconds before its request's error is heard of: fewer requests of a function end in them."""


@dataclass(frozen=True, slots=True)
class LastWake:
    """Where the bytes of a function's last wake came from. ``wake_us`` is None if it did not end before its lease."""

    gpu: int
    copied_nbytes: int
    peer_nbytes: int
    file_nbytes: int
    wake_us: int | None


class LastEviction(NamedTuple):
    """``function`` is whose request needed the room; "" if it is not known any more."""

    gpu: int
    at_s: float
    nbytes: int
    function: str


@dataclass(slots=True)
class FunctionCounts:
    """For people: never read by a decision."""

    leases: int = 0
    wakes: int = 0
    copied_nbytes: int = 0
    peer_nbytes: int = 0  # of those copied: from another GPU
    file_nbytes: int = 0  # of those copied: read from a file first
    gpu_us: int = 0
    repaired: int = 0  # results that an executor copied into the layout that the function had counted on
    evictions: int = 0  # times that an instance lost bytes on a GPU to others
    gpus: dict[int, int] = field(default_factory=dict)  # leases by GPU
    last_wake: LastWake | None = None
    last_eviction: LastEviction | None = None


class Function:
    """What is known of a function from its own requests: rate, time on a GPU, compliance.

    ``run_s`` is the time of a lease that copies nothing, ``extra_s`` what copying adds beyond the longer of run and
    copy, ``hold_s`` the mean of all leases, ``best_s`` the least that one is expected to take (0: not known).
    """

    __slots__ = (
        "_age_s",
        "_count",
        "_in_time",
        "_outcomes",
        "best_s",
        "counts",
        "deadline_s",
        "extra_s",
        "group",
        "half_life_s",
        "hold_s",
        "instances",
        "kept",
        "late",
        "latency_s",
        "metric",
        "name",
        "percentile",
        "run_s",
        "sensitivity",
        "served",
        "window",
    )

    def __init__(self, name: str, window: int, half_life_s: float) -> None:
        self.name = name
        self.percentile = 0.98
        self.deadline_s = 1.0
        self.sensitivity = 1.0
        self.window = window
        self.half_life_s = half_life_s
        self.run_s: float | None = None
        self.extra_s = 0.0
        self.hold_s = UNKNOWN_RUN_S
        self.best_s = 0.0
        self.latency_s = 0.0
        self.served = 0  # of the window
        self.late = 0  # of the window
        self.group = 0  # 0: worth saving; 1: given up for now
        self.metric = 0.0
        self.counts = FunctionCounts()
        self.instances = 0
        self.kept = False  # it is deployed: known also without an instance
        self._outcomes: deque[bool] = deque()  # late ones True
        self._in_time: deque[int] = deque(maxlen=IN_TIME)  # last requests that were, until an error is heard of
        self._count = 0.0
        self._age_s = 0.0

    def arrived(self, now_s: float) -> None:
        self._count = self._count * 2.0 ** ((self._age_s - now_s) / self.half_life_s) + 1.0
        self._age_s = now_s

    def rate(self, now_s: float) -> float:
        """Requests per second, recent ones counting more."""
        decayed: float = self._count * 2.0 ** ((self._age_s - now_s) / self.half_life_s)
        return decayed * log(2.0) / self.half_life_s

    @property
    def log_rate(self) -> float:
        """The rate's logarithm plus a term that is the same for all functions at any time: orders them without a
        clock, because all rates decay alike.
        """
        return (log2(self._count) if self._count > 0.0 else -64.0) + self._age_s / self.half_life_s

    def settled(self, waiting: "Waiting", late: bool, now_s: float) -> None:
        """A lease, or the wish for one, is over."""
        if not waiting.counts:
            return
        late = late or waiting.failed
        if not late:
            self._in_time.append(waiting.request)
        self.ended(late, now_s - waiting.arrived_s)

    def failed(self, request: int) -> None:
        """A request without a lease has failed: it never had one (0), or its lease ended in time and its answer was
        an error.
        """
        if request == 0:
            self.ended(True, self.latency_s)
        elif request in self._in_time:
            self._in_time.remove(request)
            at = len(self._outcomes) - 1
            while at >= 0 and self._outcomes[at]:
                at -= 1
            if at >= 0:  # which of those in time matters only for when it leaves the window
                self._outcomes[at] = True
                self.late += 1

    def ended(self, late: bool, latency_s: float) -> None:
        """A request that counts has met its fate, as far as is known."""
        self._outcomes.append(late)
        self.served += 1
        self.late += late
        if self.served > self.window:
            self.served -= 1
            self.late -= self._outcomes.popleft()
        self.latency_s += (latency_s - self.latency_s) / min(self.served, self.window)

    @property
    def rrc(self) -> float:
        """Required request count (Torpor §5.2): how many requests must be served in time, one after the other, until
        the function complies; negative if it does.
        """
        return (self.percentile * self.served - (self.served - self.late)) / (1.0 - self.percentile)

    def measured(self, hold_s: float, copy_s: float) -> None:
        """A lease took ``hold_s``, of which copies took ``copy_s`` (0: it copied nothing)."""
        self.hold_s += (hold_s - self.hold_s) * SMOOTHING
        if copy_s <= 0.0:
            self.run_s = hold_s if self.run_s is None else self.run_s + (hold_s - self.run_s) * SMOOTHING
            self.best_s = self.run_s
            return
        run_s = self.run_s
        if run_s is None:
            self.best_s = hold_s if copy_s < 0.7 * hold_s else 0.5 * hold_s
            return
        extra_s = hold_s - max(run_s, copy_s)
        self.extra_s += (extra_s - self.extra_s) * SMOOTHING

    def predicted_s(self, copy_s: float) -> float:
        """How long a lease takes whose wake copies for so long."""
        run_s = self.best_s or self.hold_s
        if copy_s <= 0.0:
            return run_s
        return max(run_s, copy_s) + max(0.0, self.extra_s)


class Waiting:
    """A request that waits for a lease."""

    __slots__ = (
        "arrived_s",
        "counts",
        "deadline_s",
        "failed",
        "function",
        "held_for",
        "live",
        "model",
        "request",
        "resumes",
    )

    def __init__(self, request: int, model: "Model", arrived_s: float, deadline_s: float, counts: bool = True) -> None:
        self.request = request
        self.model = model
        self.function = model.function
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.live = True  # it still waits
        self.held_for: int | None = None  # the busy GPU that it waits for, though others were free
        self.counts = counts  # by its deadline
        self.failed = False  # its client has had an error
        self.resumes: Running | None = None  # its lease, which has lost its turn and wants it again

    def __lt__(self, other: "Waiting") -> bool:
        """Only for an order's heap: a request that is asked again may meet itself there, as it waited before."""
        return False

    @property
    def blocked(self) -> bool:
        """Whether another request of its instance has a lease, or waits for a certain GPU."""
        return self.resumes is None and (self.model.leased or self.model.held_for is not None)


class Model:
    """What is known of an instance's model. ``rank`` orders models by what keeping a byte of them is worth."""

    __slots__ = (
        "function",
        "held_for",
        "instance",
        "leased",
        "nbytes",
        "parked",
        "peak_nbytes",
        "rank",
        "resident",
        "used_s",
        "version",
    )

    def __init__(self, instance: str, function: Function, used_s: float) -> None:
        self.instance = instance
        self.function = function
        self.used_s = used_s
        self.version = 0
        self.nbytes = 0
        self.peak_nbytes = 0
        self.leased = False
        self.held_for: int | None = None  # the busy GPU that its first request waits for
        self.rank = 0.0
        self.resident: dict[int, int] = {}  # nbytes by GPU
        self.parked: list[Waiting] = []  # requests that wait until its lease ends, in order of arrival

    def elsewhere(self, gpu: int) -> bool:
        """Whether another GPU has all of it."""
        if len(self.resident) < 2:
            return False
        return any(there >= self.nbytes and other != gpu for other, there in self.resident.items())


class Running:
    """A lease that an executor has been told of and has not yet given back: a seat, and mostly a turn. ``ends_s`` and
    ``copies_until_s`` are expected, ``copying_nbytes`` come from the host, others from GPU ``peer``.
    """

    __slots__ = (
        "copies_until_s",
        "copying_nbytes",
        "ends_s",
        "idle",
        "instance",
        "lease",
        "missing_nbytes",
        "model",
        "over",
        "peer",
        "revoked_until_s",
        "started_s",
        "turn_s",
        "used_s",
        "waiting",
        "wake_us",
    )

    def __init__(self, waiting: Waiting, lease: Lease, now_s: float) -> None:
        self.waiting = waiting
        self.model = waiting.model
        self.instance = waiting.model.instance
        self.lease = lease
        self.started_s = now_s
        self.ends_s = now_s
        self.copies_until_s = now_s
        self.copying_nbytes = 0
        self.peer: int | None = None
        self.wake_us: int | None = None
        self.revoked_until_s: float | None = None
        self.missing_nbytes = 0  # of its model, when it began
        self.turn_s: float | None = now_s  # since when it has a turn; None: it has a seat alone
        self.used_s = 0.0  # in turns that are over
        self.idle = False  # it has a turn and gives the GPU nothing
        self.over = False

    def held_s(self, now_s: float) -> float:
        """How long it has had a turn."""
        return self.used_s + (now_s - self.turn_s if self.turn_s is not None else 0.0)

    @property
    def overdue_s(self) -> float:
        """Until when its end may still be waited for."""
        return self.ends_s + OVERRUN * (self.ends_s - self.started_s)

    @property
    def request(self) -> int:
        return self.waiting.request


class Gpu:
    """What its executor has told. ``capacity_nbytes`` is the most that models can have of it; ``neighbours`` are the
    other GPUs on its switch; ``held`` are requests that wait until its lease is over, in order of arrival. ``leases``
    are all of its seats, ``turns`` those of them that have a turn, ``running`` the first of these to end.
    """

    __slots__ = (
        "capacity_nbytes",
        "epoch",
        "held",
        "leases",
        "neighbours",
        "number",
        "over",
        "resident",
        "running",
        "stats",
        "turns",
    )

    def __init__(self, number: int, epoch: int, stats: PoolStats, capacity_nbytes: int) -> None:
        self.number = number
        self.epoch = epoch
        self.stats = stats
        self.capacity_nbytes = capacity_nbytes
        self.neighbours: list[Gpu] = []
        self.held: list[Waiting] = []
        self.resident: dict[str, int] = {}  # nbytes by instance; shared ones count for each
        self.running: Running | None = None
        self.leases: dict[int, Running] = {}  # by serial
        self.turns: list[Running] = []
        self.over: list[int] = []  # serials of leases without a command, of whose end it has not been told

    def take_turn(self, running: Running, now_s: float) -> None:
        running.turn_s, running.idle = now_s, False
        turns = self.turns
        turns.append(running)
        self.running = running if len(turns) == 1 else min(turns, key=attrgetter("ends_s"))

    def leave_turn(self, running: Running, now_s: float) -> None:
        running.used_s, running.turn_s, running.idle = running.held_s(now_s), None, False
        turns = self.turns
        turns.remove(running)
        self.running = min(turns, key=attrgetter("ends_s")) if turns else None

    def open(self, turns: int) -> bool:
        """Whether one more could have a turn: there is one, or somebody has one who does not use it."""
        return len(self.turns) < turns or any(running.idle for running in self.turns)
