"""Turns of language models that go round, many at once: pure. For the simulator. While several runtimes on a GPU have
tokens to compute, and no prompts, each has a step in turn, in an order that follows from their last turns (margins.py).
So no step needs a decision of its own: `Rounds.ahead` returns the order, `Rounds.passed` takes the result.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from dormouse.core.decisions.scheduling.margins import due_of, tpot_of, turn_of, turn_s
from dormouse.core.decisions.scheduling.queueing import Queue
from dormouse.core.decisions.scheduling.state import DueSteps, Gpu, Running
from dormouse.core.decisions.scheduling.turns import FreeTurns
from dormouse.schemas.messages import StepsDue

Slack = Callable[[float, float], float]
"""Of the wanted time of a token, and the time of a step."""

SLACKS: Final[dict[str, Slack]] = {
    "margin": lambda tpot_s, step_s: tpot_s - step_s,
    "fifo": lambda tpot_s, step_s: 0.0,
}
"""By turn order: the value added to the time of a runtime's last turn; the least sum is next, of equal ones the least
serial.
"""


class Passed(NamedTuple):
    """A runtime that wants a turn since ``told_s``, for ``decoding`` sequences, and has had turns for ``used_s``; or
    that has it since then, and has had others for ``used_s``.
    """

    serial: int
    told_s: float
    decoding: int
    used_s: float


class Rounds:
    """``slack`` is one of `SLACKS`; None: not to be known ahead."""

    slack: Slack | None

    def __init__(self, gpus: Mapping[int, Gpu], queue: Queue, turns: FreeTurns) -> None:
        self._gpus, self._queue, self._turns = gpus, queue, turns

    def able(self, number: int) -> bool:
        """Whether `ahead` may predict a GPU: no request waits for a lease, and margins alone decide the next turn."""
        gpu, queue = self._gpus[number], self._queue
        if self.slack is None or self._turns.turns > 1 or queue.shares.on or gpu.leaves:
            return False
        return None not in [waiting.resumes for waiting in queue.waiting.values()]

    @property
    def taken(self) -> bool:
        """Whether no lease gets a turn anywhere, whatever the core receives."""
        return not self._turns.free

    def ahead(self, number: int, holder: int, decoding: Mapping[int, int]) -> dict[int, float] | None:
        """The `SLACKS` value of each of these leases on a GPU, with so many sequences each; one of them has the only
        turn, and the others want it; it is `able`. None: another lease wants it, or they have work besides tokens.
        """
        gpu, queue, slack = self._gpus[number], self._queue, self.slack
        if slack is None or [each.lease.serial for each in gpu.turns] != [holder]:
            return None
        for waiting in queue.waiting.values():
            resumes = waiting.resumes
            if resumes is not None and resumes.lease.gpu == number and resumes.lease.serial not in decoding:
                return None
        found = {}
        for serial, count in decoding.items():
            running = gpu.leases[serial]
            whole = running.model.resident.get(number, 0) >= running.model.nbytes
            if not whole or running.revoked_until_s is not None or running.idle or running.cold or running.wakes:
                return None
            if serial == holder:
                found[serial] = self.slack_s(number, serial, count)
            elif running.due is None or running.due.tokens or not running.waiting.live:
                return None
            else:
                found[serial] = slack(running.due.tpot_s, turn_s(running))
        return found

    def slack_s(self, number: int, serial: int, decoding: int) -> float:
        """The same of one of them that has so many sequences now."""
        assert self.slack is not None
        gpu = self._gpus[number]
        running = gpu.leases[serial]
        return self.slack(tpot_of(gpu, running), turn_of(running.model.function, 0, decoding))

    def passed(
        self, number: int, began_s: float, now: Passed, others: Iterable[Passed], gone: Iterable[Passed] = ()
    ) -> None:
        """The lease with the turn lost it at ``began_s``. It is ``now``'s; the ``others``, in the order of their last
        turns, want it; those that are ``gone`` have nothing to compute any more.
        """
        gpu, queue = self._gpus[number], self._queue
        old, new = gpu.turns[0], gpu.leases[now.serial]
        gpu.leave_turn(old, began_s)
        if new is not old:
            _wants_no_more(queue, new)
        for each in gone:
            running = gpu.leases[each.serial]
            running.used_s += each.used_s
            if running is not old:
                _wants_no_more(queue, running)
        for each in others:
            running = gpu.leases[each.serial]
            running.used_s += each.used_s
            _wants(queue, running, due_of(gpu, running, StepsDue(prompts=[], decoding=each.decoding), each.told_s))
        new.used_s += now.used_s
        new.ends_s = now.told_s + turn_of(new.model.function, 0, now.decoding)
        new.due = None
        gpu.take_turn(new, now.told_s)
        self._turns.changed(gpu)


def _wants_no_more(queue: Queue, running: Running) -> None:
    queue.taken(running.waiting)
    running.waiting.resumes = running.waiting.held_for = running.due = None


def _wants(queue: Queue, running: Running, due: DueSteps) -> None:
    """It wants a turn since then, as a request that came then would."""
    waiting = running.waiting
    running.due = due
    waiting.arrived_s, waiting.deadline_s = due.told_s, due.told_s + waiting.function.deadline_s
    if waiting.live:
        queue.came_again(waiting, due.told_s)
    else:
        waiting.resumes, waiting.live = running, True
        queue.add(waiting, due.told_s)
