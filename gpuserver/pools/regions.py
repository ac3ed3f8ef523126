"""Decides what lies where in one contiguous range (Tangram §3.2): a wake takes free regions as they are, else evicts
the cheapest segments, and only where the free bytes lie in pieces moves others together.

Books only: bytes are moved by whoever carries out the plan, in its order. Segments in ``fixed`` are obstacles that
nothing passes.
"""

import bisect
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Final

from dormouse.core.freelist import ALIGNMENT, FreeList, aligned
from dormouse.gpuserver.pools import eviction, packing
from dormouse.gpuserver.pools.packing import Bin, Line
from dormouse.gpuserver.pools.protocol import Cost, Move, Plan, PoolFull, Span

MERGES: Final[dict[str, Callable[[Line, Sequence[int], Sequence[int]], list[Bin] | None]]] = {
    "partitioned-gain": packing.partitioned_gain,
    "algorithm-1": packing.partition,
    "global": packing.global_merge,
}
"""Ways to find room in pieces; the second and third are what the first is compared with."""

RETRIES: Final = 16
"""Most evictions that are tried to be taken back when obstacles made more of them than the sizes: each packs anew."""

MOVE_NBYTES_S: Final = 300e9
"""Bytes that a GPU moves in its own memory per second, for weighing moves against evictions: an L40's 864 GB/s of reads
and writes, less what overlapping copies lose. Only its order of magnitude matters.
"""

NEGLIGIBLE: Final = 1e-3
"""Share of a plan's cost below which its moves are not worth looking for others."""

PARTS: Final = (4, 2, 1)
"""Into how many runs of addresses a wake is divided when runs are cleared for it; more runs are cheaper to clear."""


