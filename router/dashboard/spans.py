"""Times in which requests had a GPU, for the timeline: pure. Collected while somebody watches, taken a few times a
second; earlier ones are made of the last requests that are kept anyway.

A request whose executor dies begins again: it then has two spans, of which the first is not known later.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from dormouse.core.decisions.requests import events as e
from dormouse.router.front.recent import Past

MAX: Final = 256
"""Spans between two takings; more are counted only."""

MAX_OPEN: Final = 4096

BEFORE_S: Final = 60.0
"""That the timeline shows."""


@dataclass(slots=True)
class GpuSpan:
    """Times in seconds of the caller's clock. ``copied_s``: when the model had come, if that is known."""

    number: int
    function: str
    tenant: str
    gpu: int
    begun_s: float
    source: str
    queue_s: float  # before it: in the function's queue, then waiting for a GPU
    copied_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""

    def told(self) -> list[Any]:
        ended_s = None if self.ended_s is None else round(self.ended_s, 4)
        copied_s = None if self.copied_s is None else round(self.copied_s, 4)
        return [
            self.number, self.function, self.gpu, round(self.begun_s, 4), copied_s, ended_s, self.source, self.outcome,
            round(self.queue_s, 4),
        ]  # fmt: skip


class Spans:
    """``taken`` returns the requests ended since the last time, and those that have begun and go on."""

    def __init__(self) -> None:
        self._numbers = 0
        self._open: dict[int, GpuSpan] = {}  # by request
        self._fresh: dict[int, GpuSpan] = {}  # likewise: those that were not sent yet
        self._ended: list[GpuSpan] = []
        self._dropped: Counter[tuple[str, str]] = Counter()  # by function and tenant

    def begun(self, request: int, span: GpuSpan) -> None:
        if (before := self._open.get(request)) is not None:
            self._end(request, before, span.begun_s, "executor_lost")
        if len(self._open) >= MAX_OPEN:
            self._dropped[span.function, span.tenant] += 1
            return
        self._numbers += 1
        span.number = self._numbers
        self._open[request] = self._fresh[request] = span

    def ended(self, outcome: e.Answer | e.Fail | e.Drop, now_s: float) -> None:
        span = self._open.get(outcome.request)
        if span is None:
            return
        match outcome:
            case e.Drop():
                word = "cancelled"
            case e.Fail(failure=failure):
                word = failure.code
            case e.Answer(timing=timing):
                word = "ok"
                span.source = timing.source or span.source
                span.copied_s = _copied_s(timing, span.begun_s, now_s)
        self._end(outcome.request, span, now_s, word)

    def _end(self, request: int, span: GpuSpan, now_s: float, word: str) -> None:
        del self._open[request]
        told = self._fresh.pop(request, None) is None
        if len(self._ended) >= MAX and not told:
            self._dropped[span.function, span.tenant] += 1
            return
        span.ended_s, span.outcome = now_s, word
        self._ended.append(span)

    def taken(self) -> tuple[list[GpuSpan], Counter[tuple[str, str]]]:
        """The spans, and how many there were besides."""
        room = max(0, MAX - len(self._ended))
        fresh = list(self._fresh.items())[:room]
        for request, _ in fresh:
            del self._fresh[request]
        spans, dropped = [*self._ended, *(span for _, span in fresh)], self._dropped
        self._ended, self._dropped = [], Counter()
        return spans, dropped


def before(past: Iterable[tuple[str, Past]], at: float, now_s: float) -> list[list[Any]]:
    """As sent, oldest first, of requests that are over with their functions: the newest. Their numbers are below 0, so
    that they are nobody else's. ``at`` is ``now_s`` of the Unix clock.
    """
    newest = sorted((each for each in past if each[1].timing.gpu >= 0), key=lambda each: each[1].at)[-MAX:]
    spans = []
    for number, (function, each) in enumerate(newest, -len(newest)):
        timing, ended_s = each.timing, now_s - max(0.0, at - each.at)
        begun_s, queue_s = ended_s - timing.run_s, timing.queue_s + timing.wait_s
        copied_s = _copied_s(timing, begun_s, ended_s)
        span = GpuSpan(
            number, function, "", timing.gpu, begun_s, timing.source, queue_s, copied_s, ended_s, each.outcome
        )
        spans.append(span.told())
    return spans


def _copied_s(timing: e.Timing, begun_s: float, ended_s: float) -> float | None:
    """When its model had come, if that is known: no later than its end, whatever an instance reports."""
    if timing.first is not None:
        return begun_s + min(timing.first.wake_us / 1e6, ended_s - begun_s)
    return None if timing.copy_s is None else min(begun_s + timing.copy_s, ended_s)
