"""Allocates room in the arena's stream area as a ring, released in order, frame by frame.

Pure arithmetic: it never touches the bytes.
"""

from collections import deque
from typing import Final

_ALIGN: Final = 64  # so that the executor may view a region as any dtype


class ArenaRing:
    """Regions belong to a frame; they are free again when that frame is settled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // _ALIGN * _ALIGN
        self._head = 0  # where the next region starts, modulo capacity
        self._used = 0  # bytes from the oldest region's start to the head, skipped ends included
        self._regions: deque[tuple[int, int]] = deque()  # (frame, bytes incl. skipped), oldest first

    @property
    def empty(self) -> bool:
        return not self._regions

    def take(self, nbytes: int, frame: int) -> int | None:
        """The offset of a region for `frame`, or None if older frames must be settled first."""
        size = (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
        if size > self.capacity:
            raise ValueError(f"{nbytes} bytes cannot pass through an arena of {self.capacity}")
        if self._used == 0:
            self._head = 0
        wraps = self._head + size > self.capacity
        skipped = self.capacity - self._head if wraps else 0
        if self._used + skipped + size > self.capacity:
            return None
        start = 0 if wraps else self._head
        self._head = start + size
        self._used += skipped + size
        self._regions.append((frame, skipped + size))
        return start

    def settle(self, frame: int) -> None:
        """Every region of `frame` and of older frames is free."""
        while self._regions and self._regions[0][0] <= frame:
            self._used -= self._regions.popleft()[1]

    def clear(self) -> None:
        self._regions.clear()
        self._used = 0
