"""Requests of simulated functions that come in batches, between their arrival and the scheduling core: pure. It has the
place of the router and of the function's instance (router/decisions/queueing.py), and says what those say: one wish for
a lease for all that wait, and again which those are when one more has come. When a batch begins, and how many are in
it, the core decides.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dormouse.controller.scheduling import events as ev
from dormouse.controller.simulator.agenda import ASKS, Agenda
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.front import Ask

TOLD: Final = 2
"""So many batches at most wait in a function's instance, and are told; more wait in the router's queue."""


class BatchLine:
    """Of one function. ``asked``: the number of its wish for a lease, which its first request has; ``lease``: of the
    lease that it has, which serves ``running``.
    """

    __slots__ = ("asked", "lease", "running", "spec", "waiting")

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.waiting: list[int] = []  # in order of arrival
        self.running: list[int] = []
        self.asked: int | None = None
        self.lease: int | None = None


class BatchLines:
    """A front (front.py). ``asks`` is for requests of functions without batches; ``due_s`` says when a request is to be
    answered.
    """

    after_s = 0.0

    def __init__(
        self,
        models: Sequence[ModelSpec],
        names: Sequence[str],
        agenda: Agenda,
        asks: Ask,
        tell: Callable[[ev.Event], None],
        due_s: Callable[[int], float],
    ) -> None:
        self._lines = {number: BatchLine(spec) for number, spec in enumerate(models) if spec.batch}
        self._names, self._agenda, self._asks, self._tell, self._due_s = names, agenda, asks, tell, due_s

    def begin(self, who: list[int], times_s: npt.NDArray[np.float64], functions: npt.NDArray[np.int64]) -> None:
        self._who = who

    def arrives(self, request: int) -> None:
        line = self._lines.get(self._who[request])
        if line is None:
            self._asks(request)
            return
        insort(line.waiting, request)  # one that a GPU was lost with is where it was
        if line.asked is None:
            self._wants(line)
        elif len(line.waiting) <= TOLD * line.spec.batch:
            self._tell(ev.BatchChanged(line.asked, self._due([request])))

    def again(self, request: int) -> None:
        self.arrives(request)

    def due(self, kind: int, what: int, version: int) -> None:
        self._wants(self._lines[what])

    def _wants(self, line: BatchLine) -> None:
        """Its next batch, if it has none."""
        if line.asked is None and line.lease is None and line.waiting:
            line.asked = line.waiting[0]
            requests = self._due(line.waiting[: TOLD * line.spec.batch])
            wanted = ev.BatchWanted(requests, line.spec.batch, line.spec.batch_wait_s)
            instance = self._names[self._who[line.asked]]
            self._tell(ev.Asked(line.asked, instance, requests[0][1], 1, True, wanted))

    def _due(self, requests: Iterable[int]) -> tuple[tuple[int, float], ...]:
        return tuple((each, self._due_s(each)) for each in requests)

    # --- what becomes of them

    def granted(self, wish: int, count: int) -> None:
        """Its lease serves so many."""
        line = self._lines[self._who[wish]]
        line.asked, line.lease = None, wish
        line.running, line.waiting = line.waiting[:count], line.waiting[count:]

    def leave(self, lease: int) -> list[int]:
        """Whom it has served, or was lost with; of functions without batches one."""
        line = self._lines.get(self._who[lease])
        if line is None:
            return [lease]
        found, line.running, line.lease = line.running, [], None
        self._tell(ev.Answered(lease, True, len(found), len(found)))
        return found

    def over(self, request: int, refused: bool) -> None:
        """The next batch may ask, once what was decided with this is done."""
        function = self._who[request]
        line = self._lines.get(function)
        if line is None:
            return
        if refused:
            line.asked = None
            del line.waiting[: line.spec.batch]
        self._agenda.put(self._agenda.now_s, ASKS, function)

    def gpu_lost(self, functions: Sequence[int]) -> None:
        pass
