"""Decides what is on a GPU: which segments are resident, who shares them, what a wake evicts and what it must copy.

Pure bookkeeping over one pool: no bytes move here, and nothing knows of torch; only the executor's thread uses it. What
a seat holds stays where it is until the seat is left. A segment that is pinned for another GPU, which reads it, stays
where it is and as it is until it is let go, even when nobody here has it in a manifest any more.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from dormouse.core.freelist import aligned
from dormouse.gpuserver.lease.wake_plan import ModelLayout, ModelTooLarge, SeatedModel, WakePlan
from dormouse.gpuserver.pools.protocol import Pool, PoolChange, PoolFull
from dormouse.schemas.messages import Manifest, PoolStats


class Residency:
    """The books of one GPU. Models are known by the manifests of all instances of the node, attached here or not.

    Args:
        pool: empty books of the device's memory.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.capacity = pool.capacity
        self.moved_nbytes = 0
        self._models: dict[str, ModelLayout] = {}  # by instance
        self._sharers: dict[int, set[str]] = {}  # by segment
        self._pins: Counter[int] = Counter()
        self._doomed: set[int] = set()  # pinned, and to be dropped when it is let go
        self._arriving: set[int] = set()  # resident in the books, but not yet, or not yet there, in memory
        self._seats: dict[str, SeatedModel] = {}  # by instance
        self._claims = itertools.count(-1, -1)  # numbers of what is written in place
        self._changed: set[str] = set()  # instances whose share of the pool is not what was last reported

    # --- models

    def learn(self, manifest: Manifest) -> list[int]:
        """The newest manifest of an instance; returns the segments that it had before."""
        before = self._unlearn(manifest.instance)
        model = self._models[manifest.instance] = ModelLayout(manifest.segments)
        for segment in model.nbytes:
            self._sharers.setdefault(segment, set()).add(manifest.instance)
        self._changed.add(manifest.instance)
        return before

    def unlearn(self, instance: str) -> list[int]:
        """The instance has no model any more; returns the segments that it had."""
        self._changed.discard(instance)
        return self._unlearn(instance)

    def _unlearn(self, instance: str) -> list[int]:
        model = self._models.pop(instance, None)
        if model is None:
            return []
        for segment in model.nbytes:
            sharers = self._sharers[segment]
            sharers.discard(instance)
            if not sharers:
                del self._sharers[segment]
        return list(model.nbytes)

    def sharers(self, segment: int) -> set[str]:
        """Instances that have this segment in their newest manifest."""
        return self._sharers.get(segment, set())

    # --- wakes

    def wake(
        self,
        instance: str,
        worth: Mapping[str, float],
        nbytes_s: float,
        *,
        tenant: str = "",
        reserve_nbytes: int = 0,
        wish_nbytes: int = 0,
        alone: bool = True,
    ) -> WakePlan:
        """Give ``instance`` a seat: make room for all of its segments, and keep them here until it leaves.

        A resident segment costs what bringing it back would (Tangram §3.2.2, Eq. 2): its bytes over the bandwidth,
        times the worth of all who share it. Segments of the instance itself are evicted only if nothing else helps.

        Args:
            worth: by instance, probability of use times sensitivity; missing ones are worth nothing.
            nbytes_s: bandwidth of the source that would bring a segment back.
            reserve_nbytes: device memory outside the pool that counts against its capacity (activations).
            wish_nbytes: what is to be left free beside that if it can be had.
            alone: no other seat could be left to make room: then its own segments may make room for each other.

        Raises:
            ModelTooLarge: beside what others' seats hold there is no room; it has no seat.
        """
        assert instance not in self._seats, f"{instance} has a seat"
        seat = SeatedModel(self._models.get(instance) or ModelLayout([]))
        model, pool = seat.model, self.pool
        missing = [need for need in model.needs if need[0] not in pool]
        wake = WakePlan()
        if not missing and pool.free_nbytes >= reserve_nbytes + wish_nbytes:  # the most frequent by far
            self._seats[instance] = seat
            return wake
        self._refuse_too_large(model, reserve_nbytes)
        place = partial(pool.place, cost=self._cost(worth, nbytes_s), fixed=_Fixed(self, model), tenant=tenant)
        plan = self._try(place, missing, reserve_nbytes + wish_nbytes) or self._try(place, missing, reserve_nbytes)
        if plan is None and not alone:
            raise ModelTooLarge("others' seats leave no room", PoolChange())
        if plan is None:  # our own segments may be in the way of each other: begin anew
            loose = [segment for segment in model.nbytes if not self.held(segment)]
            wake.plans.append(self._forget(loose))
            pool.forget(loose)  # and the addresses, which may be spread over more granules than there are
            missing = [need for need in model.needs if need[0] not in pool]
            try:
                plan = place(missing, reserve_nbytes=reserve_nbytes)
            except PoolFull as error:
                text = f"{error}; run it again, or raise gpu.memory in the configuration"
                raise ModelTooLarge(text, wake.plans[0]) from error
        wake.plans.append(plan)
        self.moved_nbytes += plan.moved_nbytes
        for segment in plan.evicted:
            self._touch(segment)
        self._arriving.difference_update(plan.evicted)
        self._arriving.update(move.segment for move in plan.moves)
        for segment, nbytes in missing:
            self._arriving.add(segment)
            self._touch(segment)  # what comes for one comes for all who share it
            wake.missing.append((segment, pool.offset(segment), nbytes))
        self._seats[instance] = seat
        return wake

    @staticmethod
    def _try(
        place: Callable[..., PoolChange], missing: list[tuple[int, int]], reserve_nbytes: int
    ) -> PoolChange | None:
        try:
            return place(missing, reserve_nbytes=reserve_nbytes)
        except PoolFull:
            return None

    def _refuse_too_large(self, model: ModelLayout, reserve_nbytes: int) -> None:
        needed = model.needs_nbytes
        if needed > self.capacity - reserve_nbytes:
            raise ModelTooLarge(
                f"the model needs {needed:,} bytes of GPU memory; this GPU has {self.capacity:,}"
                + (f", of which {reserve_nbytes:,} are in use for activations" if reserve_nbytes else "")
                + ": use a smaller model or data type, or raise gpu.memory in the node's configuration",
                PoolChange(),
            )

    def _cost(self, worth: Mapping[str, float], nbytes_s: float) -> Callable[[int], float]:
        def cost(segment: int) -> float:
            total = sum(worth.get(instance, 0.0) for instance in self._sharers.get(segment, ()))
            return total * self.pool.nbytes(segment) / nbytes_s

        return cost

    def seated(self, instance: str) -> bool:
        return instance in self._seats

    def held(self, segment: int) -> bool:
        """Whether it is part of a seat."""
        return any(seat.holds(segment) for seat in self._seats.values())

    def leave(self, instance: str) -> list[int]:
        """Its seat is given up. Returns what it held."""
        seat = self._seats.pop(instance, None)
        return [] if seat is None else [*seat.model.nbytes, *seat.claimed]

    def coming(self, instance: str) -> bool:
        """Whether some of its model is on its way for others."""
        model = self._models.get(instance)
        return model is not None and not self._arriving.isdisjoint(model.nbytes)

    def places(self, instance: str) -> dict[int, tuple[int, int]]:
        """``(offset, nbytes)`` of each segment of its seat."""
        pool, model = self.pool, self._seats[instance].model
        return {segment: (pool.offset(segment), nbytes) for segment, nbytes in model.needs}

    def arrived(self, segment: int) -> None:
        """Its bytes are there, and where the books say: others may read them."""
        self._arriving.discard(segment)

    # --- changes

    def claim(self, instance: str, segment: int, tenant: str = "") -> int | None:
        """A command of ``instance`` is about to write the segment in place: the number that its bytes have from now on,
        as they are that segment's no more; to be renamed or dropped at the end of the lease. None if somebody else has
        it or reads it, or gets its memory as it is.
        """
        if segment not in self.pool or self.sharers(segment) != {instance} or self._pins[segment]:
            return None
        if sum(seat.holds(segment) for seat in self._seats.values()) > 1:  # of an older version, maybe
            return None
        if self.pool.owner(segment) not in (None, tenant):
            return None
        claimed = next(self._claims)
        self.pool.rename(segment, claimed)
        self._seats[instance].claimed[claimed] = segment
        self._arriving.discard(segment)
        self._touch(segment)
        return claimed

    def rename(self, claimed: int, segment: int) -> None:
        """What was claimed is a new segment; its bytes stay where they are."""
        self.pool.rename(claimed, segment)
        for seat in self._seats.values():
            if claimed in seat.claimed:
                seat.claimed[segment] = seat.claimed.pop(claimed)
        self._touch(segment)

    def adopt(
        self, instance: str, segment: int, nbytes: int, reserve_nbytes: int, tenant: str = ""
    ) -> PoolChange | None:
        """Room for a segment whose bytes are on the device already, if there is some without evicting anything. It has
        not :meth:`arrived` before they are copied there; until the instance's seat is left, it is part of that.
        """
        plan = self.pool.adopt(segment, nbytes, reserve_nbytes=reserve_nbytes, tenant=tenant)
        if plan is not None:
            self._arriving.add(segment)
            self._seats[instance].claimed[segment] = segment
            self._touch(segment)
        return plan

    def forget(self, segments: Iterable[int]) -> PoolChange:
        """Drop these, also from a seat; what is pinned is dropped when it is let go."""
        return self._forget(segments)

    def _forget(self, segments: Iterable[int]) -> PoolChange:
        gone = []
        for segment in segments:
            if segment not in self.pool:
                continue
            if self._pins[segment]:
                self._doomed.add(segment)
            else:
                gone.append(segment)
                self._arriving.discard(segment)
                for seat in self._seats.values():
                    seat.claimed.pop(segment, None)
            self._touch(segment)
        return self.pool.drop(gone)

    def retire(self, segments: Iterable[int]) -> PoolChange:
        """Drop those of ``segments`` that are in no manifest and no seat, and the addresses that were kept for them."""
        orphans = [segment for segment in segments if segment not in self._sharers and not self.held(segment)]
        plan = self._forget(orphans)
        self.pool.forget(segment for segment in orphans if segment not in self.pool)
        return plan

    def relieve(self) -> PoolChange:
        """Drop all but what seats hold: an operation is out of memory."""
        loose = [segment for segment in list(self.pool.segments()) if not self.held(segment)]
        return self._forget([segment for segment in loose if not self._pins[segment]])

    @property
    def fixed_nbytes(self) -> int:
        """What :meth:`relieve` would leave."""
        fixed = [segment for segment in self.pool.segments() if self.held(segment) or self._pins[segment]]
        return sum(aligned(self.pool.nbytes(segment)) for segment in fixed)

    # --- other GPUs

    def pin(self, segments: Iterable[int], max_extents: int = sys.maxsize) -> list[tuple[int, list[tuple[int, int]]]]:
        """Those of ``segments`` that are wholly here, with their extents in the exported memory, until those are so
        many.
        """
        found = []
        for segment in segments:
            if segment in self.pool and segment not in self._arriving and segment not in self._doomed:
                spans = self.pool.extents(segment)
                max_extents -= len(spans)
                if max_extents < 0:
                    break
                self._pins[segment] += 1
                found.append((segment, [(span.offset, span.nbytes) for span in spans]))
        return found

    def let_go(self, segments: Iterable[int]) -> list[int]:
        """Undo :meth:`pin`; returns what is to be forgotten now."""
        ready = []
        for segment in segments:
            self._pins[segment] -= 1
            if self._pins[segment] <= 0:
                del self._pins[segment]
                if segment in self._doomed:
                    self._doomed.discard(segment)
                    ready.append(segment)
        return ready

    # --- numbers

    def stats(self, activation_nbytes: int) -> PoolStats:
        """What the memory is used for, with so much of it in activations."""
        pool = self.pool
        activations = min(activation_nbytes, pool.free_nbytes)
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
        """What is not there for activations."""
        return self.pool.used_nbytes + self.pool.lost_nbytes

    def resident_nbytes(self, instance: str) -> int:
        """Bytes of the instance's newest manifest that are here."""
        model = self._models.get(instance)
        return 0 if model is None else sum(nbytes for segment, nbytes in model.needs if segment in self.pool)

    def changed(self) -> list[tuple[str, int]]:
        """Instances whose resident bytes may have changed since the last call, with what they are now."""
        names, self._changed = self._changed, set()
        return [(name, self.resident_nbytes(name)) for name in sorted(names) if name in self._models]

    def _touch(self, segment: int) -> None:
        self._changed |= self._sharers.get(segment, set())

    def check(self) -> None:
        """Assert that the books agree with each other and with the pool."""
        self.pool.check()
        resident = set(self.pool.segments())
        assert self._doomed <= set(self._pins) <= resident
        assert self._arriving <= resident
        assert {claimed for seat in self._seats.values() for claimed in seat.claimed} <= resident
        for segment, sharers in self._sharers.items():
            assert sharers == {name for name, model in self._models.items() if segment in model.nbytes}


class _Fixed:
    """What a wake neither evicts nor moves: the model's own, what seats hold, what other GPUs read."""

    def __init__(self, residency: Residency, model: ModelLayout) -> None:
        self._residency, self._model = residency, model

    def __contains__(self, segment: object) -> bool:
        residency = self._residency
        assert isinstance(segment, int)
        return segment in self._model.nbytes or segment in residency._pins or residency.held(segment)
