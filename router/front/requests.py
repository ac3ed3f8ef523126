"""Clients' requests: the body and the pending answer of each, from its arrival until its one outcome, and numbers of
them.

core/decisions/requests/policy.py decides the outcome of a request.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from dormouse.core.config import LimitsSection, parse_nbytes
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures
from dormouse.core.decisions.requests.state import Phase, RouterState
from dormouse.core.errortext import gist
from dormouse.router.access.access import Caller, Refusal
from dormouse.router.access.limits import TenantLimits
from dormouse.router.front.bodies import Bodies, Body
from dormouse.router.front.counts import ServedCounts
from dormouse.router.front.drain import Draining
from dormouse.router.front.minutes import FAILED, IN_TIME, LATE, OTHER, Minutes, together
from dormouse.router.front.recent import Past
from dormouse.router.front.stats import NO_ERRORS, FunctionStats
from dormouse.router.front.streams import AnswerStream, Outcome
from dormouse.router.front.traced import traced
from dormouse.router.front.tracing import NO_TRACE, Trace
from dormouse.schemas import messages as m

CATALOGUE_S: Final = 20.0
"""A request that finds the router just started waits so long for the catalogue: those that came while the router before
it died are among them, and a node's processes say hello within a second or two, on a busy machine ten.
"""

Answered = asyncio.Future[AnswerStream | tuple[Outcome, bytes]]
"""The whole answer, or what comes of it, from the first part on."""


@dataclass(frozen=True, slots=True)
class Labels:
    """By what others know a request: its X-Request-Id and its trace (tracing.py). ``again``: what is
    turned away is tried again, and nobody hears of it; of a job. ``by``: the function whose request calls it, and the
    id of that.
    """

    id: str = ""
    trace: Trace = NO_TRACE
    again: bool = False
    by: str = ""


NOT_RUN: Final = frozenset({429, 503, 504})
"""Statuses of what may be sent again, if it has not run."""


def not_run(outcome: Outcome) -> bool:
    """Whether it was turned away."""
    return isinstance(outcome, e.Fail) and outcome.failure.status in NOT_RUN and not outcome.timing.began


NO_LABELS: Final = Labels()

CODES: Final = 256
"""Codes that are counted one by one: there are fewer, but for functions' own."""


@dataclass(slots=True)
class _Open:
    function: str
    body: Body
    answer: Answered
    labels: Labels
    stats: FunctionStats | None = None  # None: there is no such function
    spec: m.FunctionSpec | None = None  # the one deployed when it came
    stream: AnswerStream | None = None  # once its first part is there

    def end(self, outcome: Outcome, answer: bytes = b"") -> None:
        if self.stream is not None:
            self.stream.end(outcome)
        elif not self.answer.done():
            self.answer.set_result((outcome, answer))


