"""The scheduling core: pure. Decides which waiting request gets which GPU, and what models there are worth. No I/O,
no clock, no randomness but a seeded field. The live controller and the simulator run this same class.

The parts: what it is told (books.py, state.py), who waits (queueing.py) and is next (orders.py, seniority.py), where it
runs (placement.py), what makes room for it (keeping.py), and links (topology.py, measured.py). One lease per instance;
a GPU has one turn, or as many as the policy says, and any number of seats.

A lease's states::

    (asked) ──grant──► turn ◄──TurnWanted, grant── seat ──┐
                        │ └──idle, and another waits──► ▲ │
                        │ Done, or Answered without use   │ Done
                        ▼                                 ▼
                      (gone)                            (gone)
    either ── Released / InstanceLost / answered, and no Done within ``revoke_s`` ──► revoked ──Done──► (gone)
                                                    no Done within ``revoke_s``: the executor is killed
"""

import random
from collections import deque
from collections.abc import Iterable
from typing import Final, assert_never

from dormouse.controller.events import (
    Action,
    Answered,
    Asked,
    Event,
    Evicted,
    ExecutorDown,
    ExecutorUp,
    FinishLease,
    ForgetInstance,
    FunctionGone,
    FunctionKnown,
    InstanceKnown,
    InstanceLost,
    KillExecutor,
    LeaseOver,
    LoseLease,
    ModelSized,
    OverOn,
    PauseOn,
    PolicyChosen,
    RefuseAsk,
    Released,
    RequestFailed,
    RevokeOn,
    Tick,
    TopologyKnown,
    TurnBusy,
    TurnIdle,
    TurnOn,
    TurnWanted,
    WakeOn,
    Woken,
)
from dormouse.controller.functions import FunctionCounts
from dormouse.controller.inventory import Inventory
from dormouse.controller.keeping import EVICTION_CLASSES
from dormouse.controller.measured import Measured
from dormouse.controller.placement import PLACEMENT_CLASSES
from dormouse.controller.queueing import Queue
from dormouse.controller.state import Gpu, Model, Running, Waiting
from dormouse.controller.topology import Topology
from dormouse.schemas.messages import Failure, Lease
from dormouse.schemas.policy import DEFAULT, Policy

PEAK_MARGIN: Final = 1.1
"""Room wished for activations, as a multiple of the highest peak seen: inputs of the next request may be a little
larger."""

MAX_OVER: Final = 64
"""Leases without a command of whose end an executor is not told yet."""

INFINITY: Final = float("inf")


def _serial(running: Running) -> int:
    return running.lease.serial


