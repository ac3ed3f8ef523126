"""Optional stages between an arrival and the scheduling core: a router with a queue for each function, as on a real
node, or processes of functions that have to start (baselines.py). Pure. Without either the core is asked at once.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.agenda import ASKS, LEAVES, STARTED, Agenda
from dormouse.controller.simulator.baselines import Processes
from dormouse.controller.simulator.devices import OutsideLease

Ask = Callable[[int], None]
"""Asks the core for a lease for a request."""


class Front(Protocol):
    """``after_s`` is what an answer takes beyond its lease."""

    after_s: float

    def begin(self, who: list[int], times_s: npt.NDArray[np.float64], functions: npt.NDArray[np.int64]) -> None:
        """``who`` is asked by each request; the others are without those that warm up."""

    def arrives(self, request: int) -> None: ...

    def again(self, request: int) -> None:
        """One that a GPU was lost with is asked once more."""

    def due(self, kind: int, what: int, version: int) -> None: ...

    def over(self, request: int, refused: bool) -> None:
        """It has met its fate."""

    def gpu_lost(self, functions: Sequence[int]) -> None:
        """That were on it."""


class RouterQueue:
    """A function has one instance, so the core learns of one of its requests at a time."""

    def __init__(self, outside: OutsideLease, count: int, agenda: Agenda, ask: Ask) -> None:
        self.after_s = outside.after_s
        self._outside = outside
        self._agenda = agenda
        self._ask = ask
        self._lines: list[deque[int]] = [deque() for _ in range(count)]

    def begin(self, who: list[int], times_s: npt.NDArray[np.float64], functions: npt.NDArray[np.int64]) -> None:
        self._who = who

    def arrives(self, request: int) -> None:
        line = self._lines[self._who[request]]
        line.append(request)
        if len(line) == 1:
            self._agenda.put(self._agenda.now_s + self._outside.before_s, ASKS, request)

    def again(self, request: int) -> None:
        self._ask(request)

    def due(self, kind: int, what: int, version: int) -> None:
        self._ask(what)

    def over(self, request: int, refused: bool) -> None:
        line = self._lines[self._who[request]]
        line.popleft()
        if line:
            self._agenda.put(self._agenda.now_s + self._outside.turn_s, ASKS, line[0])

    def gpu_lost(self, functions: Sequence[int]) -> None:
        pass


class Starts:
    """A request waits for its function's process; requests that warm up, the first ``warm``, find one. ``ends`` is
    told a function whose idle process is to give its memory back.
    """

    after_s = 0.0

    def __init__(
        self, keep_alive: str, cold_start_s: Sequence[float], agenda: Agenda, ask: Ask, ends: Callable[[int], None]
    ) -> None:
        self._processes = Processes(len(cold_start_s), keep_alive)
        self._cold_start_s = cold_start_s
        self._agenda = agenda
        self._ask = ask
        self._ends = ends

    def begin(self, who: list[int], times_s: npt.NDArray[np.float64], functions: npt.NDArray[np.int64]) -> None:
        self._who = who
        self._warm = len(who) - len(times_s)
        self._processes.know(times_s, functions)

    def arrives(self, request: int) -> None:
        self._processes.asked(self._who[request], self._agenda.now_s)
        self.again(request)

    def again(self, request: int) -> None:
        function, processes = self._who[request], self._processes
        if not processes.up[function] and request >= self._warm:
            waiting = processes.starting[function]
            if waiting is None:
                waiting = processes.starting[function] = []
                self._agenda.put(self._agenda.now_s + self._cold_start_s[function], STARTED, function)
            waiting.append(request)
            return
        processes.up[function] = True
        self._ask(request)

    def due(self, kind: int, what: int, version: int) -> None:
        processes = self._processes
        if kind == LEAVES:
            if version == processes.life[what]:
                processes.up[what] = False
                self._ends(what)
            return
        waiting, processes.starting[what] = processes.starting[what], None
        for request in waiting or ():
            processes.up[what] = True  # also if one before it was refused: they have waited for this start
            self.again(request)

    def over(self, request: int, refused: bool) -> None:
        function, processes = self._who[request], self._processes
        if refused:
            processes.up[function] = False  # a process that finds no room ends
        leaves_s = processes.over(function, self._agenda.now_s)
        if leaves_s is not None:
            self._agenda.put(leaves_s, LEAVES, function, processes.life[function])

    def gpu_lost(self, functions: Sequence[int]) -> None:
        for function in functions:
            self._processes.up[function] = False