class Requests:
    """All that have no answer yet."""

    def __init__(
        self,
        limits: LimitsSection,
        picture: RouterState,
        dispatch: Callable[[e.Event], None],
        counts: ServedCounts,
        limits_of_tenants: TenantLimits,
        drain: Draining,
    ) -> None:
        self.counts, self.tenants, self.drain = counts, limits_of_tenants, drain
        self.body_nbytes = parse_nbytes(limits.body)
        self.heartbeat_s = limits.heartbeat_ms / 1000
        bodies_nbytes = parse_nbytes(limits.bodies)  # of which a tenant has half at most, and one body in any case
        part_nbytes = bodies_nbytes if picture.one_tenant else max(bodies_nbytes // 2, self.body_nbytes)
        self.bodies = Bodies(bodies_nbytes, part_nbytes)
        self.stats: dict[str, FunctionStats] = {}  # by function
        self.since_s = time.monotonic()  # earlier ones are not known
        self._minutes: dict[str, Minutes] = {}  # by tenant: also of functions that were removed
        self.refused: Counter[str] = Counter()  # by code: answers that are none of a known function
        self.watcher: Callable[[Outcome], None] | None = None  # receives each outcome
        self.export: Callable[[m.TracedRequest], None] | None = None  # receives requests that are over, for traces
        self.trace_share: float | None = None  # of requests without a trace, how many begin one; None: no export
        self.catalogue_known = asyncio.Event()
        self._picture = picture
        self._dispatch = dispatch
        self._open: dict[int, _Open] = {}
        self._numbers = count(1)

    async def knows_catalogue(self) -> bool:
        """Wait until the router does, as long as a start takes."""
        if not self.catalogue_known.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.catalogue_known.wait(), CATALOGUE_S)
        return self.catalogue_known.is_set()

    def refusal(self, function: str) -> Refusal | None:
        """Why its tenant may not have one more request now, or nobody may."""
        if self.drain.on:
            return self.drain.refusal()
        known = self._picture.functions.get(function)
        return None if known is None else self.tenants.enter(known.spec.tenant, time.monotonic())

    def turned_away(self, failure: m.Failure, function: str | None = None, labels: Labels = NO_LABELS) -> None:
        """One that has its answer before it is submitted. ``function``: that it is for, if its caller may ask that."""
        known = None if function is None else self._picture.functions.get(function)
        if function is None or known is None:
            room = failure.code in self.refused or len(self.refused) < CODES
            self.refused[failure.code if room else "other"] += 1
            return
        stats = self._stats_of(function, known.spec.tenant)
        stats.turned_away(failure.code)
        self._count(stats, OTHER, stats.asked_s)
        number, why = labels.trace.number, gist(failure.whole or failure.text)
        past = Past(time.time(), labels.id, number, failure.code, e.Timing(), False, why, turned=True, by=labels.by)
        stats.last.add(past)

    def submit(
        self,
        function: str,
        body: Body,
        route: str = "",
        labels: Labels = NO_LABELS,
        call: tuple[str, int] | None = None,
    ) -> tuple[int, Answered]:
        """A request that has been read; its one fate is the future's result. Its body is closed with it."""
        request = next(self._numbers)
        answer: Answered = asyncio.get_running_loop().create_future()
        known = self._picture.functions.get(function)
        stats = None if known is None else self._stats_of(function, known.spec.tenant)
        self._open[request] = _Open(function, body, answer, labels, stats, None if known is None else known.spec)
        self._dispatch(e.Arrived(request, function, route, call))
        return request, answer

    def _stats_of(self, function: str, tenant: str) -> FunctionStats:
        """Another tenant's function of the same name has its own."""
        stats = self.stats.get(function)
        if stats is None or stats.tenant != tenant:
            stats = self.stats[function] = FunctionStats(tenant)
        stats.asked_s = time.monotonic()
        return stats

    def _count(self, stats: FunctionStats, kind: int, now_s: float) -> None:
        stats.minutes.add(kind, now_s)
        if (minutes := self._minutes.get(stats.tenant)) is None:
            self._minutes = {name: each for name, each in self._minutes.items() if any(each.kept(now_s))}
            minutes = self._minutes[stats.tenant] = Minutes()
        minutes.add(kind, now_s)

    def minutes(self, caller: Caller, name: str = "") -> dict[str, Any]:
        """The last hour of this function, or of all that the caller sees."""
        if name:
            stats = self.stats.get(name)
            rings = [stats.minutes] if stats is not None and caller.sees(name, stats.tenant) else []
        elif caller.functions == ("*",):
            rings = [each for tenant, each in self._minutes.items() if caller.tenant in (None, tenant)]
        else:
            rings = [each.minutes for function, each in self.stats.items() if caller.sees(function, each.tenant)]
        now_s = time.monotonic()
        return {"now": now_s, "since": self.since_s, "minutes": together(rings, now_s)}

    def since(self, caller: Caller, at: float) -> list[tuple[str, Past]]:
        """The last requests that are over since then, of the Unix clock, with their functions."""
        seen = [(name, stats) for name, stats in self.stats.items() if caller.sees(name, stats.tenant)]
        return [(name, past) for name, stats in seen for past in stats.last.since(at)]

    def forget(self, function: str) -> None:
        """It is not served any more."""
        self.stats.pop(function, None)

    def leave(self, request: int) -> None:
        """The client has departed; nothing if it was answered, or was sent the end of its stream."""
        stream = self._open[request].stream if request in self._open else None
        if stream is None or not stream.told_its_end:
            self._dispatch(e.RequesterLeft(request))

    @property
    def left(self) -> int:
        """How many have no answer yet."""
        return len(self._open)

    def body(self, request: int) -> Body:
        return self._open[request].body

    def labels(self, request: int) -> Labels:
        return self._open[request].labels

    def begun(self, begin: e.BeginStream) -> None:
        """A streamed answer: its parts follow."""
        request, number = self._open[begin.request], begin.request
        request.stream = AnswerStream(begin, lambda nbytes: self._dispatch(e.ChunkTaken(number, nbytes)))
        if not request.answer.done():
            request.answer.set_result(request.stream)

    def passed(self, parts: list[tuple[int, bytes]]) -> None:
        """The next parts of streamed answers."""
        for number, part in parts:
            stream = self._open[number].stream
            assert stream is not None, "it has begun"
            stream.put(part)

    def settle(self, outcome: Outcome, answer: bytes = b"") -> None:
        request = self._open.pop(outcome.request)
        request.body.close()
        request.end(outcome, answer)
        if self.watcher is not None:
            self.watcher(outcome)
        self.drain.look()
        if (stats := request.stats) is None or (request.labels.again and not_run(outcome)):
            return
        self.counts.add(request.function, stats.tenant, outcome)
        served = self._picture.functions.get(request.function)
        timing, code, late, failed, why, kind = e.Timing(), "cancelled", False, False, "", OTHER
        match outcome:
            case e.Answer(timing=timing, tokens=tokens):
                code, late = "ok", not stats.answered(timing, tokens, None if served is None else served.spec)
                kind = LATE if late else IN_TIME
            case e.Fail(failure=failure, timing=timing):
                code = failure.code
                late = code != failures.REFUSED and (failure.status == 429 or failure.status >= 500)
                failed = late and failure.status != 429 and code not in NO_ERRORS
                kind = FAILED if failed else OTHER
                why = gist(failure.whole or failure.text)
                stats.failed(code, failure.whole or failure.text)
                if late:
                    stats.late += 1
                    stats.tokens.in_time.append(0.0)
            case e.Drop(timing=timing):
                stats.failed(code)
        self._count(stats, kind, now_s := time.monotonic())
        if served is not None and served.spec == request.spec and (late or code == "ok"):
            stats.lately.add(served.spec, now_s, late=late, failed=failed)
        labels, now_ns = request.labels, time.time_ns()
        stats.last.add(Past(now_ns / 1e9, labels.id, labels.trace.number, code, timing, late, why, by=labels.by))
        if self.export is not None and labels.trace.above:
            self.export(traced(labels.trace, labels.id, request.function, stats.tenant, outcome, code, now_ns))

    def stop(self) -> None:
        """The router ends: all are notified."""
        for number, request in self._open.items():
            known = self._picture.requests.get(number)
            begun = known is not None and known.phase is Phase.RUNNING
            request.end(e.Fail(number, failures.stopping(begun), e.Timing()))
