"""Numbers per function for `dormouse status`: outcomes since the start, latencies over a bounded window, the last
failures. No I/O.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from dormouse.core.decisions.requests.events import Timing
from dormouse.core.decisions.requests.failures import CLIENTS
from dormouse.router.front.lately import Lately
from dormouse.router.front.minutes import Minutes
from dormouse.router.front.recent import LastRequests
from dormouse.router.front.spread import Times
from dormouse.schemas import messages as m

WINDOW: Final = 1024
"""Latest latencies kept per function: enough for a p99 that ten requests stand behind."""

NO_ERRORS: Final = ("ok", "cancelled", *sorted(CLIENTS), "unknown_parameter")
"""Outcomes that are none of the function's errors: what clients do is theirs."""


LAST: Final = 5
LAST_CHARACTERS: Final = 2000
"""Failures kept per function, and how much of a text: its end, where a traceback says what was raised."""

PARTS: Final = ("queue", "runtime", "wake", "prefill")
"""Of the time to the first token."""


def until_first_token(timing: Timing, first: m.AnswerBegun) -> dict[str, float]:
    """Seconds by part. An instance's report is about its own function."""
    said_us = first.queue_us, first.runtime_us, first.wake_us, first.prefill_us
    spent_s = {name: _clipped(spent_us) / 1e6 for name, spent_us in zip(PARTS, said_us, strict=True)}
    return spent_s | {"queue": timing.queue_s + timing.wait_s + spent_s["queue"]}


def parts(timing: Timing) -> dict[str, float]:
    """Of a request, seconds by part, one after the other: as Server-Timing has them."""
    if timing.first is None:
        return {"queue": timing.queue_s, "wait": timing.wait_s, "run": timing.run_s}
    spent_s = until_first_token(timing, timing.first)
    spent_s["rest"] = max(0.0, timing.queue_s + timing.wait_s + timing.run_s - sum(spent_s.values()))
    return spent_s


STAGES: Final = ("queue", "wait", "run")
"""Of a request: in its function's queue, waiting for a GPU, in the instance."""


MAX: Final = 1 << 40
"""Of an instance's report on one answer, in tokens or microseconds: no sum can grow too large to be sent."""


def _clipped(said: int) -> int:
    return min(max(0, said), MAX)


def _window() -> deque[float]:
    return deque(maxlen=WINDOW)


@dataclass(slots=True)
class TokenStats:
    """Of a language model: its answers' times in milliseconds, and their tokens."""

    ttft_ms: deque[float] = field(default_factory=_window)
    parts_ms: dict[str, deque[float]] = field(default_factory=lambda: {name: _window() for name in PARTS})
    tpot_ms: deque[float] = field(default_factory=_window)
    in_time: deque[float] = field(default_factory=_window)  # 1 or 0, by answer; a failure is 0
    first: Times = field(default_factory=Times)
    further: Times = field(default_factory=Times)
    prompt: int = 0
    made: int = 0
    reused: int = 0

    def add(self, timing: Timing, tokens: m.TokenCounts, wanted: m.LlmSettings) -> bool | None:
        """An answer that is whole; whether it came in time, if it had a first token."""
        if timing.first is None:
            return None
        parts_s = until_first_token(timing, timing.first)
        ttft_ms, tpot_ms = sum(parts_s.values()) * 1000, _clipped(tokens.tpot_us) / 1000
        self.ttft_ms.append(ttft_ms)
        self.first.add(ttft_ms / 1000)
        for name, spent_s in parts_s.items():
            self.parts_ms[name].append(spent_s * 1000)
        if tpot_ms:
            self.tpot_ms.append(tpot_ms)
            self.further.add(tpot_ms / 1000)
        in_time = ttft_ms <= wanted.ttft_ms and tpot_ms <= wanted.tpot_ms
        self.in_time.append(float(in_time))
        self.prompt += _clipped(tokens.prompt)
        self.made += _clipped(tokens.made)
        self.reused += _clipped(tokens.reused)
        return in_time

    def summary(self, wanted: m.LlmSettings, percentile: float) -> dict[str, Any]:
        share = sum(self.in_time) / len(self.in_time) if self.in_time else None
        return {
            "ttft_ms": quantiles(self.ttft_ms),
            **{f"{name}_ms": quantiles(values) for name, values in self.parts_ms.items()},
            "tpot_ms": quantiles(self.tpot_ms),
            "wanted_ttft_ms": wanted.ttft_ms,
            "wanted_tpot_ms": wanted.tpot_ms,
            "counted": len(self.in_time),
            "in_time": None if share is None else round(share, 4),
            "complies": None if share is None else share * 100 >= percentile,
            "prompt_tokens": self.prompt,
            "made_tokens": self.made,
            "reused_tokens": self.reused,
        }


