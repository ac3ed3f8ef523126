"""The router's picture of requests, functions and instances; plain data that only the policy changes. No I/O."""

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from typing import Final

from dormouse.router import events as e
from dormouse.router import timers as t
from dormouse.router.events import Timing
from dormouse.schemas import messages as m


class Phase(Enum):
    """Of a request. QUEUED -> WAITING (for a lease) -> RUNNING (in the instance); back to QUEUED when a lease or an
    instance is lost.
    """

    QUEUED = "queued"
    WAITING = "waiting"
    RUNNING = "running"


class InstanceState(Enum):
    """Of an instance. STARTING -> LOADING -> IDLE <-> BUSY; DEAD from anywhere: it is told to go, or is gone."""

    STARTING = "starting"
    LOADING = "loading"
    IDLE = "idle"
    BUSY = "busy"
    DEAD = "dead"


@dataclass(slots=True)
class Request:
    """A client's call whose fate is open."""

    number: int
    function: str
    arrived_s: float
    phase: Phase = Phase.QUEUED
    ticket: int = 0  # while WAITING or RUNNING
    acquired_s: float = 0.0
    granted_s: float = 0.0
    wake_nbytes: int = 0
    lost: bool = False  # RUNNING, and its executor died
    rerun: bool = False  # has had its second chance

    def timing(self, now_s: float) -> Timing:
        if self.phase is Phase.QUEUED:
            return Timing(queue_s=now_s - self.arrived_s)
        if self.phase is Phase.WAITING:
            return Timing(queue_s=self.acquired_s - self.arrived_s, wait_s=now_s - self.acquired_s)
        return Timing(
            queue_s=self.acquired_s - self.arrived_s,
            wait_s=self.granted_s - self.acquired_s,
            run_s=now_s - self.granted_s,
            wake_nbytes=self.wake_nbytes,
        )


@dataclass(slots=True)
class Ticket:
    """One wish for a lease, from Acquire until the instance is through with it.

    ``request`` is None when it is the instance's own (``load()``, a session), or when its request's fate is decided
    already.
    """

    instance: str  # or session
    request: int | None
    lease: m.Lease | None = None
    done: bool = False  # its executor was lost, and the lease with it
    stopping: bool = False  # its client has left, and the instance was told to give it up


@dataclass(slots=True)
class Instance:
    """A process that runs a function's code."""

    name: str
    spec: m.FunctionSpec
    state: InstanceState = InstanceState.STARTING
    version: int | None = None  # newest manifest version that it has told
    ticket: int | None = None  # of the request it has, or had when its client left
    own: int | None = None  # ticket of its load()
    draining: bool = False  # ends after the request it has
    idle_s: float = 0.0  # since when it has nothing to do, while IDLE

    def holds(self, ticket: int) -> bool:
        return ticket in (self.ticket, self.own)


@dataclass(slots=True)
class Session:
    """A `dormouse run` program: no function, no requests; it takes leases for itself."""

    name: str
    state: InstanceState = InstanceState.IDLE  # or DEAD
    version: int | None = None  # newest manifest version that it has told
    own: int | None = None  # ticket of the lease that it has or wants

    def holds(self, ticket: int) -> bool:
        return ticket == self.own


Holder = Instance | Session
"""Who can have a lease."""

SESSION_TENANT: Final = "default"
"""To whom sessions count."""


@dataclass(slots=True)
class ServedFunction:
    """What is served under a name: by its first instance, and by extras if it is stateless."""

    spec: m.FunctionSpec
    queue: deque[int] = field(default_factory=deque)
    instance: str | None = None
    extras: dict[str, None] = field(default_factory=dict)  # instances beside the first, oldest first
    failure: m.Failure | None = None  # why it is not loaded, while nothing is being tried
    not_deployed: str = ""  # why the newest version is not what is served
    failures: int = 0  # in a row
    retry_s: float = 0.0
    extra_failures: int = 0  # of extras, in a row
    extra_retry_s: float = 0.0  # no extra is started before
    run_s: float | None = None  # recent time of a request in an instance, from its lease to its answer
    deaths: list[float] = field(default_factory=list)  # when executors died of its commands, recently
    worn: list[float] = field(default_factory=list)  # when requests ended its instances, recently
    quarantine: str = ""  # why it is in quarantine: it has no instance and no queue then
    writes: int = 0  # requests that changed what load() had made, though the function says that none does

    @property
    def instances(self) -> list[str]:
        """All of them, the first one first."""
        return [] if self.instance is None else [self.instance, *self.extras]


@dataclass(slots=True)
class OpenDeploy:
    """Of a version that is under way."""

    ask: int
    spec: m.FunctionSpec
    instance: str | None = None
    keeping: bool = False  # the controller was told; waits for Kept
    retries: int = 0
    deaths: list[float] = field(default_factory=list)  # as a Function's


@dataclass(slots=True)
class Removal:
    """The controller was told to remove a function."""

    ask: int