class Regions:
    """The :class:`Pool` of a contiguous reservation. Raises ValueError for a merge that is not in ``MERGES``."""

    def __init__(self, capacity: int, merge: str = "partitioned-gain") -> None:
        if merge not in MERGES:
            raise ValueError(f"merge is {merge!r}; write one of {', '.join(MERGES)}")
        self.capacity = capacity
        self._merge = MERGES[merge]
        self._clears = merge == "partitioned-gain"
        self._free = FreeList(capacity)
        self._offset: dict[int, int] = {}  # by segment
        self._nbytes: dict[int, int] = {}  # by segment, as asked for
        self._size: dict[int, int] = {}  # by segment, aligned

    @property
    def used_nbytes(self) -> int:
        return self.capacity - self._free.free_nbytes

    @property
    def lost_nbytes(self) -> int:
        return 0

    @property
    def free_nbytes(self) -> int:
        return self._free.free_nbytes

    @property
    def largest_nbytes(self) -> int:
        return self._free.largest // ALIGNMENT * ALIGNMENT

    def place(
        self,
        needs: Sequence[tuple[int, int]],
        *,
        cost: Cost,
        fixed: Container[int] = (),
        reserve_nbytes: int = 0,
        tenant: str = "",
    ) -> Plan:
        if len({segment for segment, _ in needs} - self._offset.keys()) < len(needs):
            raise ValueError("a segment is named twice or is there already")
        sizes = [aligned(nbytes) for _, nbytes in needs]
        short = sum(sizes) + reserve_nbytes - self.free_nbytes
        if short <= 0:
            bins = packing.side_by_side(self._line_of_holes(), sizes)
            if bins is not None:
                return self._put(needs, sizes, bins)
        regions = sorted(zip(self._offset.values(), self._offset, strict=True))
        movable = [(segment, self._size[segment]) for _, segment in regions if segment not in fixed]
        if short > sum(nbytes for _, nbytes in movable):
            raise PoolFull(self._story(sizes, reserve_nbytes, movable))
        ordered: list[eviction.Unit] | None = eviction.ascending(movable, cost) if short > 0 else None
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        extra = 0
        while True:
            evicted = [unit.name for unit in eviction.enough(ordered or [], short + extra)]
            packed = self._pack(regions, evicted, sizes, order, fixed)
            if packed is not None:
                break
            ordered = ordered or eviction.ascending(movable, cost)
            if len(evicted) == len(ordered):
                raise PoolFull(self._story(sizes, reserve_nbytes, movable))
            extra = max(extra + sizes[order[0]], extra * 5 // 4, -short + 1)  # obstacles are in the way: more must go
        if extra:
            evicted, packed = self._needed(regions, evicted, packed, sizes, order, fixed, extra)
        if self._clears and packing.moved_nbytes(*packed):
            price = {unit.name: unit.cost for unit in ordered or eviction.ascending(movable, cost)}
            evicted, packed = self._cheaper(regions, evicted, packed, sizes, order, fixed, price, reserve_nbytes)
        return self._rearrange(needs, sizes, packed, regions, set(evicted))

    def adopt(self, segment: int, nbytes: int, *, reserve_nbytes: int = 0, tenant: str = "") -> Plan | None:
        size = aligned(nbytes)
        if self.free_nbytes - size < reserve_nbytes:
            return None
        plan = packing.side_by_side(self._line_of_holes(), [size])
        return None if plan is None else self._put([(segment, nbytes)], [size], plan)

    def drop(self, segments: Iterable[int]) -> Plan:
        plan = Plan()
        for segment in segments:
            if segment in self._offset:
                del self._nbytes[segment], self._size[segment]
                offset = self._offset.pop(segment)
                plan.evicted.append(segment)
                plan.freed.append(Span(offset, self._free.give(offset)))
        plan.freed = _joined(plan.freed)
        return plan

    def forget(self, segments: Iterable[int]) -> None:
        """An address lasts only while its segment is resident: nothing is kept that could be forgotten."""

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

    def segments(self) -> Iterable[int]:
        return self._offset.keys()

    def extents(self, segment: int) -> list[Span]:
        return [Span(self._offset[segment], self._nbytes[segment])]

    def check(self) -> None:
        self._free.check()
        assert self._offset.keys() == self._nbytes.keys()
        assert self._size == {segment: aligned(nbytes) for segment, nbytes in self._nbytes.items()}
        spans = {offset: self._size[segment] for segment, offset in self._offset.items()}
        assert len(spans) == len(self._offset), "two segments at one offset"
        assert spans == self._free.taken, "the free list knows other spans"
        assert self.used_nbytes == sum(spans.values())

    def _line_of_holes(self) -> Line:
        holes = self._free.holes
        return Line([start for start, _ in holes], [start + nbytes for start, nbytes in holes], [])

    def _pack(
        self,
        regions: Sequence[tuple[int, int]],
        evicted: Iterable[int],
        sizes: Sequence[int],
        order: Sequence[int],
        fixed: Container[int],
    ) -> tuple[Line, list[Bin]] | None:
        """The holes once these are gone, and what goes where."""
        gone = set(evicted)
        line = self._line([region for region in regions if region[1] not in gone], fixed)
        bins = packing.side_by_side(line, sizes)
        if bins is None:
            bins = self._merge(line, sizes, order)
        return None if bins is None else (line, bins)

    def _needed(
        self,
        regions: Sequence[tuple[int, int]],
        evicted: list[int],
        packed: tuple[Line, list[Bin]],
        sizes: Sequence[int],
        order: Sequence[int],
        fixed: Container[int],
        surplus_nbytes: int,
    ) -> tuple[list[int], tuple[Line, list[Bin]]]:
        """What was evicted beyond the sum of sizes, to get around obstacles, is taken back where it did not help."""
        tries = RETRIES
        for segment in reversed(evicted):
            nbytes = self._size[segment]
            if nbytes <= surplus_nbytes and tries:
                tries -= 1
                fewer = [each for each in evicted if each != segment]
                again = self._pack(regions, fewer, sizes, order, fixed)
                if again is not None:
                    evicted, packed, surplus_nbytes = fewer, again, surplus_nbytes - nbytes
        return evicted, packed

    def _cheaper(
        self,
        regions: Sequence[tuple[int, int]],
        evicted: list[int],
        packed: tuple[Line, list[Bin]],
        sizes: Sequence[int],
        order: Sequence[int],
        fixed: Container[int],
        price: dict[int, float],
        reserve_nbytes: int,
    ) -> tuple[list[int], tuple[Line, list[Bin]]]:
        """Against evictions that need moves: clear whole runs of addresses for the needs in one, two or four parts, if
        that costs less by Eq. 1, evictions and moves together.
        """
        least = self._cost(evicted, packed, price)
        if packing.moved_nbytes(*packed) / MOVE_NBYTES_S < NEGLIGIBLE * least:
            return evicted, packed
        line = eviction.Shelf(
            [(offset, self._size[segment], segment) for offset, segment in regions], price, self.capacity
        )
        for parts in PARTS:
            again = line.clear(packing.split(sizes, parts))
            if again is None:
                continue
            if sum(map(price.__getitem__, again)) >= least:
                break  # longer runs are dearer still
            free = self.free_nbytes - sum(sizes) + sum(self._size[segment] for segment in again)
            if free < reserve_nbytes:
                continue
            found = self._pack(regions, again, sizes, order, fixed)
            if found is not None and (cost := self._cost(again, found, price)) < least:
                evicted, packed, least = again, found, cost
        return evicted, packed

    def _cost(self, evicted: Iterable[int], packed: tuple[Line, list[Bin]], price: dict[int, float]) -> float:
        return sum(map(price.__getitem__, evicted)) + packing.moved_nbytes(*packed) / MOVE_NBYTES_S

    def _line(self, stay: Sequence[tuple[int, int]], fixed: Container[int]) -> Line:
        """The holes between the regions that stay, ``(offset, segment)`` by offset."""
        line = Line([], [], [])
        position, wall, sizes = 0, False, self._size
        for offset, segment in stay:
            if offset > position:
                line.starts.append(position)
                line.ends.append(offset)
                line.barrier.append(wall)
                wall = False
            wall = wall or segment in fixed
            position = offset + sizes[segment]
        if self.capacity > position:
            line.starts.append(position)
            line.ends.append(self.capacity)
            line.barrier.append(wall)
        line.barrier = line.barrier[1:]  # so far: what lies before each hole
        return line

    def _put(self, needs: Sequence[tuple[int, int]], sizes: Sequence[int], bins: Sequence[Bin]) -> Plan:
        """Record needs in holes as they are: nothing leaves, nothing moves."""
        plan, holes = Plan(), self._free.holes
        starts = [holes[bin.first][0] for bin in bins]
        places = [0] * len(needs)
        for bin, start in zip(bins, starts, strict=True):
            self._free.take_all(start, [sizes[need] for need in bin.needs])
            _fill(places, sizes, bin, start)
        self._record(needs, sizes, places, plan)
        return plan

    def _rearrange(
        self,
        needs: Sequence[tuple[int, int]],
        sizes: Sequence[int],
        packed: tuple[Line, list[Bin]],
        regions: Sequence[tuple[int, int]],
        gone: set[int],
    ) -> Plan:
        """Record evictions, moves and needs. Residents of a bin slide to its start in order of address, so that no
        move writes what a later one reads.
        """
        plan, places = Plan(), [0] * len(needs)
        line, bins = packed
        stay = [region for region in regions if region[1] not in gone]
        for bin in bins:
            start = line.starts[bin.first]
            if len(bin.needs) == 1 and bin.last == bin.first + 1:
                places[bin.needs[0]] = start
                continue
            if bin.last > bin.first + 1:
                low = bisect.bisect_left(stay, (line.ends[bin.first], -1))
                high = bisect.bisect_left(stay, (line.starts[bin.last - 1], -1))
                for source, segment in stay[low:high]:
                    plan.moves.append(Move(segment, source, start, self._nbytes[segment]))
                    start += self._size[segment]
            _fill(places, sizes, bin, start)
        plan.evicted = [segment for _, segment in regions if segment in gone]
        spans = sorted((self._offset.pop(segment), self._size.pop(segment)) for segment in plan.evicted)
        plan.freed = _joined(spans)
        for segment in plan.evicted:
            del self._nbytes[segment]
        for move in plan.moves:
            self._offset[move.segment] = move.target
        self._record(needs, sizes, places, plan)
        sizes_now = map(self._size.__getitem__, self._offset)
        self._free.reset(sorted(zip(self._offset.values(), sizes_now, strict=True)))
        return plan

    def _record(
        self, needs: Sequence[tuple[int, int]], sizes: Sequence[int], places: Sequence[int], plan: Plan
    ) -> None:
        segments = [segment for segment, _ in needs]
        plan.placed = dict(zip(segments, places, strict=True))
        self._offset.update(plan.placed)
        self._nbytes.update(needs)
        self._size.update(zip(segments, sizes, strict=True))

    def _story(self, sizes: Sequence[int], reserve_nbytes: int, movable: Sequence[tuple[int, int]]) -> str:
        held = self.used_nbytes - sum(nbytes for _, nbytes in movable)
        return (
            f"{sum(sizes)} bytes in {len(sizes)} segments (largest {max(sizes, default=0)}) and {reserve_nbytes} bytes "
            f"of reserve do not fit a pool of {self.capacity} bytes, of which {held} are in use"
        )


def _fill(places: list[int], sizes: Sequence[int], bin: Bin, start: int) -> None:
    """The needs of a bin side by side from ``start`` on, in wish order."""
    for need in sorted(bin.needs):
        places[need] = start
        start += sizes[need]


def _joined(spans: Iterable[tuple[int, int]]) -> list[Span]:
    """Spans by offset, neighbours made one."""
    joined: list[Span] = []
    for offset, nbytes in sorted(spans):
        if joined and joined[-1].offset + joined[-1].nbytes == offset:
            joined[-1] = Span(joined[-1].offset, joined[-1].nbytes + nbytes)
        else:
            joined.append(Span(offset, nbytes))
    return joined
