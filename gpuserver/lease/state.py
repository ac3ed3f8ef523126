"""What is known of the leases on one GPU: their states, seats and turns, the instances and their models; plain data,
and the effects so far. Pure.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from msgspec import structs

from dormouse.core.holdings import OwnerGroup
from dormouse.core.memory.pools.protocol import Pool, PoolChange
from dormouse.core.memory.quotas import MemoryQuotas, missing
from dormouse.core.memory.residency import Residency
from dormouse.gpuserver.lease import effects as o
from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease import gate
from dormouse.gpuserver.lease.metering import KV, LeaseMeter
from dormouse.gpuserver.lease.wake import Sources
from dormouse.schemas import messages as m


class LeaseState(Enum):
    RUNNING = "running"  # seat and turn
    YIELDING = "yielding"  # its last frames run, then it has no turn
    PAUSED = "paused"  # a seat, no turn
    LEAVING = "leaving"  # its memory is copied to the host: others need the room
    AWAY = "away"  # no seat
    ENDING = "ending"  # what it has made is written back
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

ROOM_S: Final = 0.02
"""What making room takes, until it was seen: a step, after which a runtime hears that it is asked."""

SMOOTHING: Final = 0.2
"""Weight of the newest time that it took."""

GOING: Final = (LeaseState.LEAVING, LeaseState.ENDING, LeaseState.CLOSING)
"""Whose seat can be had in a moment."""


@dataclass(slots=True)
class Writing:
    """Storages that lie, or will lie, at places of the store: for the write-back of an END, or because their lease
    leaves its seat.
    """

    ticket: int
    ended: e.Ended | None  # None: it has left
    storages: list[int]  # in the order of AskPlace
    places: list[m.Place] | None = None
    committed: bool = False  # Written was said: nothing but the new manifest ends it


@dataclass(slots=True)
class HeldLease:
    """A lease in progress."""

    wake: m.Wake
    state: LeaseState = LeaseState.RUNNING
    begun: bool = False  # the compute thread knows of it
    frames: int = 0  # given to the compute thread, not executed
    used: bool = False  # there was a frame
    ran: bool = False  # and one has been executed
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
    idle: bool = False  # the controller was told so
    wants: bool = False  # the controller was told that it wants a turn
    runtime: str = ""  # the one that computes for it, in steps (runtimes.py); "": the compute thread does
    vacated: bool = False  # of those: nothing of the pool is mapped there for it
    seated_s: float = 0.0  # since when it has its seat
    parts: bool = False  # its runtime goes on without it, and lets go of what nobody else there has
    rests_s: float | None = None  # since when its runtime has no sequence of it, as far as that has said

    @property
    def serial(self) -> int:
        return self.wake.lease.serial

    @property
    def instance(self) -> str:
        return self.wake.instance


def kv_owner(runtime: str) -> str:
    """Whose memory a runtime's KV is."""
    return f"kv of {runtime}"


@dataclass(slots=True)
class RuntimeBooks:
    """A runtime that has leases. Its KV is one memory, whichever of them it is for."""

    name: str
    wanting: bool = False  # it has something to compute, and no turn
    due: m.StepsDue | None = None  # what that is
    rests: bool = False  # it has no sequence, as far as it has said
    running: int = 0  # sequences that it had then
    kv_wanted: m.KvWanted | None = None  # for which others make room
    kv_idle: m.IdleKv = NO_IDLE_KV  # what it could give back
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
        """Whose memory KV is. No other ever gets it without its being cleared."""
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

    @property
    def segments(self) -> set[int]:
        """Of the model that it is bound to."""
        return {segment for segment, _ in self.manifest.segments}


