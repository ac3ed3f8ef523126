"""State of functions, models, GPUs and waiting requests; plain data that only the scheduler changes. No I/O."""

from operator import attrgetter
from typing import Final

import msgspec

from dormouse.core.decisions.rules.batching import BatchRequests
from dormouse.core.decisions.scheduling.functions import Function, LastPreload
from dormouse.schemas.messages import Lease, PoolStats

OVERRUN: Final = 0.5
"""Share of its expected time by which a lease may be late before its end is not expected any more."""


class Waiting:
    """A request that waits for a lease."""

    __slots__ = (
        "arrived_s",
        "batch",
        "beyond_s",
        "counts",
        "deadline_s",
        "expected_s",
        "failed",
        "failures",
        "function",
        "held_for",
        "live",
        "model",
        "rationed",
        "request",
        "resumes",
        "size",
        "tenant",
    )

    def __init__(
        self,
        request: int,
        model: "Model",
        arrived_s: float,
        deadline_s: float,
        counts: bool = True,
        batch: BatchRequests | None = None,
        beyond_s: float = 0.0,
    ) -> None:
        self.request = request
        self.model = model
        self.function = model.function
        self.tenant = model.function.tenant  # stays, though the function may become another's
        self.arrived_s = arrived_s
        self.deadline_s = deadline_s
        self.live = True  # it still waits
        self.held_for: int | None = None  # the busy GPU that it waits for, though others were free
        self.rationed = False  # it waits until one of those that are given up may be woken
        self.beyond_s = beyond_s  # its function's own deadline is so much later
        self.counts = counts  # by that
        self.failed = False  # its client has had an error
        self.failures = 0  # so many clients of its batch
        self.batch = batch  # if it is for several
        self.size = 0  # how many of them it serves, as far as is known before that is decided
        self.measure()
        self.expected_s = 0.0  # until its first token on the GPU that was chosen, of a language model
        self.resumes: Running | None = None  # its lease, which has lost its turn and wants it again

    def __lt__(self, other: "Waiting") -> bool:
        """Only for an order's heap: a request that is asked again may meet itself there, as it waited before."""
        return False

    @property
    def own_deadline_s(self) -> float:
        """Deadline by which its function is judged."""
        return self.deadline_s + self.beyond_s

    def measure(self) -> None:
        """Others are in its batch."""
        if self.batch is not None:
            assert self.function.batches is not None
            self.size = min(len(self.batch), self.function.batches.most)

    @property
    def blocked(self) -> bool:
        """Whether another request of its instance has a lease, or waits for a certain GPU."""
        return self.resumes is None and (self.model.leased or self.model.held_for is not None)


class DueSteps(msgspec.Struct, frozen=True, gc=False):
    """Work of the runtime of a lease at ``told_s``: ``tokens`` of prompts, of which one has until ``first_s`` and was
    wanted within ``ttft_s``; and a token of each of ``decoding`` sequences, wanted each ``tpot_s``.
    """

    told_s: float
    first_s: float
    ttft_s: float
    tokens: int
    decoding: int
    tpot_s: float


