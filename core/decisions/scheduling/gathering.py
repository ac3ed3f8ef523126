"""Requests that wait for more of their batch before they want a lease: pure. The time when they begin, and their
number, follow from the measured times of the function's own batches (core/decisions/rules/batching.py).

    Asked ──wait_s > 0──► gathering ──full, or it has waited for long enough──► waiting ──grant──► size() of them
      └──────────────────────────────────────────────────────────────────────────►┘

Requests wait here only with ``--batch-wait``. While a batch waits for its GPU more may come, and join it; and if all of
them leave, here or there, it wants no lease any more (NOBODY).
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from dormouse.core.decisions.rules.batching import BatchRequests, RequestBatches
from dormouse.core.decisions.scheduling.events import Asked, BatchChanged
from dormouse.core.decisions.scheduling.state import Model
from dormouse.schemas.messages import Failure

NOBODY: Final = Failure(code="nobody_waits", status=499, text="all requests of this batch have left")


class WaitingBatch(NamedTuple):
    """One batch that waits for more."""

    asked: Asked
    model: Model
    batch: BatchRequests
    due_s: float  # when it begins


class GatheringRequests:
    """Gathering requests of all functions. ``due_s``: latest time at which the next of them is to begin."""

    def __init__(self) -> None:
        self._waits: dict[int, WaitingBatch] = {}  # by request
        self.due_s = float("inf")

    def asked(self, asked: Asked, model: Model, batch: BatchRequests, now_s: float) -> bool:
        """Whether it waits here."""
        assert asked.batch is not None
        function, wanted = model.function, asked.batch
        if function.batches is None:
            function.batches = RequestBatches(wanted.most, wanted.longest_s, function.deadline_s)
        function.batches.follow(wanted.most, wanted.longest_s, function.deadline_s)
        heard(model, wanted.requests, now_s)
        return self._waits_on(asked, model, batch, now_s)

    def changed(self, event: BatchChanged, now_s: float) -> tuple[Asked, BatchRequests, bool]:
        """Its current state, and whether it goes on waiting."""
        asked, model, batch, _ = self._waits.pop(event.request)
        heard(model, event.came, now_s)
        batch.change(event.came, event.left)
        return asked, batch, self._waits_on(asked, model, batch, now_s)

    def _waits_on(self, asked: Asked, model: Model, batch: BatchRequests, now_s: float) -> bool:
        batches = model.function.batches
        assert batches is not None
        wait_s = 0.0
        if batch:
            waited_s = max(0.0, batches.deadline_s - (batch.earliest_s - now_s))
            wait_s = batches.wait_s(len(batch), waited_s)
        if wait_s > 0.0:
            self._waits[asked.request] = WaitingBatch(asked, model, batch, now_s + wait_s)
        self._settle()
        return wait_s > 0.0

    def _settle(self) -> None:
        self.due_s = min((each.due_s for each in self._waits.values()), default=float("inf"))

    def due(self, now_s: float) -> Iterator[tuple[Asked, BatchRequests]]:
        """Those that have waited for long enough; they wait here no more."""
        for request, (asked, _, batch, due_s) in list(self._waits.items()):
            if due_s <= now_s:
                self.left(request)
                yield asked, batch

    def left(self, request: int) -> None:
        """It waits no more, if it did."""
        if self._waits.pop(request, None) is not None:
            self._settle()

    def forget(self, instance: str) -> None:
        for request in [request for request, each in self._waits.items() if each.asked.instance == instance]:
            self.left(request)

    def __contains__(self, request: int) -> bool:
        return request in self._waits

    def __len__(self) -> int:
        return len(self._waits)


def heard(model: Model, requests: Sequence[tuple[int, float]], now_s: float) -> None:
    """These wait in an instance; those not reported before have arrived, each at the time that follows from its
    deadline.
    """
    function = model.function
    assert function.batches is not None
    for number, due_s in requests:
        if number > model.told:
            model.told = number
            model.came_s = function.batches.came(min(now_s, due_s - function.deadline_s), model.came_s)
            function.arrived(now_s)
