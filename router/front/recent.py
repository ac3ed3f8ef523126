"""A function's last requests, for `dormouse requests`: all, and those that failed, were late, or were cold, so that
many good or refused ones do not push out the few that are looked for. Bounded; no I/O.
"""

from collections import deque
from itertools import takewhile
from typing import Any, Final, Literal, NamedTuple

from dormouse.core.decisions.requests.events import Timing

Kind = Literal["", "slow", "failed", "cold"]
_Kept = Kind | Literal["turned"]

LAST: Final = 64
"""Of each kind."""


class Past(NamedTuple):
    """One request that is over. ``at`` is when, of the Unix clock; ``outcome`` is "ok" or an error's code."""

    at: float
    id: str
    trace: str
    outcome: str
    timing: Timing
    late: bool  # for its function's deadline
    why: str = ""  # it failed
    turned: bool = False  # away, before it was in its function's queue
    by: str = ""  # the function that has called it, and the id of its request there

    @property
    def took_s(self) -> float:
        return self.timing.queue_s + self.timing.wait_s + self.timing.run_s

    @property
    def cold(self) -> bool:
        return self.timing.source not in ("", "gpu")

    def told(self, function: str, reads: bool) -> dict[str, Any]:
        """``reads``: to one who may read the function's log, too."""
        timing = self.timing
        return {
            "function": function,
            "at": round(self.at, 3),
            "id": self.id,
            "trace": self.trace,
            "by": self.by or None,
            "outcome": self.outcome,
            "error": self.why if reads and self.why else None,
            "ms": round(self.took_s * 1000, 3),
            "queue_ms": round(timing.queue_s * 1000, 3),
            "wait_ms": round(timing.wait_s * 1000, 3),
            "run_ms": round(timing.run_s * 1000, 3),
            "copy_ms": None if timing.copy_s is None else round(timing.copy_s * 1000, 3),
            "model": timing.source or None,
            "late": self.late,
        }


class LastRequests:
    """Of one function."""

    def __init__(self) -> None:
        self._kinds: dict[_Kept, deque[Past]] = {"": deque(maxlen=LAST)}

    def add(self, past: Past) -> None:
        if past.turned:
            self._keep("turned", past)
            return
        self._kinds[""].append(past)
        if past.outcome not in ("ok", "cancelled"):
            self._keep("failed", past)
        if past.late and past.outcome in ("ok", "timed_out"):
            self._keep("slow", past)
        if past.cold:
            self._keep("cold", past)

    def _keep(self, kind: _Kept, past: Past) -> None:
        kept = self._kinds.get(kind)
        if kept is None:
            kept = self._kinds[kind] = deque(maxlen=LAST)
        kept.append(past)

    def since(self, at: float) -> list[Past]:
        """Of the last ones, newest first."""
        return list(takewhile(lambda past: past.at >= at, reversed(self._kinds[""])))

    def of(self, kind: Kind) -> list[Past]:
        """Oldest first."""
        turned = self._kinds.get("turned", ()) if kind in ("", "failed") else ()
        return sorted((*self._kinds.get(kind, ()), *turned), key=lambda past: past.at)