class RouterState:
    """All of it, the clock of the event being handled, timers, and the actions so far."""

    def __init__(
        self,
        loads: int,
        max_queue: int,
        prefix: str,
        one_tenant: bool,
        extra_instances: int,
        extra_idle_ms: int,
    ) -> None:
        self.functions: dict[str, ServedFunction] = {}
        self.instances: dict[str, Instance] = {}
        self.sessions: dict[str, Session] = {}
        self.requests: dict[int, Request] = {}
        self.changes: dict[str, OpenDeploy | Removal] = {}  # by function; one at a time
        self.gone: dict[str, m.FunctionSpec] = {}  # by instance: what the last GONE ones ran, oldest first
        self.tickets: dict[int, Ticket] = {}
        self.wanted: dict[str, None] = {}  # functions and changes without an instance, oldest first
        self.crowded: dict[str, None] = {}  # stateless functions with a queue
        self.catalogue_known = False
        self.forking = False
        self.gpu_nbytes = 0  # of the smallest GPU; 0 if not known
        self.gpus = 0
        self.loads = loads
        self.extra_instances = extra_instances
        self.extra_idle_s = extra_idle_ms / 1000
        self.one_tenant = one_tenant
        self.max_queue = max_queue
        self.now_s = 0.0
        self.out: list[e.Action] = []
        self.timers: list[tuple[float, int, t.Timer]] = []  # heap
        self.ticket_numbers = count(1)
        self._names: Iterator[str] = (f"{prefix}{number}" for number in count(1))
        self._timer_numbers = count()

    def new_name(self) -> str:
        """Name for an instance; short, because it is part of socket paths."""
        return next(self._names)

    def tell(self, message: m.RouterToController) -> None:
        self.out.append(e.Tell(message))

    def send(self, instance: str, message: m.RouterToInstance) -> None:
        self.out.append(e.Send(instance, message))

    def at(self, when_s: float, timer: t.Timer) -> None:
        heapq.heappush(self.timers, (when_s, next(self._timer_numbers), timer))

    def holder(self, name: str) -> Holder:
        """Of a ticket, which never outlives that."""
        return self.instances[name] if name in self.instances else self.sessions[name]

    def deploy(self, name: str) -> OpenDeploy | None:
        """The deploy of this function that is under way."""
        change = self.changes.get(name)
        return change if isinstance(change, OpenDeploy) else None

    def deploys(self) -> list[OpenDeploy]:
        return [change for change in self.changes.values() if isinstance(change, OpenDeploy)]

    def loading(self) -> int:
        """How many instances load now."""
        return sum(i.state in (InstanceState.STARTING, InstanceState.LOADING) for i in self.instances.values())

    def check(self) -> None:
        """Assert what holds between any two events."""
        queued = [number for function in self.functions.values() for number in function.queue]
        assert len(queued) == len(set(queued))
        assert set(queued) == {number for number, r in self.requests.items() if r.phase is Phase.QUEUED}
        for number, request in self.requests.items():
            if request.phase is not Phase.QUEUED:
                ticket = self.tickets[request.ticket]
                assert ticket.request == number, request
                assert self.instances[ticket.instance].ticket == request.ticket, request
                assert (ticket.lease is not None) == (request.phase is Phase.RUNNING), request
        for instance in self.instances.values():
            assert (instance.ticket is not None) == (instance.state is InstanceState.BUSY), instance
        for session in self.sessions.values():
            assert session.state in (InstanceState.IDLE, InstanceState.DEAD), session
        holders: list[Holder] = [*self.instances.values(), *self.sessions.values()]
        for holder in holders:
            assert holder.own is None or holder.own in self.tickets, holder
            assert holder.state is not InstanceState.DEAD or holder.own is None, holder
        for name, function in self.functions.items():
            assert list(function.queue) == sorted(function.queue), f"{name} has requests out of order"
            assert not function.queue or not function.spec.stateless or name in self.crowded, f"{name} is crowded"
            assert not function.extras or (function.spec.stateless and not function.writes), f"{name} has state"
            assert not function.quarantine or not (function.instance or function.queue), function
            if function.instance is None:
                assert name in self.wanted or function.quarantine, function
                assert not function.extras, function
            assert len(set(function.instances)) == len(function.instances), function
            for instance in [self.instances[each] for each in function.instances]:
                assert instance.spec == function.spec, function
                assert instance.state is not InstanceState.DEAD, function
                assert not instance.draining, function
                assert instance.state is not InstanceState.IDLE or not function.queue, (
                    f"{name} is idle and has requests"
                )
                held = self.tickets.get(instance.ticket or 0)
                abandoned = held is not None and held.request is None and not held.stopping
                assert not abandoned or not function.queue, f"{name} waits for what nobody waits for"
        assert sum(len(function.extras) for function in self.functions.values()) <= self.extra_instances
        assert self.loading() <= self.loads
