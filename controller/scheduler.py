"""The scheduling core: pure. Decides which waiting request gets which GPU and what is evicted for it. No I/O, no clock,
no randomness but a seeded field.

First policies: requests are served in the order in which they came; a request goes to a free GPU that already has its
model, else to the free GPU with most room; room is made by forgetting the least recently used models. One lease per GPU
and one per instance.

A lease's states::

    (asked) ──grant──► running ──Done──► (gone)
                          │ Released / InstanceLost
                          ▼
                       revoked ──Done──► (gone)      no Done within ``revoke_s``: the executor is killed
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field

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
)
from dormouse.schemas.messages import Failure, Lease

PEAK_MARGIN = 1.1
"""Room kept for activations, as a multiple of the highest peak seen: inputs of the next request may be a little larger.
"""


@dataclass(slots=True)
class Running:
    """A lease that an executor has been told of and has not yet given back."""

    request: int
    instance: str
    lease: Lease
    copies: bool  # the model was not (wholly) there
    revoked_until_s: float | None = None


@dataclass(slots=True)
class Gpu:
    epoch: int
    total_nbytes: int
    resident: "OrderedDict[str, int]" = field(default_factory=OrderedDict)  # nbytes by instance, oldest use first
    running: Running | None = None

    @property
    def free_nbytes(self) -> int:
        return self.total_nbytes - sum(self.resident.values())


@dataclass(slots=True)
class Model:
    """What is known of an instance's model."""

    function: str
    version: int = 0
    nbytes: int = 0
    peak_nbytes: int = 0


