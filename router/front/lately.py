"""Recent health of a function, for the person on call: the share of its last answers in time, those that failed, and
whether it has answered at all. Pure: no I/O, no clock.

Counted for one version: another begins anew, so that a mended fault is no longer an alarm. problems.py decides what is
an alarm.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

WINDOW_S: Final = 60.0
"""An alarm is over so long after the last answer that was a reason for it."""

ROW_S: Final = 600.0
"""Failures in a row are reported for longer: of a function that is asked seldom, too."""

MAX: Final = 1024
"""Answers that are kept: enough for 98 % and 99 %, and little for hundreds of functions."""


@dataclass(slots=True)
class Lately:
    """``key`` is what of a function is counted: its version."""

    key: object = None
    answers: deque[tuple[float, bool, bool]] = field(default_factory=lambda: deque(maxlen=MAX))  # at, late, failed
    late: int = 0  # of these
    in_a_row: int = 0  # failures, since something was answered

    def add(self, key: object, now_s: float, *, late: bool, failed: bool) -> None:
        """An answer. Late and failed ones from before ``key`` are forgotten."""
        if self.key is not key and self.key != key:
            self.key, self.late, self.in_a_row = key, 0, 0
            self.answers.clear()
        self.late += late - (len(self.answers) == MAX and self.answers[0][1])
        self.answers.append((now_s, late, failed))
        self.in_a_row = self.in_a_row + 1 if failed else 0

    def told(self, key: object, now_s: float) -> dict[str, Any]:
        """``counted`` and ``in_time``, a share, are of all that are kept; ``window`` has the alarms'."""
        if self.key is not key and self.key != key:
            return Lately(key).told(key, now_s)
        counted = late = failed = 0
        for at_s, was_late, has_failed in reversed(self.answers):
            if now_s - at_s > WINDOW_S:
                break
            counted, late, failed = counted + 1, late + was_late, failed + has_failed
        new = bool(self.answers) and now_s - self.answers[-1][0] <= ROW_S
        return {
            "counted": (kept := len(self.answers)),
            "in_time": _share(self.late, kept),
            "window": {"seconds": WINDOW_S, "counted": counted, "in_time": _share(late, counted), "failed": failed},
            "failed_in_a_row": self.in_a_row if new else 0,
        }


def _share(late: int, counted: int) -> float | None:
    return round(1 - late / counted, 4) if counted else None
