"""GPUs that have a turn for one more lease: pure.

A lease that computes keeps its turn for ``keep_s``, from when all of its model has come. Then a waiting lease may have
it, and the first goes on when it has a turn again: neither a time limit that its author chose nor parts of an answer
make a turn longer.
"""

from collections.abc import Iterable
from math import inf

from dormouse.core.decisions.scheduling.events import Action, PauseOn
from dormouse.core.decisions.scheduling.state import Gpu, Running


class FreeTurns:
    """``free``: GPUs that have a turn for one more; ``idle``: those of them where that turn is that of a lease which
    does not use it, or has had it for long enough. A GPU has ``turns``.
    """

    def __init__(self, turns: int, keep_s: float = inf) -> None:
        self.turns = turns
        self._keep_s = keep_s
        self.free: set[int] = set()
        self.idle: set[int] = set()

    def changed(self, gpu: Gpu) -> None:
        """A lease there has got, left or let go of a turn."""
        number, idle = gpu.number, False
        if gpu.leaves and not gpu.awaited:
            self.free.discard(number)
        elif len(gpu.turns) >= self.turns:
            for running in gpu.turns:
                idle = idle or running.spares
            (self.free.add if idle else self.free.discard)(number)
        else:
            self.free.add(number)
        if idle or self.idle:
            (self.idle.add if idle else self.idle.discard)(number)

    def gone(self, number: int) -> None:
        self.free.discard(number)
        self.idle.discard(number)

    def make(self, gpu: Gpu, now_s: float, actions: list[Action]) -> None:
        """Takes one from a lease that does not use it, if there is none."""
        if len(gpu.turns) < self.turns:
            return
        spare = [running for running in gpu.turns if running.spares]
        if spare:
            running = min(spare, key=lambda each: not each.idle)
            gpu.leave_turn(running, now_s)
            actions.append(PauseOn(gpu.number, running.lease.serial))

    def due_s(self, gpus: Iterable[Gpu]) -> float:
        """Time when a lease will have had a turn for long enough."""
        if self._keep_s == inf:
            return inf
        return min((self._until_s(running) for gpu in gpus for running in gpu.turns), default=inf)

    def overran(self, gpus: Iterable[Gpu], now_s: float) -> list[Gpu]:
        """GPUs where a lease has, since the last look."""
        found = []
        for gpu in gpus if self._keep_s < inf else ():
            late = [running for running in gpu.turns if self._until_s(running) <= now_s]
            for running in late:
                running.overran = True
            if late:
                self.changed(gpu)
                found.append(gpu)
        return found

    def _until_s(self, running: Running) -> float:
        """End of its turn. Of a lease of several steps, each is a turn, which others may have at any time."""
        if running.turn_s is None or running.overran or running.model.runtime:
            return inf
        if running.missing_nbytes and running.wake_us is None:
            woken_s = running.copies_until_s + self._keep_s  # that is expected, and may be late
        else:
            woken_s = running.started_s + (running.wake_us or 0) / 1e6
        return max(running.turn_s, woken_s) + self._keep_s

    def check(self, gpu: Gpu) -> None:
        assert len(gpu.turns) <= self.turns
        assert (gpu.number in self.free) == gpu.open(self.turns), "free GPUs are miscounted"
        full = len(gpu.turns) >= self.turns
        assert (gpu.number in self.idle) == (gpu.number in self.free and full), "idle turns are miscounted"
