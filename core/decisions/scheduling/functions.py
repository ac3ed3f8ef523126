"""Statistics of a function from its own requests: rate, time on a GPU, compliance. Pure."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log, log2
from typing import Final, Literal, NamedTuple, Protocol

from dormouse.core.decisions.rules.batching import BatchRequests, RequestBatches
from dormouse.core.decisions.rules.step_times import first_token_s
from dormouse.schemas.messages import StepTimes


class EndedWait(Protocol):
    """A request, or a batch of them, whose lease or wish for one is over: see `state.Waiting`."""

    request: int
    arrived_s: float
    counts: bool
    batch: BatchRequests | None
    size: int
    failures: int
    failed: bool

    @property
    def own_deadline_s(self) -> float: ...


SMOOTHING: Final = 0.2
"""Weight of the newest measurement in a mean."""


MIN: Final = 0.05
"""Share of a copy that always counts, though a run would hide it: the link is not its own."""


UNKNOWN_RUN_S: Final = 0.02
"""Assumed run time of a function that has never run."""


UNKNOWN_START_S: Final = 0.5
"""Assumed start time of a runtime until one was measured: a process that is forked, and its CUDA context."""


USUAL_PROMPT: Final = 256
"""Tokens of a prompt that is not here yet."""


IN_TIME: Final = 16
"""A lease ends a few milliseconds before its request's error is reported: fewer requests of a function end in them."""


@dataclass(frozen=True, slots=True)
class LastWake:
    """Source of the bytes of a function's last wake. ``wake_us`` is None if it did not end before its lease."""

    gpu: int
    copied_nbytes: int
    peer_nbytes: int
    file_nbytes: int
    wake_us: int | None


class LastEviction(NamedTuple):
    """``function``: the one whose request needed the room; "" if it is no longer known."""

    gpu: int
    at_s: float
    nbytes: int
    function: str


class LastPreload(NamedTuple):
    """The last model brought to a GPU before any request for it, and the reason: requests per second, and the wait that
    each would have had. ``outcome`` is the executor's; "": not reported yet.
    """

    at_s: float
    function: str
    nbytes: int
    rate_s: float
    saved_s: float
    outcome: str = ""
    copied_nbytes: int = 0


EvictedFor = Literal["wake", "memory", "preload"]
"""Reason why others lost bytes on a GPU: a lease that began, memory that a running one needed, or a preload."""

Source = Literal["host", "gpu", "file"]
"""Source of the bytes of a wake; of several, the slowest."""


@dataclass(slots=True)
class WakesFrom:
    """From one source. ``spent_us`` is of those that ended before their lease, which were ``timed``."""

    count: int = 0
    timed: int = 0
    spent_us: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class FunctionCounts:
    """For people: never read by a decision."""

    leases: int = 0
    woken: dict[Source, WakesFrom] = field(default_factory=dict)
    copied_nbytes: int = 0
    peer_nbytes: int = 0  # of those copied: from another GPU
    file_nbytes: int = 0  # of those copied: read from a file first
    gpu_us: int = 0
    repaired: int = 0  # results that an executor copied into the layout that the function had counted on
    replayed: int = 0  # sections of sequences of operations that a GPU was given at once
    evicted: Counter[EvictedFor] = field(default_factory=Counter)  # times that an instance lost bytes on a GPU
    preloads: int = 0  # times that some of it was brought before any request
    preloaded_nbytes: int = 0  # of those copied
    gpus: dict[int, int] = field(default_factory=dict)  # leases by GPU
    batches: int = 0  # leases for several requests at once
    batch_requests: int = 0  # that they have served
    batch_places: int = 0  # that they had for such
    batches_failed: int = 0  # of several requests, none of which had a call with others that came through
    last_wake: LastWake | None = None
    last_eviction: LastEviction | None = None

    @property
    def wakes(self) -> int:
        return sum(wakes.count for wakes in self.woken.values())

    @property
    def evictions(self) -> int:
        return self.evicted.total()

    def woke(self, wake: LastWake) -> None:
        self.last_wake = wake
        source: Source = "file" if wake.file_nbytes else "host" if wake.peer_nbytes < wake.copied_nbytes else "gpu"
        wakes = self.woken.setdefault(source, WakesFrom())
        wakes.count += 1
        wakes.timed += wake.wake_us is not None
        wakes.spent_us += wake.wake_us or 0
        wakes.nbytes += wake.copied_nbytes


