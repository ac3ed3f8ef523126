"""GPUs whose executors are to be replaced in peace: pure. No lease begins there; one that has a seat gets its turns
until it is over. The executor is told to end when the last one is, or when they have had LEAVE_S.
"""

from math import inf
from typing import Final

from dormouse.controller.scheduling.events import Action, ExecutorLeaves, RetireExecutor
from dormouse.controller.scheduling.state import Gpu
from dormouse.controller.scheduling.turns import FreeTurns

LEAVE_S: Final = 30.0
"""Few requests take longer, and all others wait for the last of them."""


class LeavingGpus:
    """``gpus`` are the scheduler's. ``until_s``: by GPU that leaves, how long its leases have; infinite once it was
    told.
    """

    def __init__(self, gpus: dict[int, Gpu], turns: FreeTurns) -> None:
        self._gpus, self._turns = gpus, turns
        self.until_s: dict[int, float] = {}
        self.due_s = inf  # the least of them

    def begin(self, event: ExecutorLeaves, now_s: float) -> None:
        gpu = self._gpus.get(event.gpu)
        if gpu is not None and gpu.epoch == event.epoch and not gpu.leaves:
            gpu.leaves, self.until_s[gpu.number] = True, now_s + LEAVE_S
            self._turns.changed(gpu)
            self._settle()

    def gone(self, number: int) -> None:
        self.until_s.pop(number, None)
        self._settle()

    def _settle(self) -> None:
        self.due_s = min(self.until_s.values(), default=inf)

    def retire(self, now_s: float, actions: list[Action]) -> None:
        """Those that nothing keeps any more."""
        for number, until_s in self.until_s.items():
            gpu = self._gpus[number]
            if until_s < inf and (not gpu.leases or until_s <= now_s):
                self.until_s[number] = inf
                actions.append(RetireExecutor(number, gpu.epoch))
        self._settle()
