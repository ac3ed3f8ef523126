"""Brings events to the router's policy, one at a time, and its actions to whoever carries them out; owns its clock."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from dormouse.router import events as e
from dormouse.router.policy import RequestPolicy

TICK_S: Final = 0.01
"""Ticks are no closer: each request has time limits, and thousands of them pass each second after their requests."""


class Shell:
    """See the module."""

    def __init__(self, policy: RequestPolicy, perform: Callable[[e.Action], None]) -> None:
        self._policy = policy
        self._perform = perform
        self._loop = asyncio.get_running_loop()
        self._events: deque[e.Event] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # for which time it is set, by time.monotonic

    def dispatch(self, event: e.Event) -> None:
        """Let the policy decide and do what it says; events that arise meanwhile wait their turn."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for action in self._policy.handle(self._events.popleft(), time.monotonic()):
                    self._perform(action)
        finally:
            self._handling = False
        self._set_timer()

    def _set_timer(self) -> None:
        """One that comes too early does nothing but see that the next one is set."""
        when_s = self._policy.next_deadline_s()
        if when_s is None or (self._timer is not None and self._timer_s <= when_s):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = when_s
        self._timer = self._loop.call_later(max(TICK_S, when_s - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.dispatch(e.Tick())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