class Scheduler:
    """See the module. ``handle`` takes one event and returns what must be done; equal event sequences give equal
    actions.
    """

    def __init__(
        self,
        *,
        seed: int,
        revoke_s: float,
        max_waiting: int,
        policy: Policy = DEFAULT,
        topology: Topology | None = None,
    ) -> None:
        self._random = random.Random(seed)  # secrets of leases; unpredictable to instances because the seed is
        self._revoke_s = revoke_s
        self._max_waiting = max_waiting
        self.topology = topology if topology is not None else Topology()
        self.bandwidths = Measured(self.topology)
        self._serial = 0
        self._free: set[int] = set()  # GPUs that have a turn for one more
        self._idle: set[int] = set()  # those of them where that is another's who does not use it
        self._leases: dict[int, Running] = {}  # by request
        self._revoked: dict[int, Running] = {}  # by serial: leases that are being revoked
        self._owed: deque[tuple[float, Running]] = deque()  # answered leases, and until when they may be given back
        self._books = Inventory(policy)
        self.gpus, self.functions, self.models = self._books.gpus, self._books.functions, self._books.models
        self._queue = Queue(policy, self.bandwidths, self.gpus, self.functions)
        self.waiting = self._queue.waiting
        self._choices = random.Random(seed)
        self._follow(policy)

    def _follow(self, policy: Policy) -> None:
        """By which policy models are kept and placed from now on."""
        self.policy = policy
        self._keeping = EVICTION_CLASSES[policy.eviction](self.bandwidths, self.models)
        placement = PLACEMENT_CLASSES[policy.placement]
        self._placement = placement(policy, self.bandwidths, self.gpus, self._keeping, self._choices)

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event at time ``now_s`` (seconds of any monotonic clock)."""
        actions: list[Action] = []
        match event:
            case Asked():
                self._asked(event, now_s, actions)
            case LeaseOver():
                self._lease_over(event, now_s, actions)
            case Answered():
                self._answered(event, now_s, actions)
            case Woken():
                if (running := self._books.running(event.gpu, event.epoch, event.serial)) is not None:
                    running.wake_us = event.wake_us
                    running.copying_nbytes = 0
                return actions
            case TurnIdle() | TurnBusy() | TurnWanted():
                self._turn(event, now_s, actions)
            case ExecutorUp():
                self._executor_down(event.gpu, now_s, actions)
                self._opened(self._books.executor_up(event, self.topology))
            case ExecutorDown():
                self._executor_down(event.gpu, now_s, actions)
            case FunctionKnown():
                self._books.function_known(event)
            case FunctionGone():
                self._books.function_gone(event.function)
            case InstanceKnown():
                self._keeping.used(self._books.instance_known(event.instance, event.function, now_s))
            case InstanceLost():
                self._instance_lost(event.instance, now_s, actions)
            case ModelSized():
                self._books.sized(event)
            case Released():
                self._released(event.request, now_s, actions)
            case RequestFailed():
                self._request_failed(event)
            case Evicted():
                self._evicted(event, now_s)
            case Tick():
                self._queue.let_go_overdue(now_s)
                self._take_back(now_s, actions)
                self._kill_silent(now_s, actions)
            case TopologyKnown():
                self.topology = event.topology
                self.bandwidths.known(event.topology)
                self._books.know_neighbours(event.topology)
            case PolicyChosen(policy=policy):
                self._queue.follow(policy, now_s)
                self._follow(policy)
            case _:
                assert_never(event)
        if self._free and self.waiting:
            self._place(now_s, actions)
        return actions

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due: for a lease that is not given back, or a request that need not wait any longer for a busy
        GPU.
        """
        due_s = self._queue.held_until_s
        owed = self._owed
        while owed and owed[0][1].over:
            owed.popleft()
        if owed:
            due_s = min(due_s, owed[0][0])
        if self._revoked:
            for running in self._revoked.values():
                if running.revoked_until_s is not None:
                    due_s = min(due_s, running.revoked_until_s)
        return due_s if due_s < INFINITY else None

    # --- events

    def _executor_down(self, number: int, now_s: float, actions: list[Action]) -> None:
        gone = self._books.executor_down(number, self.topology)
        if gone is None:
            return
        self._free.discard(number)
        self._idle.discard(number)
        self._queue.let_go(gone, now_s, len(gone.held))
        for running in gone.leases.values():
            self._freed(running, now_s)
            if running.revoked_until_s is None:
                actions.append(LoseLease(running.request))

    def _ended(self, gpu: Gpu, running: Running, now_s: float) -> None:
        """A lease is over: its turn and its seat can be had."""
        del gpu.leases[running.lease.serial]
        if running.turn_s is not None:
            gpu.leave_turn(running, now_s)
        self._opened(gpu)
        if gpu.held:
            self._queue.let_go(gpu, now_s)
        self._freed(running, now_s)

    def _opened(self, gpu: Gpu) -> None:
        """Its turns have changed."""
        number, idle = gpu.number, False
        if len(gpu.turns) >= self.policy.turns:
            for running in gpu.turns:
                idle = idle or running.idle
            (self._free.add if idle else self._free.discard)(number)
        else:
            self._free.add(number)
        if idle or self._idle:
            (self._idle.add if idle else self._idle.discard)(number)

    def _freed(self, running: Running, now_s: float) -> None:
        """A lease is over: other requests of its instance may be considered again."""
        running.over = True
        del self._leases[running.request]
        self._revoked.pop(running.lease.serial, None)
        if running.waiting.live:
            self._queue.taken(running.waiting)  # it wanted a turn
        model = self.models.get(running.instance)
        if model is not None:
            model.leased = False
            if model.parked:
                self._queue.unpark(model, now_s)

    def _instance_lost(self, instance: str, now_s: float, actions: list[Action]) -> None:
        model = self._books.instance_lost(instance)
        if model is None:
            return
        self._queue.forget(model)
        if model.leased:
            for running in self._leases.values():
                if running.model is model:
                    self._revoke(running, now_s, actions)
        actions.append(ForgetInstance(instance))

    def _asked(self, event: Asked, now_s: float, actions: list[Action]) -> None:
        if len(self.waiting) >= self._max_waiting:
            text = f"{len(self.waiting)} requests wait for a GPU already; try again later"
            actions.append(RefuseAsk(event.request, Failure(code="queue_full", status=429, text=text, retryable=True)))
            return
        model = self._books.model(event.instance, now_s)
        if event.version > model.version:
            model.version = event.version
        model.function.arrived(now_s)
        self._keeping.used(model)
        self._queue.add(Waiting(event.request, model, now_s, event.deadline_s, event.counts), now_s)

    def _released(self, request: int, now_s: float, actions: list[Action]) -> None:
        running = self._leases.get(request)
        if running is not None:
            self._revoke(running, now_s, actions)
            return
        waiting = self.waiting.get(request)
        if waiting is not None:
            self._queue.left(waiting, now_s)
            if waiting.failed or now_s >= waiting.deadline_s:
                waiting.function.settled(waiting, True, now_s)

    def _request_failed(self, event: RequestFailed) -> None:
        running = self._leases.get(event.request)
        waiting = running.waiting if running is not None else self.waiting.get(event.request)
        if waiting is not None:
            waiting.failed = True
        elif (function := self.functions.get(event.function)) is not None:
            function.failed(event.request)

    def _revoke(self, running: Running, now_s: float, actions: list[Action]) -> None:
        if running.revoked_until_s is None:
            running.revoked_until_s = now_s + self._revoke_s
            self._revoked[running.lease.serial] = running
            if running.waiting.live:
                self._queue.taken(running.waiting)
            actions.append(RevokeOn(running.lease.gpu, running.lease.serial))

    def _answered(self, event: Answered, now_s: float, actions: list[Action]) -> None:
        """Its instance is through with it. One that has given the GPU nothing, and for which nothing had to be brought,
        is over; the executor is told with the next that it hears.
        """
        running = self._leases.get(event.request)
        if running is None or running.revoked_until_s is not None:
            return
        gpu, serial = self.gpus[running.lease.gpu], running.lease.serial
        if event.used or running.missing_nbytes:
            if not event.used:
                actions.append(OverOn(gpu.number, (serial,)))
            self._owed.append((now_s + self._revoke_s, running))
            return
        gpu.over.append(serial)
        if len(gpu.over) >= MAX_OVER:
            self._tell_over(gpu, actions)
        self._ended(gpu, running, now_s)
        self._books.unused(gpu, running, now_s)
        self._keeping.used(running.model)
        actions.append(FinishLease(running.request, running.instance, 0, 0))

    def _tell_over(self, gpu: Gpu, actions: list[Action]) -> None:
        actions.append(OverOn(gpu.number, tuple(gpu.over)))
        gpu.over.clear()

    def _take_back(self, now_s: float, actions: list[Action]) -> None:
        """Leases that were answered, and that their executor still has."""
        while self._owed and self._owed[0][0] <= now_s:
            _, running = self._owed.popleft()
            if not running.over:
                self._revoke(running, now_s, actions)

    def _turn(self, event: TurnIdle | TurnBusy | TurnWanted, now_s: float, actions: list[Action]) -> None:
        running = self._books.running(event.gpu, event.epoch, event.serial)
        if running is None:
            gpu = self.gpus.get(event.gpu)
            if gpu is not None and gpu.epoch == event.epoch and event.serial in gpu.over:
                self._tell_over(gpu, actions)
            return
        gpu = self.gpus[event.gpu]
        if not isinstance(event, TurnWanted):
            running.idle = running.turn_s is not None and isinstance(event, TurnIdle)
            self._opened(gpu)
            if running.idle:
                self._queue.let_go(gpu, now_s)
        elif running.turn_s is None and running.revoked_until_s is None and not running.waiting.live:
            waiting = running.waiting
            waiting.resumes, waiting.live = running, True
            self._queue.add(waiting, now_s)

    def _lease_over(self, event: LeaseOver, now_s: float, actions: list[Action]) -> None:
        done = event.done
        gpu = self.gpus.get(event.gpu)
        if gpu is None or gpu.epoch != event.epoch:
            return  # of an executor that has died since
        running = gpu.leases.get(done.serial)
        gpu.stats = done.stats
        self._books.follow(gpu, done.resident, running.instance if running is not None else "", now_s)
        if running is None:
            return  # its instance had said that it gave the GPU nothing
        self.bandwidths.woke(gpu, running, done)
        self._ended(gpu, running, now_s)
        if self.models.get(running.instance) is not running.model:
            return
        self._books.lease_over(gpu, running, done, now_s)
        self._keeping.used(running.model)
        if running.revoked_until_s is None:
            wrote = done.wrote and running.waiting.counts
            actions.append(FinishLease(running.request, running.instance, done.gpu_us, done.copied_nbytes, wrote))

    def _evicted(self, event: Evicted, now_s: float) -> None:
        gpu = self.gpus.get(event.gpu)
        if gpu is not None and gpu.epoch == event.epoch:
            gpu.stats = event.stats
            own = gpu.turns[0].instance if len(gpu.turns) == 1 else ""  # of several, nobody says which needed it
            self._books.follow(gpu, event.resident, own, now_s)
            self._queue.let_go(gpu, now_s, len(gpu.held))

    def _kill_silent(self, now_s: float, actions: list[Action]) -> None:
        for serial, running in sorted(self._revoked.items()):
            if running.revoked_until_s is not None and running.revoked_until_s <= now_s:
                running.revoked_until_s = INFINITY  # said once; the sentinel tells the rest
                number = running.lease.gpu
                text = f"lease {serial} was not given back within {self._revoke_s:g} s of being revoked"
                actions.append(KillExecutor(number, self.gpus[number].epoch, text))

    # --- decisions

    def _place(self, now_s: float, actions: list[Action]) -> None:
        """Give free GPUs to waiting requests: to those that are overdue in their turn, else in the policy's order."""
        queue, seniority, free = self._queue, self._queue.seniority, self._free
        queue.update(now_s)
        may_jump = True
        while free:
            overdue = seniority.overdue(self.waiting.values(), now_s)
            waiting, late = overdue if may_jump and seniority.due else None, True
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
            if number is not None:
                queue.taken(waiting)
                running = self._grant(number, waiting, now_s, actions) if resumes is None else resumes
                if resumes is not None:
                    self._resume(resumes, now_s, actions)
                seniority.granted(waiting, overdue, running.ends_s - now_s)
            elif jumps:
                may_jump = False  # bound to a busy GPU: others do not wait for that
            elif waiting.held_for is not None:
                queue.hold(waiting, waiting.held_for, now_s)
            else:
                queue.left(waiting, now_s)
                actions.append(RefuseAsk(waiting.request, unbound(waiting.model)))

    def _choose(self, waiting: Waiting, now_s: float, may_wait: bool) -> int | None:
        """One of the GPUs that have a turn; None to wait for another, as in `Placement.choose`."""
        free = self._free
        if waiting.resumes is not None:
            number = waiting.resumes.lease.gpu
            if number in free:
                return number
            waiting.held_for = number
            return None
        # A turn is taken from nobody while there is another, but where the model is.
        if 0 < len(self._idle) < len(free):
            resident, nbytes = waiting.model.resident, waiting.model.nbytes
            if not any(resident.get(number, -1) >= nbytes for number in self._idle):
                free = free - self._idle
        if waiting.model.nbytes > self._books.least_nbytes:  # GPUs differ
            free = self._placement.fitting(waiting.model, free)
            if not free:
                self._placement.wait(waiting)
                return None
        return self._placement.choose(waiting, free, now_s, may_wait)

    def _make_turn(self, gpu: Gpu, now_s: float, actions: list[Action]) -> None:
        """Take one from whoever does not use it, if there is none."""
        if len(gpu.turns) >= self.policy.turns:
            idle = next(running for running in gpu.turns if running.idle)
            gpu.leave_turn(idle, now_s)
            actions.append(PauseOn(gpu.number, idle.lease.serial))

    def _resume(self, running: Running, now_s: float, actions: list[Action]) -> None:
        """A lease has a turn again."""
        gpu = self.gpus[running.lease.gpu]
        self._make_turn(gpu, now_s, actions)
        running.waiting.resumes = None
        running.ends_s = now_s + max(0.0, running.waiting.function.predicted_s(0.0) - running.used_s)
        gpu.take_turn(running, now_s)
        self._opened(gpu)
        actions.append(TurnOn(gpu.number, running.lease.serial))

    def _grant(self, number: int, waiting: Waiting, now_s: float, actions: list[Action]) -> Running:
        gpu, model = self.gpus[number], waiting.model
        if self._idle:
            self._make_turn(gpu, now_s, actions)
        model.used_s = now_s
        model.leased = True
        model.held_for = waiting.held_for = None
        copy_s, host_nbytes, peer = self._placement.copy_s(model, number, now_s)
        self._serial += 1
        lease = Lease(gpu=number, epoch=gpu.epoch, serial=self._serial, secret=self._random.getrandbits(62))
        running = Running(waiting, lease, now_s)
        running.ends_s = now_s + waiting.function.predicted_s(copy_s)
        running.copies_until_s = now_s + copy_s
        running.copying_nbytes, running.peer = host_nbytes, peer
        gpu.leases[lease.serial] = self._leases[waiting.request] = running
        gpu.take_turn(running, now_s)
        self._opened(gpu)
        if gpu.held:
            self._queue.begun(gpu, now_s)
        missing = running.missing_nbytes = max(0, model.nbytes - model.resident.get(number, 0))
        peers: tuple[int, ...] = ()
        if len(model.resident) > (number in model.resident) and self._placement.from_peers:
            there = {other: nbytes for other, nbytes in model.resident.items() if other != number}
            peers = tuple(sorted(there, key=lambda other: (other != peer, -there[other], other)))
        room = int(model.peak_nbytes * PEAK_MARGIN)
        over = tuple(gpu.over)
        if over:
            gpu.over.clear()
        wake = WakeOn(waiting.request, lease, model.instance, model.version, peers, room, missing, over)
        actions.append(wake)
        return running

    # --- questions

    def worth(self, gpu: int) -> dict[str, float]:
        """What each model on a GPU is worth there, for the executor; see `Keeping.worth`."""
        return self._keeping.worth(self.gpus[gpu])

    def victims(self, gpu: int) -> Iterable[Model]:
        """The same as an order, for the simulator; see `Keeping.victims`."""
        return self._keeping.victims(self.gpus[gpu])

    def heavy(self, model: Model) -> bool:
        """See `Keeping.heavy`."""
        return self._keeping.heavy(model)

    def standing(self, waiting: Waiting, now_s: float) -> tuple[float, ...]:
        """See `Order.standing`."""
        return self._queue.order.standing(waiting, now_s)

    def counts(self, function: str) -> FunctionCounts:
        """What a function has had so far."""
        known = self.functions.get(function)
        return known.counts if known is not None else FunctionCounts()

    def too_large(self, instance: str) -> Failure | None:
        """Why no GPU could ever hold this instance's model, as far as its size and GPUs are known."""
        model = self.models.get(instance)
        return self._books.too_large(model) if model is not None else None

    def check(self) -> None:
        """Assert the invariants; tests call it after every event."""
        self._books.check()
        leased = [running for gpu in self.gpus.values() for running in gpu.leases.values()]
        assert {running.request: running for running in leased} == self._leases
        requests = [running.request for running in leased]
        assert len(set(requests)) == len(requests), "a request has two leases"
        instances = [running.instance for running in leased]
        assert len(set(instances)) == len(instances), "an instance has two leases"
        for waiting in self.waiting.values():
            running = self._leases.get(waiting.request)
            assert waiting.resumes is running, "a request both waits and runs"
            assert running is None or running.turn_s is None, "it waits for the turn that it has"
        for number, gpu in self.gpus.items():
            assert len(gpu.turns) <= self.policy.turns
            assert [r for r in gpu.leases.values() if r.turn_s is not None] == sorted(gpu.turns, key=_serial)
            assert (number in self._free) == gpu.open(self.policy.turns), "free GPUs are miscounted"
            full = len(gpu.turns) >= self.policy.turns
            assert (number in self._idle) == (number in self._free and full), "idle turns are miscounted"
        if self._free:
            idle = [w for w in self.waiting.values() if not w.blocked and w.held_for is None]
            assert not idle, "a GPU is free while a request that could use it waits"


def unbound(model: Model) -> Failure:
    """With early binding, no GPU has room for it."""
    text = (
        f"no GPU has {model.nbytes:,} bytes that no other model has, and with placement bound none makes room; use "
        "another placement, or more GPUs"
    )
    return Failure(code="gpus_full", status=507, text=text)
