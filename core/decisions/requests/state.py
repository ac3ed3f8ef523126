"""State of requests, functions and instances; plain data that only the policy changes. No I/O."""

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import count
from math import inf
from typing import Final

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import timers as t
from dormouse.core.decisions.requests.events import Timing
from dormouse.core.names import base_of
from dormouse.schemas import messages as m


class Phase(Enum):
    """The phase of a request: QUEUED -> WAITING (for a lease) -> RUNNING (in the instance); back to QUEUED when a lease
    or an instance is lost.
    """

    QUEUED = "queued"
    WAITING = "waiting"
    RUNNING = "running"


class InstanceState(Enum):
    """The state of an instance: STARTING -> LOADING -> IDLE <-> BUSY; DEAD from anywhere, when it is told to go or is
    gone.
    """

    STARTING = "starting"
    LOADING = "loading"
    IDLE = "idle"
    BUSY = "busy"
    DEAD = "dead"

    @property
    def loads(self) -> bool:
        return self in (InstanceState.STARTING, InstanceState.LOADING)

    @property
    def serves(self) -> bool:
        return self in (InstanceState.IDLE, InstanceState.BUSY)


@dataclass(slots=True)
class Request:
    """A client's call whose fate is open."""

    number: int
    function: str
    arrived_s: float
    route: str = ""  # of OpenAI's interface
    phase: Phase = Phase.QUEUED
    ticket: int = 0  # while WAITING or RUNNING
    acquired_s: float = 0.0
    granted_s: float = 0.0
    wake_nbytes: int = 0
    source: m.WokenFrom = ""  # the place of its model when it was granted
    copy_s: float | None = None  # until that had come
    lost: bool = False  # RUNNING, and its executor died
    rerun: bool = False  # has had its second chance
    streams: bool = False  # RUNNING, and some of its answer has been passed on
    first: m.AnswerBegun | None = None  # RUNNING, and a language model has made its first token
    untaken_nbytes: int = 0  # of that, bytes that were not reported to the instance as taken
    moved_s: float = 0.0  # when a part of it last came, or was taken
    version: int = 0  # of its function that it was last handed to
    gpu: int = -1  # RUNNING: of its lease
    depth: int = 0  # of how many calls it is the last; 0: a client's
    due_s: float = inf  # the deadline of the request that calls it
    calls: dict[tuple[str, int], None] = field(default_factory=dict)  # RUNNING: that have no answer yet

    @property
    def begun(self) -> bool:
        return self.first is not None

    def timing(self, now_s: float) -> Timing:
        if self.phase is Phase.QUEUED:
            return Timing(queue_s=now_s - self.arrived_s, began=self.rerun)
        if self.phase is Phase.WAITING:
            queue_s, wait_s = self.acquired_s - self.arrived_s, now_s - self.acquired_s
            return Timing(queue_s=queue_s, wait_s=wait_s, began=self.rerun)
        return Timing(
            queue_s=self.acquired_s - self.arrived_s,
            wait_s=self.granted_s - self.acquired_s,
            run_s=now_s - self.granted_s,
            wake_nbytes=self.wake_nbytes,
            first=self.first,
            source=self.source,
            copy_s=self.copy_s,
            began=True,
            version=self.version,
            gpu=self.gpu,
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
    source: m.WokenFrom = ""  # the place of the model when it was granted
    done: bool = False  # its executor was lost, and the lease with it
    stopping: bool = False  # its client has left, and the instance was told to give it up


@dataclass(slots=True)
class OpenCall:
    """A call of an instance's code that has no answer yet."""

    caller: int  # the request that calls
    depth: int
    due_s: float  # when the caller is to be answered
    request: int = 0  # that it is, once the shell has submitted it
    left: bool = False  # its answer is no longer wanted


@dataclass(slots=True)
class Instance:
    """A process that runs a function's code."""

    name: str
    spec: m.FunctionSpec
    state: InstanceState = InstanceState.STARTING
    version: int | None = None  # newest manifest version that it has reported
    ticket: int | None = None  # of the request it has, or had when its client left
    own: int | None = None  # ticket of its load(), or of a language model's seat
    open: dict[int, None] = field(default_factory=dict)  # tickets of requests, of those that have many at once
    batch_own: int = 0  # the ticket of its last batch's lease
    batch: frozenset[int] = frozenset()  # the tickets of the requests in that
    begun_own: int | None = None  # the ticket of its seat when it last began an answer
    replaces: bool = False  # its function was served already when it was started
    started_s: float = 0.0
    progress_s: float = 0.0  # when it last did something, while it loads
    draining: str = ""  # ends after the request it has, and why: completes "the instance ..."
    ending: str = ""  # the same, once it was told to end
    idle_s: float = 0.0  # since when it has nothing to do, while IDLE
    calls: int = 0  # that have no answer yet


@dataclass(slots=True)
class Session:
    """A `dormouse run` program: no function, no requests; it takes leases for itself."""

    name: str
    state: InstanceState = InstanceState.IDLE  # or DEAD
    ending: str = ""  # why it was told to end: completes "the session ..."
    version: int | None = None  # newest manifest version that it has reported
    own: int | None = None  # ticket of the lease that it has or wants


Holder = Instance | Session
"""Holders of leases."""

MAX_OPEN: Final = 256
"""Requests that an instance of a language model has at once; more wait in the queue."""


def most_open(spec: m.FunctionSpec) -> int:
    """How many an instance has at once, which asks for leases itself then; 0: one, with a lease for each. Of batches,
    one runs and one comes together.
    """
    if spec.llm is not None:
        return MAX_OPEN
    return 2 * spec.batch if spec.batch else spec.concurrency if spec.concurrency > 1 else 0


SESSION_TENANT: Final = "default"
"""Tenant of all sessions."""


@dataclass(slots=True)
class ServedFunction:
    """The function served under a name: by its first instance, and by extras if it is stateless."""

    spec: m.FunctionSpec
    queue: deque[int] = field(default_factory=deque)
    instance: str | None = None
    extras: dict[str, None] = field(default_factory=dict)  # instances beside the first, oldest first
    failure: m.Failure | None = None  # why it is not loaded, while nothing is being tried
    not_deployed: str = ""  # why the newest version is not served
    failures: int = 0  # in a row
    retry_s: float = 0.0
    extra_failures: int = 0  # of extras, in a row
    extra_retry_s: float = 0.0  # no extra is started before
    run_s: float | None = None  # recent time of a request in an instance, from its lease to its answer
    tpot_ms: float | None = None  # recent time of a language model's token after the first; None after an extra started
    deaths: list[float] = field(default_factory=list)  # when executors died of its commands, recently
    worn: list[float] = field(default_factory=list)  # when requests ended its instances, recently
    quarantine: str = ""  # why it is in quarantine: it has no instance and no queue then
    schema: bytes | None = None  # its instance's description of its requests; None until one has loaded
    writes: int = 0  # requests that changed load()'s results, though the function declares none

    @property
    def instances(self) -> list[str]:
        """All of them, the first one first."""
        return [] if self.instance is None else [self.instance, *self.extras]


@dataclass(slots=True)
class Split:
    """A version that is served beside the one that has the function's name: it is a function of its own, ``name``."""

    name: str
    share: int = 0  # of the requests to the function, in per cent
    due: int = 0  # hundredths of a request that it has not had yet


@dataclass(slots=True)
class OpenDeploy:
    """The deploy of a version that is under way."""

    ask: int
    spec: m.FunctionSpec
    instance: str | None = None
    keeping: bool = False  # the controller was told; waits for Kept
    retries: int = 0
    deaths: list[float] = field(default_factory=list)  # as a Function's
    warning: str = ""  # of the instance that has loaded it
    schema: bytes = b""  # likewise
    check: str = ""  # JSON: a request that its instance answers before it counts as loaded


@dataclass(slots=True)
class Removal:
    """The controller was sent the removal of a function. Once it has removed it, ``ending`` are its instances that are
    told to end: the removal is answered when they have, and the name stays taken until then.
    """

    ask: int
    ending: set[str] = field(default_factory=set)


@dataclass(slots=True)
class RouterState:
    """All of it, the clock of the event being handled, timers, and the actions so far."""

    loads: int
    max_queue: int
    prefix: str  # of instances' names
    one_tenant: bool = True
    extra_instances: int = 16
    extra_idle_s: float = 30.0
    longest_s: float = 3600.0  # for a request, whatever its function's time limit is
    longest_load_s: float = 3600.0
    functions: dict[str, ServedFunction] = field(default_factory=dict)
    splits: dict[str, Split] = field(default_factory=dict)  # by function
    instances: dict[str, Instance] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    changes: dict[str, OpenDeploy | Removal] = field(default_factory=dict)  # by function; one at a time
    gone: dict[str, m.FunctionSpec] = field(default_factory=dict)  # by instance: the specs of the last GONE ones
    tickets: dict[int, Ticket] = field(default_factory=dict)
    calls: dict[tuple[str, int], OpenCall] = field(default_factory=dict)  # by instance, and its number there
    orphans: list[tuple[str, int]] = field(default_factory=list)  # of them, whose requests are over
    wanted: dict[str, None] = field(default_factory=dict)  # functions and changes without an instance, oldest first
    crowded: dict[str, None] = field(default_factory=dict)  # stateless functions with a queue, or late tokens
    catalogue_known: bool = False
    forking: bool = False
    gpu_nbytes: int = 0  # of the smallest GPU; 0 if not known
    gpus: int = 0
    drained: frozenset[int] = frozenset()  # GPUs on which nothing new is to begin
    all_drained: bool = False
    models_exposed: str = ""  # why language models of several tenants cannot be kept apart
    over_share: frozenset[str] = frozenset()  # tenants whose requests wait for those of others
    shares: Mapping[str, float] = field(default_factory=dict)  # of tenants; others have 1
    now_s: float = 0.0
    out: list[e.Action] = field(default_factory=list)
    timers: list[tuple[float, int, t.Timer]] = field(default_factory=list)  # heap
    ticket_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _name_numbers: Iterator[int] = field(default_factory=lambda: count(1))
    _timer_numbers: Iterator[int] = field(default_factory=count)

    def new_name(self) -> str:
        """Name for an instance; short, because it is part of socket paths."""
        return f"{self.prefix}{next(self._name_numbers)}"

    def serving(self, instance: Instance) -> ServedFunction | None:
        """The function that it serves; None: of a version that is being replaced, or is not served yet."""
        function = self.functions.get(instance.spec.name)
        return function if function is not None and instance.name in function.instances else None

    def takes_more(self, instance: Instance, most: int) -> bool:
        """For instances that have many requests at once: not with a lease on a GPU that is drained, which ends only
        when its requests are answered.
        """
        ticket = self.tickets.get(instance.own or 0)
        drains = ticket is not None and ticket.lease is not None and ticket.lease.gpu in self.drained
        return instance.state is InstanceState.IDLE and len(instance.open) < most and not drains

    def tell(self, message: m.RouterToController) -> None:
        self.out.append(e.Tell(message))

    def settle(
        self,
        ask: int,
        failure: m.Failure | None,
        spec: m.FunctionSpec | None = None,
        warning: str = "",
        schema: bytes = b"",
    ) -> None:
        self.out.append(e.Settled(ask, spec, failure, warning, schema))

    def send(self, instance: str, message: m.RouterToInstance) -> None:
        self.out.append(e.Send(instance, message))

    def at(self, when_s: float, timer: t.Timer) -> None:
        heapq.heappush(self.timers, (when_s, next(self._timer_numbers), timer))

    def holder(self, name: str) -> Holder:
        """The holder of a ticket; no ticket outlives its holder."""
        return self.instances[name] if name in self.instances else self.sessions[name]

    def deploy(self, name: str) -> OpenDeploy | None:
        """The deploy of this function that is under way."""
        change = self.changes.get(name)
        return change if isinstance(change, OpenDeploy) else None

    def tenants(self) -> list[str]:
        """Tenants of the functions here, served or on their way."""
        served = [function.spec.tenant for function in self.functions.values()]
        return served + [each.spec.tenant for each in self.changes.values() if isinstance(each, OpenDeploy)]

    def part(self, whole: int) -> int:
        """One tenant's part of something that the node has ``whole`` of."""
        return whole if self.one_tenant else min(whole, max(1, whole // 2))

    def check(self) -> None:
        """Asserts the invariants between any two events."""
        queued = [number for function in self.functions.values() for number in function.queue]
        assert len(queued) == len(set(queued))
        assert set(queued) == {number for number, r in self.requests.items() if r.phase is Phase.QUEUED}
        for number, request in self.requests.items():
            if request.phase is not Phase.QUEUED:
                ticket = self.tickets[request.ticket]
                assert ticket.request == number, request
                if request.ticket in self.instances[ticket.instance].open:
                    assert request.phase is Phase.RUNNING, request
                    continue
                assert self.instances[ticket.instance].ticket == request.ticket, request
                assert (ticket.lease is not None) == (request.phase is Phase.RUNNING), request
        for key, call in self.calls.items():
            waits = key in self.requests[call.caller].calls if call.caller in self.requests else False
            assert call.left or waits, f"{key} outlives its request"
            assert call.request not in self.requests or not call.left, f"{key} is left and goes on"
        for request in self.requests.values():
            assert not request.calls or request.phase is Phase.RUNNING, request
            assert request.calls.keys() <= self.calls.keys(), request
        for instance in self.instances.values():
            assert instance.calls == sum(name == instance.name for name, _ in self.calls), instance
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
            assert base_of(name) in self.functions, f"{name} is beside nothing"
            for instance in [self.instances[each] for each in function.instances]:
                assert instance.spec == function.spec, function
                assert instance.state is not InstanceState.DEAD, function
                assert not instance.draining, function
                takes = self.takes_more(instance, most_open(instance.spec) or 1)
                assert not takes or not function.queue, f"{name} has requests"
                held = self.tickets.get(instance.ticket or 0)
                abandoned = held is not None and held.request is None and not held.stopping
                assert not abandoned or not function.queue, f"{name} waits for what nobody waits for"
        for name, change in self.changes.items():
            if isinstance(change, Removal):
                assert change.ending <= self.instances.keys(), change
                assert change.ending or name in self.functions, f"{name} is removed, and nobody was answered"
        for name, split in self.splits.items():
            assert split.name in self.functions, split
            assert base_of(split.name) == name, split
        assert sum(len(function.extras) for function in self.functions.values()) <= self.extra_instances
        loading = Counter((each.spec.tenant, each.replaces) for each in self.instances.values() if each.state.loads)
        assert all(count <= self.part(self.loads) for count in loading.values()), loading
