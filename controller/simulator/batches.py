"""Requests of simulated functions that come in batches, between their arrival and the scheduling core: pure. It has the
place of the router and of the functions' instances (queueing.py), and reports what they report: one wish of each
instance for a lease for all that wait there, and again their list when one more has come. The core decides when a batch
begins, and how many are in it.

A request goes to the instance that has fewest. Where a function may have several, each has at most a batch that runs
and one that comes together; others wait for the first that has room.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.agenda import ASKS, Agenda
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.extras import Extras
from dormouse.controller.simulator.front import Ask
from dormouse.core.decisions.rules.replicas import mean, queue_is_late
from dormouse.core.decisions.scheduling import events as ev

TOLD: Final = 2
"""So many batches at most wait in a function's instance, and are reported; more wait in the router's queue."""


class BatchLine:
    """Of one instance. ``asked``: the number of its wish for a lease, which its first request has; ``lease``: of the
    lease that it has, which serves ``running``. ``idle_s``: since when it has nothing to do.
    """

    __slots__ = ("asked", "idle_s", "lease", "name", "running", "waiting")

    def __init__(self, name: str, now_s: float) -> None:
        self.name, self.idle_s = name, now_s
        self.waiting: list[int] = []  # in order of arrival
        self.running: list[int] = []
        self.asked: int | None = None
        self.lease: int | None = None

    @property
    def count(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def idle(self) -> bool:
        return not self.count and self.asked is None and self.lease is None


class BatchedFunction:
    """One whose requests come in batches: the ``lines`` of its instances that serve, the first one's first, and a
    ``queue`` of requests that no instance has room for. ``handed_s``: when each of the others came to its instance.
    """

    def __init__(self, number: int, names: Sequence[str], spec: ModelSpec, deadline_s: float, front: "BatchLines"):
        self.number, self.names, self.spec, self._front = number, names, spec, front
        self._deadline_s = deadline_s
        self.lines = [BatchLine(names[0], 0.0)]
        self.loading = 0
        self.most = TOLD * spec.batch if len(names) > 1 else 1 << 60
        self.queue: list[int] = []  # in order of arrival
        self.handed_s: dict[int, float] = {}
        self.run_s: float | None = None  # recent time of a request in its instance

    def line(self, name: str) -> BatchLine:
        return next(each for each in self.lines if each.name == name)

    def waits(self, now_s: float) -> bool:
        return bool(self.queue)

    def called_for(self, now_s: float) -> bool:
        if self.loading or any(line.lease is None for line in self.lines):
            return False
        return queue_is_late(len(self.queue), len(self.lines), self.spec.batch, self.run_s, self._deadline_s)

    def starts(self) -> None:
        pass

    def serves(self, name: str) -> None:
        self._front.serves(self, name)

    def idle_since_s(self, name: str) -> float | None:
        line = self.line(name)
        return line.idle_s if line.idle else None

    def ends(self, name: str) -> None:
        self.lines.remove(self.line(name))


class BatchLines:
    """A front (front.py). ``names`` are those that each function's instances may have. ``asks`` is for requests of
    functions without batches; ``due_s`` says when a request is to be answered.
    """

    after_s = 0.0

    def __init__(
        self,
        models: Sequence[ModelSpec],
        names: Sequence[Sequence[str]],
        deadlines_s: Sequence[float],
        agenda: Agenda,
        asks: Ask,
        tell: Callable[[ev.Event], None],
        due_s: Callable[[int], float],
        extras: Extras | None,
    ) -> None:
        self._functions = {
            number: BatchedFunction(number, names[number], spec, deadlines_s[number], self)
            for number, spec in enumerate(models)
            if spec.batch
        }
        self._agenda, self._asks, self._tell, self._due_s, self._extras = agenda, asks, tell, due_s, extras
        self._of: dict[int, BatchLine] = {}  # by wish for a lease, or its lease

    def begin(self, who: list[int], times_s: npt.NDArray[np.float64], functions: npt.NDArray[np.int64]) -> None:
        self._who = who

    def arrives(self, request: int) -> None:
        function = self._functions.get(self._who[request])
        if function is None:
            self._asks(request)
            return
        insort(function.queue, request)  # one that a GPU was lost with is where it was
        self._feed(function)
        if function.queue and self._extras is not None:
            self._extras.crowded[function] = None

    def again(self, request: int) -> None:
        self.arrives(request)

    def due(self, kind: int, what: int, version: int) -> None:
        self._feed(self._functions[what])

    def serves(self, function: BatchedFunction, name: str) -> None:
        """One more instance does."""
        function.lines.append(BatchLine(name, self._agenda.now_s))
        self._feed(function)

    def _feed(self, function: BatchedFunction) -> None:
        """To instances; each that has no wish for a lease has one then, for all that it has."""
        queue, told = function.queue, TOLD * function.spec.batch
        while queue:
            line = min(function.lines, key=_count) if len(function.lines) > 1 else function.lines[0]
            if line.count >= function.most:
                break
            request = queue.pop(0)
            insort(line.waiting, request)
            if len(function.names) > 1:
                function.handed_s[request] = self._agenda.now_s
            if line.asked is not None and len(line.waiting) <= told:
                self._tell(ev.BatchChanged(line.asked, self._due([request])))
        for line in function.lines:
            if line.asked is None and line.lease is None and line.waiting:
                line.asked = line.waiting[0]
                self._of[line.asked] = line
                requests = self._due(line.waiting[:told])
                wanted = ev.BatchWanted(requests, function.spec.batch, function.spec.batch_wait_s)
                self._tell(ev.Asked(line.asked, line.name, requests[0][1], 1, True, wanted))

    def _due(self, requests: Iterable[int]) -> tuple[tuple[int, float], ...]:
        return tuple((each, self._due_s(each)) for each in requests)

    # --- what becomes of them

    def granted(self, wish: int, count: int) -> None:
        """Its lease serves so many."""
        line = self._of[wish]
        line.asked, line.lease = None, wish
        line.running, line.waiting = line.waiting[:count], line.waiting[count:]

    def leave(self, lease: int, lost: bool = False) -> list[int]:
        """Requests that it has served, or was lost with; one for functions without batches."""
        function = self._functions.get(self._who[lease])
        if function is None:
            return [lease]
        line = self._of.pop(lease)
        found, line.running, line.lease = line.running, [], None
        for request in found if function.handed_s else ():
            took_s = self._agenda.now_s - function.handed_s.pop(request)
            function.run_s = function.run_s if lost else mean(function.run_s, took_s)
        self._idles(line)
        self._tell(ev.Answered(lease, True, len(found), len(found)))
        return found

    def over(self, request: int, refused: bool) -> None:
        """The next batch may ask, once what was decided with this is done."""
        number = self._who[request]
        function = self._functions.get(number)
        if function is None:
            return
        if refused:
            line = self._of.pop(request)
            line.asked = None
            for each in line.waiting[: function.spec.batch]:
                function.handed_s.pop(each, None)
            del line.waiting[: function.spec.batch]
            self._idles(line)
        self._agenda.put(self._agenda.now_s, ASKS, number)

    def _idles(self, line: BatchLine) -> None:
        line.idle_s = self._agenda.now_s
        if self._extras is not None:
            self._extras.idles(line.name)

    def gpu_lost(self, functions: Sequence[int]) -> None:
        pass


def _count(line: BatchLine) -> int:
    return line.count
