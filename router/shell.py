"""Passes events to the router's policy, one at a time, and its actions to the parts that carry them out; owns its
clock.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.policy import RequestPolicy
from dormouse.core.due_timer import DueTimer

TICK_S: Final = 0.01
"""Ticks are no closer: each request has time limits, and thousands of them pass each second after their requests."""


class Shell:
    """See the module."""

    def __init__(self, policy: RequestPolicy, perform: Callable[[e.Action], None]) -> None:
        self._policy = policy
        self._perform = perform
        self._events: deque[e.Event] = deque()
        self._handling = False
        self._timer = DueTimer(lambda: self.dispatch(e.Tick()), TICK_S)

    def dispatch(self, event: e.Event) -> None:
        """Let the policy decide and carry out its actions; events that arise meanwhile wait their turn."""
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
        self._timer.set(self._policy.next_deadline_s())

    def close(self) -> None:
        self._timer.close()
