"""Decides what lies where in a GPU's pool: which segments are resident, what a wake evicts and where it puts what is
missing.

Pure bookkeeping: no bytes move here, and nothing knows of torch. The unit of residency is the segment, the unit of
eviction the instance, least recently leased first. A segment whose instance holds the lease is never moved or
evicted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dormouse.core.freelist import FreeList, aligned
from dormouse.schemas.messages import Segment


class ModelTooLarge(Exception):
    """The model cannot fit into what this GPU has; the text has the numbers."""


@dataclass(frozen=True, slots=True)
class Span:
    """Where a resident segment lies."""

    offset: int
    nbytes: int


@dataclass
class WakePlan:
    """What a wake changed in the books, to be carried out in this order."""

    evicted: list[str] = field(default_factory=list)  # instances that lost everything
    freed: list[Span] = field(default_factory=list)  # spans that were given up, to be poisoned
    missing: list[tuple[Segment, Span]] = field(default_factory=list)  # to be copied, in manifest order

    @property
    def copy_nbytes(self) -> int:
        return sum(segment.nbytes for segment, _ in self.missing)


class Residency:
    """The books of one pool of ``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.leased: str | None = None
        self._free = FreeList(capacity)
        # By instance, then by segment id; least recently leased instance first.
        self._spans: dict[str, dict[int, Span]] = {}

    @property
    def used_nbytes(self) -> int:
        return self.capacity - self._free.free_nbytes

    def resident_nbytes(self, instance: str) -> int:
        return sum(aligned(span.nbytes) for span in self._spans.get(instance, {}).values())

    def spans(self, instance: str) -> dict[int, Span]:
        """By segment id; do not change it."""
        return self._spans.get(instance, {})

    def wake(
        self, instance: str, segments: Sequence[Segment], evict: Iterable[str] = (), reserved_nbytes: int = 0
    ) -> WakePlan:
        """Lease the pool to ``instance`` and make room for all of ``segments``.

        Resident segments of the instance that are not in ``segments`` are stale and are dropped first. Then instances
        are evicted while room is short or too fragmented: those of ``evict`` in their order, then the least recently
        leased.

        Args:
            reserved_nbytes: device memory outside the pool that counts against its capacity (activations).

        Raises:
            ModelTooLarge: even an otherwise empty pool has no room; nothing is leased, others stay as they are.
        """
        assert self.leased is None, f"{self.leased} still holds the lease"
        needed = sum(aligned(segment.nbytes) for segment in segments)
        if needed > self.capacity - reserved_nbytes:
            raise ModelTooLarge(
                f"the model needs {needed:,} bytes of GPU memory; this GPU has {self.capacity:,}"
                + (f", of which {reserved_nbytes:,} are in use for activations" if reserved_nbytes else "")
                + ": use a smaller model or data type, or raise gpu.memory in the node's configuration"
            )
        plan = WakePlan()
        wanted = {segment.segment for segment in segments}
        plan.freed += self.drop(instance, [segment for segment in self.spans(instance) if segment not in wanted])
        victims = [victim for victim in evict if victim in self._spans and victim != instance]
        victims += [victim for victim in self._spans if victim != instance and victim not in victims]
        missing = [segment for segment in segments if segment.segment not in self.spans(instance)]
        short = sum(aligned(segment.nbytes) for segment in missing) + reserved_nbytes
        while short > self._free.free_nbytes or (spans := self._place(missing)) is None:
            if victims:
                plan.freed += self.evict(victims[0])
                plan.evicted.append(victims.pop(0))
            else:  # only our own segments are left, in the way of each other: start from an empty pool
                plan.freed += self.evict(instance)
                missing = list(segments)
                short = needed + reserved_nbytes
        plan.missing = list(zip(missing, spans, strict=True))
        own = self._spans.pop(instance, {})
        own.update((segment.segment, span) for segment, span in plan.missing)
        self._spans[instance] = own  # at the end: most recently leased
        self.leased = instance
        return plan

    def _place(self, segments: Sequence[Segment]) -> list[Span] | None:
        """Side by side if there is a hole for all of them, else one by one; None, and nothing taken, if they do not
        fit.
        """
        start = self._free.find(sum(aligned(segment.nbytes) for segment in segments)) if segments else None
        spans: list[Span] = []
        for segment in segments:
            offset: int | None
            if start is not None:
                taken = self._free.take_at(start, segment.nbytes)
                assert taken
                offset, start = start, start + aligned(segment.nbytes)
            else:
                offset = self._free.take(segment.nbytes)
            if offset is None:
                for span in spans:
                    self._free.give(span.offset)
                return None
            spans.append(Span(offset, segment.nbytes))
        return spans

    def end_lease(self) -> None:
        self.leased = None

    def drop(self, instance: str, segments: Iterable[int]) -> list[Span]:
        """Forget these segments of an instance; returns the spans that are free now."""
        own = self._spans.get(instance, {})
        freed = [own.pop(segment) for segment in list(segments) if segment in own]
        for span in freed:
            self._free.give(span.offset)
        if not own and instance != self.leased:
            self._spans.pop(instance, None)
        return freed

    def evict(self, instance: str) -> list[Span]:
        """Forget all of an instance that does not hold the lease."""
        assert instance != self.leased, f"{instance} holds the lease"
        return self.drop(instance, list(self.spans(instance)))

    def relieve(self) -> tuple[list[str], list[Span]]:
        """Evict every instance that does not hold the lease: an operation is out of memory."""
        victims = [instance for instance, own in self._spans.items() if instance != self.leased and own]
        return victims, [span for victim in victims for span in self.evict(victim)]

    def rename(self, instance: str, old: int, new: int) -> None:
        """A resident segment was written and has a new id; its bytes stay where they are."""
        own = self._spans[instance]
        own[new] = own.pop(old)

    def adopt(self, instance: str, segment: Segment, reserved_nbytes: int) -> Span | None:
        """A span for a segment that already exists on the device, if there is one without evicting anything."""
        if aligned(segment.nbytes) + reserved_nbytes > self._free.free_nbytes:
            return None
        offset = self._free.take(segment.nbytes)
        if offset is None:
            return None
        span = Span(offset, segment.nbytes)
        self._spans.setdefault(instance, {})[segment.segment] = span
        return span

    def check(self) -> None:
        """Assert that spans and holes tile the pool, and that no segment is counted twice."""
        self._free.check()
        spans = [span for own in self._spans.values() for span in own.values()]
        assert len({span.offset for span in spans}) == len(spans)
        assert sum(aligned(span.nbytes) for span in spans) == self.used_nbytes
        assert {span.offset: aligned(span.nbytes) for span in spans} == self._free._taken
