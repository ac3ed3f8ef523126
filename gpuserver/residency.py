"""Decides what is on a GPU: which segments are resident, who shares them, what a wake evicts and what it must copy.

Pure bookkeeping over one pool: no bytes move here, and nothing knows of torch. Two threads ask: the device thread
wakes, evicts and forgets; the I/O thread pins segments for other GPUs, which read them. A pinned segment stays where it
is and as it is until it is let go, even when nobody here has it in a manifest any more.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from dormouse.core.freelist import aligned
from dormouse.gpuserver.pools.protocol import Plan, Pool, PoolFull
from dormouse.schemas.messages import Manifest, PoolStats


class ModelTooLarge(Exception):
    """The model cannot fit into what this GPU has; the text has the numbers, ``plan`` what has changed nevertheless."""

    def __init__(self, text: str, plan: Plan) -> None:
        super().__init__(text)
        self.plan = plan


@dataclass
class WakePlan:
    """What a wake changed in the books, to be carried out in order: first the plans of the pool."""

    plans: list[Plan] = field(default_factory=list)
    missing: list[tuple[int, int, int]] = field(default_factory=list)  # (segment, offset, nbytes), first use first

    @property
    def copy_nbytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self.missing)


class Residency:
    """The books of one GPU. Models are known by the manifests of all instances of the node, attached here or not.

    Args:
        pool: empty books of the device's memory.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.capacity = pool.capacity
        self.leased: str | None = None
        self.moved_nbytes = 0
        self._lock = threading.RLock()
        self._models: dict[str, dict[int, int]] = {}  # nbytes by segment, by instance
        self._sharers: dict[int, set[str]] = {}  # by segment
        self._pins: Counter[int] = Counter()
        self._doomed: set[int] = set()  # pinned, and to be dropped when it is let go
        self._arriving: set[int] = set()  # resident in the books, but not yet, or not yet there, in memory
        self._written: set[int] = set()  # written in place by the lease
        self._changed: set[str] = set()  # instances whose share of the pool is not what was last reported

    # --- models

    def learn(self, manifest: Manifest) -> None:
        """The newest manifest of an instance."""
        with self._lock:
            self._unlearn(manifest.instance)
            model = self._models[manifest.instance] = dict(manifest.segments)
            for segment in model:
                self._sharers.setdefault(segment, set()).add(manifest.instance)
            self._changed.add(manifest.instance)

    def unlearn(self, instance: str) -> list[int]:
        """The instance has no model any more; returns the segments that it had."""
        with self._lock:
            self._changed.discard(instance)
            return self._unlearn(instance)

    def _unlearn(self, instance: str) -> list[int]:
        model = self._models.pop(instance, {})
        for segment in model:
            sharers = self._sharers[segment]
            sharers.discard(instance)
            if not sharers:
                del self._sharers[segment]
        return list(model)

    def sharers(self, segment: int) -> set[str]:
        """Instances that have this segment in their newest manifest."""
        return self._sharers.get(segment, set())

    # --- wakes

    def wake(
        self,
        instance: str,
        manifest: Manifest,
        worth: Mapping[str, float],
        nbytes_s: float,
        *,
        tenant: str = "",
        reserve_nbytes: int = 0,
        wish_nbytes: int = 0,
    ) -> WakePlan:
        """Lease the pool to ``instance`` and make room for all of its segments.

        A resident segment costs what bringing it back would (Tangram §3.2.2, Eq. 2): its bytes over the bandwidth,
        times the worth of all who share it. Segments of the instance itself are evicted only if nothing else helps.

        Args:
            worth: by instance, probability of use times sensitivity; missing ones are worth nothing.
            nbytes_s: bandwidth of the source that would bring a segment back.
            reserve_nbytes: device memory outside the pool that counts against its capacity (activations).
            wish_nbytes: what is to be left free beside that if it can be had.

        Raises:
            ModelTooLarge: even an otherwise empty pool has no room; nothing is leased.
        """
        assert self.leased is None, f"{self.leased} still holds the lease"
        with self._lock:
            self._refuse_too_large(manifest, reserve_nbytes)
            wake = WakePlan()
            own = {segment for segment, _ in manifest.segments}
            cost = self._cost(worth, nbytes_s)
            fixed = own | self._pins.keys()
            missing = [need for need in manifest.segments if need[0] not in self.pool]
            place = partial(self.pool.place, cost=cost, fixed=fixed, tenant=tenant)
            plan = self._try(place, missing, reserve_nbytes + wish_nbytes) or self._try(place, missing, reserve_nbytes)
            if plan is None:  # our own segments may be in the way of each other: begin anew
                wake.plans.append(self._forget([segment for segment in own if segment in self.pool]))
                self.pool.forget(own)  # and the addresses, which may be spread over more granules than there are
                missing = [need for need in manifest.segments if need[0] not in self.pool]
                try:
                    plan = place(missing, reserve_nbytes=reserve_nbytes)
                except PoolFull as error:
                    text = f"{error}; run it again, or raise gpu.memory in the configuration"
                    raise ModelTooLarge(text, wake.plans[0]) from error
            wake.plans.append(plan)
            self.moved_nbytes += plan.moved_nbytes
            for segment in plan.evicted:
                self._touch(segment)
            self._arriving -= set(plan.evicted)
            self._arriving |= {segment for segment, _ in missing} | {move.segment for move in plan.moves}
            self._changed.add(instance)
            for segment, _ in missing:
                self._touch(segment)  # what comes for one comes for all who share it
            wake.missing = [(segment, self.pool.offset(segment), nbytes) for segment, nbytes in missing]
            self.leased = instance
            return wake

    @staticmethod
    def _try(place: Callable[..., Plan], missing: list[tuple[int, int]], reserve_nbytes: int) -> Plan | None:
        try:
            return place(missing, reserve_nbytes=reserve_nbytes)
        except PoolFull:
            return None

    def _refuse_too_large(self, manifest: Manifest, reserve_nbytes: int) -> None:
        needed = sum(aligned(nbytes) for _, nbytes in manifest.segments)
        if needed > self.capacity - reserve_nbytes:
            raise ModelTooLarge(
                f"the model needs {needed:,} bytes of GPU memory; this GPU has {self.capacity:,}"
                + (f", of which {reserve_nbytes:,} are in use for activations" if reserve_nbytes else "")
                + ": use a smaller model or data type, or raise gpu.memory in the node's configuration",
                Plan(),
            )

    def _cost(self, worth: Mapping[str, float], nbytes_s: float) -> Callable[[int], float]:
        def cost(segment: int) -> float:
            total = sum(worth.get(instance, 0.0) for instance in self._sharers.get(segment, ()))
            return total * self.pool.nbytes(segment) / nbytes_s

        return cost

    def end_lease(self) -> None:
        self.leased = None

    def arrived(self, segment: int) -> None:
        """Its bytes are there, and where the books say: others may read them."""
        with self._lock:
            self._arriving.discard(segment)

    # --- changes

    def may_write(self, instance: str, segment: int, tenant: str = "") -> bool:
        """Whether a command of ``instance`` may write the segment in place: nobody else has it or reads it, nor gets
        its memory as it is. From then on it is not given to others; it is to be renamed or dropped at the end of the
        lease.
        """
        with self._lock:
            if self.sharers(segment) != {instance} or self._pins[segment]:
                return False
            if self.pool.owner(segment) not in (None, tenant):
                return False
            self._written.add(segment)
            return True

    def rename(self, old: int, new: int) -> None:
        """A segment was written in place and has a new id; its bytes stay where they are."""
        with self._lock:
            self.pool.rename(old, new)
            self._written.discard(old)
            self._touch(old)
            self._touch(new)

    def adopt(self, segment: int, nbytes: int, reserve_nbytes: int, tenant: str = "") -> Plan | None:
        """Room for a segment whose bytes are on the device already, if there is some without evicting anything. It has
        not :meth:`arrived` before they are copied there.
        """
        with self._lock:
            plan = self.pool.adopt(segment, nbytes, reserve_nbytes=reserve_nbytes, tenant=tenant)
            if plan is not None:
                self._arriving.add(segment)
                self._touch(segment)
            return plan

    def forget(self, segments: Iterable[int]) -> Plan:
        """Drop these; what is pinned is dropped when it is let go."""
        with self._lock:
            return self._forget(segments)

    def _forget(self, segments: Iterable[int]) -> Plan:
        gone = []
        for segment in segments:
            if segment not in self.pool:
                continue
            if self._pins[segment]:
                self._doomed.add(segment)
            else:
                gone.append(segment)
                self._arriving.discard(segment)
                self._written.discard(segment)
            self._touch(segment)
        return self.pool.drop(gone)

    def retire(self, segments: Iterable[int]) -> Plan:
        """Drop those of ``segments`` that are in nobody's manifest, and the addresses that were kept for them."""
        with self._lock:
            orphans = [segment for segment in segments if segment not in self._sharers]
            plan = self._forget(orphans)
            self.pool.forget(segment for segment in orphans if segment not in self.pool)
            return plan

    def relieve(self, keep: Container[int]) -> Plan:
        """Drop all but ``keep``, which the lease uses: an operation is out of memory."""
        with self._lock:
            return self._forget(
                [segment for segment in list(self.pool.segments()) if segment not in keep and not self._pins[segment]]
            )

    def fixed_nbytes(self, keep: Container[int]) -> int:
        """What :meth:`relieve` would leave."""
        with self._lock:
            fixed = [segment for segment in self.pool.segments() if segment in keep or self._pins[segment]]
            return sum(aligned(self.pool.nbytes(segment)) for segment in fixed)

    # --- other GPUs

    def pin(self, segments: Iterable[int], max_extents: int = sys.maxsize) -> list[tuple[int, list[tuple[int, int]]]]:
        """Those of ``segments`` that are wholly here, with their extents in the exported memory, until those are so
        many. Any thread.
        """
        with self._lock:
            found = []
            for segment in segments:
                ready = segment in self.pool and segment not in self._arriving and segment not in self._written
                if ready and segment not in self._doomed:
                    spans = self.pool.extents(segment)
                    max_extents -= len(spans)
                    if max_extents < 0:
                        break
                    self._pins[segment] += 1
                    found.append((segment, [(span.offset, span.nbytes) for span in spans]))
            return found

    def let_go(self, segments: Iterable[int]) -> list[int]:
        """Undo :meth:`pin`; returns what is to be forgotten now. Any thread."""
        with self._lock:
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
        """What the memory is used for, with so much of it in activations. Any thread."""
        with self._lock:
            pool = self.pool
            activations = min(activation_nbytes, pool.free_nbytes)
            return PoolStats(
                weights_nbytes=pool.used_nbytes,
                lost_nbytes=pool.lost_nbytes,
                activation_nbytes=activations,
                free_nbytes=pool.free_nbytes - activations,
                largest_nbytes=min(pool.largest_nbytes, pool.free_nbytes - activations),
                moved_nbytes=self.moved_nbytes,
                segments=sum(1 for _ in pool.segments()),
            )

    @property
    def occupied_nbytes(self) -> int:
        """What is not there for activations."""
        return self.pool.used_nbytes + self.pool.lost_nbytes

    def resident_nbytes(self, instance: str) -> int:
        """Bytes of the instance's newest manifest that are here."""
        return sum(nbytes for segment, nbytes in self._models.get(instance, {}).items() if segment in self.pool)

    def changed(self) -> list[tuple[str, int]]:
        """Instances whose resident bytes may have changed since the last call, with what they are now."""
        with self._lock:
            names, self._changed = self._changed, set()
            return [(name, self.resident_nbytes(name)) for name in sorted(names) if name in self._models]

    def _touch(self, segment: int) -> None:
        self._changed |= self._sharers.get(segment, set())

    def check(self) -> None:
        """Assert that the books agree with each other and with the pool."""
        self.pool.check()
        resident = set(self.pool.segments())
        assert self._doomed <= set(self._pins) <= resident
        assert self._arriving | self._written <= resident
        for segment, sharers in self._sharers.items():
            assert sharers == {name for name, model in self._models.items() if segment in model}
