"""State of each lease on one GPU, of the instances and the runtimes that have leases: plain data."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.wake import Sources
from dormouse.schemas import messages as m


class LeaseState(Enum):
    RUNNING = "running"  # seat and turn
    YIELDING = "yielding"  # its last frames run, then it has no turn
    PAUSED = "paused"  # a seat, no turn
    LEAVING = "leaving"  # its memory is copied to the host: others need the room
    AWAY = "away"  # no seat
    ENDING = "ending"  # its results are written back
    CLOSING = "closing"  # the compute thread lets go of it


NEXT: Final[dict[LeaseState, frozenset[LeaseState]]] = {
    LeaseState.RUNNING: frozenset({LeaseState.YIELDING, LeaseState.PAUSED, LeaseState.ENDING, LeaseState.CLOSING}),
    LeaseState.YIELDING: frozenset({LeaseState.RUNNING, LeaseState.PAUSED, LeaseState.ENDING, LeaseState.CLOSING}),
    LeaseState.PAUSED: frozenset({LeaseState.RUNNING, LeaseState.LEAVING, LeaseState.CLOSING}),
    LeaseState.LEAVING: frozenset({LeaseState.AWAY, LeaseState.CLOSING}),
    LeaseState.AWAY: frozenset({LeaseState.RUNNING, LeaseState.CLOSING}),
    LeaseState.ENDING: frozenset({LeaseState.CLOSING}),
    LeaseState.CLOSING: frozenset(),
}

TURN: Final = (LeaseState.RUNNING, LeaseState.YIELDING)

SEATED: Final = (LeaseState.RUNNING, LeaseState.YIELDING, LeaseState.PAUSED)

NO_IDLE_KV: Final = m.IdleKv(nbytes=0, recompute_us=0)

GOING: Final = (LeaseState.LEAVING, LeaseState.ENDING, LeaseState.CLOSING)
"""States of leases whose seat is about to be released."""


@dataclass(slots=True)
class Writing:
    """Storages that lie, or will lie, at places of the store: for the write-back of an END, or because their lease
    leaves its seat.
    """

    ticket: int
    ended: e.Ended | None  # None: it has left
    storages: list[int]  # in the order of AskPlace
    places: list[m.Place] | None = None
    committed: bool = False  # Written was sent: nothing but the new manifest ends it


@dataclass(slots=True)
class HeldLease:
    """A lease in progress."""

    wake: m.Wake
    state: LeaseState = LeaseState.RUNNING
    begun: bool = False  # the compute thread knows of it
    frames: int = 0  # given to the compute thread, not executed; one that is yet to come, too (`Listen`)
    used: bool = False  # there was a frame
    said_unused: bool = False  # there was none, as reported by its instance
    reached: bool = False  # the compute thread has begun with it
    refused: str = ""  # why its model is not here
    copies: bool = False  # a wake brings something
    missing_nbytes: dict[int, int] = field(default_factory=dict)  # of that, by segment
    lost: set[int] = field(default_factory=set)  # of that, given up already
    writing: Writing | None = None
    brought: list[int] = field(default_factory=list)  # segments that its last storages are moved into
    outcome: str = "ended"
    wrote: bool = False
    copied_nbytes: int = 0
    sources: Sources = field(default_factory=Sources)
    busy_us: int = 0
    link_nbytes_s: float = 1.0  # at which weights come back
    beside_nbytes: int = 0  # activations of others when it began
    since_s: float = 0.0  # when it last had something to do, or got its turn
    idle: bool = False  # the controller was notified
    wants: bool = False  # the controller was sent its wish for a turn
    runtime: str = ""  # the one that computes for it, in steps (runtimes.py); "": the compute thread does
    vacated: bool = False  # of those: nothing of the pool is mapped there for it
    seated_s: float = 0.0  # since when it has its seat
    parts: bool = False  # its runtime goes on without it, and lets go of segments that no other lease there has
    rests_s: float | None = None  # since when its runtime has no sequence of it, as far as reported

    @property
    def serial(self) -> int:
        return self.wake.lease.serial

    @property
    def instance(self) -> str:
        return self.wake.instance


def kv_owner(runtime: str) -> str:
    """Owner of a runtime's KV memory."""
    return f"kv of {runtime}"


@dataclass(slots=True)
class RuntimeBooks:
    """A runtime that has leases. Its KV is one memory, shared by all of them."""

    name: str
    wanting: bool = False  # it has something to compute, and no turn
    due: m.StepsDue | None = None  # its work
    rests: bool = False  # it has no sequence, as far as reported
    running: int = 0  # sequences that it had then
    kv_wanted: m.KvWanted | None = None  # for which others make room
    kv_idle: m.IdleKv = NO_IDLE_KV  # KV that it could give back
    kv_asked: bool = False  # and was asked to; it has not answered
    last_nbytes: int = 0  # of KV, that it has got last
    grown_nbytes: float = 0.0  # lately, by offload.py
    grown_s: float = 0.0
    waits: bool = False  # a step of it, for weights that are on their way
    owes: bool = False  # its turn, which has ended
    lent: bool = False  # it has a step in another's turn
    short: bool = False  # there was no room for KV in that: it has the next step in its own

    @property
    def kv_owner(self) -> str:
        """Owner of the KV memory. It is cleared before any other owner gets it."""
        return kv_owner(self.name)


@dataclass(slots=True)
class HeldPreload:
    """A model that is brought without a lease (preloads.py); its serial is negative. ``left_nbytes``: by segment that
    has not come. ``stops``: it is given up, and copies may be under way.
    """

    serial: int
    instance: str
    left_nbytes: dict[int, int]
    copied_nbytes: int = 0
    stops: bool = False
    outcome: str = "there"


@dataclass(slots=True)
class AttachedInstance:
    """An attached instance. ``bound``: the compute thread knows where all of its model is. ``group``: its runtime may
    be one of all instances of that group with the same model; "": it is its own. ``adapter``: it has more than that.
    """

    tenant: str
    manifest: m.Manifest  # that it is bound to
    bound: bool = False
    lease: HeldLease | None = None
    llm: bool = False  # its leases are a runtime's
    group: str = ""
    adapter: bool = False
    uses: bool = False  # its last lease had commands

    @property
    def segments(self) -> set[int]:
        """Of the model that it is bound to."""
        return {segment for segment, _ in self.manifest.segments}
