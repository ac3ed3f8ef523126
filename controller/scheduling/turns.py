"""Which GPUs have a turn for one more lease: pure."""

from dormouse.controller.scheduling.events import Action, PauseOn
from dormouse.controller.scheduling.state import Gpu


class FreeTurns:
    """``free``: GPUs that have a turn for one more; ``idle``: those of them where that is another's who does not use
    it. A GPU has ``turns``.
    """

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.free: set[int] = set()
        self.idle: set[int] = set()

    def changed(self, gpu: Gpu) -> None:
        """Somebody there has got, left or let go of a turn."""
        number, idle = gpu.number, False
        if gpu.leaves and not gpu.awaited:
            self.free.discard(number)
        elif len(gpu.turns) >= self.turns:
            for running in gpu.turns:
                idle = idle or running.idle
            (self.free.add if idle else self.free.discard)(number)
        else:
            self.free.add(number)
        if idle or self.idle:
            (self.idle.add if idle else self.idle.discard)(number)

    def gone(self, number: int) -> None:
        self.free.discard(number)
        self.idle.discard(number)

    def make(self, gpu: Gpu, now_s: float, actions: list[Action]) -> None:
        """Take one from whoever does not use it, if there is none."""
        if len(gpu.turns) < self.turns:
            return
        for running in gpu.turns:
            if running.idle:
                gpu.leave_turn(running, now_s)
                actions.append(PauseOn(gpu.number, running.lease.serial))
                return

    def check(self, gpu: Gpu) -> None:
        assert len(gpu.turns) <= self.turns
        assert (gpu.number in self.free) == gpu.open(self.turns), "free GPUs are miscounted"
        full = len(gpu.turns) >= self.turns
        assert (gpu.number in self.idle) == (gpu.number in self.free and full), "idle turns are miscounted"
