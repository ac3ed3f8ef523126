"""Decides which holes of a contiguous pool become one by Tangram's Algorithm 1, and by the global merge that it is
compared with.

``partition`` goes downwards: from "merge everything" it splits the line at a group whenever the needs can be divided
between both sides, which gains the group's bytes; the largest gain is tried first. Line 21 refuses a tensor that is not
smaller than the *smaller* of the two rooms, while the text sends a tensor to the larger room and gives up only if it
does not fit there. The text is followed: by line 21 no large tensor could be placed beside a small hole, and a side
that is exactly full would refuse everything after it. A tensor that fits exactly fits.
"""

import bisect
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from dormouse.core.decisions.memory.pools.packing import HOLE_BITS, HOLE_MASK, Layout, Line, best_fit, room_keys

STEPS: Final = 2_000
"""Most tensors that ``partition`` looks at in all its attempts together, for a quarter of a millisecond. The unsplit
rest is then merged.
"""


class Bin(NamedTuple):
    """Holes ``[first, last)`` take ``needs``, indices in no particular order."""

    first: int
    last: int
    needs: list[int]


def partition(line: Line, sizes: Sequence[int], order: Sequence[int]) -> Layout | None:
    """A layout from the whole line downwards (Algorithm 1); None if the needs cannot be divided among the barriers."""
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
            bins.append(_trimmed(line, before, Bin(first, last, needs), sum([sizes[need] for need in needs])))
    return _layout(bins, len(sizes))


def _layout(bins: Sequence[Bin], count: int) -> Layout:
    homes = [0] * count
    for bin in bins:
        for need in bin.needs:
            homes[need] = bin.first
    return Layout(homes, sorted((first, last) for first, last, needs in bins if needs and last > first + 1))


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
    need to the most room, or where that fails to the tightest. None also where only a cleverer division would do: not
    seen in thousands of random cases that a tenth of the room is to spare in, and in 3 to 4 % of those where, by
    construction, every byte is needed.
    """
    count = len(line.starts)
    cuts = [0, *(index + 1 for index, wall in enumerate(line.barrier()) if wall), count]
    runs = [(low, high) for low, high in itertools.pairwise(cuts) if high > low]
    if len(runs) == 1:
        whole = sum(line.ends) - sum(line.starts) >= sum(sizes)
        return [Bin(*runs[0], list(order))] if whole else None
    rooms = [sum(line.ends[low:high]) - sum(line.starts[low:high]) for low, high in runs]
    divided = _worst_fit(rooms, sizes, order)
    if divided is None:
        homes, left = best_fit(sorted(room_keys(rooms)), sizes, order)
        if left:
            return None
        divided = [[] for _ in runs]
        for need in order:
            divided[homes[need]].append(need)
    return [Bin(low, high, needs) for (low, high), needs in zip(runs, divided, strict=True)]


def _worst_fit(rooms: Sequence[int], sizes: Sequence[int], order: Sequence[int]) -> list[list[int]] | None:
    by_room = sorted(room_keys(rooms))
    needs: list[list[int]] = [[] for _ in rooms]
    for need in order:
        size = sizes[need] << HOLE_BITS
        if not by_room or by_room[-1] < size:
            return None
        room = by_room.pop()
        needs[room & HOLE_MASK].append(need)
        bisect.insort(by_room, room - size)
    return needs


def global_merge(line: Line, sizes: Sequence[int], order: Sequence[int]) -> Layout | None:
    """All holes made one (between barriers), as the baseline that Tangram §5.4.1 compares with."""
    divided = stretches(line, sizes, order)
    return None if divided is None else _layout(divided, len(sizes))
