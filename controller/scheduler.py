"""The scheduling core: pure. Decides which waiting request gets which GPU, and what models there are worth. No I/O,
no clock, no randomness but a seeded field. The live controller and the simulator run this same class.

The parts: which request is next (orders.py), where it runs (placement.py), what makes room for it (keeping.py), what is
known of functions, models and GPUs (state.py) and of the links between (topology.py). One lease per GPU and one per
instance. What a GPU holds is what its executor has told, and the executor chooses what is evicted, by worth: several
instances may share bytes, so only it knows what forgetting one would free.

A lease's states::

    (asked) ──grant──► running ──Done──► (gone)
                          │ Released / InstanceLost
                          ▼
                       revoked ──Done──► (gone)      no Done within ``revoke_s``: the executor is killed
"""

import random
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, assert_never

from dormouse.controller.events import (
    Action,
    Asked,
    Event,
    Evicted,
    ExecutorDown,
    ExecutorUp,
    FinishLease,
    ForgetInstance,
    FunctionKnown,
    InstanceKnown,
    InstanceLost,
    KillExecutor,
    LeaseOver,
    LoseLease,
    ModelSized,
    RefuseAsk,
    Released,
    RevokeOn,
    Tick,
    WakeOn,
    Woken,
)
from dormouse.controller.keeping import Keeping
from dormouse.controller.orders import UPDATE_S, make_order
from dormouse.controller.placement import Placement
from dormouse.controller.state import Function, FunctionCounts, Gpu, LastWake, Model, Running, Waiting
from dormouse.controller.topology import Topology
from dormouse.schemas.messages import Failure, Lease
from dormouse.schemas.policy import DEFAULT, Policy

PEAK_MARGIN: Final = 1.1
"""Room wished for activations, as a multiple of the highest peak seen: inputs of the next request may be a little
larger."""

MAX_EARLY: Final = 1024

INFINITY: Final = float("inf")

