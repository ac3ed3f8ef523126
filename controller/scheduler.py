"""The scheduling core: pure. Decides which waiting request gets which GPU and what each model there is worth. No I/O,
no clock, no randomness but a seeded field.

First policies: requests are served in the order in which they came; a request goes to the free GPU that misses least of
its model, of those to the one with most room. One lease per GPU and one per instance. What a GPU holds is what its
executor has told, and the executor chooses what is evicted, by worth (worth.py): several instances may share bytes, so
only it knows what forgetting one would free.

A lease's states::

    (asked) ──grant──► running ──Done──► (gone)
                          │ Released / InstanceLost
                          ▼
                       revoked ──Done──► (gone)      no Done within ``revoke_s``: the executor is killed
"""

import random
from collections import OrderedDict
from collections.abc import Iterable
from typing import assert_never

from dormouse.controller.events import (
    Action,
    Asked,
    Event,
    Evicted,
    ExecutorDown,
    ExecutorUp,
    FinishLease,
    ForgetInstance,
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
from dormouse.controller.state import FunctionCounts, Gpu, LastWake, Model, Running
from dormouse.controller.worth import by_recency
from dormouse.schemas.messages import Failure, Lease

PEAK_MARGIN = 1.1
"""Room wished for activations, as a multiple of the highest peak seen: inputs of the next request may be a little
larger."""


MAX_EARLY = 1024


class Scheduler:
    """See the module. ``handle`` takes one event and returns what must be done; equal event sequences give equal
    actions.
    """

    def __init__(self, *, seed: int, revoke_s: float, max_waiting: int) -> None:
        self._random = random.Random(seed)  # secrets of leases; unpredictable to instances because the seed is
        self._revoke_s = revoke_s
        self._max_waiting = max_waiting
        self._serial = 0
        self.gpus: dict[int, Gpu] = {}
        self.models: OrderedDict[str, Model] = OrderedDict()  # by instance, least recently used first
        self._early: OrderedDict[str, ModelSized] = OrderedDict()  # by instance that is not known (any more)
        self.waiting: OrderedDict[int, Asked] = OrderedDict()  # by request, in order of arrival
        self.counts: dict[str, FunctionCounts] = {}  # by function

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event at time ``now_s`` (seconds of any monotonic clock)."""
        actions: list[Action] = []
        match event:
            case ExecutorUp():
                self._executor_down(event.gpu, actions)
                stats = event.stats
                capacity = stats.weights_nbytes + stats.lost_nbytes + stats.free_nbytes
                self.gpus[event.gpu] = Gpu(event.epoch, stats, capacity)
            case ExecutorDown():
                self._executor_down(event.gpu, actions)
            case InstanceKnown():
                self._model(event.instance, now_s).function = event.function
                if (early := self._early.pop(event.instance, None)) is not None:
                    self._sized(early)
            case InstanceLost():
                self._instance_lost(event.instance, now_s, actions)
            case ModelSized():
                self._sized(event)
            case Asked():
                self._asked(event, now_s, actions)
            case Released():
                self._released(event.request, now_s, actions)
            case Woken():
                if (running := self._running(event.gpu, event.epoch, event.serial)) is not None:
                    running.wake_us = event.wake_us
            case LeaseOver():
                self._lease_over(event, now_s, actions)
            case Evicted():
                gpu = self.gpus.get(event.gpu)
                if gpu is not None and gpu.epoch == event.epoch:
                    gpu.stats = event.stats
                    self._follow(gpu, event.resident, gpu.running.instance if gpu.running is not None else "")
            case Tick():
                self._overdue(now_s, actions)
            case _:
                assert_never(event)
        self._place(now_s, actions)
        return actions

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due."""
        return min(
            (r.revoked_until_s for g in self.gpus.values() if (r := g.running) and r.revoked_until_s is not None),
            default=None,
        )

    # --- events

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
        return self.models.setdefault(instance, Model("", now_s))

    def _use(self, instance: str, now_s: float) -> None:
        self.models[instance].used_s = now_s
        self.models.move_to_end(instance)

    def _running(self, gpu: int, epoch: int, serial: int) -> Running | None:
        """The lease that an executor speaks of; None if it speaks of one that is no more."""
        known = self.gpus.get(gpu)
        if known is None or known.epoch != epoch or known.running is None or known.running.lease.serial != serial:
            return None
        return known.running

    def _executor_down(self, gpu: int, actions: list[Action]) -> None:
        gone = self.gpus.pop(gpu, None)
        if gone is not None and gone.running is not None and gone.running.revoked_until_s is None:
            actions.append(LoseLease(gone.running.request))

    def _instance_lost(self, instance: str, now_s: float, actions: list[Action]) -> None:
        for request in [request for request, asked in self.waiting.items() if asked.instance == instance]:
            del self.waiting[request]
        for gpu in self.gpus.values():
            gpu.resident.pop(instance, None)
        for number, gpu in self.gpus.items():
            if gpu.running is not None and gpu.running.instance == instance:
                self._revoke(number, gpu.running, now_s, actions)
        if self.models.pop(instance, None) is not None:
            actions.append(ForgetInstance(instance))

    def _asked(self, event: Asked, now_s: float, actions: list[Action]) -> None:
        if len(self.waiting) >= self._max_waiting:
            text = f"{len(self.waiting)} requests wait for a GPU already; try again later"
            actions.append(RefuseAsk(event.request, Failure(code="queue_full", status=429, text=text, retryable=True)))
            return
        model = self._model(event.instance, now_s)
        model.version = max(model.version, event.version)
        self.waiting[event.request] = event

    def _released(self, request: int, now_s: float, actions: list[Action]) -> None:
        if self.waiting.pop(request, None) is not None:
            return
        for number, gpu in self.gpus.items():
            if gpu.running is not None and gpu.running.request == request:
                self._revoke(number, gpu.running, now_s, actions)

    def _revoke(self, number: int, running: Running, now_s: float, actions: list[Action]) -> None:
        if running.revoked_until_s is None:
            running.revoked_until_s = now_s + self._revoke_s
            actions.append(RevokeOn(number, running.lease.serial))

    def _lease_over(self, event: LeaseOver, now_s: float, actions: list[Action]) -> None:
        done = event.done
        running = self._running(event.gpu, event.epoch, done.serial)
        if running is None:
            return  # of an executor that has died since
        gpu = self.gpus[event.gpu]
        gpu.running, gpu.stats = None, done.stats
        self._follow(gpu, done.resident, running.instance)
        model = self.models.get(running.instance)
        if model is None:
            return
        self._use(running.instance, now_s)
        model.version = max(model.version, done.version)
        model.peak_nbytes = max(model.peak_nbytes, done.peak_activation_nbytes)
        counts = self._counts(model)
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
        for instance, nbytes in resident:
            model = self.models.get(instance)
            if model is None:
                continue  # lost meanwhile; the executor has been told to forget it
            if nbytes < gpu.resident.get(instance, 0) and instance != own:
                self._counts(model).evictions += 1
            if nbytes:
                gpu.resident[instance] = nbytes
            else:
                gpu.resident.pop(instance, None)

    def _counts(self, model: Model) -> FunctionCounts:
        return self.counts.setdefault(model.function, FunctionCounts())

    def _overdue(self, now_s: float, actions: list[Action]) -> None:
        for number, gpu in self.gpus.items():
            running = gpu.running
            if running is not None and running.revoked_until_s is not None and running.revoked_until_s <= now_s:
                running.revoked_until_s = float("inf")  # said once; the sentinel tells the rest
                text = f"lease {running.lease.serial} was not given back within {self._revoke_s:g} s of being revoked"
                actions.append(KillExecutor(number, gpu.epoch, text))

    # --- decisions

    def _place(self, now_s: float, actions: list[Action]) -> None:
        """Give free GPUs to waiting requests, oldest first; a request whose instance still holds a lease lets others
        pass.
        """
        free = {number for number, gpu in self.gpus.items() if gpu.running is None}
        if not free or not self.waiting:
            return
        busy = {gpu.running.instance for gpu in self.gpus.values() if gpu.running is not None}
        for request, asked in list(self.waiting.items()):
            if not free:
                return
            if asked.instance in busy:
                continue
            del self.waiting[request]
            if (failure := self.too_large(asked.instance)) is not None:
                actions.append(RefuseAsk(request, failure))
                continue
            number = min(free, key=lambda n: self._preference(n, asked.instance))
            free.discard(number)
            busy.add(asked.instance)
            actions.append(self._grant(number, asked, now_s))

    def too_large(self, instance: str) -> Failure | None:
        """Why no GPU could ever hold this model, as far as its size and GPUs are known."""
        model = self.models.get(instance)
        largest = max((gpu.capacity_nbytes for gpu in self.gpus.values()), default=None)
        if model is None or largest is None or model.nbytes <= largest:
            return None
        text = (
            f"the model has {model.nbytes:,} bytes and the largest GPU {largest:,} for models; use a smaller model or "
            "a GPU with more memory ([gpu] memory for emulated ones; [gpu] activations is what others keep back)"
        )
        return Failure(code="model_too_large", status=507, text=text)

    def _preference(self, number: int, instance: str) -> tuple[int, int, int]:
        gpu = self.gpus[number]
        return (-gpu.resident.get(instance, 0), -gpu.stats.free_nbytes, number)

    def _grant(self, number: int, asked: Asked, now_s: float) -> WakeOn:
        gpu, instance = self.gpus[number], asked.instance
        self._use(instance, now_s)
        model = self.models[instance]
        named = {*gpu.resident, instance}
        worth = by_recency((name, now_s - m.used_s) for name, m in reversed(self.models.items()) if name in named)
        there = {other: nbytes for other, g in self.gpus.items() if (nbytes := g.resident.get(instance, 0))}
        missing = max(0, model.nbytes - there.pop(number, 0))
        peers = tuple(sorted(there, key=lambda other: (-there[other], other)))
        self._serial += 1
        lease = Lease(gpu=number, epoch=gpu.epoch, serial=self._serial, secret=self._random.getrandbits(62))
        gpu.running = Running(asked.request, instance, lease)
        room = int(model.peak_nbytes * PEAK_MARGIN)
        return WakeOn(asked.request, lease, instance, model.version, worth, peers, room, missing)

    # --- checks

    def check(self) -> None:
        """Assert the invariants; tests call it after every event."""
        requests = [g.running.request for g in self.gpus.values() if g.running is not None]
        assert len(set(requests)) == len(requests), "a request has two leases"
        instances = [g.running.instance for g in self.gpus.values() if g.running is not None]
        assert len(set(instances)) == len(instances), "an instance has two leases"
        assert not set(requests) & set(self.waiting), "a request both waits and runs"
        for gpu in self.gpus.values():
            running = gpu.running
            assert running is None or running.revoked_until_s is not None or running.instance in self.models
            assert all(instance in self.models for instance in gpu.resident), "a lost instance is resident"
            assert all(nbytes > 0 for nbytes in gpu.resident.values()), "an instance is resident with no bytes"
        used = [model.used_s for model in self.models.values()]
        assert used == sorted(used), "models are not in the order of their last use"
        if any(gpu.running is None for gpu in self.gpus.values()):
            idle = [a for a in self.waiting.values() if a.instance not in instances]
            assert not idle, "a GPU is free while a request that could use it waits"
