"""Keeps the books of one contiguous range (Tangram §3.2): a wake takes free regions as they are, else the cheapest
segments are evicted, and only where the free bytes lie in pieces others are moved together.

planning.py decides the evictions and moves; here they are entered. Whoever carries out the plan moves the bytes, in its
order. Segments in ``fixed`` are obstacles that nothing passes.
"""

from collections.abc import Container, Iterable, KeysView, Sequence

from dormouse.core.decisions.memory.freelist import ALIGNMENT, Holes, aligned, aligned_all, check_tiling
from dormouse.core.decisions.memory.pools.planning import MERGES, PlacementChoice, Planner
from dormouse.core.decisions.memory.pools.protocol import Cost, Granule, Move, PoolChange, PoolFull, Span
from dormouse.core.decisions.memory.pools.shelf import Shelf


class Regions:
    """The :class:`Pool` of a contiguous reservation. Raises ValueError for a merge that is not in ``MERGES``."""

    def __init__(self, capacity: int, merge: str = "partitioned-gain") -> None:
        if merge not in MERGES:
            raise ValueError(f"merge is {merge!r}; write one of {', '.join(MERGES)}")
        self.capacity = capacity
        self._merge = merge
        self._holes = Holes(capacity)
        self._offset: dict[int, int] = {}  # by segment
        self._nbytes: dict[int, int] = {}  # by segment, as asked for
        self._size: dict[int, int] = {}  # by segment, aligned

    @property
    def used_nbytes(self) -> int:
        return self.capacity - self._holes.free_nbytes

    @property
    def lost_nbytes(self) -> int:
        return 0

    @property
    def free_nbytes(self) -> int:
        return self._holes.free_nbytes

    @property
    def largest_nbytes(self) -> int:
        return self._holes.largest // ALIGNMENT * ALIGNMENT

    def place(
        self,
        needs: Sequence[tuple[int, int]],
        *,
        cost: Cost,
        fixed: Container[int] = (),
        reserve_nbytes: int = 0,
        tenant: str = "",
        roaming: Container[int] = (),
    ) -> PoolChange:
        segments = [segment for segment, _ in needs]
        if len(set(segments)) < len(segments) or not self._offset.keys().isdisjoint(segments):
            raise ValueError("a segment is named twice or is there already")
        sizes = aligned_all([nbytes for _, nbytes in needs])
        spare = self.free_nbytes - sum(sizes) - reserve_nbytes
        planner = Planner(
            sizes,
            spare,
            (self._holes.starts, self._holes.ends),
            lambda: Shelf(self._offset, self._size, fixed, self.capacity),
            self._merge,
            cost,
        )
        choice = planner.choose()
        if choice is None:
            raise PoolFull(self._story(sizes, reserve_nbytes, sum(planner.shelf.movable()[1])))
        return self._enter(needs, sizes, choice, planner)

    def adopt(self, segment: int, nbytes: int, *, reserve_nbytes: int = 0, tenant: str = "") -> PoolChange | None:
        if segment in self._offset:
            raise ValueError(f"segment {segment} is there already")
        size = aligned(nbytes)
        if self.free_nbytes - size < reserve_nbytes:
            return None
        rooms = map(int.__sub__, self._holes.ends, self._holes.starts)
        found = min(
            [(room, start) for room, start in zip(rooms, self._holes.starts, strict=True) if room >= size], default=None
        )
        if found is None:
            return None
        self._holes.take(found[1], size)
        self._offset[segment], self._nbytes[segment], self._size[segment] = found[1], nbytes, size
        return PoolChange(placed={segment: found[1]})

    def drop(self, segments: Iterable[int]) -> PoolChange:
        plan = PoolChange()
        for segment in segments:
            if segment in self._offset:
                offset, size = self._forget(segment)
                self._holes.give(offset, size)
                plan.evicted.append(segment)
                plan.freed.append(Span(offset, size))
        plan.freed = _joined(plan.freed)
        return plan

    def forget(self, segments: Iterable[int]) -> None:
        """An address lasts only while its segment is resident: there is none to forget."""

    def rename(self, old: int, new: int) -> None:
        if new in self._offset:
            raise ValueError(f"segment {new} is there already")
        self._offset[new] = self._offset.pop(old)
        self._nbytes[new] = self._nbytes.pop(old)
        self._size[new] = self._size.pop(old)

    def __contains__(self, segment: object) -> bool:
        return segment in self._offset

    def offset(self, segment: int) -> int:
        return self._offset[segment]

    def nbytes(self, segment: int) -> int:
        return self._nbytes[segment]

    def segments(self) -> KeysView[int]:
        return self._offset.keys()

    def owner(self, segment: int) -> str | None:
        return None

    def extents(self, segment: int) -> list[Span]:
        return [Span(self._offset[segment], self._nbytes[segment])]

    def granules(self, segments: Iterable[int]) -> list[Granule]:
        return [Granule(0, 0, self.capacity)]

    def check(self) -> None:
        assert self._offset.keys() == self._nbytes.keys()
        assert self._size == {segment: aligned(nbytes) for segment, nbytes in self._nbytes.items()}
        check_tiling([(offset, self._size[segment]) for segment, offset in self._offset.items()], self._holes)
        assert self.used_nbytes == sum(self._size.values())

    def _enter(
        self, needs: Sequence[tuple[int, int]], sizes: Sequence[int], choice: PlacementChoice, planner: Planner
    ) -> PoolChange:
        """Record evictions, moves and needs. Residents of a run slide to its start in order of address, so that no
        move writes what a later one reads.
        """
        plan = PoolChange()
        gone, line, layout = set(choice.evicted), choice.line, choice.layout
        cursors, ends = line.starts.copy(), line.ends
        for first, last in layout.runs:
            start = cursors[first]
            for source, segment in planner.shelf.between(ends[first], line.starts[last - 1], gone):
                plan.moves.append(Move(segment, source, start, self._nbytes[segment]))
                start += self._size[segment]
            cursors[first] = start
        places = []
        for home, size in zip(layout.homes, sizes, strict=True):  # side by side in their order
            places.append(cursors[home])
            cursors[home] += size
        if gone:
            plan.evicted = sorted(gone, key=self._offset.__getitem__)
            plan.freed = _joined([Span(*self._forget(segment)) for segment in plan.evicted])
        for move in plan.moves:
            self._offset[move.segment] = move.target
        plan.placed = dict(zip([segment for segment, _ in needs], places, strict=True))
        self._offset.update(plan.placed)
        self._nbytes.update(needs)
        self._size.update(zip(plan.placed, sizes, strict=True))
        if layout.runs:
            ends = ends.copy()
        for first, last in layout.runs:
            ends[first] = ends[last - 1]
            cursors[first + 1 : last] = ends[first + 1 : last]  # no room remains in these
        self._holes.reset(zip(cursors, ends, strict=True))
        return plan

    def _forget(self, segment: int) -> tuple[int, int]:
        """Returns where it was, ``(offset, aligned nbytes)``."""
        del self._nbytes[segment]
        return self._offset.pop(segment), self._size.pop(segment)

    def _story(self, sizes: Sequence[int], reserve_nbytes: int, movable_nbytes: int) -> str:
        return (
            f"{sum(sizes)} bytes in {len(sizes)} segments (largest {max(sizes, default=0)}) and {reserve_nbytes} bytes "
            f"of reserve do not fit a pool of {self.capacity} bytes, of which {self.used_nbytes - movable_nbytes} are "
            "in use"
        )


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Spans by offset, neighbours made one."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1].offset + joined[-1].nbytes == span.offset:
            joined[-1] = Span(joined[-1].offset, joined[-1].nbytes + span.nbytes)
        else:
            joined.append(span)
    return joined
