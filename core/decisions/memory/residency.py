"""Decides which segments are resident on a GPU, which instances share them, which of them a wake evicts and which it
must copy.

Pure bookkeeping over one pool: no bytes move here, and nothing depends on torch; only the executor's thread uses it.
Segments of a seat stay in place until the seat is left. A segment that is pinned for another GPU, which reads it, stays
in place and unchanged until it is let go, even when it is in no manifest here any more (seats.py).
"""

import itertools
import sys
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from functools import partial

from dormouse.core.decisions.memory.changes import Changes
from dormouse.core.decisions.memory.eviction_cost import WakeEvictionCost
from dormouse.core.decisions.memory.freelist import aligned
from dormouse.core.decisions.memory.models import KnownModels, ModelLayout
from dormouse.core.decisions.memory.pools.protocol import Pool, PoolChange, PoolFull
from dormouse.core.decisions.memory.seats import Seats
from dormouse.core.decisions.memory.wake_plan import ModelTooLarge, SeatedModel, WakePlan, refuse_too_large
from dormouse.schemas.messages import PoolStats


class Residency:
    """The books of one GPU.

    Args:
        pool: empty books of the device's memory.
        models: those of all instances of the node, attached here or not; a table of its own if there is none.
    """

    def __init__(self, pool: Pool, models: KnownModels | None = None) -> None:
        self.pool = pool
        self.models = models or KnownModels()
        self.capacity = pool.capacity
        self.moved_nbytes = 0
        self._arriving: set[int] = set()  # they have a place, and not all of their bytes are there
        self.seats = Seats()
        self._claims = itertools.count(-1, -1)  # numbers of segments that are written in place
        self.changes = Changes(self.models)

    # --- models

    def learn(self, instance: str, needs: Iterable[tuple[int, int]]) -> list[int]:
        """An instance's newest model: ``(segment, nbytes)``, first use first. Returns the segments that it had."""
        self.changes.instances.add(instance)
        model = ModelLayout(needs)
        before = self.models.learn(instance, model)
        self.changes.note((*before, *model.nbytes))
        return before

    def unlearn(self, instance: str) -> list[int]:
        """The instance has no model any more. Returns the segments that it had."""
        self.changes.instances.discard(instance)
        before = self.models.forget(instance)
        self.changes.note(before)
        return before

    def sharers(self, segment: int) -> Collection[str]:
        """Instances that have this segment in their newest model."""
        return self.models.sharers.get(segment, ())

    # --- wakes

    def wake(
        self,
        instance: str,
        worth: Callable[[], Mapping[str, float]],
        nbytes_s: float,
        *,
        tenant: str = "",
        reserve_nbytes: int = 0,
        wish_nbytes: int = 0,
        alone: bool = True,
        roams: Callable[[int], bool] = lambda segment: False,
    ) -> WakePlan:
        """Give ``instance`` a seat: make room for all of its segments, and keep them here until it leaves.

        The cheapest of others' segments leave (`WakeEvictionCost`). Segments of the instance itself are evicted only
        if nothing else helps.

        Args:
            worth, nbytes_s: see `WakeEvictionCost`.
            reserve_nbytes: device memory outside the pool that counts against its capacity (activations).
            wish_nbytes: bytes to remain free beside that if possible.
            alone: no other seat could be left to make room: then its own segments may make room for each other.
            roams: whether a segment needs no address that it has had (`Pool.place`).

        Raises:
            ModelTooLarge: beside others' seats there is no room; it has no seat.
        """
        assert not self.seated(instance), f"{instance} has a seat"
        seat = SeatedModel(self.models.by_instance.get(instance) or ModelLayout(()))
        model, pool, resident = seat.model, self.pool, self.pool.segments()
        missing: list[tuple[int, int]] = []
        if not model.nbytes.keys() <= resident:
            missing = [need for need in model.needs if need[0] not in resident]
        wake = WakePlan()
        if not missing and pool.free_nbytes >= reserve_nbytes + wish_nbytes:  # the most frequent by far
            self.seats.by_owner[instance] = seat
            self.changes.note((), instance)
            return wake
        refuse_too_large(model, self.capacity, reserve_nbytes)
        cost = WakeEvictionCost(self.models, worth, nbytes_s, pool.nbytes)
        fixed = self.seats.kept()
        fixed.update(model.nbytes)
        roaming = {segment for segment, _ in missing if roams(segment)}
        place = partial(pool.place, cost=cost, fixed=fixed, tenant=tenant, roaming=roaming)
        plan = None
        for reserve in (reserve_nbytes + wish_nbytes, reserve_nbytes) if wish_nbytes else (reserve_nbytes,):
            try:
                plan = place(missing, reserve_nbytes=reserve)
                break
            except PoolFull:
                continue
        if plan is None and not alone:
            raise ModelTooLarge("others' seats leave no room", PoolChange())
        if plan is None:  # our own segments may be in the way of each other: begin anew
            loose = [segment for segment in model.nbytes if not self.seats.held(segment)]
            wake.plans.append(self.forget(loose))
            pool.forget(loose)  # and the addresses, which may be spread over more granules than there are
            missing = [need for need in model.needs if need[0] not in resident]
            try:
                plan = place(missing, reserve_nbytes=reserve_nbytes)
            except PoolFull as error:
                text = f"{error}; run it again, or raise gpu.memory in the configuration"
                raise ModelTooLarge(text, wake.plans[0]) from error
        self.take(instance, seat, plan, missing, wake)
        return wake

    def take(
        self, owner: str, seat: SeatedModel, plan: PoolChange, missing: Iterable[tuple[int, int]], wake: WakePlan
    ) -> None:
        """A seat that has got its places."""
        wake.plans.append(plan)
        placed = plan.placed
        self._arriving.difference_update(plan.evicted)
        self._arriving.update(placed)
        if plan.moves:
            self.moved_nbytes += plan.moved_nbytes
            self._arriving.update([move.segment for move in plan.moves])
        self.changes.touch(plan.evicted)
        self.changes.touch(placed)  # bytes that come for one instance come for all that share them
        wake.missing = [(segment, placed[segment], nbytes) for segment, nbytes in missing]
        self.seats.by_owner[owner] = seat
        self.changes.note((), owner)

    def missing_nbytes(self, instance: str) -> int:
        """Bytes that a wake of it would bring."""
        model = self.models.by_instance.get(instance)
        return 0 if model is None else model.needs_nbytes - self.resident_nbytes(instance)

    def seated(self, instance: str) -> bool:
        return instance in self.seats.by_owner

    def holders(self, segment: int) -> Collection[str]:
        """Instances that have this in their newest model; if there are none, those whose seats hold it."""
        return self.sharers(segment) or self.seats.holders(segment)

    def leave(self, instance: str) -> list[int]:
        """Its seat is given up. Returns the seat's segments."""
        self.changes.note((), instance)
        return self.seats.leave(instance)

    def coming(self, instance: str) -> bool:
        """Whether some of its model is on its way for others."""
        model = self.models.by_instance.get(instance)
        return model is not None and not self._arriving.isdisjoint(model.nbytes)

    def places(self, instance: str) -> dict[int, tuple[int, int]]:
        """``(offset, nbytes)`` of each segment of its seat."""
        pool, model = self.pool, self.seats.by_owner[instance].model
        return {segment: (pool.offset(segment), nbytes) for segment, nbytes in model.needs}

    def arriving(self, segment: int) -> bool:
        """Whether some of its bytes are not here yet."""
        return segment in self._arriving

    def claimed(self, instance: str) -> Collection[int]:
        """Segments that only its seat has: those written in place, and KV."""
        return self.seats.by_owner[instance].claimed.keys()

    def arrived(self, segment: int) -> None:
        """Its bytes are at its place in the books: others may read them."""
        self._arriving.discard(segment)

    # --- changes

    def claim(self, instance: str, segment: int, tenant: str = "") -> int | None:
        """A command of ``instance`` is about to write the segment in place. Returns the number of its bytes from now
        on, as they are that segment's no more; to be renamed or dropped at the end of the lease. Returns None if
        another instance has it or reads it, or gets its memory as it is.
        """
        if segment not in self.pool or self.sharers(segment) != {instance} or self.seats.pinned(segment):
            return None
        if len(self.seats.holders(segment)) > 1:  # of an older version, maybe
            return None
        if self.pool.owner(segment) not in (None, tenant):
            return None
        claimed = next(self._claims)
        self.pool.rename(segment, claimed)
        self.seats.by_owner[instance].claimed[claimed] = segment
        self.changes.note((claimed,))
        self._arriving.discard(segment)
        self.changes.touch((segment,))
        return claimed

    def grow(
        self,
        instance: str,
        count: int,
        nbytes: int,
        worth: Callable[[], Mapping[str, float]],
        nbytes_s: float,
        *,
        owner: str,
        reserve_nbytes: int = 0,
        evict: bool = True,
    ) -> tuple[list[int], PoolChange] | None:
        """Makes room for so many segments of ``nbytes`` that only this seat has (KV), which need not have a model: the
        cheapest unused segments leave for them, as for a wake; with ``evict`` False, none do. Returns None if there is
        no room. ``owner`` names the owner of the memory, for clearing.
        """
        fixed: Container[int] = self.seats.kept() if evict else self.pool.segments()
        cost = WakeEvictionCost(self.models, worth, nbytes_s, self.pool.nbytes)
        numbers = list(itertools.islice(self._claims, count))
        needs = [(number, nbytes) for number in numbers]
        try:
            plan = self.pool.place(needs, cost=cost, fixed=fixed, reserve_nbytes=reserve_nbytes, tenant=owner)
        except PoolFull:
            return None
        seat = self.seats.by_owner.get(instance)
        if seat is None:
            seat = self.seats.by_owner[instance] = SeatedModel(ModelLayout(()))
        self.changes.note(numbers)
        seat.claimed.update(zip(numbers, numbers, strict=True))
        if plan.evicted:
            self._arriving.difference_update(plan.evicted)
            self.changes.touch(plan.evicted)
        if plan.moves:
            self.moved_nbytes += plan.moved_nbytes
            self._arriving.update([move.segment for move in plan.moves])
        return numbers, plan

    def rename(self, claimed: int, segment: int) -> None:
        """A claimed segment is a new segment now; its bytes stay where they are."""
        self.pool.rename(claimed, segment)
        self.seats.rename(claimed, segment)
        self.changes.touch((claimed, segment))

    def adopt(
        self, instance: str, segment: int, nbytes: int, reserve_nbytes: int, tenant: str = ""
    ) -> PoolChange | None:
        """Room for a segment whose bytes are on the device already, if there is some without evicting anything. It has
        not :meth:`arrived` before they are copied there; until the instance's seat is left, it is part of that.
        """
        plan = self.pool.adopt(segment, nbytes, reserve_nbytes=reserve_nbytes, tenant=tenant)
        if plan is not None:
            self._arriving.add(segment)
            self.seats.by_owner[instance].claimed[segment] = segment
            self.changes.touch((segment,))
        return plan

    def forget(self, segments: Iterable[int]) -> PoolChange:
        """Drops these, also from a seat; pinned segments are dropped when they are let go."""
        gone, claims = [], []
        for segment in segments:
            if segment not in self.pool:
                continue
            if self.seats.drop(segment):
                gone.append(segment)
                if segment < 0:
                    claims.append(segment)
                self._arriving.discard(segment)
            self.changes.touch((segment,))
        plan = self.pool.drop(gone)
        self.pool.forget(claims)  # a claim never comes back: its address would be lost
        return plan

    def retire(self, segments: Iterable[int]) -> PoolChange:
        """Drop those of ``segments`` that are in no manifest and no seat, and the addresses that were kept for them."""
        orphans = [segment for segment in segments if not self.holders(segment)]
        plan = self.forget(orphans)
        self.pool.forget(segment for segment in orphans if segment not in self.pool)
        return plan

    def alone(self, instances: Collection[str]) -> list[int]:
        """Segments of these instances' models that are here, in no other model, and in no seat."""
        fixed, names = self.seats.kept(), set(instances)
        known = [self.models.by_instance[name] for name in names if name in self.models.by_instance]
        found = {segment for model in known for segment in model.nbytes if segment in self.pool.segments()}
        return sorted(each for each in found if each not in fixed and names.issuperset(self.sharers(each)))

    def relieve(self) -> PoolChange:
        """Drops all but the seats' segments: an operation is out of memory."""
        fixed = self.seats.kept()
        return self.forget([segment for segment in self.pool.segments() if segment not in fixed])

    @property
    def fixed_nbytes(self) -> int:
        """Bytes that would remain after :meth:`relieve`."""
        return sum(aligned(self.pool.nbytes(segment)) for segment in self.seats.kept() if segment in self.pool)

    # --- other GPUs

    def pin(self, segments: Iterable[int], max_extents: int = sys.maxsize) -> list[tuple[int, list[tuple[int, int]]]]:
        """Those of ``segments`` that are wholly here, with their extents in the exported memory, until those are so
        many.
        """
        found = []
        for segment in segments:
            if segment in self.pool and segment not in self._arriving and not self.seats.doomed(segment):
                spans = self.pool.extents(segment)
                max_extents -= len(spans)
                if max_extents < 0:
                    break
                self.seats.pin(segment)
                found.append((segment, [(span.offset, span.nbytes) for span in spans]))
        return found

    def let_go(self, segments: Iterable[int]) -> list[int]:
        """Undo :meth:`pin`; returns the segments to forget now."""
        return self.seats.let_go(segments)

    # --- numbers

    def stats(self, activation_nbytes: int) -> PoolStats:
        """Memory by use, with so much of it in activations. KV is not counted apart."""
        pool, activations = self.pool, min(activation_nbytes, self.pool.free_nbytes)
        return PoolStats(
            weights_nbytes=pool.used_nbytes,
            lost_nbytes=pool.lost_nbytes,
            activation_nbytes=activations,
            free_nbytes=pool.free_nbytes - activations,
            largest_nbytes=min(pool.largest_nbytes, pool.free_nbytes - activations),
            moved_nbytes=self.moved_nbytes,
            segments=len(pool.segments()),
        )

    @property
    def occupied_nbytes(self) -> int:
        """Bytes that activations cannot have."""
        return self.pool.used_nbytes + self.pool.lost_nbytes

    @property
    def instances(self) -> list[str]:
        """Those of whose newest models something is here."""
        return sorted({name for segment in self.pool.segments() for name in self.sharers(segment)})

    def resident_nbytes(self, instance: str) -> int:
        """Bytes of the instance's newest manifest that are here."""
        model, resident = self.models.by_instance.get(instance), self.pool.segments()
        return 0 if model is None else sum([nbytes for segment, nbytes in model.nbytes.items() if segment in resident])

    def changed(self) -> list[tuple[str, int]]:
        """Instances whose resident bytes may have changed since the last call, with these bytes."""
        names, self.changes.instances = self.changes.instances, set()
        return [(name, self.resident_nbytes(name)) for name in sorted(names) if name in self.models.by_instance]

    def check(self) -> None:
        """Asserts that the books agree with each other and with the pool."""
        self.pool.check()
        resident = set(self.pool.segments())
        self.seats.check(resident)
        assert self._arriving <= resident
        self.models.check()
