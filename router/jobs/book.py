"""The jobs of a node, the choice of those that may begin, and of those that are forgotten: pure.

A job is::

    QUEUED --begin--> BEGUN --end--> ENDED --expires, or room is needed--> forgotten
           <--back--   (it has not run: turned away, or the node ended in good order)

Jobs of one function begin in order, and only a few of them wait in its queue at a time, so that other requests come
between them. The tenant with the fewest begun is next. Jobs that somebody waits for are such other requests, and
begin at once. Ended jobs are kept for ``keep_s``, or until newer jobs of their tenant need the room.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import Final

from dormouse.core.quantities import size
from dormouse.router.front.bodies import SMALL_NBYTES
from dormouse.schemas.messages import Failure

MAX_BEGUN: Final = 64
"""Of a node at a time: their bodies and answers are in memory."""

AGAIN_S: Final = 1.0
"""After which a job that was turned away is tried again; twice as long each time, up to AGAIN_MOST_S."""

AGAIN_MOST_S: Final = 60.0


class JobState(Enum):
    QUEUED = "queued"
    BEGUN = "begun"
    ENDED = "ended"


@dataclass(slots=True)
class Job:
    """``scope``: function, route and key of a request that has an Idempotency-Key, or "". ``patient``: nobody waits for
    it, so refused ones are tried again. Times are of the book's clock, which nobody sets; ``created`` and
    ``ended`` are of the Unix clock, for people.
    """

    id: str
    function: str
    tenant: str
    created: float
    nbytes: int  # of its body, then of its answer
    route: str = ""
    scope: str = ""
    digest: bytes = b""  # of the body, with a key
    patient: bool = True
    idempotent: bool = False  # its function was, when it began
    state: JobState = JobState.QUEUED
    request: int | None = None  # its number among requests, while it is one
    cancelled: bool = False  # while it is BEGUN: to be ended
    tries: int = 0
    came_nbytes: int = 0  # of its answer, until that is kept
    due_s: float = 0.0  # not to begin before
    tried_until_s: float = float("inf")  # what is turned away is not tried again after
    ended_s: float = 0.0
    ended: float = 0.0
    status: int = 0  # of the answer
    code: str = ""  # of an error

    @property
    def word(self) -> str:
        """For counts of them: its state, or how it has ended."""
        if self.state is not JobState.ENDED:
            return str(self.state.value)
        return "succeeded" if not self.code else "cancelled" if self.code == "cancelled" else "failed"


@dataclass(frozen=True, slots=True)
class JobLimits:
    """``keep_s``: of what has ended. The others are of each tenant, and of the node; ``begun_nbytes``: of larger bodies
    of jobs that have begun, beside which other requests have room. Of what may have begun a tenant has one of so many
    ``parts``, also while nobody wants the others: the next one would have to wait until a job ends.
    """

    keep_s: float
    tenant_jobs: int
    tenant_nbytes: int
    nbytes: int
    begun_nbytes: int
    parts: int = 1


def _room_nbytes(job: Job) -> int:
    """Bytes that its body takes of the room for bodies, once it has begun."""
    return job.nbytes if job.nbytes > SMALL_NBYTES else 0


@dataclass(slots=True)
class _Tenant:
    jobs: int = 0
    nbytes: int = 0
    begun: int = 0  # of those that nobody waits for
    begun_nbytes: int = 0  # of their larger bodies
    ended: deque[Job] = field(default_factory=deque)  # oldest first


class JobBook:
    """All jobs of a node."""

    def __init__(self, limits: JobLimits) -> None:
        self.limits = limits
        self.jobs: dict[str, Job] = {}  # oldest first
        self.keyed: dict[str, Job] = {}  # by scope
        self.nbytes = 0
        self._queues: dict[str, deque[Job]] = {}  # by function
        self._at_once: deque[Job] = deque()  # that somebody waits for
        self._begun_nbytes = 0  # of those of which _begun counts
        self._begun: Counter[str] = Counter()  # by function, of those that nobody waits for
        self._tenants: dict[str, _Tenant] = {}
        self._words: dict[tuple[str, str], Counter[str]] = {}  # how many, by function and tenant

    def words(self, function: str, tenant: str) -> dict[str, int]:
        """How many jobs of a function are queued, begun, succeeded, failed and cancelled; of which there are any."""
        return dict(self._words.get((function, tenant), {}))

    def _becomes(self, job: Job, state: JobState) -> None:
        self._count_word(job, -1)
        job.state = state
        self._count_word(job, 1)

    def _count_word(self, job: Job, jobs: int) -> None:
        key = job.function, job.tenant
        words = self._words.setdefault(key, Counter())
        words[job.word] += jobs
        if not words[job.word]:
            del words[job.word]
            if not words:
                del self._words[key]

    # --- room

    def room(self, tenant: str, nbytes: int) -> tuple[list[Job], Failure | None]:
        """For so many bytes of one more job: which of its tenant's that have ended are forgotten, or why it may not."""
        return self._room(tenant, 1, nbytes)

    def room_for_answer(self, job: Job, nbytes: int) -> tuple[list[Job], Failure | None]:
        """The same for its answer, in the place of its body."""
        return self._room(job.tenant, 0, nbytes - job.nbytes)

    def _room(self, tenant: str, jobs: int, nbytes: int) -> tuple[list[Job], Failure | None]:
        known, limits, forgotten = self._tenants.get(tenant, _Tenant()), self.limits, list[Job]()
        jobs, nbytes, whole = known.jobs + jobs, known.nbytes + nbytes, self.nbytes + nbytes
        for oldest in known.ended:
            if jobs <= limits.tenant_jobs and nbytes <= limits.tenant_nbytes and whole <= limits.nbytes:
                break
            forgotten.append(oldest)
            jobs, nbytes, whole = jobs - 1, nbytes - oldest.nbytes, whole - oldest.nbytes
        if jobs > limits.tenant_jobs:
            return [], _full(f"tenant {tenant!r} has {limits.tenant_jobs} jobs already (jobs.tenant_jobs)")
        if nbytes > limits.tenant_nbytes:
            return [], _full(f"jobs of tenant {tenant!r} may have {size(limits.tenant_nbytes)} (jobs.tenant_store)")
        if whole > limits.nbytes:
            return [], _full(f"jobs of this node may have {size(limits.nbytes)} (jobs.store)")
        return forgotten, None

    # --- what happens to jobs

    def add(self, job: Job) -> None:
        """A new one, for which there is room, or one of before a restart."""
        self.jobs[job.id] = job
        if job.scope:
            self.keyed[job.scope] = job
        known = self._tenants.setdefault(job.tenant, _Tenant())
        known.jobs += 1
        self._count(job, job.nbytes)
        self._count_word(job, 1)
        if job.state is JobState.ENDED:
            known.ended.append(job)
        else:
            assert job.state is JobState.QUEUED, "what had begun is one or the other after a restart"
            if job.patient:
                self._queues.setdefault(job.function, deque()).append(job)
            else:
                self._at_once.append(job)

    def _count(self, job: Job, nbytes: int) -> None:
        self._tenants[job.tenant].nbytes += nbytes
        self.nbytes += nbytes

    def next(self, room: Callable[[str], int], now_s: float, *, patient: bool = True) -> Job | None:
        """The next job to begin; ``room(function)``: how many of its jobs may have begun at a time. Without
        ``patient`` only one that somebody waits for.
        """
        for job in self._at_once:
            if job.due_s <= now_s:
                self._at_once.remove(job)
                self._becomes(job, JobState.BEGUN)
                return job
        if not patient or self._begun.total() >= MAX_BEGUN:
            return None
        found: Job | None = None
        for function, queue in self._queues.items():
            first = queue[0]
            if found is not None and self._tenants[first.tenant].begun >= self._tenants[found.tenant].begun:
                continue
            if first.due_s <= now_s and self._may_begin(first) and self._begun[function] < room(function):
                found = first
        if found is not None:
            self._unqueue(found)
            self._becomes(found, JobState.BEGUN)
            self._begun[found.function] += 1
            self._count_begun(found, 1)
        return found

    def _may_begin(self, job: Job) -> bool:
        """Whether what the node and its tenant may have begun has room for it. A body alone may be larger."""
        known, nbytes, most_nbytes, parts = (
            self._tenants[job.tenant], _room_nbytes(job), self.limits.begun_nbytes, self.limits.parts,
        )  # fmt: skip
        if known.begun >= MAX_BEGUN // parts:
            return False
        if nbytes and self._begun_nbytes and self._begun_nbytes + nbytes > most_nbytes:
            return False
        return not nbytes or not known.begun_nbytes or known.begun_nbytes + nbytes <= most_nbytes // parts

    def _count_begun(self, job: Job, jobs: int) -> None:
        known, nbytes = self._tenants[job.tenant], jobs * _room_nbytes(job)
        known.begun += jobs
        known.begun_nbytes += nbytes
        self._begun_nbytes += nbytes

    def _unqueue(self, job: Job) -> None:
        """A function whose turn it was comes last the next time."""
        if not job.patient:
            self._at_once.remove(job)
            return
        queue = self._queues.pop(job.function)
        queue.remove(job)
        if queue:
            self._queues[job.function] = queue

    def back(self, job: Job, now_s: float) -> None:
        """It has begun and not run: it is first again, after a while. Nobody waits for it."""
        self._leave(job)
        self._becomes(job, JobState.QUEUED)
        job.request = None
        job.due_s = now_s + min(AGAIN_MOST_S, AGAIN_S * 2.0**job.tries)
        job.tries = min(job.tries + 1, 16)
        self._queues.setdefault(job.function, deque()).appendleft(job)

    def end(self, job: Job, nbytes: int, status: int, code: str, now_s: float, unix_s: float) -> None:
        """With an answer of so many bytes; room was made for it."""
        if job.state is JobState.QUEUED:
            self._unqueue(job)
        else:
            self._leave(job)
        self._count(job, nbytes - job.nbytes)
        job.nbytes, job.status, job.code = nbytes, status, code
        self._becomes(job, JobState.ENDED)
        job.request, job.ended_s, job.ended = None, now_s, unix_s
        self._tenants[job.tenant].ended.append(job)

    def _leave(self, job: Job) -> None:
        if not job.patient:
            return
        self._count_begun(job, -1)
        self._begun[job.function] -= 1
        if not self._begun[job.function]:
            del self._begun[job.function]

    def forget(self, job: Job) -> None:
        """Whatever its state."""
        known = self._tenants[job.tenant]
        if job.state is JobState.ENDED:
            known.ended.remove(job)
        elif job.state is JobState.QUEUED:
            self._unqueue(job)
        else:
            self._leave(job)
        del self.jobs[job.id]
        self._count_word(job, -1)
        if job.scope and self.keyed.get(job.scope) is job:
            del self.keyed[job.scope]
        self._count(job, -job.nbytes)
        known.jobs -= 1
        if not known.jobs:
            del self._tenants[job.tenant]

    # --- time

    def expired(self, now_s: float) -> list[Job]:
        """Jobs that have been kept for long enough."""
        until_s = now_s - self.limits.keep_s
        return [
            job
            for tenant in self._tenants.values()
            for job in takewhile(lambda job: job.ended_s <= until_s, tenant.ended)
        ]

    def next_due_s(self, now_s: float) -> float:
        """When something is to be done though nothing has happened; infinity if never."""
        ends = [tenant.ended[0].ended_s + self.limits.keep_s for tenant in self._tenants.values() if tenant.ended]
        waits = [queue[0].due_s for queue in self._queues.values() if queue[0].due_s > now_s]
        return min([*ends, *waits], default=float("inf"))

    def check(self) -> None:
        """Assert what holds between any two calls."""
        queued = [job for queue in (*self._queues.values(), self._at_once) for job in queue]
        assert all(self._queues.values())
        assert {id(job) for job in queued} == {id(j) for j in self.jobs.values() if j.state is JobState.QUEUED}
        begun = Counter(job.function for job in self.jobs.values() if job.state is JobState.BEGUN and job.patient)
        assert begun == self._begun
        assert begun.total() <= MAX_BEGUN
        sizes = [_room_nbytes(job) for job in self.jobs.values() if job.state is JobState.BEGUN and job.patient]
        assert self._begun_nbytes == sum(sizes)
        assert self._begun_nbytes <= self.limits.begun_nbytes or len([nbytes for nbytes in sizes if nbytes]) == 1
        assert self.nbytes == sum(job.nbytes for job in self.jobs.values()) <= self.limits.nbytes
        words = Counter((job.function, job.tenant, job.word) for job in self.jobs.values())
        assert words == {(*key, word): count for key, found in self._words.items() for word, count in found.items()}
        for name, tenant in self._tenants.items():
            own = [job for job in self.jobs.values() if job.tenant == name]
            assert (tenant.jobs, tenant.nbytes) == (len(own), sum(job.nbytes for job in own))
            assert {id(job) for job in tenant.ended} == {id(j) for j in own if j.state is JobState.ENDED}
            assert [job.ended_s for job in tenant.ended] == sorted(job.ended_s for job in tenant.ended)
            having = [_room_nbytes(job) for job in own if job.state is JobState.BEGUN and job.patient]
            assert (tenant.begun, tenant.begun_nbytes) == (len(having), sum(having))
            assert tenant.begun <= MAX_BEGUN // self.limits.parts
            assert 0 < tenant.jobs <= self.limits.tenant_jobs
            assert tenant.nbytes <= self.limits.tenant_nbytes
        for scope, job in self.keyed.items():
            assert self.jobs[job.id] is job
            assert job.scope == scope


def _full(why: str) -> Failure:
    text = f"{why}; send it again when some have ended, or DELETE those whose answers nobody needs"
    return Failure(code="jobs_full", status=429, text=text, retryable=True)
