"""Ends of leases: pure. A lease is over when its executor reports it, or, if it gave the GPU nothing, when its instance
has answered. One that is not given back in time after it was revoked costs its executor's life.
"""

from collections import deque
from math import inf
from typing import Final

from dormouse.core.decisions.scheduling.events import (
    Action,
    KillExecutor,
    OverOn,
    RevokeOn,
    TurnBusy,
    TurnIdle,
    TurnWanted,
)
from dormouse.core.decisions.scheduling.margins import due_of
from dormouse.core.decisions.scheduling.queueing import Queue
from dormouse.core.decisions.scheduling.state import Gpu, Model, Running
from dormouse.core.decisions.scheduling.turns import FreeTurns
from dormouse.schemas.messages import StepsDue

MAX_OVER: Final = 64
"""Most ended leases without a command that an executor has not been notified of yet."""

COPIED_BEFORE: Final = 0.8
"""Share of a first step's time: copies that took less were not the cause of it."""


class GrantedLeases:
    """Those of all GPUs; ``gpus`` and ``models`` are the scheduler's. One that was revoked is to be given back within
    ``revoke_s``.
    """

    def __init__(
        self, revoke_s: float, gpus: dict[int, Gpu], models: dict[str, Model], queue: Queue, turns: FreeTurns
    ) -> None:
        self._revoke_s = revoke_s
        self._gpus, self._models, self._queue, self._turns = gpus, models, queue, turns
        self.by_request: dict[int, Running] = {}
        self._revoked: dict[int, Running] = {}  # by serial: leases that are being revoked
        self._owed: deque[tuple[float, Running]] = deque()  # answered leases, and until when they may be given back

    @property
    def due_s(self) -> float:
        """Time when the next should have been given back."""
        due_s, owed = inf, self._owed
        while owed and owed[0][1].over:
            owed.popleft()
        if owed:
            due_s = owed[0][0]
        if self._revoked:
            for running in self._revoked.values():
                if running.revoked_until_s is not None:
                    due_s = min(due_s, running.revoked_until_s)
        return due_s

    def ended(self, gpu: Gpu, running: Running, now_s: float) -> None:
        """A lease is over: its turn and its seat can be had."""
        del gpu.leases[running.lease.serial]
        if running.turn_s is not None:
            gpu.leave_turn(running, now_s)
        self._turns.changed(gpu)
        if gpu.held:
            self._queue.let_go(gpu, now_s)
        self.freed(running, now_s)

    def freed(self, running: Running, now_s: float) -> None:
        """A lease is over: other requests of its instance may be considered again."""
        running.over = True
        del self.by_request[running.request]
        self._revoked.pop(running.lease.serial, None)
        if self._queue.shares.on:
            self._queue.shares.over(running, now_s)
        if running.waiting.live:
            self._queue.taken(running.waiting)  # it wanted a turn
        running.waits_no_more()
        model = self._models.get(running.instance)
        if model is not None:
            model.leased = False
            if model.parked:
                self._queue.unpark(model, now_s)

    def turn_told(self, gpu: Gpu, event: TurnIdle | TurnBusy | TurnWanted, now_s: float, actions: list[Action]) -> None:
        """The executor's report of a turn."""
        running = gpu.leases.get(event.serial)
        if running is None:
            if event.serial in gpu.over:
                self.tell_over(gpu, actions)
        elif type(event) is TurnWanted:
            if running.turn_s is None and running.revoked_until_s is None:
                self._wanted(gpu, running, event.due, now_s)
        else:
            running.idle = running.turn_s is not None and type(event) is TurnIdle
            running.rests = running.idle and type(event) is TurnIdle and event.rests
            if running.wakes and running.idle:
                running.wakes, gpu.woken_s = False, now_s
            if running.cold and running.idle:
                running.cold, first_s = False, now_s - running.started_s
                if (running.wake_us or 0) / 1e6 < COPIED_BEFORE * first_s:  # else it has waited for its copies
                    running.model.function.started(first_s)
            self._turns.changed(gpu)
            if running.idle:
                self._queue.let_go(gpu, now_s)

    def _wanted(self, gpu: Gpu, running: Running, due: StepsDue | None, now_s: float) -> None:
        """It wants its turn again."""
        waiting = running.waiting
        if due is not None:
            running.due = due_of(gpu, running, due, now_s)
        if waiting.live:
            return
        if running.overran:
            running.wants_again(now_s)
        if running.due is not None:  # it wants a turn as a request that comes now would
            waiting.arrived_s, waiting.deadline_s = now_s, now_s + waiting.function.deadline_s
        waiting.resumes, waiting.live = running, True
        self._queue.add(waiting, now_s)
        if gpu.leaves:
            self._turns.changed(gpu)

    def revoke(self, running: Running, now_s: float, actions: list[Action]) -> None:
        if running.revoked_until_s is None:
            running.revoked_until_s = now_s + self._revoke_s
            self._revoked[running.lease.serial] = running
            if running.waiting.live:
                self._queue.taken(running.waiting)
            self._turns.changed(self._gpus[running.lease.gpu])
            actions.append(RevokeOn(running.lease.gpu, running.lease.serial))

    def owe(self, running: Running, now_s: float) -> None:
        """It was answered: its executor is to give it back by itself."""
        self._owed.append((now_s + self._revoke_s, running))

    def over_unused(self, gpu: Gpu, running: Running, now_s: float, actions: list[Action]) -> None:
        """It has given the GPU nothing. Its executor is notified with the next message."""
        gpu.over.append(running.lease.serial)
        if len(gpu.over) >= MAX_OVER:
            self.tell_over(gpu, actions)
        self.ended(gpu, running, now_s)

    def tell_over(self, gpu: Gpu, actions: list[Action]) -> None:
        actions.append(OverOn(gpu.number, tuple(gpu.over)))
        gpu.over.clear()

    def take_back(self, now_s: float, actions: list[Action]) -> None:
        """Revokes leases that were answered, and that their executor still has."""
        while self._owed and self._owed[0][0] <= now_s:
            _, running = self._owed.popleft()
            if not running.over:
                self.revoke(running, now_s, actions)

    def kill_silent(self, now_s: float, actions: list[Action]) -> None:
        for serial, running in sorted(self._revoked.items()):
            if running.revoked_until_s is not None and running.revoked_until_s <= now_s:
                running.revoked_until_s = inf  # sent once; the sentinel reports the rest
                number = running.lease.gpu
                text = f"lease {serial} was not given back within {self._revoke_s:g} s of being revoked"
                actions.append(KillExecutor(number, self._gpus[number].epoch, text))
