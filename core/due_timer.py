"""A timer for the earliest due time. One that fires too early is set again: most awaited events happen long before they
are due, and moving the timer each time would cost more.
"""

import asyncio
import time
from collections.abc import Callable


class DueTimer:
    """Calls ``tick`` in the running loop; ticks are ``least_s`` apart or more. Times by time.monotonic."""

    def __init__(self, tick: Callable[[], None], least_s: float = 0.0) -> None:
        self._tick = tick
        self._least_s = least_s
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def set(self, due_s: float | None) -> None:
        """Call back then, or earlier if that is asked for, too; None: nothing is due. The callee sets it again."""
        if due_s is None or (self._timer is not None and self._due_s <= due_s):
            return
        self.close()
        wait_s = max(self._least_s, due_s - time.monotonic())
        self._timer, self._due_s = asyncio.get_running_loop().call_later(wait_s, self._fire), due_s

    def _fire(self) -> None:
        self._timer = None
        self._tick()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
