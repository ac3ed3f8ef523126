"""Durations of a request's phases, as a language model's instance sees them. Pure: callers pass the time.

The runtime measures a sequence from the Submit on (FirstToken). Before that, from its arrival here, the request waits:
for a lease, then for a runtime that was not ready, or for the end of another request's step.
"""

import math

from dormouse.client_shim.llm.open_requests import OpenRequest
from dormouse.schemas import messages as m


class Timings:
    """Of one instance."""

    def __init__(self) -> None:
        self._leased_s = 0.0
        self._ready_s = math.inf  # when the runtime of this lease first said something

    def leased(self, now_s: float) -> None:
        self._leased_s, self._ready_s = now_s, math.inf

    def heard(self, now_s: float) -> None:
        """A runtime has computed something."""
        self._ready_s = min(self._ready_s, now_s)

    def first_token(self, request: OpenRequest, told: m.FirstToken | None, now_s: float) -> m.AnswerBegun:
        """A request has its first token."""
        request.first_s = now_s
        start_s = max(request.came_s, self._leased_s)
        queue_us, wake_us, prefill_us = (0, 0, 0) if told is None else (told.queue_us, told.wake_us, told.prefill_us)
        before_us = max(0, int((now_s - start_s) * 1e6) - queue_us - wake_us - prefill_us)
        was_ready = self._ready_s <= request.came_s
        return m.AnswerBegun(
            request=request.number,
            queue_us=int((start_s - request.came_s) * 1e6) + queue_us + (before_us if was_ready else 0),
            runtime_us=0 if was_ready else before_us,
            wake_us=wake_us,
            prefill_us=prefill_us,
        )


def counts(request: OpenRequest, now_s: float) -> m.TokenCounts:
    """Of a request that has its last token."""
    made = [len(each.made) for each in request.generations]
    steps = max(made) - 1
    return m.TokenCounts(
        prompt=len(request.prompt),
        made=sum(made),
        reused=max(each.reused for each in request.generations),
        tpot_us=int((now_s - request.first_s) * 1e6 / steps) if steps > 0 and request.first_s is not None else 0,
    )
