"""Decides where new segments go in a contiguous pool whose free bytes suffice but lie in pieces, so that few bytes must
move: the second stage of Tangram §3.2.2.

The range is seen as a line of holes with groups of resident segments between them. A solution is a list of bins, each a
run of holes with the needs that it takes; the groups inside a run of several holes must be moved together, and their
bytes are what it costs. Where a group holds a segment that must stay, no bin reaches over it.

Two heuristics, both bounded, of which the pool takes the cheaper result:

``partition`` is the paper's Algorithm 1: from "merge everything" downwards, it splits the line at a group whenever the
needs can be divided between both sides, which gains the group's bytes; the largest gain is tried first. Line 21 refuses
a tensor that is not smaller than the *smaller* of the two rooms, while the text sends a tensor to the larger room and
gives up only where it does not fit there. The text is followed: by line 21 no large tensor could be placed beside a
small hole, and a side that is exactly full would refuse everything after it. A tensor that fits exactly fits.

``windows`` goes upwards: most needs fit a hole as it is (best fit decreasing), and for each of the few that are left it
merges the run of holes whose groups are cheapest. It finds what the paper's two-way division cannot when nearly every
free byte is needed.
"""

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

STEPS: Final = 2_000
"""Most tensors that ``partition`` looks at in all its attempts together, for a quarter of a millisecond. What is
unsplit then is merged.
"""

BATCHES: Final = 12
"""Most windows that ``windows`` searches for; more needs that fit no hole are taken several at a time."""


HOLE_BITS: Final = 32
HOLE_MASK: Final = (1 << HOLE_BITS) - 1

Counts = npt.NDArray[np.int64]


@dataclass(slots=True)
class Line:
    """Holes by address: hole ``i`` is ``[starts[i], ends[i])``; ``barrier[i]``: what lies between it and the next one
    must not move.
    """

    starts: list[int]
    ends: list[int]
    barrier: list[bool]

    def rooms(self) -> list[int]:
        return [end - start for start, end in zip(self.starts, self.ends, strict=True)]

    def cost(self, first: int, last: int) -> int:
        """Bytes to move so that holes ``[first, last)`` become one."""
        return sum(self.starts[i + 1] - self.ends[i] for i in range(first, last - 1))


class Bin(NamedTuple):
    """Holes ``[first, last)`` take ``needs``, indices in no particular order."""

    first: int
    last: int
    needs: list[int]


def moved_nbytes(line: Line, bins: Sequence[Bin]) -> int:
    return sum(line.cost(first, last) for first, last, _ in bins if last > first + 1)


