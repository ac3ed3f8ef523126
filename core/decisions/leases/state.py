"""State of all leases on one GPU, of its memory and of waiting leases, and the effects so far. Pure."""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import structs

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases import gate
from dormouse.core.decisions.leases.held import (
    NEXT,
    AttachedInstance,
    HeldLease,
    HeldPreload,
    LeaseState,
    RuntimeBooks,
    kv_owner,
)
from dormouse.core.decisions.leases.metering import KV, LeaseMeter
from dormouse.core.decisions.memory.holdings import OwnerGroup
from dormouse.core.decisions.memory.pools.protocol import Pool, PoolChange
from dormouse.core.decisions.memory.quotas import MemoryQuotas, missing
from dormouse.core.decisions.memory.residency import Residency
from dormouse.schemas import messages as m

ROOM_S: Final = 0.02
"""Time that making room takes, until it was measured: a step, after which a runtime receives the request."""

SMOOTHING: Final = 0.2
"""Weight of the newest time that it took."""


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
        self.unknown: tuple[int, float] | None = None  # a serial that waits for a version of its model, and since when
        self.offload = offload  # as in schemas/policy.py
        self.worth: Mapping[str, float] = {}  # of a byte of each model here, as last reported
        self.room_s = ROOM_S
        self.asked_s: float | None = None  # since when others are to make room
        self.share, self.turns, self.turn_s, self.seat_idle_s = share, turns, turn_s, seat_idle_s
        self.drains = False  # no seat is kept that rests
        self.preload: HeldPreload | None = None
        self.preloads = itertools.count(-1, -1)  # their serials
        self.tickets = itertools.count(2, 2)  # of write-backs; the odd ones are questions of wakes
        self.use = e.Use()
        self.limit_nbytes = -1  # activations' limit, as last sent to the device
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
        """Whether only adapters have it: a runtime gets their places with each seat, and nothing else reads
        them.
        """
        return all(self.adapted(name) for name in self.residency.sharers(segment))

    def tell(self, lease: HeldLease, message: o.ForRuntime) -> None:
        """Sends a message to its runtime."""
        self.emit(o.ToRuntimeOf(lease.serial, lease.instance, lease.runtime, message))

    def end_turn(self, lease: HeldLease) -> None:
        """None of its runtime begins before TurnGivenBack, which is then sent for this one."""
        self.runtimes[lease.runtime].owes = True
        self.tell(lease, m.TurnEnds())

    def _tenant(self, instance: str) -> str:
        known = self.instances.get(instance)
        return "" if known is None else known.tenant

    def worth_here(self, worth: Mapping[str, float], coming: str) -> Mapping[str, float]:
        """Worths with tenants' quotas applied: models over quota, this one included, go first."""
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
        """So many bytes are used beside the pool after an action of this lease."""
        before, self.use = self.use, use
        if use.now == before.now:
            return  # whichever lease has made the rest
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
        """A seat can be left that could not be before: the compute thread, or a runtime, may be waiting for that."""
        self.left_seat = True
        self.look_again = self.relieving is not None

    def room(self) -> None:
        """A seat has been left: the compute thread, or a runtime, may be waiting for that."""
        self.left_seat = True
        if self.asked_s is not None:
            self.room_s += SMOOTHING * (self.now_s - self.asked_s - self.room_s)
            self.asked_s = None
        if self.relieving is not None:
            self.left = self.look_again = True

    def asks(self) -> None:
        """Other leases are to make room: the time until some is there is measured."""
        if self.asked_s is None:
            self.asked_s = self.now_s

    def stats(self) -> m.PoolStats:
        """Memory of the pool by use."""
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
        """The newest manifest is the current one from now on; segments in no manifest and no seat are dropped."""
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
        """Brings the device to the state of the books. Evicted or moved segments are unreachable afterwards."""
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
        """Not all of its model is at the places known to the compute thread."""
        if (instance := self.instances.get(name)) is not None:
            instance.bound = False

    def press(self, seated: bool = False) -> None:
        self.emit(m.Pressed(resident=self.residency.changed(), stats=self.stats(), seated=seated))

    def drop(self, segments: Iterable[int]) -> None:
        self.arrange(self.residency.forget(segments))