@dataclass(slots=True)
class FunctionCounts:
    """For people: never read by a decision."""

    leases: int = 0
    wakes: int = 0
    copied_nbytes: int = 0
    gpu_us: int = 0
    evictions: int = 0
    gpus: dict[int, int] = field(default_factory=dict)  # leases by GPU


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
        self.models: dict[str, Model] = {}  # by instance
        self.waiting: OrderedDict[int, Asked] = OrderedDict()  # by request, in order of arrival
        self.counts: dict[str, FunctionCounts] = {}  # by function

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event at time ``now_s`` (seconds of any monotonic clock)."""
        actions: list[Action] = []
        match event:
            case ExecutorUp():
                self._executor_down(event.gpu, actions)
                self.gpus[event.gpu] = Gpu(event.epoch, event.total_nbytes)
            case ExecutorDown():
                self._executor_down(event.gpu, actions)
            case InstanceKnown():
                self.models.setdefault(event.instance, Model(event.function)).function = event.function
            case InstanceLost():
                self._instance_lost(event.instance, now_s, actions)
            case ModelSized():
                model = self.models.setdefault(event.instance, Model(""))
                model.version, model.nbytes = max(model.version, event.version), event.nbytes
            case Asked():
                self._asked(event, actions)
            case Released():
                self._released(event.request, now_s, actions)
            case LeaseOver():
                self._lease_over(event, actions)
            case Evicted():
                self._evicted(event)
            case Tick():
                self._overdue(now_s, actions)
        self._place(actions)
        return actions

    @property
    def next_deadline_s(self) -> float | None:
        """When a Tick is due."""
        return min(
            (r.revoked_until_s for g in self.gpus.values() if (r := g.running) and r.revoked_until_s is not None),
            default=None,
        )

    # --- events

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

    def _asked(self, event: Asked, actions: list[Action]) -> None:
        if len(self.waiting) >= self._max_waiting:
            text = f"{len(self.waiting)} requests wait for a GPU already; try again later"
            actions.append(RefuseAsk(event.request, Failure(code="queue_full", status=429, text=text, retryable=True)))
            return
        model = self.models.setdefault(event.instance, Model(""))
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

    def _lease_over(self, event: LeaseOver, actions: list[Action]) -> None:
        gpu = self.gpus.get(event.gpu)
        if gpu is None or gpu.epoch != event.epoch or gpu.running is None or gpu.running.lease.serial != event.serial:
            return  # of an executor that has died since
        running, gpu.running = gpu.running, None
        for instance in event.evicted:
            self._forget(gpu, instance)
        model = self.models.get(running.instance)
        if model is None:
            return
        if event.resident_nbytes:
            gpu.resident[running.instance] = event.resident_nbytes
            gpu.resident.move_to_end(running.instance)
        else:
            gpu.resident.pop(running.instance, None)
        model.version = max(model.version, event.version)
        model.peak_nbytes = max(model.peak_nbytes, event.peak_activation_nbytes)
        counts = self.counts.setdefault(model.function, FunctionCounts())
        counts.leases += 1
        counts.wakes += event.copied_nbytes > 0
        counts.copied_nbytes += event.copied_nbytes
        counts.gpu_us += event.gpu_us
        counts.gpus[event.gpu] = counts.gpus.get(event.gpu, 0) + 1
        if running.revoked_until_s is None:
            actions.append(FinishLease(running.request, event.gpu_us, event.copied_nbytes))

    def _evicted(self, event: Evicted) -> None:
        gpu = self.gpus.get(event.gpu)
        if gpu is not None and gpu.epoch == event.epoch:
            for instance in event.instances:
                self._forget(gpu, instance)

    def _forget(self, gpu: Gpu, instance: str) -> None:
        if gpu.resident.pop(instance, None) is not None and instance in self.models:
            self.counts.setdefault(self.models[instance].function, FunctionCounts()).evictions += 1

    def _overdue(self, now_s: float, actions: list[Action]) -> None:
        for number, gpu in self.gpus.items():
            running = gpu.running
            if running is not None and running.revoked_until_s is not None and running.revoked_until_s <= now_s:
                running.revoked_until_s = float("inf")  # said once; the sentinel tells the rest
                text = f"lease {running.lease.serial} was not given back within {self._revoke_s:g} s of being revoked"
                actions.append(KillExecutor(number, gpu.epoch, text))

    # --- decisions

    def _place(self, actions: list[Action]) -> None:
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
            if (refusal := self._too_large(asked)) is not None:
                actions.append(refusal)
                continue
            number = min(free, key=lambda n: self._preference(n, asked.instance))
            free.discard(number)
            busy.add(asked.instance)
            actions.append(self._grant(number, asked))

    def _too_large(self, asked: Asked) -> RefuseAsk | None:
        model = self.models[asked.instance]
        largest = max(gpu.total_nbytes for gpu in self.gpus.values())
        if model.nbytes <= largest:
            return None
        text = (
            f"the model has {model.nbytes:,} bytes and the largest GPU {largest:,}; use a GPU with more memory "
            "([gpu] memory for emulated ones) or a smaller model"
        )
        return RefuseAsk(asked.request, Failure(code="model_too_large", status=507, text=text))

    def _preference(self, number: int, instance: str) -> tuple[bool, int, int]:
        gpu = self.gpus[number]
        return (instance not in gpu.resident, -gpu.free_nbytes, number)

    def _grant(self, number: int, asked: Asked) -> WakeOn:
        gpu, model = self.gpus[number], self.models[asked.instance]
        there = gpu.resident.get(asked.instance, 0)
        missing = max(0, model.nbytes - there)
        room = missing + int(model.peak_nbytes * PEAK_MARGIN)
        evict: list[str] = []
        freed = gpu.free_nbytes
        for instance, nbytes in gpu.resident.items():
            if freed >= room:
                break
            if instance != asked.instance:
                evict.append(instance)
                freed += nbytes
        for instance in evict:
            self._forget(gpu, instance)
        gpu.resident[asked.instance] = model.nbytes
        gpu.resident.move_to_end(asked.instance)
        self._serial += 1
        lease = Lease(gpu=number, epoch=gpu.epoch, serial=self._serial, secret=self._random.getrandbits(62))
        gpu.running = Running(asked.request, asked.instance, lease, copies=missing > 0)
        return WakeOn(asked.request, lease, asked.instance, model.version, tuple(evict), missing)

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
            assert running is None or running.revoked_until_s is not None or running.instance in gpu.resident
            assert all(instance in self.models for instance in gpu.resident)
        if any(gpu.running is None for gpu in self.gpus.values()):
            idle = [a for a in self.waiting.values() if a.instance not in instances]
            assert not idle, "a GPU is free while a request that could use it waits"