class LastError(NamedTuple):
    """A request that failed, by the Unix clock."""

    at_s: float
    code: str
    text: str


@dataclass(slots=True)
class FunctionStats:
    """The counts of one ``tenant``'s function, across its versions. ``latencies_ms``, ``latency`` and ``spent_s`` are
    of answered requests; ``asked_s`` is when the last one came, by time.monotonic.
    """

    tenant: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)  # "ok" or an error's code
    latencies_ms: deque[float] = field(default_factory=_window)
    latency: Times = field(default_factory=Times)
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    in_time: int = 0
    late: int = 0
    tokens: TokenStats = field(default_factory=TokenStats)
    asked_s: float = 0.0
    turned: int = 0  # of the outcomes: refused before it was asked, which is no error of the function
    last: LastRequests = field(default_factory=LastRequests)
    last_errors: deque[LastError] = field(default_factory=lambda: deque(maxlen=LAST))
    lately: Lately = field(default_factory=Lately)
    minutes: Minutes = field(default_factory=Minutes)
    _told: tuple[int, dict[str, Any]] = (-1, {})  # the summary, by how many outcomes it has
    _tokens_told: tuple[object, dict[str, Any]] = (None, {})

    def failed(self, outcome: str, text: str = "") -> None:
        self.outcomes[outcome] += 1
        if outcome not in NO_ERRORS:
            self.last_errors.append(LastError(time.time(), outcome, text[-LAST_CHARACTERS:]))

    def turned_away(self, code: str) -> None:
        """Before it was a request of the function's."""
        self.outcomes[code] += 1
        self.turned += code not in NO_ERRORS

    def answered(self, timing: Timing, tokens: m.TokenCounts | None, spec: m.FunctionSpec | None) -> bool:
        """``spec`` is the function deployed under its name by now. False if it was late."""
        self.outcomes["ok"] += 1
        spent_s = timing.queue_s, timing.wait_s, timing.run_s
        latency_s = sum(spent_s)
        self.latencies_ms.append(latency_s * 1000)
        self.latency.add(latency_s)
        for stage, stage_s in zip(STAGES, spent_s, strict=True):
            self.spent_s[stage] += stage_s
        in_time: bool | None = None
        if spec is not None and spec.llm is None:
            in_time = latency_s * 1000 <= spec.deadline_ms
        elif spec is not None and spec.llm is not None and tokens is not None:
            in_time = self.tokens.add(timing, tokens, spec.llm)
        if in_time is not None:
            self.in_time += in_time
            self.late += not in_time
        return in_time is not False

    def summary(self) -> dict[str, Any]:
        """Kept until there is one outcome more: a watcher asks for all functions' every second."""
        requests = self.outcomes.total()
        if requests != self._told[0]:
            spread = quantiles(self.latencies_ms)
            self._told = (
                requests,
                {
                    "requests": requests,
                    "errors": requests - sum(self.outcomes[each] for each in NO_ERRORS) - self.turned,
                    "outcomes": {name: count for name, count in self.outcomes.items() if count},
                    "p50_ms": spread["p50"],
                    "p99_ms": spread["p99"],
                },
            )
        return self._told[1]

    def tokens_summary(self, wanted: m.LlmSettings, percentile: float) -> dict[str, Any]:
        """Kept likewise."""
        key = self.outcomes.total(), wanted, percentile
        if self._tokens_told[0] != key:
            self._tokens_told = key, self.tokens.summary(wanted, percentile)
        return self._tokens_told[1]


def quantiles(values: deque[float]) -> dict[str, float | None]:
    ordered = sorted(values)
    return {"p50": quantile(ordered, 0.50), "p99": quantile(ordered, 0.99)}


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least ``share`` of all do not exceed; ``ordered`` is sorted."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)