class Model:
    """State of an instance's model. ``rank`` orders models by the worth of keeping a byte of them. ``runtime``: of a
    language model, the name of its runtime.
    """

    __slots__ = (
        "came_s",
        "function",
        "held_for",
        "instance",
        "leased",
        "nbytes",
        "parked",
        "peak_nbytes",
        "rank",
        "resident",
        "runtime",
        "told",
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
        self.runtime = ""
        self.held_for: int | None = None  # the busy GPU that its first request waits for
        self.rank = 0.0
        self.resident: dict[int, int] = {}  # nbytes by GPU
        self.told = 0  # the highest number of a request reported as waiting in the instance for a batch
        self.came_s: float | None = None  # when the last of those came
        self.parked: list[Waiting] = []  # requests that wait until its lease ends, in order of arrival

    def elsewhere(self, gpu: int) -> bool:
        """Whether another GPU has all of it."""
        if len(self.resident) < 2:
            return False
        return any(there >= self.nbytes and other != gpu for other, there in self.resident.items())


class Running:
    """A lease that an executor has been sent and has not yet given back: a seat, and mostly a turn. ``ends_s`` and
    ``copies_until_s`` are expected, ``copying_nbytes`` come from the host, others from GPU ``peer``. ``due``: the work
    of a language model's runtime, while it wants a turn.
    """

    __slots__ = (
        "answered",
        "asked",
        "cold",
        "copies_until_s",
        "copying_nbytes",
        "counted_s",
        "due",
        "ends_s",
        "idle",
        "instance",
        "lease",
        "missing_nbytes",
        "model",
        "over",
        "overran",
        "peer",
        "rests",
        "revoked_until_s",
        "started_s",
        "turn_s",
        "used_s",
        "waiting",
        "wake_us",
        "wakes",
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
        self.counted_s = 0.0  # of its time in turns, for its tenant's share
        self.idle = False  # it has a turn and gives the GPU nothing
        self.over = False
        self.overran = False  # it has had its turn for so long that others may have it
        self.asked: tuple[float, float] | None = None  # when it came, and its deadline; it waits as one that comes anew
        self.answered: tuple[int, int] | None = None  # its instance's report of its batch: taken, together
        self.due: DueSteps | None = None
        self.rests = False  # it has a turn, and nothing to compute, as far as reported
        self.wakes = False  # it has brought its missing bytes, and has had no step since
        self.cold = False  # its runtime had no process there, and has had no step

    @property
    def spares(self) -> bool:
        """Whether its turn may be another's."""
        return self.idle or self.overran

    def wants_again(self, now_s: float) -> None:
        """Its turn was taken while it computed. It waits as one that comes now and is late already: behind those that
        can be in time, and those that have been late for longer, however many do likewise.
        """
        waiting = self.waiting
        self.asked = self.asked or (waiting.arrived_s, waiting.deadline_s)
        waiting.arrived_s = waiting.deadline_s = now_s

    def waits_no_more(self) -> None:
        """It is judged by its arrival again."""
        if self.asked is not None:
            (self.waiting.arrived_s, self.waiting.deadline_s), self.asked = self.asked, None

    def held_s(self, now_s: float) -> float:
        """Time that it has had a turn."""
        return self.used_s + (now_s - self.turn_s if self.turn_s is not None else 0.0)

    @property
    def overdue_s(self) -> float:
        """Time until which its end may still be waited for."""
        return self.ends_s + OVERRUN * (self.ends_s - self.started_s)

    @property
    def request(self) -> int:
        return self.waiting.request


class Gpu:
    """State of a GPU, as reported by its executor. ``capacity_nbytes`` is the most that models can have of it;
    ``neighbours`` are the other GPUs on its switch; ``held`` are requests that wait until its lease is over, in order
    of arrival. ``leases`` are all of its seats, ``turns`` those of them that have a turn, ``running`` the first of
    these to end. One that ``leaves`` gets no more leases (leaving.py). ``preload`` is the instance whose model comes
    without a lease (preloading.py), "" if none does.
    """

    __slots__ = (
        "beside_nbytes",
        "capacity_nbytes",
        "context_nbytes",
        "epoch",
        "held",
        "last_preload",
        "leases",
        "leaves",
        "neighbours",
        "number",
        "over",
        "preload",
        "resident",
        "running",
        "runtimes",
        "stats",
        "turns",
        "woken_s",
    )

    def __init__(self, number: int, epoch: int, stats: PoolStats, capacity_nbytes: int) -> None:
        self.number = number
        self.epoch = epoch
        self.stats = stats
        self.capacity_nbytes = capacity_nbytes
        self.context_nbytes = self.beside_nbytes = 0  # of a runtime's process, and for all of them, beside the pool
        self.neighbours: list[Gpu] = []
        self.held: list[Waiting] = []
        self.resident: dict[str, int] = {}  # nbytes by instance; shared ones count for each
        self.running: Running | None = None
        self.leases: dict[int, Running] = {}  # by serial
        self.turns: list[Running] = []
        self.leaves = False
        self.woken_s = float("-inf")  # when a language model that had to be brought there had its first step
        self.runtimes: tuple[str, ...] = ()  # of language models, that have a process here
        self.preload = ""
        self.last_preload: LastPreload | None = None
        self.over: list[int] = []  # serials of ended leases without a command, not reported to it yet

    def take_turn(self, running: Running, now_s: float) -> None:
        running.turn_s, running.idle, running.rests, running.overran = now_s, False, False, False
        turns = self.turns
        turns.append(running)
        self.running = running if len(turns) == 1 else min(turns, key=attrgetter("ends_s"))

    def leave_turn(self, running: Running, now_s: float) -> None:
        running.used_s, running.turn_s, running.idle = running.held_s(now_s), None, False
        turns = self.turns
        turns.remove(running)
        self.running = min(turns, key=attrgetter("ends_s")) if turns else None

    def serves(self, function: Function) -> bool:
        """Whether an instance of this function has a seat here."""
        return any(running.model.function is function for running in self.leases.values())

    def open(self, turns: int) -> bool:
        """Whether one more could have a turn: there is one, or a lease does not use its own."""
        return self.awaited and (len(self.turns) < turns or any(running.spares for running in self.turns))

    @property
    def awaited(self) -> bool:
        """Whether any lease may have a turn here: with ``leaves``, only a lease that wants its turn again."""
        return not self.leaves or any(running.waiting.live for running in self.leases.values())
