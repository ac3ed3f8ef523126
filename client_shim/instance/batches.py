"""Requests of one instance in batches: ``handle_batch(state, requests)``, under one lease for each batch.

Arriving requests wait here. A GPU is requested as soon as there is a request. The scheduler decides when the batch
begins and how many requests it has (core/decisions/scheduling/gathering.py), and says so with the lease.

Each request keeps its own error: one whose body is wrong is in no batch; an exception among the results is one
request's; and if a whole batch fails, each of its requests is tried alone.
"""

import math
import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

from dormouse.client_shim.instance import context, report
from dormouse.client_shim.instance.codec import BadRequest, BadResponse
from dormouse.client_shim.instance.hints import AskedRequest, EncodedAnswer, Hints
from dormouse.client_shim.instance.user_function import UserFunction
from dormouse.client_shim.node.node_backend import NodeBackend
from dormouse.client_shim.node.router_port import LeaseRefusal
from dormouse.client_shim.stream.stream import Stream
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

NOBODY: Final = "nobody_waits"
"""The scheduler's code when all requests of a batch were abandoned before it began."""

LOST: Final = ("executor_lost", "seat_lost")


class FailedRequest(NamedTuple):
    """The error of a request that has no answer."""

    code: str
    text: str
    param: str = ""
    head: m.AnswerHead | None = None


Outcome = EncodedAnswer | FailedRequest


class LoadedFunction(Protocol):
    """A loaded function that serves requests (runner.py)."""

    backend: NodeBackend
    stream: Stream
    function: UserFunction
    state: Any
    hints: Hints

    def call(self, code: Callable[..., Any], *arguments: Any) -> Any:
        """Code of the function, whatever kind it is."""
        ...

    def failure(self, error: BaseException, where: str) -> FailedRequest: ...


def said(request: int, outcome: Outcome) -> m.Returned | m.Raised:
    """To the router, in one message."""
    if isinstance(outcome, FailedRequest):
        code, text, param, head = outcome
        return m.Raised(request=request, code=code, text=text, param=param, head=head)
    data = bytes(outcome.data)
    return m.Returned(request=request, body=data, nbytes=len(data), kind=outcome.kind, head=outcome.head)


class Batches:
    """Of one instance, whose function has loaded."""

    def __init__(self, runner: LoadedFunction) -> None:
        self._runner = runner
        self._router, self._stream = runner.backend.router, runner.stream
        self._waiting: deque[m.Run] = deque()
        self._leaving = False
        self._together = 0  # requests in handle_batch()'s only call

    def serve(self) -> None:
        """Until the router says Exit. Raises PeerLost."""
        while True:
            self._hear(0.0 if self._waiting or self._leaving else math.inf)
            if not self._waiting:
                if self._leaving:
                    return
                continue
            self._next()

    def _hear(self, timeout_s: float) -> None:
        """Receive the router's messages, if need be after waiting."""
        if timeout_s > 0 and not self._router.has_news:
            self._router.wait([self._router.link], min(timeout_s, 3600.0))
        runs, abandoned = self._router.news()
        for run in runs:
            if isinstance(run, m.Run):
                self._waiting.append(run)
            else:
                self._leaving = True
        for number in abandoned:
            if found := [each for each in self._waiting if each.request == number]:
                self._waiting.remove(found[0])
                self._send(found[0], FailedRequest("cancelled", "the request was cancelled"))

    def _next(self) -> None:
        failed: FailedRequest | None = None
        backend = self._runner.backend
        backend.may_acquire = True
        try:
            self._stream.begin_lease(backend.acquire())
        except LeaseRefusal as refusal:
            if refusal.code == NOBODY:  # of those that it was asked for; later requests ask anew
                return
            failed = self._failed(refusal)
        except Exception as error:
            failed = self._failed(error)
        finally:
            backend.may_acquire = False
        self._hear(0.0)  # requests that have come while the GPU was waited for
        count = len(self._waiting) if failed is not None else self._router.granted
        taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), count))]
        self._together = 0
        outcomes = [failed] * len(taken) if failed is not None else self._outcomes(taken)
        backend.batch = len(taken), self._together
        if self._stream.leased and (late := self._end()) is not None:
            outcomes = [each if isinstance(each, FailedRequest) else late for each in outcomes]
        if remains := self._stream.remains():
            print(f"dormouse: this instance is replaced: {remains}", file=sys.stderr, flush=True)
            self._router.send(m.Spoiled(text=remains))
        sys.stdout.flush()
        sys.stderr.flush()
        for run, outcome in zip(taken, outcomes, strict=True):
            self._send(run, outcome)
        context.end()

    def _end(self) -> FailedRequest | None:
        """Give the lease back; why the batch has failed all the same, if it has."""
        try:
            if not self._stream.used:  # no END would be sent, and nobody else ends a lease that was asked for here
                self._stream.wait(wire.SYNC)
            self._stream.end_lease()
        except Exception as error:
            failed = self._failed(error)
            if failed.code in LOST:
                self._stream.lose_lease()
            return failed
        return None

    def _send(self, run: m.Run, outcome: Outcome) -> None:
        if isinstance(outcome, FailedRequest) and outcome.code not in (*report.CLIENTS, "cancelled"):
            context.begin(run)
            print(report.record(context.of(run), outcome.text), file=sys.stderr, flush=True)
        self._router.send(said(run.request, outcome))

    # --- a batch

    def _outcomes(self, runs: list[m.Run]) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        good: list[tuple[m.Run, AskedRequest]] = []
        for run in runs:
            assert run.body is not None, "requests of many come in messages"
            context.begin(run)
            try:
                good.append((run, self._runner.hints.asked(run.body, run.kind, run.accept)))
            except BaseException as error:  # code of the types runs here, too
                found[run.request] = self._failed(error)
        if good:
            found |= zip((run.request for run, _ in good), self._called(good), strict=True)
        return [found[run.request] for run in runs]

    def _called(self, good: list[tuple[m.Run, AskedRequest]]) -> list[Outcome]:
        alone = good[0][0] if len(good) == 1 else None
        if alone is None:
            context.begin_together([run for run, _ in good])
        else:
            context.begin(alone)
        failed: FailedRequest | None = None
        try:
            results = self._results(good)
            self._together = len(good)
            return results
        except BaseException as error:
            failed = self._failed(error)
        if alone is not None or failed.code in LOST:
            return [failed] * len(good)
        print(report.together(len(good), failed.text), file=sys.stderr, flush=True)
        each_alone = [self._called([each])[0] for each in good]
        self._together = 0  # in calls of their own
        return each_alone

    def _results(self, good: list[tuple[m.Run, AskedRequest]]) -> list[Outcome]:
        handle = self._runner.function.handle_batch
        assert handle is not None, "it was loaded with one"
        results = self._runner.call(handle, self._runner.state, [asked.value for _, asked in good])
        if not isinstance(results, list | tuple) or len(results) != len(good):
            what = f"{len(results)} results" if isinstance(results, list | tuple) else type(results).__name__
            text = f"handle_batch() returned {what} for {len(good)} requests: return a list of one result for each"
            raise BadResponse(text)
        return [self._outcome(asked, result) for (_, asked), result in zip(good, results, strict=True)]

    def _outcome(self, asked: AskedRequest, result: Any) -> Outcome:
        if isinstance(result, BaseException):
            return self._failed(result)
        try:
            return asked.answer(result, m.MESSAGE_BODY_NBYTES)
        except (BadRequest, BadResponse) as error:
            return self._failed(error)

    def _failed(self, error: BaseException) -> FailedRequest:
        return self._runner.failure(error, "handle_batch()")
