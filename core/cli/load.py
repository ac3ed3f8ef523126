"""Requests that arrive at random at some rate, whether or not earlier ones are answered: an open loop.

Times count from when a request was due, so a request that waits for a thread here is late too. A closed loop would send
less while the node is slow, and so would not see it.
"""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from dormouse.core.errortext import gist
from dormouse.core.node.refusals import CallRefused, Unreachable

THREADS: Final = 256
"""Requests under way at once, at most; more wait, and are late."""

SLICES: Final = 10
OK: Final = "ok"


class Sent(NamedTuple):
    """A request, in seconds since the first was due. ``first_s``: the first part of its answer; None: there is none."""

    due_s: float
    first_s: float | None
    over_s: float
    outcome: str  # "ok" or an error's code
    why: str = ""  # of an error: its gist

    @property
    def latency_s(self) -> float:
        return self.over_s - self.due_s


def arrivals(rate_s: float, duration_s: float, seed: int) -> list[float]:
    """Of a Poisson process."""
    chance, found, at_s = random.Random(seed), list[float](), 0.0
    while (at_s := at_s + chance.expovariate(rate_s)) < duration_s:
        found.append(at_s)
    return found


def run(send: Callable[[], Iterable[bytes]], due: Sequence[float], told: Callable[[int], None]) -> list[Sent]:
    """``send`` gives the parts of one answer; ``told`` hears how many requests are on their way, after each. Raises
    Unreachable if the node is gone.
    """
    began_s = time.perf_counter()

    def one(due_s: float) -> Sent:
        first_s, outcome, why = None, OK, ""
        try:
            for _ in send():
                if first_s is None:
                    first_s = time.perf_counter() - began_s
        except CallRefused as error:
            outcome, why = error.code, gist(str(error))
        return Sent(due_s, first_s, time.perf_counter() - began_s, outcome, why)

    with ThreadPoolExecutor(THREADS) as threads:
        futures = []
        try:
            for number, due_s in enumerate(due, 1):
                time.sleep(max(0.0, began_s + due_s - time.perf_counter()))
                futures.append(threads.submit(one, due_s))
                told(number)
                if futures[0].done() and isinstance(futures[0].exception(), Unreachable):
                    break
        except KeyboardInterrupt:
            threads.shutdown(cancel_futures=True)
        return [future.result() for future in futures if not future.cancelled()]


def summary(sent: Sequence[Sent], deadline_s: float, streamed: bool) -> dict[str, object]:
    """Times in milliseconds. Failed requests are late; a streamed answer's deadline is for its first part."""
    outcomes = Counter(each.outcome for each in sent)
    answered = [each for each in sent if each.outcome == OK]
    first = [each.first_s - each.due_s for each in answered if each.first_s is not None]
    latencies = [each.latency_s for each in answered]
    in_time = sum(spent_s <= deadline_s for spent_s in (first if streamed else latencies))
    return {
        "sent": len(sent),
        "outcomes": dict(outcomes),
        "errors": {each.outcome: each.why for each in sent if each.outcome != OK},
        "deadline_ms": deadline_s * 1000,
        "in_time": round(in_time / len(sent), 4) if sent else None,
        "answered_s": round(len(answered) / max((each.over_s for each in answered), default=1.0), 3),
        "latency_ms": _quantiles(latencies),
        "first_ms": _quantiles(first) if streamed else None,
        "slices": slices(sent, deadline_s, streamed),
    }


def slices(sent: Sequence[Sent], deadline_s: float, streamed: bool) -> list[dict[str, float | None]]:
    """The run in parts of equal length: when it was slow."""
    length_s = max((each.due_s for each in sent), default=0.0) / SLICES or 1.0
    parts: list[list[Sent]] = [[] for _ in range(SLICES)]
    for each in sent:
        parts[min(SLICES - 1, int(each.due_s / length_s))].append(each)
    found = []
    for number, part in enumerate(parts):
        told = [each for each in part if each.outcome == OK]
        spent = [(each.first_s or each.over_s) - each.due_s if streamed else each.latency_s for each in told]
        times = _quantiles(spent) or {}
        late = len(part) - sum(each <= deadline_s for each in spent)
        row: dict[str, float | None] = {"from_s": round(number * length_s, 3), "sent": len(part), "late": late}
        found.append(row | {"p50_ms": times.get("p50"), "p99_ms": times.get("p99")})
    return found


def _quantiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(each * 1000 for each in seconds)
    last = len(ordered) - 1
    parts = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(ordered[min(last, int(share * len(ordered)))], 3) for name, share in parts.items()}
