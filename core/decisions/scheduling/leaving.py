"""GPUs whose executors are to leave: pure. No lease begins there; one that has a seat gets its turns until it is over.
An executor leaves for two reasons: another one, with another pool, is to take its place, or its GPU is drained. The
states of a GPU::

             ExecutorUp           ExecutorLeaves             the last lease is over, or LEAVE_S are
    absent ─────────────► serves ────────────────► replaced ──────────────────────────► RetireExecutor ──► absent
      │                     │ ▲ DrainChosen without it
      │ DrainChosen         ▼ │               the last lease is over
      │                    drains ◄─────┐ ─────────────────────► DismissExecutor ──ExecutorDown──┐
      │                                 │ ExecutorUp: it was on its way                          │
      └──► DismissExecutor ──────────► drained ◄─────────────────────────────────────────────────┘
                                        └── DrainChosen without it: WantExecutor ──► absent

To a request, a drained GPU is one whose executor does not come up: absent. A replaced executor has LEAVE_S; a draining
one has as long as it takes, for that is its purpose. Language models keep their seats while they rest, but not on an
executor that drains.
"""

from collections.abc import Iterable
from math import inf
from typing import Final

from dormouse.core.decisions.scheduling.events import (
    Action,
    DismissExecutor,
    DrainOn,
    ExecutorLeaves,
    RetireExecutor,
    WantExecutor,
)
from dormouse.core.decisions.scheduling.queueing import Queue
from dormouse.core.decisions.scheduling.state import Gpu
from dormouse.core.decisions.scheduling.turns import FreeTurns

LEAVE_S: Final = 30.0
"""Few requests take longer, and all others wait for the last of them."""


class LeavingGpus:
    """``gpus`` are the scheduler's. ``leaving``: those with an executor that leaves; ``drained``: those chosen to be
    drained, whether they have one or not.
    """

    def __init__(self, gpus: dict[int, Gpu], turns: FreeTurns, queue: Queue) -> None:
        self._gpus, self._turns, self._queue = gpus, turns, queue
        self.leaving: set[int] = set()
        self.drained: frozenset[int] = frozenset()
        self._until_s: dict[int, float] = {}  # of those that are replaced: how long their leases have
        self._told: set[int] = set()  # that they are to end
        self.due_s = inf

    def begin(self, event: ExecutorLeaves, now_s: float) -> None:
        gpu = self._gpus.get(event.gpu)
        if gpu is not None and gpu.epoch == event.epoch and gpu.number not in self._until_s:
            self._until_s[gpu.number] = now_s + LEAVE_S
            self._leaves(gpu)

    def drain(self, gpus: Iterable[int], now_s: float, actions: list[Action]) -> None:
        """Just these are drained from now on."""
        before, self.drained = self.drained, frozenset(gpus)
        for number in sorted(self.drained - before):
            if (gpu := self._gpus.get(number)) is None:
                actions.append(DismissExecutor(number))
            else:
                self._drains(gpu, now_s, actions)
        for number in sorted(before - self.drained):
            actions.append(WantExecutor(number))
            gpu = self._gpus.get(number)
            if gpu is not None and number not in self._told:
                actions.append(DrainOn(number, False))
                if number not in self._until_s:
                    gpu.leaves = False
                    self.leaving.discard(number)
                    self._turns.changed(gpu)
                    self._let_go(now_s)

    def came(self, number: int, now_s: float, actions: list[Action]) -> None:
        """An executor is up."""
        if number in self.drained:
            self._drains(self._gpus[number], now_s, actions)
        else:
            self._let_go(now_s)

    def gone(self, number: int) -> None:
        self.leaving.discard(number)
        self._until_s.pop(number, None)
        self._told.discard(number)
        self._settle()

    def retire(self, now_s: float, actions: list[Action]) -> None:
        """Retires those that no lease keeps any more."""
        for number in sorted(self.leaving - self._told):
            gpu = self._gpus[number]
            if number in self.drained and not gpu.leases:
                self._told.add(number)
                actions.append(DismissExecutor(number))
            elif number in self._until_s and (not gpu.leases or self._until_s[number] <= now_s):
                self._told.add(number)
                actions.append(RetireExecutor(number, gpu.epoch))
        self._settle()

    def _drains(self, gpu: Gpu, now_s: float, actions: list[Action]) -> None:
        self._leaves(gpu)
        actions.append(DrainOn(gpu.number, True))
        self._queue.let_go(gpu, now_s, len(gpu.held))  # requests that wait for its model there go elsewhere

    def _leaves(self, gpu: Gpu) -> None:
        gpu.leaves = True
        self.leaving.add(gpu.number)
        self._turns.changed(gpu)
        self._settle()

    def _let_go(self, now_s: float) -> None:
        """There is another GPU: requests that wait for one that drains, which may last for hours, may have that."""
        for number in self.leaving:
            self._queue.let_go(self._gpus[number], now_s, len(self._gpus[number].held))

    def _settle(self) -> None:
        self.due_s = min(
            (until_s for number, until_s in self._until_s.items() if number not in self._told), default=inf
        )