class MachineState:
    """See the module; `Machine` has the arguments."""

    def __init__(
        self,
        pool: Pool,
        share: bool,
        turns: int,
        turn_s: float,
        seat_idle_s: float,
        offload: str = "asked",
        quotas: Mapping[str, int] | None = None,
    ) -> None:
        self.residency = Residency(pool)
        self.quotas = MemoryQuotas(quotas or {}, self._tenant)
        self.meter = LeaseMeter(self.residency, self._kv_users)
        self.gate = gate.FrameGate()
        self.leases: dict[int, HeldLease] = {}  # by serial
        self.runtimes: dict[str, RuntimeBooks] = {}  # those that have leases, by name
        self.instances: dict[str, AttachedInstance] = {}  # attached
        self.manifests: dict[str, m.Manifest] = {}  # the newest, also of instances that are not attached
        self.coming: deque[e.WakeAsked | int] = deque()  # that wait for a turn: new leases, and serials of others
        self.offload = offload  # as in schemas/policy.py
        self.worth: Mapping[str, float] = {}  # of a byte of each model here, as it was told last
        self.room_s = ROOM_S
        self.asked_s: float | None = None  # since when others are to make room
        self.share, self.turns, self.turn_s, self.seat_idle_s = share, turns, turn_s, seat_idle_s
        self.preload: HeldPreload | None = None
        self.preloads = itertools.count(-1, -1)  # their serials
        self.tickets = itertools.count(2, 2)  # of write-backs; the odd ones are questions of wakes
        self.use = e.Use()
        self.limit_nbytes = -1  # what activations may have, as far as the device was told
        self.relieving: e.Relieve | None = None  # the compute thread waits until a seat has been left
        self.left = False  # one has been left for that
        self.look_again = False  # just now
        self.left_seat = False  # some lease has left its seat, just now
        self.ordinary_s = -math.inf  # when an ordinary function's lease has last begun or ended
        self.now_s = 0.0
        self.out: list[o.Effect] = []

    def emit(self, effect: o.Effect) -> None:
        self.out.append(effect)

    def members(self, runtime: str) -> list[HeldLease]:
        """The leases that a runtime computes for."""
        return [lease for lease in self.leases.values() if lease.runtime == runtime]

    def computing(self, runtime: str) -> bool:
        """Whether one of its leases has a turn."""
        return any(lease.state is LeaseState.RUNNING for lease in self.members(runtime))

    def adapted(self, name: str) -> bool:
        """Whether an attached instance has an adapter."""
        return (instance := self.instances.get(name)) is not None and instance.adapter

    def roams(self, segment: int) -> bool:
        """Whether only adapters have it: a runtime is told where they are with each seat, and nothing else reads
        them.
        """
        return all(self.adapted(name) for name in self.residency.sharers(segment))

    def tell(self, lease: HeldLease, message: o.ForRuntime) -> None:
        """Its runtime."""
        self.emit(o.ToRuntimeOf(lease.serial, lease.instance, lease.runtime, message))

    def end_turn(self, lease: HeldLease) -> None:
        """None of its runtime begins before TurnGivenBack, which is then said of this one."""
        self.runtimes[lease.runtime].owes = True
        self.tell(lease, m.TurnEnds())

    def _tenant(self, instance: str) -> str:
        known = self.instances.get(instance)
        return "" if known is None else known.tenant

    def worth_here(self, worth: Mapping[str, float], coming: str) -> Mapping[str, float]:
        """What tenants have beyond their quotas, with this model, goes first."""
        if not self.quotas:
            return worth
        kv: Counter[str] = Counter()
        for name in self.runtimes:
            owner = kv_owner(name)
            users = self._kv_users(owner)
            if users:
                kv[self._tenant(users[0])] += self.meter.nbytes(OwnerGroup.of(KV, (owner,)))
        held = Counter(dict(self.meter.models()))
        if self.quotas.limits(coming):
            held.update(missing(self.residency, coming))
        return self.quotas.adjusted(worth, held, kv, coming)

    def _kv_users(self, owner: str) -> list[str]:
        return [lease.instance for lease in self.leases.values() if lease.runtime and kv_owner(lease.runtime) == owner]

    def used(self, use: e.Use, serial: int) -> None:
        """So much is used beside the pool after something that this lease has done."""
        before, self.use = self.use, use
        if use.now == before.now:
            return  # whoever has made what is there
        others = [lease.instance for lease in self.leases.values() if not lease.runtime]
        if (lease := self.leases.get(serial)) is not None:
            self.meter.activations(lease.instance, use.now, others)

    def kv(self, runtime: RuntimeBooks) -> list[int]:
        """Extents that it has."""
        owner = runtime.kv_owner
        return list(self.residency.claimed(owner)) if self.residency.seated(owner) else []

    def refuse(self, actions: Sequence[gate.Refuse]) -> None:
        """Tell instances that their frames come too late."""
        for action in actions:
            self.emit(o.Reply(action.instance, gate.refusal(action.serial, action.reason)))

    def look(self) -> None:
        """A seat can be left that could not be: the compute thread, or a runtime, may be waiting for that."""
        self.left_seat = True
        self.look_again = self.relieving is not None

    def room(self) -> None:
        """A seat has been left: that is what the compute thread, or a runtime, may be waiting for."""
        self.left_seat = True
        if self.asked_s is not None:
            self.room_s += SMOOTHING * (self.now_s - self.asked_s - self.room_s)
            self.asked_s = None
        if self.relieving is not None:
            self.left = self.look_again = True

    def asks(self) -> None:
        """Somebody is to make room: how long that takes is the time until some is there."""
        if self.asked_s is None:
            self.asked_s = self.now_s

    def stats(self) -> m.PoolStats:
        """What the memory is used for."""
        self.meter.sync(self.now_s)
        stats, kv_nbytes = self.residency.stats(self.activations), self.meter.kv_nbytes
        return structs.replace(stats, weights_nbytes=stats.weights_nbytes - kv_nbytes, kv_nbytes=kv_nbytes)

    @property
    def activations(self) -> int:
        """Bytes of activations that the pool cannot have."""
        return self.use.now if self.share else 0

    def to(self, lease: HeldLease, state: LeaseState) -> None:
        assert state in NEXT[lease.state], f"lease {lease.serial}: {lease.state.value} -> {state.value}"
        lease.state = state

    def adopt(self, name: str) -> None:
        """The newest manifest is the one from now on; what no manifest and no seat has any more goes."""
        instance = self.instances.get(name)
        if instance is None or (newest := self.newest(instance)) is instance.manifest:
            return
        before, instance.manifest, instance.bound = instance.manifest, newest, False
        self.emit(o.Adopt(newest))
        self.arrange(self.residency.retire(segment for segment, _ in before.segments))

    def newest(self, instance: AttachedInstance) -> m.Manifest:
        """The newest manifest that the store has sent; an empty one if the store has dropped the instance."""
        known = instance.manifest
        if (newest := self.manifests.get(known.instance)) is not None:
            return newest
        if not known.entries:
            return known
        return m.Manifest(instance=known.instance, version=known.version, entries=[], segments=[])

    def arrange(self, *plans: PoolChange, serial: int = 0) -> None:
        """Have the device made as the books say. Nothing of what is evicted or moved can be reached afterwards."""
        changed = [plan for plan in plans if plan.evicted or plan.moves or plan.freed or plan.unmapped or plan.mapped]
        limit_nbytes = self.residency.capacity - self.residency.occupied_nbytes
        if not changed and limit_nbytes == self.limit_nbytes:
            return
        self.limit_nbytes = limit_nbytes
        for plan in changed:
            for segment in itertools.chain(plan.evicted, (move.segment for move in plan.moves)):
                for name in self.residency.sharers(segment):
                    self.moved_away(name)
        self.emit(o.Arrange(changed, limit_nbytes, serial))

    def moved_away(self, name: str) -> None:
        """Not all of its model is where the compute thread knows it."""
        if (instance := self.instances.get(name)) is not None:
            instance.bound = False

    def press(self, seated: bool = False) -> None:
        self.emit(m.Pressed(resident=self.residency.changed(), stats=self.stats(), seated=seated))

    def drop(self, segments: Iterable[int]) -> None:
        self.arrange(self.residency.forget(segments))
