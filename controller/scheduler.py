"""The scheduling core: pure. Decides which waiting request gets which GPU, and what models there are worth. No I/O,
no clock, no randomness but a seeded field. The live controller and the simulator run this same class.

The parts: what it is told (books.py, state.py), who waits (queueing.py) and is next (orders.py, seniority.py), where it
runs (placement.py), what makes room for it (keeping.py), and links (topology.py, measured.py). One lease per GPU, and
one per instance.

A lease's states::

    (asked) ──grant──► running ──Done──► (gone)
                          │ Released / InstanceLost
                          ▼
                       revoked ──Done──► (gone)      no Done within ``revoke_s``: the executor is killed
"""

import random
from collections.abc import Iterable
from typing import Final, assert_never

from dormouse.controller.books import Books
from dormouse.controller.events import (
    Action,
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
    RefuseAsk,
    Released,
    RequestFailed,
    RevokeOn,
    Tick,
    TopologyKnown,
    WakeOn,
    Woken,
)
from dormouse.controller.keeping import Keeping
from dormouse.controller.measured import Measured
from dormouse.controller.placement import Placement
from dormouse.controller.queueing import Queue
from dormouse.controller.state import FunctionCounts, Model, Running, Waiting
from dormouse.controller.topology import Topology
from dormouse.schemas.messages import Failure, Lease
from dormouse.schemas.policy import DEFAULT, Policy

PEAK_MARGIN: Final = 1.1
"""Room wished for activations, as a multiple of the highest peak seen: inputs of the next request may be a little
larger."""

