"""Requests that wait for more of their batch, before they want a lease: pure. When they begin, and how many of them, is
decided by what the function's own batches have taken (core/batching.py).

    Asked ──wait_s > 0──► gathering ──full, or it has waited for long enough──► waiting ──grant──► size() of them
      └──────────────────────────────────────────────────────────────────────────►┘

Nobody waits here but by ``--batch-wait``. While a batch waits for its GPU more may come, and are in it; and if all of
them leave, here or there, it wants no lease any more (NOBODY).
"""

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import structs

from dormouse.controller.scheduling.events import Asked, BatchGrew
from dormouse.controller.scheduling.state import Model
from dormouse.core.batching import RequestBatches
from dormouse.schemas.messages import Failure

NOBODY: Final = Failure(code="nobody_waits", status=499, text="all requests of this batch have left")


class GatheringRequests:
    """Those of all functions. ``due_s``: when the next of them is to begin, whatever comes."""

    def __init__(self) -> None:
        self._waits: dict[int, tuple[Asked, Model, float]] = {}  # by request: and when it begins
        self.due_s = float("inf")

    def asked(self, asked: Asked, model: Model, now_s: float) -> bool:
        """Whether it waits here."""
        assert asked.batch is not None
        function, wanted = model.function, asked.batch
        if function.batches is None:
            function.batches = RequestBatches(wanted.most, wanted.longest_s, function.deadline_s)
        function.batches.follow(wanted.most, wanted.longest_s, function.deadline_s)
        heard(model, asked.batch.deadlines, now_s)
        return self._waits_on(asked, model, now_s)

    def grew(self, event: BatchGrew, now_s: float) -> Asked | None:
        """What begins now because of that."""
        asked, model, _ = self._waits[event.request]
        assert asked.batch is not None
        heard(model, event.deadlines, now_s)
        asked = structs.replace(asked, batch=structs.replace(asked.batch, deadlines=event.deadlines))
        return None if self._waits_on(asked, model, now_s) else asked

    def _waits_on(self, asked: Asked, model: Model, now_s: float) -> bool:
        assert asked.batch is not None
        deadlines, batches = asked.batch.deadlines, model.function.batches
        assert batches is not None
        waited_s = max(0.0, batches.deadline_s - (min(deadlines) - now_s))
        wait_s = batches.wait_s(len(deadlines), waited_s)
        self._waits.pop(asked.request, None)
        if wait_s > 0.0:
            self._waits[asked.request] = asked, model, now_s + wait_s
        self._settle()
        return wait_s > 0.0

    def _settle(self) -> None:
        self.due_s = min((due_s for _, _, due_s in self._waits.values()), default=float("inf"))

    def due(self, now_s: float) -> Iterator[Asked]:
        """Those that have waited for long enough; they wait here no more."""
        for request, (asked, _, due_s) in list(self._waits.items()):
            if due_s <= now_s:
                self.left(request)
                yield asked

    def left(self, request: int) -> Model | None:
        """It waits no more; whose it was, if it did."""
        found = self._waits.pop(request, None)
        if found is None:
            return None
        self._settle()
        return found[1]

    def forget(self, instance: str) -> None:
        for request in [request for request, (asked, *_) in self._waits.items() if asked.instance == instance]:
            self.left(request)

    def __contains__(self, request: int) -> bool:
        return request in self._waits

    def __len__(self) -> int:
        return len(self._waits)


def heard(model: Model, deadlines: Sequence[float], now_s: float) -> None:
    """So many wait in an instance; those that were not known before have come."""
    function, came = model.function, len(deadlines) - model.told
    model.told = len(deadlines)
    if came > 0:
        assert function.batches is not None
        function.batches.came(came, now_s)
        for _ in range(came):
            function.arrived(now_s)
