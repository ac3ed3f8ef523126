"""The copy stream: one thread that issues chunks, keeps a bounded part of them on the link, and reports arrivals.

Decides how far ahead of the link chunks are issued, and measures the rate of a link. The bytes to copy, and their steps
(steps.py), were decided before.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Final

from dormouse.core.decisions.memory.transfer import Kind
from dormouse.gpuserver.device.cuda import driver
from dormouse.gpuserver.device.cuda.host import Staging
from dormouse.gpuserver.device.cuda.steps import Step, Steps
from dormouse.gpuserver.device.cuda.streams import CudaContext, CudaEvent
from dormouse.gpuserver.device.protocol import DeviceLost
from dormouse.schemas.errors import DormouseError

AHEAD_NBYTES: Final = 64 << 20
"""Issued and not there yet: 1.2 ms of a PCIe 5 link, which hides the thread's own pauses and lets kernels be launched
ahead of their weights; and all that a cancelled job still copies."""

ASSUMED_NBYTES_S: Final = {Kind.SLAB: 20e9, Kind.PEER: 50e9, Kind.POOL: 500e9}
"""Before the first copy: below the rates of PCIe 4, NVLink 3 and HBM2."""

PEER_TRIES: Final = 4
"""Jobs from peers that are made whatever the host's link has reached: NVLink is many times as fast as PCIe, two GPUs
that share a switch hardly faster than the host. No attribute of the driver says how many bytes a second a link has."""

RATE_WEIGHT: Final = 0.25
"""Of the newest job in the average: a change of the link shows within a few wakes, one disturbed wake hardly."""

RATE_MIN_NBYTES: Final = 1 << 20
"""Smaller jobs measure latency, not bandwidth."""


class CudaCopyJob:
    """Steps for the copy thread, which the event ``after`` comes before."""

    def __init__(self, plan: Steps, after: CudaEvent, on_done: Callable[[], None]) -> None:
        self.steps = plan.steps
        self.events = plan.events
        self.sources = list(plan.sources.values())
        self.spans = plan.spans
        self.after = after
        self.on_done = on_done
        self.cancelled = False
        self.finished = threading.Event()
        self.last: CudaEvent | None = None  # whose time the next step's is measured from
        self.spent: dict[Kind, tuple[int, float]] = {}  # bytes, seconds
        self.lost: DeviceLost | None = None

    def cancel(self) -> None:
        self.cancelled = True

    def join(self) -> None:
        """Raises DeviceLost if the copies failed."""
        self.finished.wait()
        if self.lost is not None:
            raise DeviceLost(*self.lost.args)

    def touches(self, start: int, end: int) -> bool:
        return any(start < stop and begin < end for begin, stop in self.spans)


class LinkRates:
    """Exponentially weighted bandwidth by kind of link, in bytes per second."""

    def __init__(self) -> None:
        self._rates = dict(ASSUMED_NBYTES_S)
        self._jobs: Counter[Kind] = Counter()  # measured

    def note(self, kind: Kind, nbytes: int, seconds: float) -> None:
        if nbytes < RATE_MIN_NBYTES or seconds <= 0:
            return
        weight = RATE_WEIGHT if self._jobs[kind] else 1.0
        self._jobs[kind] += 1
        self._rates[kind] += weight * (nbytes / seconds - self._rates[kind])

    def get(self, kind: Kind) -> float:
        rate = self._rates[kind]
        if kind is Kind.PEER and self._jobs[kind] < PEER_TRIES:
            return max(rate, 2 * self._rates[Kind.SLAB])
        return rate


class CopyStream:
    """Carries out jobs in the order in which they are given."""

    def __init__(self, context: CudaContext, chunk_nbytes: int, on_lost: Callable[[DeviceLost], None]) -> None:
        self._context = context
        self._stream = driver.create_stream()
        self.staging = Staging(context, chunk_nbytes)
        self._on_lost = on_lost
        self._jobs: SimpleQueue[CudaCopyJob | None] = SimpleQueue()
        # On the link, the oldest first. None: all of the job that was begun is before it.
        self._flight: deque[tuple[CudaCopyJob, Step | None]] = deque()
        self._ahead_nbytes = 0
        self._unfinished: dict[int, CudaCopyJob] = {}  # by id
        self._lock = threading.Lock()
        self.rates = LinkRates()
        self._thread = threading.Thread(target=self._run, name="copy-stream", daemon=True)
        self._thread.start()

    def give(self, job: CudaCopyJob) -> None:
        for source in job.sources:
            source.acquire()
        with self._lock:
            self._unfinished[id(job)] = job
            lost = driver.lost()
            if lost is None:
                self._jobs.put(job)
        if lost is not None:
            self._fail(lost)

    def touching(self, spans: Sequence[tuple[int, int]]) -> list[CudaCopyJob]:
        """Unfinished jobs that use any of these bytes of the pool."""
        with self._lock:
            jobs = list(self._unfinished.values())
        return [job for job in jobs if any(job.touches(start, end) for start, end in spans)]

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        if driver.lost() is None:
            self.staging.close()
            driver.destroy_stream(self._stream)

    # --- the copy thread

    def _run(self) -> None:
        try:
            self._context.use()
            while (job := self._next()) is not None:
                self._begin(job)
                for step in job.steps:
                    if job.cancelled:
                        break
                    self._issue(job, step)
                self._flight.append((job, None))
            while self._flight:
                self._retire()
        except BaseException as error:  # the thread's outermost frame: the jobs can say so, and who replaces us
            lost = error if isinstance(error, DeviceLost) else DeviceLost(f"a copy failed: {_said(error)}")
            with self._lock:
                driver.lose(lost)
            self._fail(lost)
            self._on_lost(lost)

    def _next(self) -> CudaCopyJob | None:
        """The next job; meanwhile, report arrivals."""
        while self._flight:
            try:
                return self._jobs.get_nowait()
            except Empty:
                self._retire()
        return self._jobs.get()

    def _begin(self, job: CudaCopyJob) -> None:
        driver.wait_event(self._stream, job.after.handle())
        job.last = self._context.recorded(self._stream)

    def _issue(self, job: CudaCopyJob, step: Step) -> None:
        while self._flight and self._ahead_nbytes + step.nbytes > AHEAD_NBYTES:
            self._retire()
        if step.staged:
            self.staging.to_device(step.target, step.source, step.nbytes, self._stream, step.event)
        elif step.nbytes:
            copy = driver.copy_to_device if step.kind is Kind.SLAB else driver.copy_on_device
            copy(step.target, step.source, step.nbytes, self._stream)
        if not step.staged:
            step.event.record(self._stream)
        self._ahead_nbytes += step.nbytes
        self._flight.append((job, step))

    def _retire(self) -> None:
        """Wait for the oldest step on the link."""
        job, step = self._flight.popleft()
        if step is None:
            self._finish(job)
            return
        step.event.synchronize()
        self._ahead_nbytes -= step.nbytes
        assert job.last is not None
        nbytes, seconds = job.spent.get(step.kind, (0, 0.0))
        job.spent[step.kind] = nbytes + step.nbytes, seconds + step.event.seconds_after(job.last)
        job.last = step.event

    def _finish(self, job: CudaCopyJob) -> None:
        for kind, (nbytes, seconds) in job.spent.items():
            self.rates.note(kind, nbytes, seconds)
        with self._lock:
            del self._unfinished[id(job)]
        for source in job.sources:
            source.release()
        for event in job.events:
            event.give_up()  # those of a cancelled job; nothing to those that were issued
        if not job.cancelled:
            job.on_done()
        job.finished.set()

    def _fail(self, lost: DeviceLost) -> None:
        """End all jobs as failed, so that nobody waits for them. Sources stay: the device may still be reading them."""
        with self._lock:
            jobs = list(self._unfinished.values())
            self._unfinished.clear()
        for job in jobs:
            job.lost = lost
            for event in job.events:
                event.give_up()
            job.finished.set()


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, DormouseError) else f"{type(error).__name__}: {error}"
