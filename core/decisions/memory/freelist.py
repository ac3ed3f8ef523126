"""First-fit allocation of spans in ``[0, capacity)``: pure bookkeeping, no memory.

Used for the store's slabs and the GPUs' pools. Best placement is not its business; merging neighbours is.
"""

import bisect
from collections.abc import Iterable, Mapping
from typing import Final

ALIGNMENT: Final = 512
"""Bytes. Wanted by vectorised loads and direct I/O, and a multiple of every element size."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment; at least one unit, so that every span has an address of its own."""
    return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)


def aligned_all(sizes: Iterable[int]) -> list[int]:
    """``aligned`` of each: a wake has thousands, and as many calls cost more than all the rest of counting them."""
    return [-(-nbytes // ALIGNMENT) * ALIGNMENT or ALIGNMENT for nbytes in sizes]


class Holes:
    """The free ranges of ``[0, capacity)``: ``[starts[i], ends[i])``, by address; no two of them touch.

    The lists may be read and not changed. The caller knows which ranges are taken, and names a range when it gives it
    back.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free_nbytes = capacity
        self.starts: list[int] = [0] if capacity else []
        self.ends: list[int] = [capacity] if capacity else []

    @property
    def largest(self) -> int:
        return max(map(int.__sub__, self.ends, self.starts), default=0)

    def find(self, size: int) -> int | None:
        """Offset of the first hole of at least ``size`` bytes."""
        return next((start for start, end in zip(self.starts, self.ends, strict=True) if end - start >= size), None)

    def take(self, offset: int, size: int) -> bool:
        """Take exactly these bytes; False, and nothing is taken, if they are not all free."""
        index = bisect.bisect(self.starts, offset) - 1
        if index < 0 or offset + size > self.ends[index]:
            return False
        start, end = self.starts[index], self.ends[index]
        parts = [part for part in ((start, offset), (offset + size, end)) if part[0] < part[1]]
        self.starts[index : index + 1] = [part[0] for part in parts]
        self.ends[index : index + 1] = [part[1] for part in parts]
        self.free_nbytes -= size
        return True

    def give(self, offset: int, size: int) -> None:
        """Free what is taken, and merge it with its neighbours."""
        self.free_nbytes += size
        end = offset + size
        index = bisect.bisect(self.starts, offset)
        if index < len(self.starts) and self.starts[index] == end:
            end = self.ends.pop(index)
            del self.starts[index]
        if index and self.ends[index - 1] == offset:
            self.ends[index - 1] = end
        else:
            self.starts.insert(index, offset)
            self.ends.insert(index, end)

    def reset(self, spans: Iterable[tuple[int, int]]) -> None:
        """Have exactly the spans ``(start, end)`` free, given by address; empty ones are left out: what many changes at
        once are cheaper with.
        """
        kept = [span for span in spans if span[0] < span[1]]
        self.starts, self.ends = [start for start, _ in kept], [end for _, end in kept]
        self.free_nbytes = sum(self.ends) - sum(self.starts)


class FreeList:
    """Spans of a contiguous range. ``free_nbytes`` and ``largest`` are exact to the byte."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._holes = Holes(capacity)
        self._taken: dict[int, int] = {}  # nbytes by offset

    @property
    def free_nbytes(self) -> int:
        return self._holes.free_nbytes

    @property
    def largest(self) -> int:
        return self._holes.largest

    @property
    def taken(self) -> Mapping[int, int]:
        """nbytes by offset of what is taken. Not a copy."""
        return self._taken

    def find(self, nbytes: int) -> int | None:
        """Offset of the first hole of at least ``aligned(nbytes)``; takes nothing."""
        return self._holes.find(aligned(nbytes))

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
        sizes = aligned_all(nbytes)
        if not self._holes.take(offset, sum(sizes)):
            return False
        for size in sizes:
            self._taken[offset] = size
            offset += size
        return True

    def give(self, offset: int) -> int:
        """Free the span at ``offset`` and merge it with its neighbours; returns its size. Raises KeyError if there is
        none.
        """
        size = self._taken.pop(offset)
        self._holes.give(offset, size)
        return size

    def check(self) -> None:
        check_tiling(self._taken.items(), self._holes)


def check_tiling(taken: Iterable[tuple[int, int]], holes: Holes) -> None:
    """Assert that the taken spans ``(offset, nbytes)`` and the holes tile the range without overlap, and that no two
    holes touch.
    """
    free = [(start, end - start, False) for start, end in zip(holes.starts, holes.ends, strict=True)]
    position, was_hole = 0, False
    for offset, nbytes, is_taken in sorted([*((offset, nbytes, True) for offset, nbytes in taken), *free]):
        assert offset == position, (offset, position)
        assert is_taken or not was_hole, offset
        assert nbytes > 0, offset
        position, was_hole = offset + nbytes, not is_taken
    assert position == holes.capacity
    assert holes.free_nbytes == sum(nbytes for _, nbytes, _ in free)
