"""Decides where new segments go in a contiguous pool whose free bytes suffice but lie in pieces, so that few bytes must
move: the second stage of Tangram §3.2.2.

The range is seen as a line of holes with groups of resident segments between them. A layout names for each need the
hole that takes it, and the runs of holes that become one first. The groups inside a run must be moved together; their
bytes are its cost. No run reaches over a group with a segment that must stay.

``windows`` goes upwards: most needs fit a hole as it is (best fit decreasing), and for each of the few that remain it
merges the run of holes whose groups are cheapest. It finds layouts that the two-way division of the paper's Algorithm 1
(algorithm1.py) cannot when nearly every free byte is needed. Both are bounded, and the pool takes the cheaper result.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

BATCHES: Final = 12
"""Most runs that ``windows`` searches for; more needs that fit no hole are taken several at a time."""

HOLE_BITS: Final = 32
HOLE_MASK: Final = (1 << HOLE_BITS) - 1

Counts = npt.NDArray[np.int64]


@dataclass(slots=True)
class Line:
    """Holes by address: hole ``i`` is ``[starts[i], ends[i])``. ``barrier()[i]``: whether the group between it and the
    next hole must not move; called only if a group would move.
    """

    starts: list[int]
    ends: list[int]
    barrier: Callable[[], list[bool]]
    _by_room: list[int] | None = None

    def by_room(self) -> list[int]:
        """``room_keys``, ascending. Not a copy."""
        if self._by_room is None:
            self._by_room = sorted(room_keys(self.rooms()))
        return self._by_room

    def rooms(self) -> list[int]:
        return list(map(int.__sub__, self.ends, self.starts))

    def cost(self, first: int, last: int) -> int:
        """Bytes to move so that holes ``[first, last)`` become one."""
        return sum(self.starts[first + 1 : last]) - sum(self.ends[first : last - 1])


class Layout(NamedTuple):
    """Homes of the needs, and the holes that are merged for them."""

    homes: list[int]  # hole by need; of those that become one, the first
    runs: list[tuple[int, int]]  # holes [first, last) that become one, only those of several


def moved_nbytes(line: Line, layout: Layout) -> int:
    return sum(line.cost(first, last) for first, last in layout.runs)


def descending(sizes: Sequence[int]) -> list[int]:
    """Indices of the needs, the largest first; equals in their order."""
    order: list[int] = np.argsort(-np.array(sizes, dtype=np.int64), kind="stable").tolist()
    return order


def split(sizes: Sequence[int], parts: int) -> list[int]:
    """Bytes of ``parts`` runs of needs in their order, about as long as each other."""
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    cuts = np.unique(np.searchsorted(ends, [ends[-1] * part // parts for part in range(1, parts)]))
    marks = [0, *(int(ends[cut]) for cut in cuts if cut < len(sizes) - 1), int(ends[-1])]
    return [after - before for before, after in itertools.pairwise(marks)]


def side_by_side(line: Line, sizes: Sequence[int]) -> Layout | None:
    """All needs in their order without a move: in the smallest hole that takes all, else in as few as possible."""
    if not sizes:
        return Layout([], [])
    total, by_room = sum(sizes), line.by_room()
    whole = bisect.bisect_left(by_room, total << HOLE_BITS)
    if whole < len(by_room):
        return Layout([by_room[whole] & HOLE_MASK] * len(sizes), [])
    ends = list(itertools.accumulate(sizes))
    taken: list[tuple[int, int]] = []  # (hole, needs that it takes)
    upto, done, waste = 0, 0, sum(line.ends) - sum(line.starts) - total
    for key in reversed(by_room):
        begin, upto = upto, bisect.bisect_right(ends, done + (key >> HOLE_BITS), upto)
        taken.append((key & HOLE_MASK, upto - begin))
        if upto == len(sizes):
            return Layout([home for home, count in taken for _ in range(count)], [])
        before, done = done, ends[upto - 1] if upto else 0
        waste -= (key >> HOLE_BITS) - (done - before)
        if begin == upto or waste < 0:
            return None  # the largest hole left does not take the next need, or all that are left are too small
    return None


def room_keys(rooms: Sequence[int]) -> list[int]:
    """Room and hole as one number: comparing tuples would be most of the work."""
    return [(room << HOLE_BITS) + index for index, room in enumerate(rooms)]


def best_fit(by_room: list[int], sizes: Sequence[int], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Puts each need of ``order`` (descending) into the smallest hole that takes it. Returns the hole by need, 0 for
    needs that fit none, and these needs.

    Args:
        by_room: ``room_keys``, ascending.
    """
    by_room = by_room.copy()
    homes = [0] * len(sizes)
    left: list[int] = []
    least = sizes[order[-1]] << HOLE_BITS if order else 0  # holes that take no need any more are not kept
    find, insert = bisect.bisect_left, bisect.insort
    for need in order:
        size = sizes[need] << HOLE_BITS
        at = find(by_room, size)
        if at == len(by_room):
            left.append(need)
            continue
        room = by_room.pop(at)
        homes[need] = room & HOLE_MASK
        room -= size
        if room >= least:
            insert(by_room, room, 0, at)
    return homes, left


