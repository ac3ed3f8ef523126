"""The scheduling core: pure. Decides which waiting request gets which GPU, and the worth of models there. No I/O, no
clock, no randomness but a seeded field. The live controller and the simulator run this same class.

The parts: known state (inventory.py, state.py), waiting requests (queueing.py) and their order (orders.py,
seniority.py), functions given up while links are too slow (rationing.py), placement (placement.py), begins
(granting.py, turns.py, margins.py) and ends of leases (leases.py, leaving.py), evictions (keeping.py), preloads
(preloading.py, filling.py), and links (topology.py, measured.py). One lease per instance; a GPU has one turn, or as
many as the policy says, and any number of seats.

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
from math import inf
from typing import assert_never

from dormouse.core.decisions.rules.batching import BatchRequests
from dormouse.core.decisions.scheduling.events import (
    Action,
    Answered,
    Asked,
    BatchChanged,
    BringAsked,
    DrainChosen,
    Event,
    Evicted,
    ExecutorDown,
    ExecutorLeaves,
    ExecutorUp,
    FinishLease,
    ForgetInstance,
    FunctionGone,
    FunctionKnown,
    InstanceKnown,
    InstanceLost,
    KeptAway,
    LeaseOver,
    LoseLease,
    ModelSized,
    OverOn,
    PolicyChosen,
    PreloadOver,
    RefuseAsk,
    Released,
    RequestAnswered,
    RequestFailed,
    RuntimesOn,
    SharesKnown,
    StepsTimed,
    Tick,
    TopologyKnown,
    TurnBusy,
    TurnIdle,
    TurnWanted,
    Woken,
)
from dormouse.core.decisions.scheduling.functions import FunctionCounts
from dormouse.core.decisions.scheduling.gathering import NOBODY, GatheringRequests, heard
from dormouse.core.decisions.scheduling.granting import Granting
from dormouse.core.decisions.scheduling.invariants import check_leases
from dormouse.core.decisions.scheduling.inventory import Inventory
from dormouse.core.decisions.scheduling.keeping import EVICTION_CLASSES
from dormouse.core.decisions.scheduling.leases import GrantedLeases
from dormouse.core.decisions.scheduling.leaving import LeavingGpus
from dormouse.core.decisions.scheduling.margins import TURN_ORDERS
from dormouse.core.decisions.scheduling.measured import Measured
from dormouse.core.decisions.scheduling.passing import SLACKS, Rounds
from dormouse.core.decisions.scheduling.placement import PLACEMENT_CLASSES
from dormouse.core.decisions.scheduling.preloading import Preloading
from dormouse.core.decisions.scheduling.queueing import Queue
from dormouse.core.decisions.scheduling.rationing import Rationing
from dormouse.core.decisions.scheduling.shares import Shares
from dormouse.core.decisions.scheduling.state import Model, Running, Waiting
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.core.decisions.scheduling.turns import FreeTurns
from dormouse.schemas.messages import Failure
from dormouse.schemas.policy import DEFAULT, Policy


class Scheduler:
    """See the module. ``handle`` takes one event and returns its actions; equal event sequences give equal
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
        keep_s: float = inf,
    ) -> None:
        self._max_waiting = max_waiting
        self.topology = topology if topology is not None else Topology()
        self.bandwidths = Measured(self.topology)
        self._books = Inventory(policy)
        self.gpus, self.functions, self.models = self._books.gpus, self._books.functions, self._books.models
        self._queue = Queue(policy, self.bandwidths, self.gpus, self.functions)
        self.waiting = self._queue.waiting
        self._gathering = GatheringRequests()
        self._rationing = Rationing(self.bandwidths, self.gpus, self.functions, self.models)
        self._turns = FreeTurns(policy.turns, keep_s)
        self._leases = GrantedLeases(revoke_s, self.gpus, self.models, self._queue, self._turns)
        secrets = random.Random(seed)  # unpredictable to instances because the seed is
        self._leaving = LeavingGpus(self.gpus, self._turns, self._queue)
        granting = Granting(secrets, self._books, self._queue, self._turns, self._leases, self._rationing)
        self._granting, granting.leaving = granting, self._leaving.leaving
        self._choices = random.Random(seed)
        self._preloading = Preloading(self._books, self.bandwidths)
        self.rounds = Rounds(self.gpus, self._queue, self._turns)
        self._follow(policy)

    def _follow(self, policy: Policy) -> None:
        """The policy by which models are kept and placed from now on."""
        self.policy = policy
        if not self._queue.order.gives_up:
            self._rationing.forget()
        self._keeping = EVICTION_CLASSES[policy.eviction](self.bandwidths, self.models)
        placement = PLACEMENT_CLASSES[policy.placement]
        self._granting.keeping = self._keeping
        self._granting.turn_order = TURN_ORDERS[policy.turn_order]
        placing = placement(policy, self.bandwidths, self.gpus, self._keeping, self._choices)
        self._granting.placement = placing
        self._preloading.choose(policy, placing)
        self.rounds.slack = None if policy.preload else SLACKS[policy.turn_order]

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event at time ``now_s`` (seconds of any monotonic clock)."""
        actions: list[Action] = []
        match event:  # the most frequent ones first
            case Asked():
                self._asked(event, now_s, actions)
            case LeaseOver():
                self._lease_over(event, now_s, actions)
            case TurnIdle() | TurnWanted() | TurnBusy():
                if (known := self.gpus.get(event.gpu)) is not None and known.epoch == event.epoch:
                    self._leases.turn_told(known, event, now_s, actions)
            case StepsTimed():
                for model in self._books.steps_timed(event):
                    self._used(model)
            case BatchChanged():
                self._batch_changed(event, now_s, actions)
            case Answered():
                self._answered(event, now_s, actions)
            case Woken():
                self._books.woken(event, now_s)
                return actions
            case ExecutorUp():
                self._executor_down(event.gpu, now_s, actions)
                self._turns.changed(self._books.executor_up(event, self.topology))
                self._leaving.came(event.gpu, now_s, actions)
            case ExecutorDown():
                self._executor_down(event.gpu, now_s, actions)
            case ExecutorLeaves():
                self._leaving.begin(event, now_s)
            case DrainChosen():
                self._leaving.drain(event.gpus, now_s, actions)
            case FunctionKnown():
                self._books.function_known(event)
            case FunctionGone():
                self._books.function_gone(event.function)
            case InstanceKnown():
                self._used(self._books.instance_known(event, now_s))
            case InstanceLost():
                self._instance_lost(event.instance, now_s, actions)
            case ModelSized():
                self._books.sized(event)
            case RuntimesOn():
                if (known := self.gpus.get(event.gpu)) is not None and known.epoch == event.epoch:
                    known.runtimes = event.runtimes
            case Released():
                self._released(event.request, now_s, actions)
            case RequestFailed():
                self._request_failed(event)
            case RequestAnswered():
                if (function := self.functions.get(event.function)) is not None:
                    function.ended(event.latency_s > function.deadline_s, event.latency_s)
            case Evicted():
                self._evicted(event, now_s)
            case PreloadOver():
                self._preloading.over(event, now_s)
            case BringAsked() | KeptAway():
                self._preloading.wished(event)
            case Tick():
                for asked, batch in self._gathering.due(now_s):
                    self._wants(asked, batch, now_s)
                self._queue.let_go_overdue(now_s)
                if self._queue.rations_s <= now_s and self._rationing.next_s <= now_s:
                    self._queue.let_rationed(now_s)
                for gpu in self._turns.overran(self.gpus.values(), now_s):
                    self._queue.let_go(gpu, now_s, len(gpu.held))
                self._leases.take_back(now_s, actions)
                self._leases.kill_silent(now_s, actions)
            case TopologyKnown():
                self.topology = event.topology
                self.bandwidths.known(event.topology)
                self._books.know_neighbours(event.topology)
            case SharesKnown():
                self._queue.shares.known(event.shares)
                self._queue.follow(self.policy, now_s)
            case PolicyChosen(policy=policy):
                self._queue.follow(policy, now_s)
                self._follow(policy)
            case _:
                assert_never(event)
        if self._turns.free and self.waiting:
            self._granting.place(now_s, actions)
        self._preloading.follow(event, now_s, bool(self.waiting), actions)
        if self._leaving.leaving:
            self._leaving.retire(now_s, actions)
        return actions

    @property
    def next_deadline_s(self) -> float | None:
        """Time of the next Tick: for a lease or executor that lasts too long, a request that waits for a busy GPU."""
        due_s = min(
            self._queue.held_until_s,
            self._leases.due_s,
            self._leaving.due_s,
            self._preloading.due_s,
            self._gathering.due_s,
            self._turns.due_s(self.gpus.values()),
        )
        if self._queue.rations_s < due_s:
            due_s = min(due_s, max(self._queue.rations_s, self._rationing.next_s))
        return due_s if due_s < inf else None

    # --- events

    def _used(self, model: Model) -> None:
        """The worth of its bytes may have changed."""
        self._keeping.used(model)
        self._preloading.used(model)

    def _executor_down(self, number: int, now_s: float, actions: list[Action]) -> None:
        gone = self._books.executor_down(number, self.topology)
        if gone is None:
            return
        self._turns.gone(number)
        self._leaving.gone(number)
        self._queue.let_go(gone, now_s, len(gone.held))
        for running in gone.leases.values():
            self._leases.freed(running, now_s)
            if running.revoked_until_s is None:
                actions.append(LoseLease(running.request))

    def _instance_lost(self, instance: str, now_s: float, actions: list[Action]) -> None:
        model = self._books.instance_lost(instance)
        if model is None:
            return
        self._queue.forget(model)
        self._gathering.forget(instance)
        if model.leased:
            for running in self._leases.by_request.values():
                if running.model is model:
                    self._leases.revoke(running, now_s, actions)
        actions.append(ForgetInstance(instance))

    def _asked(self, event: Asked, now_s: float, actions: list[Action]) -> None:
        if len(self.waiting) + len(self._gathering) >= self._max_waiting:
            text = f"{len(self.waiting)} requests wait for a GPU already; try again later"
            actions.append(RefuseAsk(event.request, Failure(code="queue_full", status=429, text=text, retryable=True)))
            return
        if event.batch is not None and not event.batch.requests:
            actions.append(RefuseAsk(event.request, NOBODY))
            return
        model = self._books.model(event.instance, now_s)
        if event.version > model.version:
            model.version = event.version
        batch = None
        if event.batch is None:
            model.function.arrived(now_s)
        else:
            batch = BatchRequests(event.batch.requests)
            if self._gathering.asked(event, model, batch, now_s):
                return
        self._used(model)
        self._wants(event, batch, now_s)

    def _wants(self, asked: Asked, batch: BatchRequests | None, now_s: float) -> None:
        """It waits for a lease from now on."""
        model = self._books.model(asked.instance, now_s)
        waiting = Waiting(asked.request, model, now_s, asked.deadline_s, asked.counts, batch, asked.beyond_s)
        self._queue.add(waiting, now_s)

    def _batch_changed(self, event: BatchChanged, now_s: float, actions: list[Action]) -> None:
        waiting = self.waiting.get(event.request)
        if waiting is not None and waiting.batch is not None and waiting.resumes is None:
            heard(waiting.model, event.came, now_s)
            waiting.batch.change(event.came, event.left)
            waiting.measure()
            if not waiting.batch:
                self._queue.left(waiting, now_s)
                actions.append(RefuseAsk(event.request, NOBODY))
        elif event.request in self._gathering:
            asked, batch, waits = self._gathering.changed(event, now_s)
            if not batch:
                actions.append(RefuseAsk(event.request, NOBODY))
            elif not waits:
                self._wants(asked, batch, now_s)

    def _released(self, request: int, now_s: float, actions: list[Action]) -> None:
        running = self._leases.by_request.get(request)
        if running is not None:
            self._leases.revoke(running, now_s, actions)
            return
        self._gathering.left(request)
        waiting = self.waiting.get(request)
        if waiting is not None:
            self._queue.left(waiting, now_s)
            if waiting.failed or now_s >= waiting.own_deadline_s:
                waiting.function.settled(waiting, True, now_s, now_s - waiting.arrived_s)

    def _request_failed(self, event: RequestFailed) -> None:
        running = self._leases.by_request.get(event.request)
        waiting = running.waiting if running is not None else self.waiting.get(event.request)
        waiting = waiting or self._books.ended(event.request)
        if waiting is not None:
            waiting.failed = True
            waiting.failures += 1
        elif (function := self.functions.get(event.function)) is not None:
            function.failed(event.request)

    def _answered(self, event: Answered, now_s: float, actions: list[Action]) -> None:
        """Its instance is through with it. One that has given the GPU nothing, and for which nothing had to be brought,
        is over; the executor is notified with its next message.
        """
        running = self._leases.by_request.get(event.request)
        if running is None:
            self._books.batch_answered(event.request, event.taken, event.together)
            return
        if running.revoked_until_s is not None:
            return
        running.answered = event.taken, event.together
        gpu, serial = self.gpus[running.lease.gpu], running.lease.serial
        if event.used or running.missing_nbytes:
            if not event.used:
                actions.append(OverOn(gpu.number, (serial,)))
            self._leases.owe(running, now_s)
            return
        self._leases.over_unused(gpu, running, now_s, actions)
        self._books.unused(gpu, running, now_s)
        self._used(running.model)
        actions.append(FinishLease(running.request, running.instance, 0, 0))

    def _lease_over(self, event: LeaseOver, now_s: float, actions: list[Action]) -> None:
        done = event.done
        gpu = self.gpus.get(event.gpu)
        if gpu is None or gpu.epoch != event.epoch:
            return  # of an executor that has died since
        running = gpu.leases.get(done.serial)
        gpu.stats = done.stats
        self._books.follow(gpu, done.resident, running.instance if running is not None else "", now_s)
        if running is None:
            return  # its instance had reported that it gave the GPU nothing
        self.bandwidths.woke(gpu, running, done)
        self._leases.ended(gpu, running, now_s)
        if self.models.get(running.instance) is not running.model:
            return
        host_nbytes = done.copied_nbytes - done.peer_nbytes
        self._rationing.ended(running.model, running.used_s, host_nbytes)
        self._books.lease_over(gpu, running, done, now_s, done.copied_nbytes / self.bandwidths.host_bps)
        self._used(running.model)
        if running.revoked_until_s is None:
            wrote = done.wrote and running.waiting.counts
            actions.append(FinishLease(running.request, running.instance, done.gpu_us, done.copied_nbytes, wrote))

    def _evicted(self, event: Evicted, now_s: float) -> None:
        gpu = self.gpus.get(event.gpu)
        if gpu is not None and gpu.epoch == event.epoch:
            gpu.stats = event.stats
            own = gpu.turns[0].instance if len(gpu.turns) == 1 else ""  # of several, it is not reported which needed it
            self._books.follow(gpu, event.resident, own, now_s, "wake" if event.seated else "memory")
            self._queue.let_go(gpu, now_s, len(gpu.held))

    # --- questions

    def worth(self, gpu: int, coming: str = "") -> dict[str, float]:
        """Worth of each model on a GPU, for evictions there; see `Keeping.worth`."""
        return self._keeping.worth(self.gpus[gpu], self.models.get(coming))

    def instances_of(self, function: str) -> list[str]:
        return list(self._books.models_of.get(function, ()))

    def function_of(self, instance: str) -> str:
        """ "" if it is gone."""
        return self.models[instance].function.name if instance in self.models else ""

    def is_on_gpu(self, function: str) -> bool:
        """Whether all of its model is on some GPU."""
        models = self._books.models_of.get(function, {})
        return any(max(model.resident.values(), default=0) >= model.nbytes for model in models.values())

    def preload_worth(self, gpu: int, coming: str) -> dict[str, float]:
        """The same for a preload there; see `Preloading.worth`."""
        return self._preloading.worth(self.gpus[gpu], coming)

    def heavy(self, model: Model) -> bool:
        """See `Keeping.heavy`."""
        return self._keeping.heavy(model)

    def standing(self, waiting: Waiting, now_s: float) -> tuple[float, ...]:
        """See `Order.standing`."""
        return self._queue.order.standing(waiting, now_s)

    @property
    def drained(self) -> frozenset[int]:
        """GPUs that are drained, or will be when their leases are over."""
        return self._leaving.drained

    @property
    def shares(self) -> Shares:
        return self._queue.shares

    def margin_s(self, running: Running, now_s: float) -> float:
        """See margins.py."""
        return self._granting.margin_s(running, now_s)

    def counts(self, function: str) -> FunctionCounts:
        """Counts of a function so far."""
        known = self.functions.get(function)
        return known.counts if known is not None else FunctionCounts()

    def too_large(self, instance: str) -> Failure | None:
        """Reason why no GPU could ever hold this instance's model, as far as its size and GPUs are known."""
        model = self.models.get(instance)
        return self._books.too_large(model) if model is not None else None

    def check(self) -> None:
        """Assert the invariants; tests call it after every event."""
        self._books.check()
        check_leases(self.gpus.values(), self.waiting.values(), self._leases, self._turns)