INFINITY: Final = float("inf")


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
        self.policy = policy
        self.topology = topology if topology is not None else Topology()
        self.bandwidths = Measured(self.topology)
        self._serial = 0
        self._free: set[int] = set()
        self._revoked: set[int] = set()  # GPUs whose lease is being revoked
        self._books = Books(policy)
        self.gpus, self.functions, self.models = self._books.gpus, self._books.functions, self._books.models
        self._queue = Queue(policy, self.bandwidths, self.gpus, self.functions)
        self.waiting = self._queue.waiting
        self._keeping = Keeping(policy.eviction, self.bandwidths, self.models)
        self._placement = Placement(
            policy.placement, self.bandwidths, self.gpus, self._keeping, policy.await_resident, random.Random(seed)
        )

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event at time ``now_s`` (seconds of any monotonic clock)."""
        actions: list[Action] = []
        match event:
            case Asked():
                self._asked(event, now_s, actions)
            case LeaseOver():
                self._lease_over(event, now_s, actions)
            case Woken():
                if (running := self._books.running(event.gpu, event.epoch, event.serial)) is not None:
                    running.wake_us = event.wake_us
                    running.copying_nbytes = 0
                return actions
            case ExecutorUp():
                self._executor_down(event.gpu, now_s, actions)
                self._books.executor_up(event, self.topology)
                self._free.add(event.gpu)
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
                self._kill_silent(now_s, actions)
            case TopologyKnown():
                self.topology = event.topology
                self.bandwidths.known(event.topology)
                self._books.know_neighbours(event.topology)
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
        for number in self._revoked:
            running = self.gpus[number].running
            if running is not None and running.revoked_until_s is not None:
                due_s = min(due_s, running.revoked_until_s)
        return due_s if due_s < INFINITY else None

    # --- events

    def _executor_down(self, number: int, now_s: float, actions: list[Action]) -> None:
        gone = self._books.executor_down(number, self.topology)
        if gone is None:
            return
        self._free.discard(number)
        self._revoked.discard(number)
        self._queue.let_go(gone, now_s, len(gone.held))
        if gone.running is not None:
            self._freed(gone.running, now_s)
            if gone.running.revoked_until_s is None:
                actions.append(LoseLease(gone.running.request))

    def _freed(self, running: Running, now_s: float) -> None:
        """A lease is over: other requests of its instance may be considered again."""
        model = self.models.get(running.instance)
        if model is not None:
            model.leased = False
            self._queue.unpark(model, now_s)

    def _instance_lost(self, instance: str, now_s: float, actions: list[Action]) -> None:
        model = self._books.instance_lost(instance)
        if model is None:
            return
        self._queue.forget(model)
        if model.leased:
            for number, gpu in self.gpus.items():
                if gpu.running is not None and gpu.running.model is model:
                    self._revoke(number, gpu.running, now_s, actions)
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
        waiting = self.waiting.get(request)
        if waiting is not None:
            self._queue.left(waiting, now_s)
            if waiting.failed or now_s >= waiting.deadline_s:
                waiting.function.settled(waiting, True, now_s)
            return
        for number, gpu in self.gpus.items():
            if gpu.running is not None and gpu.running.request == request:
                self._revoke(number, gpu.running, now_s, actions)

    def _request_failed(self, event: RequestFailed) -> None:
        leases = (gpu.running for gpu in self.gpus.values())
        waiting = self.waiting.get(event.request) or next(
            (running.waiting for running in leases if running is not None and running.request == event.request), None
        )
        if waiting is not None:
            waiting.failed = True
        elif (function := self.functions.get(event.function)) is not None:
            function.failed(event.request)

    def _revoke(self, number: int, running: Running, now_s: float, actions: list[Action]) -> None:
        if running.revoked_until_s is None:
            running.revoked_until_s = now_s + self._revoke_s
            self._revoked.add(number)
            actions.append(RevokeOn(number, running.lease.serial))

    def _lease_over(self, event: LeaseOver, now_s: float, actions: list[Action]) -> None:
        done = event.done
        running = self._books.running(event.gpu, event.epoch, done.serial)
        if running is None:
            return  # of an executor that has died since
        gpu = self.gpus[event.gpu]
        gpu.running, gpu.stats = None, done.stats
        self._free.add(event.gpu)
        self._revoked.discard(event.gpu)
        self._books.follow(gpu, done.resident, running.instance, now_s)
        self.bandwidths.woke(gpu, running, done)
        self._queue.let_go(gpu, now_s)
        self._freed(running, now_s)
        if self.models.get(running.instance) is not running.model:
            return
        self._books.lease_over(gpu, running, done, now_s)
        self._keeping.used(running.model)
        if running.revoked_until_s is None:
            actions.append(FinishLease(running.request, done.gpu_us, done.copied_nbytes, done.wrote))

    def _evicted(self, event: Evicted, now_s: float) -> None:
        gpu = self.gpus.get(event.gpu)
        if gpu is not None and gpu.epoch == event.epoch:
            gpu.stats = event.stats
            own = gpu.running.instance if gpu.running is not None else ""
            self._books.follow(gpu, event.resident, own, now_s)
            self._queue.let_go(gpu, now_s, len(gpu.held))

    def _kill_silent(self, now_s: float, actions: list[Action]) -> None:
        for number in sorted(self._revoked):
            running = self.gpus[number].running
            if running is not None and running.revoked_until_s is not None and running.revoked_until_s <= now_s:
                running.revoked_until_s = INFINITY  # said once; the sentinel tells the rest
                text = f"lease {running.lease.serial} was not given back within {self._revoke_s:g} s of being revoked"
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
            if (failure := self._books.too_large(waiting.model)) is not None:
                queue.left(waiting, now_s)
                actions.append(RefuseAsk(waiting.request, failure))
                continue
            waiting.held_for = None  # of a choice that others came before
            fitting = free
            if waiting.model.nbytes > self._books.least_nbytes:  # GPUs differ
                fitting = self._placement.fitting(waiting.model, free)
            number = None
            if fitting:
                number = self._placement.choose(waiting, fitting, now_s, not late)
            else:
                self._placement.wait(waiting)
            if number is not None:
                queue.taken(waiting)
                actions.append(self._grant(number, waiting, now_s))
                running = self.gpus[number].running
                assert running is not None
                seniority.granted(waiting, overdue, running.ends_s - now_s)
            elif jumps:
                may_jump = False  # bound to a busy GPU: others do not wait for that
            elif waiting.held_for is not None:
                queue.hold(waiting, waiting.held_for, now_s)
            else:
                queue.left(waiting, now_s)
                actions.append(RefuseAsk(waiting.request, unbound(waiting.model)))

    def _grant(self, number: int, waiting: Waiting, now_s: float) -> WakeOn:
        gpu, model = self.gpus[number], waiting.model
        model.used_s = now_s
        model.leased = True
        model.held_for = waiting.held_for = None
        self._free.discard(number)
        copy_s, host_nbytes, peer = self._placement.copy_s(model, number, now_s)
        self._serial += 1
        lease = Lease(gpu=number, epoch=gpu.epoch, serial=self._serial, secret=self._random.getrandbits(62))
        running = gpu.running = Running(waiting, lease, now_s)
        running.ends_s = now_s + waiting.function.predicted_s(copy_s)
        running.copies_until_s = now_s + copy_s
        running.copying_nbytes, running.peer = host_nbytes, peer
        if gpu.held:
            self._queue.begun(gpu, now_s)
        missing = max(0, model.nbytes - model.resident.get(number, 0))
        peers: tuple[int, ...] = ()
        if len(model.resident) > (number in model.resident) and self.policy.placement != "random":
            there = {other: nbytes for other, nbytes in model.resident.items() if other != number}
            peers = tuple(sorted(there, key=lambda other: (other != peer, -there[other], other)))
        room = int(model.peak_nbytes * PEAK_MARGIN)
        return WakeOn(waiting.request, lease, model.instance, model.version, peers, room, missing)

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
        leased = [gpu.running for gpu in self.gpus.values() if gpu.running is not None]
        requests = [running.request for running in leased]
        assert len(set(requests)) == len(requests), "a request has two leases"
        instances = [running.instance for running in leased]
        assert len(set(instances)) == len(instances), "an instance has two leases"
        assert not set(requests) & set(self.waiting), "a request both waits and runs"
        assert self._free == {n for n, gpu in self.gpus.items() if gpu.running is None}, "free GPUs are miscounted"
        if self._free:
            idle = [w for w in self.waiting.values() if not w.model.leased and w.model.held_for is None]
            assert not idle, "a GPU is free while a request that could use it waits"


def unbound(model: Model) -> Failure:
    """With early binding, no GPU has room for it."""
    text = (
        f"no GPU has {model.nbytes:,} bytes that no other model has, and with placement bound none makes room; use "
        "another placement, or more GPUs"
    )
    return Failure(code="gpus_full", status=507, text=text)
