"""Grants of GPUs that have a turn: pure. Takes waiting requests in their order, asks the policy's placement for a GPU,
and grants leases or gives turns back.
"""

import random
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Final

from dormouse.core.decisions.scheduling.events import Action, RefuseAsk, TurnOn, WakeOn
from dormouse.core.decisions.scheduling.inventory import Inventory
from dormouse.core.decisions.scheduling.keeping import Keeping
from dormouse.core.decisions.scheduling.leases import GrantedLeases
from dormouse.core.decisions.scheduling.margins import WakeTime, margin_s, turn_s, wanting
from dormouse.core.decisions.scheduling.placement import Placement
from dormouse.core.decisions.scheduling.queueing import Queue
from dormouse.core.decisions.scheduling.rationing import Rationing
from dormouse.core.decisions.scheduling.state import Gpu, Model, Running, Waiting
from dormouse.core.decisions.scheduling.turns import FreeTurns
from dormouse.core.quantities import size
from dormouse.schemas.messages import Failure, Lease

PEAK_MARGIN: Final = 1.1
"""Room wished for activations, as a multiple of the highest peak seen: inputs of the next request may be a little
larger."""


class Granting:
    """``rng`` makes leases' secrets. ``placement``, ``keeping`` and ``turn_order`` are of the policy, which may change;
    ``leaving`` are GPUs that get no more leases.
    """

    placement: Placement
    keeping: Keeping
    leaving: Set[int]
    turn_order: Callable[[Sequence[Running], float, WakeTime], tuple[Running, str, float]]

    def __init__(
        self,
        rng: random.Random,
        books: Inventory,
        queue: Queue,
        turns: FreeTurns,
        leases: GrantedLeases,
        rationing: Rationing,
    ) -> None:
        self._random = rng
        self._books, self._queue, self._turns, self._leases = books, queue, turns, leases
        self._gpus = books.gpus
        self._rationing = rationing
        self._serial = 0

    def place(self, now_s: float, actions: list[Action]) -> None:
        """Give free GPUs to waiting requests: to those that are overdue in their turn, else in the policy's order."""
        queue, seniority, free = self._queue, self._queue.seniority, self._turns.free
        if queue.update(now_s) and queue.order.gives_up and self._rationing.update(now_s):
            for model in self._books.models.values():
                self.keeping.used(model)
        may_jump, shares = True, queue.shares
        if shares.on:
            shares.count(now_s)
        while free:
            overdue = queue.overdue(now_s)
            waiting, late = overdue if overdue is not None and may_jump and seniority.due else None, True
            jumps = waiting is not None
            if waiting is None:
                waiting, late = queue.next(free, now_s)
                if waiting is None:
                    break
            resumes = waiting.resumes
            if resumes is None and (failure := self._books.too_large(waiting.model)) is not None:
                queue.left(waiting, now_s)
                actions.append(RefuseAsk(waiting.request, failure))
                continue
            waiting.held_for = None  # of a choice that others came before
            number = self._choose(waiting, now_s, not late)
            large = number is not None and resumes is None and self._rationing.concerns(waiting.model)
            if number is not None and large and not self._allowed(waiting, number, jumps, now_s):
                continue
            if number is not None:
                if resumes is None:
                    queue.taken(waiting)
                    running = self._grant(number, waiting, now_s, actions)
                else:
                    running = self._resume(number, resumes, now_s, actions)
                seniority.granted(running.waiting, overdue, running.ends_s - now_s)
                if shares.on:
                    shares.began(running, now_s)
            elif jumps:
                may_jump = False  # bound to a busy GPU: others do not wait for that
            elif waiting.held_for is not None:
                queue.hold(waiting, waiting.held_for, now_s)
            else:
                queue.left(waiting, now_s)
                actions.append(RefuseAsk(waiting.request, unbound(waiting.model)))

    def _allowed(self, waiting: Waiting, number: int, jumps: bool, now_s: float) -> bool:
        """Whether it may be woken on this GPU now, though its copy may be long; else it waits for that."""
        queue, rationing = self._queue, self._rationing
        if not queue.order.gives_up:
            return True
        copy_s, _, _ = self.placement.copy_s(waiting.model, number, now_s)
        if not rationing.long(copy_s):
            return True
        if waiting.function.given_up:
            if now_s < rationing.next_s:
                if jumps:  # it is in the order, too
                    queue.contends_no_more(waiting)
                else:
                    queue.ration(waiting)
                return False
            rationing.woke(waiting.function.predicted_s(copy_s), now_s)
        elif not jumps and (busy := rationing.crowded(now_s)) is not None and busy not in self._turns.free:
            waiting.held_for = busy
            queue.hold(waiting, busy, now_s)
            return False
        return True

    def _choose(self, waiting: Waiting, now_s: float, may_wait: bool) -> int | None:
        """One of the GPUs that have a turn; None to wait for another, as in `Placement.choose`."""
        free = self._turns.free
        if waiting.resumes is not None:
            own = waiting.resumes.lease.gpu
            if own in free:
                until_s = self._worth_a_wake_s(waiting.resumes, self._gpus[own], now_s)
                if until_s <= now_s:
                    return own
                self._queue.postpone(own, until_s)
            waiting.held_for = own
            return None
        if leaving := self.leaving:
            free = free - leaving
            if len(leaving) == len(self._gpus):
                waiting.held_for = min(leaving)  # until that is gone; then for the next executor
                return None
        # While there is a free turn, one is taken from a lease only where the model is.
        if 0 < len(self._turns.idle) < len(free) and not self.placement.by_first_token(waiting.model):
            resident, nbytes = waiting.model.resident, waiting.model.nbytes
            if not any(resident.get(number, -1) >= nbytes for number in self._turns.idle):
                free = free - self._turns.idle
        if waiting.function.instances > 1 and len(free) > 1:
            apart = {number for number in free if not self._gpus[number].serves(waiting.function)}
            if apart:  # several instances are there to compute at the same time
                free, may_wait = apart, False
        if waiting.model.nbytes > self._books.least_nbytes:  # GPUs differ
            free = self.placement.fitting(waiting.model, free)
        if not free:
            self.placement.wait(waiting)
        elif (number := self.placement.choose(waiting, free, now_s, may_wait)) is not None:
            return number
        held_for = waiting.held_for
        if held_for is None or held_for not in self._turns.free or held_for in leaving:
            return None
        waiting.held_for = None  # its turn is one that another does not use
        return held_for

    def _worth_a_wake_s(self, running: Running, gpu: Gpu, now_s: float) -> float:
        """Time when a lease that has lost bytes with its seat may take the turn of one that computes. Both may have no
        room at a time: then each wake is followed by as long a time without one, or all time would go into copies.
        """
        copy_s = 0.0 if running.due is None else self._wake_s(running, now_s)
        if copy_s <= 0.0 or len(gpu.turns) < self._turns.turns or any(turn.rests for turn in gpu.turns):
            return now_s
        return max(now_s, gpu.woken_s + copy_s)

    def margin_s(self, running: Running, now_s: float) -> float:
        """Margin of a lease that wants a turn."""
        return margin_s(running, now_s, partial(self._wake_s, now_s=now_s))

    def _wake_s(self, running: Running, now_s: float) -> float:
        return self.placement.copy_s(running.model, running.lease.gpu, now_s)[0]

    def _resume(self, number: int, running: Running, now_s: float, actions: list[Action]) -> Running:
        """A lease has a turn again: this one, or another runtime of a language model if it is to be first."""
        gpu, why, margin_s = self._gpus[number], "", 0.0
        if running.due is not None:
            shares, own, wants = self._queue.shares, running.waiting.tenant, wanting(gpu)
            if shares.on:
                wants = [each for each in wants if (its := each.waiting.tenant) == own or not shares.is_over(its)]
            wants = [each for each in wants if each is running or self._worth_a_wake_s(each, gpu, now_s) <= now_s]
            first, why, margin_s = self.turn_order(wants, now_s, partial(self._wake_s, now_s=now_s))
            if first is not running:
                running.waiting.held_for = number
                self._queue.hold(running.waiting, number, now_s)
                running = first
        self._queue.taken(running.waiting)
        running.waits_no_more()
        self._turns.make(gpu, now_s, actions)
        running.waiting.resumes = running.waiting.held_for = None
        whole_s = running.waiting.function.predicted_s(0.0, running.waiting.size)
        left_s = turn_s(running) if why else whole_s - running.used_s
        running.ends_s = now_s + max(0.0, left_s)
        if running.due is not None:
            running.wakes = running.model.resident.get(number, 0) < running.model.nbytes
        running.due = None
        gpu.take_turn(running, now_s)
        self._turns.changed(gpu)
        actions.append(TurnOn(number, running.lease.serial, why, margin_s))
        return running

    def _grant(self, number: int, waiting: Waiting, now_s: float, actions: list[Action]) -> Running:
        gpu, model = self._gpus[number], waiting.model
        if self._turns.idle:
            self._turns.make(gpu, now_s, actions)
        model.used_s = now_s
        model.leased = True
        model.held_for = waiting.held_for = None
        copy_s, host_nbytes, peer = self.placement.copy_s(model, number, now_s)
        self._serial += 1
        lease = Lease(gpu=number, epoch=gpu.epoch, serial=self._serial, secret=self._random.getrandbits(62))
        running = Running(waiting, lease, now_s)
        running.cold = model.runtime != "" and model.runtime not in gpu.runtimes
        running.wakes = model.runtime != "" and model.resident.get(number, 0) < model.nbytes
        if waiting.batch is not None and (batches := waiting.function.batches) is not None:
            waiting.size = batches.size([due_s - now_s - copy_s for due_s in waiting.batch.in_order()])
        running.ends_s = now_s + waiting.function.predicted_s(copy_s, waiting.size)
        running.copies_until_s = now_s + copy_s
        running.copying_nbytes, running.peer = host_nbytes, peer
        gpu.leases[lease.serial] = self._leases.by_request[waiting.request] = running
        gpu.take_turn(running, now_s)
        self._turns.changed(gpu)
        if gpu.held:
            self._queue.begun(gpu, now_s)
        missing = running.missing_nbytes = max(0, model.nbytes - model.resident.get(number, 0))
        peers: tuple[int, ...] = ()
        if len(model.resident) > (number in model.resident) and self.placement.from_peers:
            there = {other: nbytes for other, nbytes in model.resident.items() if other != number}
            peers = tuple(sorted(there, key=lambda other: (other != peer, -there[other], other)))
        room = int(model.peak_nbytes * PEAK_MARGIN)
        over = tuple(gpu.over)
        if over:
            gpu.over.clear()
        what = model.instance, model.version, peers, room, missing, over, waiting.expected_s, waiting.size
        actions.append(WakeOn(waiting.request, lease, *what))
        return running


def unbound(model: Model) -> Failure:
    """With early binding, no GPU has room for it."""
    text = (
        f"no GPU has {size(model.nbytes)} that no other model has, and with placement bound none makes room; use "
        "another placement, or more GPUs"
    )
    return Failure(code="gpus_full", status=507, text=text)