LOOK: Final = 64
"""Requests that are set aside to wait for a certain GPU before the others are left to wait too."""


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
        self._serial = 0
        self._early: OrderedDict[str, ModelSized] = OrderedDict()  # by instance that is not known (any more)
        self._bound_s = policy.passed_over_ms / 1000 if policy.passed_over_ms else INFINITY
        self._half_life_s = policy.half_life_ms / 1000
        self._update_s = 0.0  # when functions were ranked last
        self._free: set[int] = set()
        self._revoked: set[int] = set()  # GPUs whose lease is being revoked
        self._held_until_s = INFINITY  # when requests that wait for a busy GPU are to be considered again
        self.gpus: dict[int, Gpu] = {}
        self.functions: dict[str, Function] = {}
        self.models: dict[str, Model] = {}  # by instance
        self.waiting: OrderedDict[int, Waiting] = OrderedDict()  # by request, in order of arrival
        self._keeping = Keeping(policy.eviction, self.topology, self.models)
        self._order = make_order(policy.order)
        self._placement = Placement(
            policy.placement, self.topology, self.gpus, self._keeping, policy.await_resident, random.Random(seed)
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
                if (running := self._running(event.gpu, event.epoch, event.serial)) is not None:
                    running.wake_us = event.wake_us
                    running.copying_nbytes = 0
                return actions
            case ExecutorUp():
                self._executor_down(event.gpu, now_s, actions)
                stats = event.stats
                capacity = stats.weights_nbytes + stats.lost_nbytes + stats.free_nbytes
                self.gpus[event.gpu] = Gpu(event.gpu, event.epoch, stats, capacity)
                self._free.add(event.gpu)
                self._know_neighbours()
            case ExecutorDown():
                self._executor_down(event.gpu, now_s, actions)
            case FunctionKnown():
                function = self._function(event.function)
                function.deadline_s, function.percentile = event.deadline_s, event.percentile
                function.sensitivity = event.sensitivity
            case InstanceKnown():
                self._instance_known(event, now_s)
            case InstanceLost():
                self._instance_lost(event.instance, now_s, actions)
            case ModelSized():
                self._sized(event)
            case Released():
                self._released(event.request, now_s, actions)
            case Evicted():
                gpu = self.gpus.get(event.gpu)
                if gpu is not None and gpu.epoch == event.epoch:
                    gpu.stats = event.stats
                    self._follow(gpu, event.resident, gpu.running.instance if gpu.running is not None else "")
            case Tick():
                self._overdue(now_s, actions)
            case _:
                assert_never(event)
        self._held_until_s = INFINITY
        if self._free and self.waiting:
            self._place(now_s, actions)
        return actions

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due: for a lease that is not given back, or a request that need not wait any longer for a busy
        GPU.
        """
        due_s = self._held_until_s
        for number in self._revoked:
            running = self.gpus[number].running
            if running is not None and running.revoked_until_s is not None:
                due_s = min(due_s, running.revoked_until_s)
        return due_s if due_s < INFINITY else None

    # --- events

    def _function(self, name: str) -> Function:
        function = self.functions.get(name)
        if function is None:
            function = self.functions[name] = Function(name, self.policy.window, self._half_life_s)
        return function

    def _instance_known(self, event: InstanceKnown, now_s: float) -> None:
        model = self._model(event.instance, now_s)
        model.function = self._function(event.function)
        self._keeping.used(model)
        if (early := self._early.pop(event.instance, None)) is not None:
            self._sized(early)

    def _sized(self, event: ModelSized) -> None:
        """The store's word of an instance may come before the router's, and also after its last."""
        model = self.models.get(event.instance)
        if model is None:
            self._early[event.instance] = event
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return
        model.version, model.nbytes = max(model.version, event.version), event.nbytes

    def _model(self, instance: str, now_s: float) -> Model:
        """A model that becomes known counts as used."""
        model = self.models.get(instance)
        if model is None:
            model = self.models[instance] = Model(instance, self._function(""), now_s)
            # one of this name may have been lost whose lease is not given back yet
            model.leased = any(
                gpu.running is not None and gpu.running.instance == instance for gpu in self.gpus.values()
            )
        return model

    def _running(self, gpu: int, epoch: int, serial: int) -> Running | None:
        """The lease that an executor speaks of; None if it speaks of one that is no more."""
        known = self.gpus.get(gpu)
        if known is None or known.epoch != epoch or known.running is None or known.running.lease.serial != serial:
            return None
        return known.running

    def _executor_down(self, number: int, now_s: float, actions: list[Action]) -> None:
        gone = self.gpus.pop(number, None)
        if gone is None:
            return
        self._free.discard(number)
        self._revoked.discard(number)
        self._know_neighbours()
        for instance in gone.resident:
            if (model := self.models.get(instance)) is not None:
                model.resident.pop(number, None)
        if gone.running is not None:
            self._freed(gone.running, now_s)
            if gone.running.revoked_until_s is None:
                actions.append(LoseLease(gone.running.request))

    def _know_neighbours(self) -> None:
        for gpu in self.gpus.values():
            gpu.neighbours = [self.gpus[other] for other in self.topology.neighbours(gpu.number, self.gpus)]

    def _freed(self, running: Running, now_s: float) -> None:
        """A lease is over: other requests of its instance may be considered again."""
        model = self.models.get(running.instance)
        if model is None:
            return
        model.leased = False
        while model.parked:
            waiting = model.parked.popleft()
            if waiting.live:
                self._order.add(waiting, now_s)

    def _instance_lost(self, instance: str, now_s: float, actions: list[Action]) -> None:
        model = self.models.pop(instance, None)
        if model is None:
            return
        for request in [request for request, waiting in self.waiting.items() if waiting.model is model]:
            self.waiting.pop(request).live = False
        for number in model.resident:
            self.gpus[number].resident.pop(instance, None)
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
        model = self._model(event.instance, now_s)
        if event.version > model.version:
            model.version = event.version
        model.function.arrived(now_s)
        self._keeping.used(model)
        waiting = Waiting(event.request, model, now_s, event.deadline_s)
        self.waiting[event.request] = waiting
        if model.leased:
            model.parked.append(waiting)
        else:
            self._order.add(waiting, now_s)

    def _released(self, request: int, now_s: float, actions: list[Action]) -> None:
        waiting = self.waiting.pop(request, None)
        if waiting is not None:
            waiting.live = False
            if now_s >= waiting.deadline_s:
                waiting.function.ended(True, now_s - waiting.arrived_s)
            return
        for number, gpu in self.gpus.items():
            if gpu.running is not None and gpu.running.request == request:
                self._revoke(number, gpu.running, now_s, actions)

    def _revoke(self, number: int, running: Running, now_s: float, actions: list[Action]) -> None:
        if running.revoked_until_s is None:
            running.revoked_until_s = now_s + self._revoke_s
            self._revoked.add(number)
            actions.append(RevokeOn(number, running.lease.serial))

    def _lease_over(self, event: LeaseOver, now_s: float, actions: list[Action]) -> None:
        done = event.done
        running = self._running(event.gpu, event.epoch, done.serial)
        if running is None:
            return  # of an executor that has died since
        gpu = self.gpus[event.gpu]
        gpu.running, gpu.stats = None, done.stats
        self._free.add(event.gpu)
        self._revoked.discard(event.gpu)
        model = running.model
        self._follow(gpu, done.resident, running.instance)
        self._freed(running, now_s)
        if self.models.get(running.instance) is not model:
            return
        model.used_s = now_s
        model.version = max(model.version, done.version)
        model.peak_nbytes = max(model.peak_nbytes, done.peak_activation_nbytes)
        function, waiting = model.function, running.waiting
        if running.revoked_until_s is None:
            function.measured(now_s - running.started_s, (running.wake_us or 0) / 1e6 if done.copied_nbytes else 0.0)
            function.ended(now_s > waiting.deadline_s, now_s - waiting.arrived_s)
        elif now_s > waiting.deadline_s:
            function.ended(True, now_s - waiting.arrived_s)
        self._keeping.used(model)
        counts = function.counts
        counts.leases += 1
        counts.copied_nbytes += done.copied_nbytes
        counts.peer_nbytes += done.peer_nbytes
        counts.file_nbytes += done.file_nbytes
        counts.gpu_us += done.gpu_us
        counts.gpus[event.gpu] = counts.gpus.get(event.gpu, 0) + 1
        if done.copied_nbytes:
            counts.wakes += 1
            counts.last_wake = LastWake(
                event.gpu, done.copied_nbytes, done.peer_nbytes, done.file_nbytes, running.wake_us
            )
        if running.revoked_until_s is None:
            actions.append(FinishLease(running.request, done.gpu_us, done.copied_nbytes))

    def _follow(self, gpu: Gpu, resident: Iterable[tuple[str, int]], own: str) -> None:
        """Take over what an executor says is resident; ``own`` is the instance whose lease it speaks of."""
        number = gpu.number
        for instance, nbytes in resident:
            model = self.models.get(instance)
            if model is None:
                continue  # lost meanwhile; the executor has been told to forget it
            if nbytes < gpu.resident.get(instance, 0) and instance != own:
                model.function.counts.evictions += 1
            if nbytes:
                gpu.resident[instance] = model.resident[number] = nbytes
            else:
                gpu.resident.pop(instance, None)
                model.resident.pop(number, None)

    def _overdue(self, now_s: float, actions: list[Action]) -> None:
        for number in sorted(self._revoked):
            running = self.gpus[number].running
            if running is not None and running.revoked_until_s is not None and running.revoked_until_s <= now_s:
                running.revoked_until_s = INFINITY  # said once; the sentinel tells the rest
                text = f"lease {running.lease.serial} was not given back within {self._revoke_s:g} s of being revoked"
                actions.append(KillExecutor(number, self.gpus[number].epoch, text))

    def worth(self, gpu: int) -> dict[str, float]:
        """What each model on a GPU is worth there, for the executor; see `Keeping.worth`."""
        return self._keeping.worth(self.gpus[gpu])

    def victims(self, gpu: int) -> Iterable[Model]:
        """The same as an order, for the simulator; see `Keeping.victims`."""
        return self._keeping.victims(self.gpus[gpu])

    def counts(self, function: str) -> FunctionCounts:
        """What a function has had so far."""
        known = self.functions.get(function)
        return known.counts if known is not None else FunctionCounts()

    # --- decisions

    def _place(self, now_s: float, actions: list[Action]) -> None:
        """Give free GPUs to waiting requests in the policy's order. One whose instance holds a lease lets others pass,
        and so does one that is sooner done on a GPU that is busy.
        """
        if now_s >= self._update_s + UPDATE_S:
            self._update_s = now_s
            self._order.update(now_s, list(self.functions.values()))
        aside: list[tuple[Waiting, bool]] = []
        held: dict[Model, int | None] = {}  # GPU by model: no other request of theirs may take the lease elsewhere
        free, order = self._free, self._order
        while free and len(aside) < LOOK:
            waiting, late = self._passed_over(now_s), True
            over = waiting is not None
            if waiting is None:
                waiting, late = order.pop(now_s)
                if waiting is None:
                    break
                if waiting.model.leased:
                    waiting.model.parked.append(waiting)
                    continue
            if (failure := self.too_large(waiting.model.instance)) is not None:
                self._taken(waiting)
                actions.append(RefuseAsk(waiting.request, failure))
                continue
            if waiting.model in held and not over:
                waiting.held_for = held[waiting.model]
                aside.append((waiting, late))
                continue
            waiting.held_for = None
            number = self._placement.choose(waiting, free, now_s, not late)
            if number is None:
                aside.append((waiting, late))
                held[waiting.model] = waiting.held_for
                if waiting.held_for is not None and (running := self.gpus[waiting.held_for].running) is not None:
                    self._held_until_s = min(self._held_until_s, running.overdue_s)
                continue
            self._taken(waiting)
            actions.append(self._grant(number, waiting, now_s))
        for waiting, late in aside:
            if late:
                order.add_late(waiting)
            else:
                order.add(waiting, now_s)

    def _passed_over(self, now_s: float) -> Waiting | None:
        """The oldest request, if it has waited longer than the policy lets others overtake it."""
        for waiting in self.waiting.values():
            if now_s - waiting.arrived_s < self._bound_s:
                return None
            if not waiting.model.leased:
                return waiting
        return None

    def _taken(self, waiting: Waiting) -> None:
        waiting.live = False
        del self.waiting[waiting.request]

    def too_large(self, instance: str) -> Failure | None:
        """Why no GPU could ever hold this model, as far as its size and GPUs are known."""
        model = self.models.get(instance)
        if model is None or not self.gpus:
            return None
        for gpu in self.gpus.values():
            if model.nbytes <= gpu.capacity_nbytes:
                return None
        largest = max(gpu.capacity_nbytes for gpu in self.gpus.values())
        text = (
            f"the model has {model.nbytes:,} bytes and the largest GPU {largest:,} for models; use a smaller model or "
            "a GPU with more memory ([gpu] memory for emulated ones; [gpu] activations is what others keep back)"
        )
        return Failure(code="model_too_large", status=507, text=text)

    def _grant(self, number: int, waiting: Waiting, now_s: float) -> WakeOn:
        gpu, model = self.gpus[number], waiting.model
        model.used_s = now_s
        model.leased = True
        self._free.discard(number)
        copy_s, host_nbytes, peer = self._placement.copy_s(model, number, now_s)
        self._serial += 1
        lease = Lease(gpu=number, epoch=gpu.epoch, serial=self._serial, secret=self._random.getrandbits(62))
        running = gpu.running = Running(waiting, lease, now_s)
        running.ends_s = now_s + waiting.function.predicted_s(copy_s)
        running.copies_until_s = now_s + copy_s
        running.copying_nbytes = host_nbytes
        missing = max(0, model.nbytes - model.resident.get(number, 0))
        peers: tuple[int, ...] = ()
        if len(model.resident) > (number in model.resident) and self.policy.placement != "random":
            there = {other: nbytes for other, nbytes in model.resident.items() if other != number}
            peers = tuple(sorted(there, key=lambda other: (other != peer, -there[other], other)))
        room = int(model.peak_nbytes * PEAK_MARGIN)
        return WakeOn(waiting.request, lease, model.instance, model.version, peers, room, missing)

    # --- checks

    def check(self) -> None:
        """Assert the invariants; tests call it after every event."""
        leased = [gpu.running for gpu in self.gpus.values() if gpu.running is not None]
        requests = [running.request for running in leased]
        assert len(set(requests)) == len(requests), "a request has two leases"
        instances = [running.instance for running in leased]
        assert len(set(instances)) == len(instances), "an instance has two leases"
        assert not set(requests) & set(self.waiting), "a request both waits and runs"
        assert self._free == {n for n, gpu in self.gpus.items() if gpu.running is None}, "free GPUs are miscounted"
        for number, gpu in self.gpus.items():
            running = gpu.running
            assert running is None or running.revoked_until_s is not None or running.instance in self.models
            assert all(instance in self.models for instance in gpu.resident), "a lost instance is resident"
            assert all(nbytes > 0 for nbytes in gpu.resident.values()), "an instance is resident with no bytes"
            assert all(self.models[name].resident.get(number) == nbytes for name, nbytes in gpu.resident.items())
        assert all(n in self.gpus for model in self.models.values() for n in model.resident), "resident on no GPU"
        if self._free:
            idle = [w for w in self.waiting.values() if not w.model.leased and w.held_for is None]
            assert not idle, "a GPU is free while a request that could use it waits"
