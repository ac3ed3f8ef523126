"""First-fit allocation of spans in ``[0, capacity)``: pure bookkeeping, no memory.

Used for the store's slabs and the GPUs' pools. Best placement is not its business; merging neighbours is.
"""

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

ALIGNMENT: Final = 512
"""Bytes. What vectorised loads and direct I/O want, and a multiple of every element size."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment; at least one unit, so that every span has an address of its own."""
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


class FreeList:
    """Spans of a contiguous range. ``free_nbytes`` and ``largest`` are exact to the byte."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free_nbytes = capacity
        self._holes: list[tuple[int, int]] = [(0, capacity)] if capacity else []  # (offset, nbytes), by offset
        self._taken: dict[int, int] = {}  # nbytes by offset

    @property
    def largest(self) -> int:
        return max((nbytes for _, nbytes in self._holes), default=0)

    @property
    def holes(self) -> Sequence[tuple[int, int]]:
        """``(offset, nbytes)`` of what is free, by offset; no two touch. Not a copy."""
        return self._holes

    @property
    def taken(self) -> Mapping[int, int]:
        """nbytes by offset of what is taken. Not a copy."""
        return self._taken

    def find(self, nbytes: int) -> int | None:
        """Offset of the first hole of at least ``aligned(nbytes)``; takes nothing."""
        size = aligned(nbytes)
        return next((offset for offset, hole in self._holes if hole >= size), None)

    def take(self, nbytes: int) -> int | None:
        """Offset of a new span of ``aligned(nbytes)``, or None if no hole is large enough."""
        offset = self.find(nbytes)
        if offset is not None:
            self.take_at(offset, nbytes)
        return offset

    def take_at(self, offset: int, nbytes: int) -> bool:
        """Take ``aligned(nbytes)`` at ``offset``, so that spans can lie side by side; False if it is not free."""
        return self.take_all(offset, (nbytes,))

    def take_all(self, offset: int, nbytes: Iterable[int]) -> bool:
        """Take spans side by side from ``offset`` on, in one step; False, and nothing is taken, if one is not free."""
        sizes = [aligned(each) for each in nbytes]
        total = sum(sizes)
        index = bisect.bisect(self._holes, (offset, self.capacity)) - 1
        if index < 0:
            return False
        start, hole = self._holes[index]
        if offset + total > start + hole:
            return False
        before, after = (start, offset - start), (offset + total, start + hole - offset - total)
        self._holes[index : index + 1] = [part for part in (before, after) if part[1]]
        for size in sizes:
            self._taken[offset] = size
            offset += size
        self.free_nbytes -= total
        return True

    def give(self, offset: int) -> int:
        """Free the span at ``offset`` and merge it with its neighbours; returns its size. Raises KeyError if there is
        none.
        """
        size = self._taken.pop(offset)
        self.free_nbytes += size
        index = bisect.bisect(self._holes, (offset, 0))
        start, end = offset, offset + size
        if index < len(self._holes) and self._holes[index][0] == end:
            end += self._holes.pop(index)[1]
        if index and sum(self._holes[index - 1]) == start:
            index -= 1
            start = self._holes.pop(index)[0]
        self._holes.insert(index, (start, end - start))
        return size

    def reset(self, spans: Iterable[tuple[int, int]]) -> None:
        """Have exactly these ``(offset, nbytes)`` taken, given by offset and without overlap: what many changes at once
        are cheaper with.
        """
        taken: dict[int, int] = {}
        holes: list[tuple[int, int]] = []
        position, free = 0, 0
        for offset, nbytes in spans:
            size = -(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT
            if offset > position:
                holes.append((position, offset - position))
                free += offset - position
            taken[offset] = size
            position = offset + size
        if position < self.capacity:
            holes.append((position, self.capacity - position))
            free += self.capacity - position
        self._taken, self._holes, self.free_nbytes = taken, holes, free

    def check(self) -> None:
        """Assert that taken spans and holes tile the range without overlap and that no two holes touch."""
        spans = sorted([*((o, n, True) for o, n in self._taken.items()), *((o, n, False) for o, n in self._holes)])
        position, was_hole = 0, False
        for offset, nbytes, taken in spans:
            assert offset == position, (offset, position)
            assert taken or not was_hole, offset
            position, was_hole = offset + nbytes, not taken
        assert position == self.capacity
        assert self.free_nbytes == sum(nbytes for _, nbytes in self._holes)
