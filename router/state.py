"""The router's picture of requests, functions and instances; plain data that only router/policy.py changes. No I/O."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from dormouse.router.events import Timing
from dormouse.schemas import messages as m


class Phase(Enum):
    """Of a request. QUEUED -> WAITING (for a lease) -> RUNNING (in the instance); back to QUEUED when a lease or an instance is lost."""

    QUEUED = "queued"
    WAITING = "waiting"
    RUNNING = "running"


class State(Enum):
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
    """One wish for a lease, from Acquire until the lease is known to be over.

    ``request`` is None when it is the instance's own (``load()``, a session), or when its request's fate is decided already.
    """

    instance: str
    request: int | None
    lease: m.Lease | None = None
    done: bool = False  # LeaseDone came


@dataclass(slots=True)
class Instance:
    """A process that runs a function's code, or a session (``spec`` is None)."""

    name: str
    spec: m.FunctionSpec | None
    state: State
    version: int | None = None  # newest manifest version that it has told
    ticket: int | None = None  # of the request it has, or had when its client left
    own: int | None = None  # ticket of its load() or session
    draining: bool = False  # ends after the request it has


@dataclass(slots=True)
class Function:
    """What is served under a name."""

    spec: m.FunctionSpec
    queue: deque[int] = field(default_factory=deque)
    instance: str | None = None
    failure: m.Failure | None = None  # why it is not loaded, while nothing is being tried
    failures: int = 0  # in a row
    retry_s: float = 0.0


@dataclass(slots=True)
class Change:
    """A deploy or removal that is under way; one per name at a time."""

    ask: int
    spec: m.FunctionSpec | None  # None: removal
    instance: str | None = None
    keeping: bool = False  # the controller was told; waits for Kept
    retries: int = 0