def split(sizes: Sequence[int], parts: int) -> list[int]:
    """Bytes of ``parts`` runs of needs in their order, about as long as each other."""
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    cuts = np.unique(np.searchsorted(ends, [ends[-1] * part // parts for part in range(1, parts)]))
    marks = [0, *(int(ends[cut]) for cut in cuts if cut < len(sizes) - 1), int(ends[-1])]
    return [after - before for before, after in itertools.pairwise(marks)]


def side_by_side(line: Line, sizes: Sequence[int]) -> list[Bin] | None:
    """All needs in their order without a move: in the smallest hole that takes all, else in as few runs as possible."""
    if not sizes:
        return []
    rooms = line.rooms()
    total = sum(sizes)
    whole = min(((room, index) for index, room in enumerate(rooms) if room >= total), default=None)
    if whole is not None:
        return [Bin(whole[1], whole[1] + 1, list(range(len(sizes))))]
    ends = list(itertools.accumulate(sizes))
    bins: list[Bin] = []
    taken, done = 0, 0
    for room, index in sorted(((room, index) for index, room in enumerate(rooms)), reverse=True):
        upto = bisect.bisect_right(ends, done + room)
        if upto == taken:
            return None  # the largest hole left does not take the next need
        bins.append(Bin(index, index + 1, list(range(taken, upto))))
        taken, done = upto, ends[upto - 1]
        if taken == len(sizes):
            return bins
    return None


def best_fit(rooms: Sequence[int], sizes: Sequence[int], order: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """Each need of ``order`` (descending) into the smallest hole that takes it: needs by hole, and what fits none."""
    # (room, hole) as one number: comparing tuples would be most of the work
    by_room = sorted((room << HOLE_BITS) + index for index, room in enumerate(rooms))
    needs: list[list[int]] = [[] for _ in rooms]
    left: list[int] = []
    least = sizes[order[-1]] << HOLE_BITS if order else 0  # what takes no need any more is not kept
    for need in order:
        size = sizes[need] << HOLE_BITS
        at = bisect.bisect_left(by_room, size)
        if at == len(by_room):
            left.append(need)
            continue
        room = by_room.pop(at)
        needs[room & HOLE_MASK].append(need)
        if room - size >= least:
            bisect.insort(by_room, room - size, 0, at)
    return needs, left


def windows(line: Line, sizes: Sequence[int], order: Sequence[int]) -> list[Bin] | None:
    """Bins from holes upwards; None if no run between barriers has the room."""
    rooms = line.rooms()
    needs, left = best_fit(rooms, sizes, order)
    cells = [Bin(index, index + 1, members) for index, members in enumerate(needs)]
    if not left:
        return [cell for cell in cells if cell.needs]
    room = np.array(rooms, dtype=np.int64)
    room -= [sum([sizes[need] for need in members]) for members in needs]
    gaps = np.array(line.starts[1:], dtype=np.int64) - np.array(line.ends[:-1], dtype=np.int64)
    walls = np.array(line.barrier, dtype=np.int64)
    per_batch = -(-len(left) // BATCHES)
    for begin in range(0, len(left), per_batch):
        batch = left[begin : begin + per_batch]
        nbytes = sum(sizes[need] for need in batch)
        found = _cheapest_window(room, gaps, walls, nbytes)
        if found is None:
            return None
        low, high = found
        together = [need for cell in cells[low:high] for need in cell.needs]
        cells[low:high] = [Bin(cells[low].first, cells[high - 1].last, together + batch)]
        room = np.concatenate([room[:low], [room[low:high].sum() - nbytes], room[high:]])
        gaps, walls = (np.concatenate([each[:low], each[high - 1 :]]) for each in (gaps, walls))
    return [cell for cell in cells if cell.needs]


def _cheapest_window(room: Counts, gaps: Counts, walls: Counts, nbytes: int) -> tuple[int, int] | None:
    """Holes ``[low, high)`` with ``nbytes`` of room together, whose merging moves the fewest bytes more.

    Args:
        gaps: bytes between each hole and the next.
        walls: 1 where those must not move.
    """
    before, reach, passed = (np.concatenate([[0], np.cumsum(each)]) for each in (room, gaps, walls))
    lows = np.searchsorted(before, before[1:] - nbytes, side="right") - 1  # the shortest window that ends at each hole
    fits = lows >= 0
    lows = np.maximum(lows, 0)
    fits &= passed == passed[lows]
    if not fits.any():
        return None
    high = int(np.where(fits, reach - reach[lows], np.iinfo(np.int64).max).argmin())
    return int(lows[high]), high + 1


def partition(line: Line, sizes: Sequence[int], order: Sequence[int]) -> list[Bin] | None:
    """Bins from the whole line downwards (Algorithm 1); None if the needs cannot be divided among the barriers."""
    pending = stretches(line, sizes, order)
    if pending is None:
        return None
    before = [0]
    for room in line.rooms():
        before.append(before[-1] + room)
    gaps = [start - end for start, end in zip(line.starts[1:], line.ends, strict=False)]
    bins: list[Bin] = []
    steps = STEPS
    while pending:
        first, last, needs = pending.pop()
        if not needs:
            continue
        split = None
        for point in sorted(range(first, last - 1), key=gaps.__getitem__, reverse=True):
            if steps <= 0:
                break
            left_room, right_room = before[point + 1] - before[first], before[last] - before[point + 1]
            if sizes[needs[0]] > max(left_room, right_room):
                continue
            split = divide(needs, sizes, left_room, right_room)
            steps -= len(needs)
            if split is not None:
                pending += [Bin(first, point + 1, split[0]), Bin(point + 1, last, split[1])]
                break
        if split is None:
            bins.append(_trimmed(line, before, Bin(first, last, needs), sum(sizes[need] for need in needs)))
    return bins


def divide(
    needs: Sequence[int], sizes: Sequence[int], left_room: int, right_room: int
) -> tuple[list[int], list[int]] | None:
    """Two-bin packing (TryPacking): each need, largest first, to the side with more room; None if one does not fit."""
    left: list[int] = []
    right: list[int] = []
    for need in needs:
        size = sizes[need]
        if left_room >= right_room:
            left_room -= size
            if left_room < 0:
                return None
            left.append(need)
        else:
            right_room -= size
            if right_room < 0:
                return None
            right.append(need)
    return left, right


def _trimmed(line: Line, before: Sequence[int], bin: Bin, nbytes: int) -> Bin:
    """The run of holes inside ``bin`` that suffices and moves the fewest bytes."""
    low, best, least = bin.first, bin, None
    for high in range(bin.first + 1, bin.last + 1):
        while low + 1 < high and before[high] - before[low + 1] >= nbytes:
            low += 1
        if before[high] - before[low] >= nbytes:
            inside = before[high - 1] - before[low + 1] if high > low + 1 else 0
            span = line.starts[high - 1] - line.ends[low] - inside if high > low + 1 else 0
            if least is None or span < least:
                best, least = Bin(low, high, bin.needs), span
    return best


def stretches(line: Line, sizes: Sequence[int], order: Sequence[int]) -> list[Bin] | None:
    """The needs divided among the runs of holes between barriers, each of which can be merged into one; the largest
    need to the most room, or where that fails to the tightest.
    """
    count = len(line.starts)
    cuts = [0, *(index + 1 for index in range(count - 1) if line.barrier[index]), count]
    runs = [(low, high) for low, high in itertools.pairwise(cuts) if high > low]
    if len(runs) == 1:
        whole = sum(line.ends) - sum(line.starts) >= sum(sizes)
        return [Bin(*runs[0], list(order))] if whole else None
    rooms = [sum(line.ends[low:high]) - sum(line.starts[low:high]) for low, high in runs]
    divided = _worst_fit(rooms, sizes, order)
    if divided is None:
        divided, left = best_fit(rooms, sizes, order)
        if left:
            return None
    return [Bin(low, high, needs) for (low, high), needs in zip(runs, divided, strict=True)]


def _worst_fit(rooms: Sequence[int], sizes: Sequence[int], order: Sequence[int]) -> list[list[int]] | None:
    by_room = sorted((room, index) for index, room in enumerate(rooms))
    needs: list[list[int]] = [[] for _ in rooms]
    for need in order:
        if not by_room or by_room[-1][0] < sizes[need]:
            return None
        room, run = by_room.pop()
        needs[run].append(need)
        bisect.insort(by_room, (room - sizes[need], run))
    return needs


def global_merge(line: Line, sizes: Sequence[int], order: Sequence[int]) -> list[Bin] | None:
    """All holes made one (between barriers), as the baseline that Tangram §5.4.1 compares with."""
    divided = stretches(line, sizes, order)
    return None if divided is None else [bin for bin in divided if bin.needs]


def partitioned_gain(line: Line, sizes: Sequence[int], order: Sequence[int]) -> list[Bin] | None:
    """The cheaper of ``windows`` and ``partition``; the former where it moves nothing or there are so many needs that
    the latter's work would end before it got anywhere.
    """
    upwards = windows(line, sizes, order)
    if upwards is not None and (len(order) * 8 > STEPS or not moved_nbytes(line, upwards)):
        return upwards
    found = [bins for bins in (upwards, partition(line, sizes, order)) if bins is not None]
    return min(found, key=lambda bins: moved_nbytes(line, bins), default=None)
