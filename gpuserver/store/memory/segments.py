"""Decides which segments there are, which uploads are the same segment, and which are moved down or freed; pure.

A segment is named by an id that means the same bytes for ever. Its bytes are in host memory (``span``), in a file
(named by its fingerprint), or in both; a segment without a fingerprint is written to no file and shared with nobody.

A segment lives while somebody holds it (an instance's manifest or draft, a function's record, a write-back ticket) or
has pinned it (a copy, a hash, a read or a write of its bytes is under way). Pinned bytes are neither moved nor freed.

Write-backs make segments before their bytes are known, so several may turn out to have the same: *twins*, with one
fingerprint, one file and, as soon as nobody reads the other, one span.

Work for the caller is collected in ``freed`` (spans to be scrubbed and given back) and ``doomed`` (fingerprints whose
files are to go).
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dormouse.gpuserver.store.memory.slabs import SlabSpan

Holder = str | tuple[str, int]
"""An instance's name, or a function and its version (or an executor's role and its ticket)."""


@dataclass(slots=True, eq=False)
class Segment:
    """``scope`` names the key of the fingerprint (fingerprint.py)."""

    id: int
    nbytes: int
    scope: str
    fingerprint: bytes | None = None
    span: SlabSpan | None = None
    holders: set[Holder] = field(default_factory=set)
    pins: int = 0
    damaged: bool = False  # its bytes are lost; only its id lives until its holders are gone


class Segments:
    """The state of all segments.

    Args:
        first_id: ids are counted from here.
    """

    def __init__(self, first_id: int = 1) -> None:
        self.by_id: dict[int, Segment] = {}
        self.filed: dict[bytes, int] = {}  # nbytes by fingerprint
        self.filed_nbytes = 0
        self.freed: list[SlabSpan] = []
        self.doomed: list[bytes] = []
        self._ids = itertools.count(first_id)
        self._by_fingerprint: dict[bytes, dict[Segment, None]] = {}  # twins, the oldest first: there may be thousands
        self._here: dict[bytes, dict[Segment, None]] = {}  # those of them that are in host memory
        self._lying: Counter[SlabSpan] = Counter()  # segments by where they lie
        self.touched: dict[SlabSpan, Segment] = {}  # where one lies, or lay, that others hold now; the reader clears it
        self.moved: dict[SlabSpan, Segment] = {}  # the same, also of those that got a file or lost it
        self._placed: OrderedDict[int, Segment] = OrderedDict()  # those in host memory, least recently used first

    # --- coming to be

    def new(self, nbytes: int, scope: str, span: SlabSpan) -> Segment:
        """A segment of its own whose bytes will be in ``span``; its fingerprint is not known yet."""
        segment = Segment(next(self._ids), nbytes, scope)
        self.by_id[segment.id] = segment
        self.move_up(segment, span)
        return segment

    def restore(self, fingerprint: bytes, nbytes: int, scope: str) -> Segment:
        """A segment that is in a file since an earlier run."""
        segment = Segment(next(self._ids), nbytes, scope, fingerprint)
        self.by_id[segment.id] = segment
        self._by_fingerprint.setdefault(fingerprint, {})[segment] = None
        self.mark_filed(segment)
        return segment

    def settle(self, nbytes: int, scope: str, span: SlabSpan, fingerprint: bytes) -> Segment:
        """The segment with these bytes: a known one (whose host copy becomes ``span`` if it had none, while otherwise
        ``span`` is freed), or a new one. The caller holds it next.
        """
        known = self.find(fingerprint)
        if known is None:
            segment = self.new(nbytes, scope, span)
            self.identify(segment, fingerprint)
            return segment
        if known.span is None:
            self.move_up(known, span)
        else:
            self.freed.append(span)
            self.touch(known)
        return known

    def identify(self, segment: Segment, fingerprint: bytes) -> None:
        """Its hash is known. The caller has it pinned: when that ends it shares the host memory of a twin."""
        segment.fingerprint = fingerprint
        self._by_fingerprint.setdefault(fingerprint, {})[segment] = None
        if segment.span is not None:
            self._here.setdefault(fingerprint, {})[segment] = None

    def find(self, fingerprint: bytes) -> Segment | None:
        """A segment with these bytes, best one in host memory."""
        return next(iter(self._here.get(fingerprint) or self._by_fingerprint.get(fingerprint) or ()), None)

    # --- living

    def hold(self, segment: Segment, holder: Holder) -> None:
        segment.holders.add(holder)
        self._touch(segment)

    def release(self, segment: Segment, holder: Holder) -> None:
        segment.holders.discard(holder)
        self._touch(segment)
        self._free_if_unused(segment)

    def _touch(self, segment: Segment) -> None:
        if segment.span is not None:
            self.touched[segment.span] = self.moved[segment.span] = segment

    def holders_at(self, span: SlabSpan, known: Segment) -> set[Holder] | None:
        """Of all segments there, which are, or were, ``known`` and its twins; None if there are none."""
        if not self._lying[span]:
            return None
        twins = (known,) if known.fingerprint is None else self._here.get(known.fingerprint, ())
        return {holder for segment in twins if segment.span == span for holder in segment.holders}

    def pin(self, segment: Segment) -> None:
        segment.pins += 1

    def unpin(self, segment: Segment) -> None:
        segment.pins -= 1
        self._free_if_unused(segment)
        self._join_twin(segment)

    def touch(self, segment: Segment) -> None:
        """The segment is being used. If a twin is in host memory, the segment is there too."""
        if segment.span is None:
            self._join_twin(segment)
        if segment.id in self._placed:
            self._placed.move_to_end(segment.id)

    def _join_twin(self, segment: Segment) -> None:
        """Lie where the first of the twins lies, if nobody reads from where it lies now."""
        if segment.fingerprint is None or segment.damaged or segment.id not in self.by_id:
            return
        twin = self.find(segment.fingerprint)
        if (
            twin is None
            or twin.span is None
            or twin.span == segment.span
            or (segment.pins and segment.span is not None)
        ):
            return
        self._drop_span(segment)
        self.move_up(segment, twin.span)

    def _free_if_unused(self, segment: Segment) -> None:
        if segment.holders or segment.pins or segment.id not in self.by_id:
            return
        del self.by_id[segment.id]
        self._drop_span(segment)
        if not segment.damaged:
            self._forget_fingerprint(segment)

    def _forget_fingerprint(self, segment: Segment) -> None:
        fingerprint = segment.fingerprint
        if fingerprint is None:
            return
        same = self._by_fingerprint[fingerprint]
        del same[segment]
        if not same:
            del self._by_fingerprint[fingerprint]
            self._unfile(fingerprint)

    def _unfile(self, fingerprint: bytes) -> None:
        if fingerprint in self.filed:
            self.filed_nbytes -= self.filed.pop(fingerprint)
            self.doomed.append(fingerprint)
            self._refiled(fingerprint)

    def _drop_span(self, segment: Segment) -> int:
        """Returns how many bytes are free by that: none while a twin has them."""
        span, segment.span = segment.span, None
        if span is None:
            return 0
        self.touched[span] = self.moved[span] = segment
        del self._placed[segment.id]
        if segment.fingerprint is not None:
            here = self._here[segment.fingerprint]
            del here[segment]
            if not here:
                del self._here[segment.fingerprint]
        self._lying[span] -= 1
        if self._lying[span]:
            return 0
        del self._lying[span]
        self.freed.append(span)
        return segment.nbytes

    # --- the two tiers

    def is_filed(self, segment: Segment) -> bool:
        return not segment.damaged and segment.fingerprint in self.filed

    def mark_filed(self, segment: Segment) -> None:
        """Its file and the index row are on disk."""
        assert segment.fingerprint is not None
        if segment.fingerprint not in self.filed:
            self.filed[segment.fingerprint] = segment.nbytes
            self.filed_nbytes += segment.nbytes
            self._refiled(segment.fingerprint)

    def _refiled(self, fingerprint: bytes) -> None:
        for segment in self._here.get(fingerprint, ()):
            if segment.span is not None:
                self.moved[segment.span] = segment

    def move_up(self, segment: Segment, span: SlabSpan) -> None:
        """Its bytes are in ``span`` now."""
        segment.span = span
        self._placed[segment.id] = segment
        self._lying[span] += 1
        self._touch(segment)
        if segment.fingerprint is not None:
            self._here.setdefault(segment.fingerprint, {})[segment] = None

    def move_down(self, nbytes: int) -> int:
        """Forget the host copies of the least recently used segments that are in a file and not pinned, until at least
        ``nbytes`` are free; returns how many bytes that were.
        """
        moved = 0
        for segment in list(self._placed.values()):
            if moved >= nbytes:
                break
            if not segment.pins and self.is_filed(segment):
                moved += self._drop_span(segment)
        return moved

    def forget_here(self, segments: Iterable[Segment], holders: Collection[Holder]) -> int:
        """The same of these, where only ``holders`` have them; returns how many bytes are still in host memory."""
        left_nbytes = 0
        for segment in segments:
            alone = all(holder in holders or not isinstance(holder, str) for holder in segment.holders)
            if segment.span is not None and alone and not segment.pins and self.is_filed(segment):
                self._drop_span(segment)
            left_nbytes += segment.nbytes if segment.span is not None else 0
        return left_nbytes

    def unfiled(self, nbytes: int) -> list[Segment]:
        """The least recently used segments that could be moved down if they were in a file, ``nbytes`` of them."""
        found: list[Segment] = []
        for segment in self._placed.values():
            if nbytes <= 0:
                break
            if segment.fingerprint is not None and not self.is_filed(segment):
                found.append(segment)
                nbytes -= segment.nbytes
        return found

    def pinned_room(self) -> bool:
        """Whether anything could be moved down, or is free, as soon as it is no longer pinned."""
        placed = self._placed.values()
        return any(segment.pins and (self.is_filed(segment) or not segment.holders) for segment in placed)

    def damage(self, fingerprint: bytes) -> list[Segment]:
        """A file does not have its bytes: segments that are nowhere else are given to nobody again, and equal bytes
        make a new one. Returns the lost ones.
        """
        for segment in self._by_fingerprint.get(fingerprint, ()):
            self.touch(segment)  # one whose twin is in host memory is not lost
        same = self._by_fingerprint.pop(fingerprint, {})
        lost = [segment for segment in same if segment.span is None]
        for segment in lost:
            segment.damaged = True
        if len(lost) < len(same):
            self._by_fingerprint[fingerprint] = {segment: None for segment in same if segment.span is not None}
        self._unfile(fingerprint)
        return lost

    def check(self) -> None:
        """Assert the invariants that are not visible in one place."""
        owners: dict[tuple[int, int], Segment] = {}  # by where the span begins
        for segment in self.by_id.values():
            if (span := segment.span) is not None:
                owner = owners.setdefault((span.slab, span.offset), segment)
                assert owner is segment or owner.fingerprint == segment.fingerprint is not None
                assert owner.span == span
        assert {id for id, segment in self.by_id.items() if segment.span is not None} == set(self._placed)
        assert self._lying == Counter(segment.span for segment in self._placed.values())
        placed = {segment for segment in self._placed.values() if segment.fingerprint is not None}
        assert [len(here) for here in self._here.values() if not here] == []
        assert {segment for here in self._here.values() for segment in here} == placed
        assert self.filed_nbytes == sum(self.filed.values())
        for fingerprint, same in self._by_fingerprint.items():
            assert same
            assert all(segment.fingerprint == fingerprint and segment.id in self.by_id for segment in same)
            assert len({segment.nbytes for segment in same}) == 1
        assert set(self.filed) <= set(self._by_fingerprint)
        for segment in self.by_id.values():
            assert segment.holders or segment.pins, segment
            assert segment.damaged or segment.span is not None or segment.fingerprint in self.filed, segment
