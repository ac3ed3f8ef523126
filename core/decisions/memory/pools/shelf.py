"""Views a contiguous pool's residents by address: the holes once some residents are gone, and the run of addresses that
is cheapest to clear.

Greedy eviction takes the cheapest wherever they are; a run may cost a little more and needs no moves.
"""

import bisect
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping

import numpy as np

from dormouse.core.decisions.memory.pools.packing import Line


class Shelf:
    """Segments by address as they are now.

    Args:
        offset: of every resident segment.
        size: of every resident segment, aligned.
        fixed: those that neither go nor move.
    """

    def __init__(
        self, offset: Mapping[int, int], size: Mapping[int, int], fixed: Container[int], capacity: int
    ) -> None:
        self._segments = segments = sorted(offset, key=offset.__getitem__)
        self._offsets = [offset[segment] for segment in segments]
        self._fixed = [segment in fixed for segment in segments]
        self._size = size
        self._ends = np.array(self._offsets, dtype=np.int64) + [size[segment] for segment in segments]
        # run (i, j) of segments leaves the addresses [left[i], right[j]) when segments i to j-1 are gone
        self._left = np.concatenate([[0], self._ends])
        self._right = np.array([*self._offsets, capacity], dtype=np.int64)

    def movable(self) -> tuple[list[int], list[int]]:
        """Segments that are not fixed, by address, and their sizes."""
        names = [segment for segment, fixed in zip(self._segments, self._fixed, strict=True) if not fixed]
        return names, [self._size[segment] for segment in names]

    def size(self, segment: int) -> int:
        return self._size[segment]

    def barrier(self) -> list[bool]:
        """As in a :class:`Line` of the holes as they are now."""
        return self.line(()).barrier()

    def line(self, gone: Collection[int]) -> Line:
        """The holes between the segments that stay."""
        left, right, fixed = self._left, self._right, np.array(self._fixed, dtype=np.int64)
        if gone:
            stay = np.array([segment not in gone for segment in self._segments], dtype=bool)
            left, right = np.concatenate([[0], self._ends[stay]]), np.append(right[:-1][stay], right[-1])
            fixed = fixed[stay]
        holes = np.flatnonzero(right > left)

        def barrier() -> list[bool]:
            walls = np.concatenate([[0], np.cumsum(fixed)])[holes]
            found: list[bool] = (walls[1:] > walls[:-1]).tolist()
            return found

        return Line(left[holes].tolist(), right[holes].tolist(), barrier)

    def between(self, start: int, end: int, gone: Container[int]) -> Iterator[tuple[int, int]]:
        """``(offset, segment)`` by address of those in ``[start, end)`` that stay."""
        for index in range(bisect.bisect_left(self._offsets, start), bisect.bisect_left(self._offsets, end)):
            if self._segments[index] not in gone:
                yield self._offsets[index], self._segments[index]

    def clear(self, totals: Iterable[int], price: Mapping[int, float]) -> list[int] | None:
        """Segments to evict so that there is a free run of each of ``totals`` bytes, the largest chosen first; None if
        the segments that must stay leave no such run.

        Args:
            price: cost of each segment that may go; the others stay.
        """
        cost, gone = np.array([price.get(segment, math.inf) for segment in self._segments]), list[int]()
        for total in sorted(totals, reverse=True):
            walls = np.concatenate([[0], np.cumsum(np.isinf(cost))])
            spent = np.concatenate([[0.0], np.cumsum(np.where(np.isinf(cost), 0.0, cost))])
            ends = np.searchsorted(self._right, self._left + total)
            possible = ends < len(self._right)
            ends = np.maximum(np.minimum(ends, len(self._right) - 1), np.arange(len(ends)))
            possible &= walls[ends] == walls[: len(ends)]
            if not possible.any():
                return None
            first = int(np.where(possible, spent[ends] - spent[: len(ends)], math.inf).argmin())
            last = int(ends[first])
            gone += self._segments[first:last]
            cost[max(0, first - 1) : last + 1] = math.inf  # taken, and its neighbours bound it
        return gone