class Function:
    """Statistics of a function from its own requests: rate, time on a GPU, compliance.

    ``run_s`` is the time of a lease that copies nothing, ``extra_s`` the time that copying adds beyond the longer of
    run and copy, ``hold_s`` the mean of all leases, ``best_s`` the least time expected of one (0: not known).
    """

    __slots__ = (
        "_age_s",
        "_count",
        "_in_time",
        "_outcomes",
        "base",
        "base_nbytes",
        "batches",
        "best_s",
        "busy",
        "context_nbytes",
        "counts",
        "deadline_s",
        "ends",
        "extra_s",
        "given_up",
        "group",
        "half_life_s",
        "hindered_ends",
        "hold_s",
        "instances",
        "kept",
        "late",
        "latency_s",
        "metric",
        "name",
        "percentile",
        "pinned",
        "run_s",
        "sensitivity",
        "served",
        "start_s",
        "tenant",
        "times",
        "tpot_s",
        "window",
        "work_s",
    )

    def __init__(self, name: str, window: int, half_life_s: float) -> None:
        self.name = name
        self.tenant = ""
        self.percentile = 0.98
        self.deadline_s = 1.0
        self.sensitivity = 1.0
        self.pinned = False
        self.window = window
        self.half_life_s = half_life_s
        self.run_s: float | None = None
        self.extra_s = 0.0
        self.hold_s = UNKNOWN_RUN_S
        self.best_s = 0.0
        self.latency_s = 0.0
        self.served = 0  # of the window
        self.late = 0  # of the window
        self.ends = 0  # since rationing.py has looked
        self.hindered_ends = 0  # of these: late, and because of others
        self.given_up = False  # while links are too slow for all
        self.group = 0  # 0: worth saving; 1: given up for now
        self.metric = 0.0
        self.tpot_s = 0.0  # wanted of each token after the first, of a language model
        self.work_s = 0.0  # of a GPU, that a lease has had in all, of a language model
        self.busy = 1.0  # share of a lease in which it computes
        self.start_s = UNKNOWN_START_S  # of its runtime, where there is none
        self.times: StepTimes | None = None  # times of its steps, of a language model
        self.batches: RequestBatches | None = None  # times of its batches, if requests come in such
        self.counts = FunctionCounts()
        self.base = ""  # the function to whose model its own adds
        self.base_nbytes = 0  # of that, if no instance of it is known
        self.context_nbytes = 0  # of a GPU's memory for models, that its runtime's process takes
        self.instances = 0
        self.kept = False  # it is deployed: known also without an instance
        self._outcomes: deque[bool] = deque()  # late ones True
        self._in_time: deque[int] = deque(maxlen=IN_TIME)  # last requests in time, until an error is reported
        self._count = 0.0
        self._age_s = 0.0

    def arrived(self, now_s: float) -> None:
        self._count = self._count * 2.0 ** ((self._age_s - now_s) / self.half_life_s) + 1.0
        self._age_s = now_s

    def rate(self, now_s: float) -> float:
        """Requests per second, recent ones counting more."""
        return self.lately(now_s) * log(2.0) / self.half_life_s

    def lately(self, now_s: float) -> float:
        """Requests that it has had, old ones counting less."""
        decayed: float = self._count * 2.0 ** ((self._age_s - now_s) / self.half_life_s)
        return decayed

    @property
    def asked(self) -> bool:
        """Whether it ever had a request."""
        return self._count > 0.0

    @property
    def log_rate(self) -> float:
        """The rate's logarithm plus a term that is the same for all functions at any time: orders them without a
        clock, because all rates decay alike.
        """
        return (log2(self._count) if self._count > 0.0 else -64.0) + self._age_s / self.half_life_s

    def settled(self, waiting: EndedWait, late: bool, now_s: float, hindered_s: float) -> None:
        """A lease, or the wish for one, is over. ``hindered_s``: how long other requests have kept it waiting."""
        if not waiting.counts:
            return
        if waiting.batch is not None:
            for index, deadline_s in enumerate(waiting.batch.in_order()[: waiting.size]):
                self._settled(waiting, deadline_s, now_s > deadline_s, index < waiting.failures, now_s, hindered_s)
        else:
            self._settled(waiting, waiting.own_deadline_s, late, waiting.failed, now_s, hindered_s)

    def _settled(
        self, waiting: EndedWait, deadline_s: float, late: bool, failed: bool, now_s: float, hindered_s: float
    ) -> None:
        """One request."""
        hindered = late and hindered_s >= now_s - deadline_s
        late = late or failed
        if not late:
            self._in_time.append(waiting.request)
        self.ended(late, now_s - waiting.arrived_s, hindered)

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

    def ended(self, late: bool, latency_s: float, hindered: bool = False) -> None:
        """A request that counts has its fate, as far as is known. ``hindered``: without others it would not have been
        late.
        """
        self._outcomes.append(late)
        self.served += 1
        self.late += late
        self.ends += 1
        self.hindered_ends += hindered
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

    def measured(self, hold_s: float, copy_s: float, requests: int = 0) -> None:
        """A lease took ``hold_s``, of which copies took ``copy_s`` (0: it copied nothing). Those of language models
        last as long as requests come. ``requests``: it was for a batch of so many; see `computed`, too.
        """
        if self.times is not None:
            return
        self.hold_s += (hold_s - self.hold_s) * SMOOTHING
        if requests and copy_s <= 0.0:
            return
        if copy_s <= 0.0:
            self.run_s = hold_s if self.run_s is None else self.run_s + (hold_s - self.run_s) * SMOOTHING
            self.best_s = self.run_s
            return
        run_s = self.run_s
        if run_s is None:
            self.best_s = hold_s if copy_s < 0.7 * hold_s else 0.5 * hold_s
            return
        extra_s = hold_s - max(self.run_of(requests) if requests else run_s, copy_s)
        self.extra_s += (extra_s - self.extra_s) * SMOOTHING

    def batches_took(self, times: Sequence[tuple[int, float]]) -> None:
        """Its batches of so many requests took so long before this scheduler began."""
        self.batches = RequestBatches(1, 0.0, self.deadline_s)
        for count, seconds in times:
            self.batches.times.took(count, seconds)
        if (one_s := self.batches.times.of(1)) is not None:
            self.run_s = self.hold_s = self.best_s = one_s

    def computed(self, requests: int, hold_s: float) -> None:
        """A lease that copied nothing was of one batch of so many, which was computed once."""
        assert self.batches is not None
        self.batches.times.took(requests, hold_s)
        self.run_s = self.best_s = self.batches.times.of(1) or 0.0

    def worked(self, gpu_s: float, lease_s: float) -> None:
        """A lease of its language model is over, which lasted so long."""
        weight = SMOOTHING if self.work_s else 1.0
        self.work_s += (gpu_s - self.work_s) * weight
        self.busy += (min(1.0, gpu_s / lease_s if lease_s > 0.0 else 1.0) - self.busy) * weight

    def started(self, first_s: float) -> None:
        """The first step of a runtime that was not there was over after so long, and copies were there before."""
        start_s = max(0.0, first_s - (self.best_s or self.hold_s))
        self.start_s += (start_s - self.start_s) * SMOOTHING

    def timed(self, times: StepTimes) -> None:
        """Steps of its language model take so long: a lease is expected to take as long as a prompt."""
        self.times = times
        self.run_s = self.hold_s = self.best_s = first_token_s(times, USUAL_PROMPT, 0)

    def run_of(self, requests: int) -> float:
        """Expected time of a lease without copies, of a batch of so many or, with 0, of none (0: unknown)."""
        of_batch_s = self.batches.times.of(requests) if requests and self.batches is not None else None
        return of_batch_s or self.best_s

    def lease_of(self, requests: int) -> float:
        """The same, or the mean time of leases while that is not known."""
        return self.run_of(requests) or self.hold_s

    def predicted_s(self, copy_s: float, requests: int = 0) -> float:
        """Expected time of a lease whose wake copies for so long; ``requests`` as above."""
        run_s = self.lease_of(requests)
        if copy_s <= 0.0:
            return run_s
        return max(run_s, copy_s) + max(0.0, self.extra_s)

    def exposed_s(self, copy_s: float) -> float:
        """Additional wait of a request because of a copy. A lease of a language model is of many requests, and hides
        nothing of it.
        """
        hidden_s = 0.0 if self.tpot_s else self.best_s
        return max(MIN * copy_s, copy_s - hidden_s)