def windows(line: Line, sizes: Sequence[int], order: Sequence[int]) -> Layout | None:
    """A layout from holes upwards; None if no run between barriers has the room."""
    homes, left = best_fit(line.by_room(), sizes, order)
    if not left:
        return Layout(homes, [])
    rooms = line.rooms()
    if not rooms:
        return None
    for home, size in zip(homes, sizes, strict=True):
        rooms[home] -= size
    rooms[0] += sum([sizes[need] for need in left])
    room = np.array(rooms, dtype=np.int64)
    gaps = np.array(line.starts[1:], dtype=np.int64) - np.array(line.ends[:-1], dtype=np.int64)
    walls = _before(np.array(line.barrier(), dtype=np.int64))
    # holes of a run stay apart in the arrays, with all its room in the last and no gaps: a window then has all or none
    first, last = list(range(len(rooms))), list(range(1, len(rooms) + 1))  # the run that each hole is in
    runs: dict[int, int] = {}  # end by first hole
    per_batch = -(-len(left) // BATCHES)
    for begin in range(0, len(left), per_batch):
        batch = left[begin : begin + per_batch]
        nbytes = sum([sizes[need] for need in batch])
        found = _cheapest_window(room, gaps, walls, nbytes)
        if found is None:
            return None
        low, high = first[found[0]], last[found[1] - 1]
        rest = room[low:high].sum() - nbytes
        room[low:high], gaps[low : high - 1] = 0, 0
        room[high - 1] = rest
        first[low:high], last[low:high] = [low] * (high - low), [high] * (high - low)
        runs = {each: end for each, end in runs.items() if not low <= each < high} | {low: high}
        for need in batch:
            homes[need] = low
    return Layout([first[home] for home in homes], sorted(run for run in runs.items() if run[1] > run[0] + 1))


def _cheapest_window(room: Counts, gaps: Counts, walls: Counts, nbytes: int) -> tuple[int, int] | None:
    """Holes ``[low, high)`` with ``nbytes`` of room together, whose merging moves the fewest bytes more.

    Args:
        gaps: bytes between each hole and the next.
        walls: how many of those before each hole must not move.
    """
    before, reach = _before(room), _before(gaps)
    lows = before.searchsorted(before[1:] - nbytes, side="right") - 1  # the shortest window that ends at each hole
    fits = lows >= 0
    np.maximum(lows, 0, out=lows)
    fits &= walls == walls[lows]
    if not fits.any():
        return None
    high = int(np.where(fits, reach - reach[lows], np.iinfo(np.int64).max).argmin())
    return int(lows[high]), high + 1


def _before(counts: Counts) -> Counts:
    """Sums of the first none, one, two, ... of them."""
    sums = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
