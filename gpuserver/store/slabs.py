"""Decides where segments lie in the store's slabs; pure, the memory itself belongs to memory.py.

A slab is a range that is far larger than most models, so that what one owner places in a row lies in a row and is
copied in a row. To keep it so while several instances load at once, an owner that has begun has a slab to itself
until it is closed. The budget counts live segments: a slab costs address space only, its pages are taken when written
and given back when a segment is freed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dormouse.core.freelist import FreeList, aligned

SLAB_NBYTES: Final = 256 << 20
"""Smallest slab. Executors map every slab: a few hundred mappings for a large host's memory, and most models fit into
one."""


class HostFull(Exception):
    """The budget has no room; the text has the numbers and says what to do."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``[offset, +nbytes)`` of a slab."""

    slab: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Cursor:
    slab: int
    offset: int


class Slabs:
    """The books of all slabs.

    Args:
        budget_nbytes: most bytes of live segments, padding included.
    """

    def __init__(self, budget_nbytes: int, slab_nbytes: int = SLAB_NBYTES) -> None:
        self.budget_nbytes = budget_nbytes
        self.used_nbytes = 0
        self._slab_nbytes = slab_nbytes
        self._free: list[FreeList] = []  # by slab
        self._cursors: dict[object, _Cursor] = {}  # by owner
        self._expected: dict[object, int] = {}  # bytes by owner

    @property
    def slabs(self) -> list[int]:
        """Size of every slab, by its number."""
        return [slab.capacity for slab in self._free]

    def lacking(self, nbytes: int) -> int:
        """How many bytes must be freed before a span of ``nbytes`` is within the budget; 0 if it is."""
        return max(0, self.used_nbytes + aligned(nbytes) - self.budget_nbytes)

    def expect(self, owner: object, sizes: Iterable[int]) -> None:
        """The owner will place these: its spans shall lie in a row although there are smaller holes."""
        self._expected[owner] = sum(aligned(nbytes) for nbytes in sizes)

    def place(self, owner: object, nbytes: int) -> Span:
        """Room for ``nbytes``, right behind the owner's last span if possible. A slab that is not yet in use may have
        been added.

        Raises:
            HostFull: the budget would be exceeded.
        """
        size = aligned(nbytes)
        if self.lacking(nbytes):
            raise HostFull(
                f"no host memory for {nbytes:,} bytes: models use {self.used_nbytes:,} of {self.budget_nbytes:,}; "
                "remove functions, or raise limits.host in the node's configuration"
            )
        cursor = self._cursors.get(owner)
        if cursor is None or not self._free[cursor.slab].take_at(cursor.offset, nbytes):
            cursor = self._cursors[owner] = self._begin(owner, size)
            taken = self._free[cursor.slab].take_at(cursor.offset, nbytes)
            assert taken
        span = Span(cursor.slab, cursor.offset, nbytes)
        cursor.offset += size
        self.used_nbytes += size
        if owner in self._expected:
            self._expected[owner] -= size
        return span

    def _begin(self, owner: object, size: int) -> _Cursor:
        """A hole in a slab that no other owner is filling, else a new slab. Address space is cheap but not free: a hole
        that is too small for a row is used only once there are slabs for twice the budget.
        """
        taken = {cursor.slab for other, cursor in self._cursors.items() if other != owner}
        row = max(size, self._expected.get(owner, 0))
        plenty = sum(slab.capacity for slab in self._free) >= 2 * self.budget_nbytes
        for wanted in (row, size) if plenty else (row,):
            for number, slab in enumerate(self._free):
                if number not in taken and (offset := slab.find(wanted)) is not None:
                    return _Cursor(number, offset)
        self._free.append(FreeList(max(self._slab_nbytes, -(-size // (2 << 20)) * (2 << 20))))
        return _Cursor(len(self._free) - 1, 0)

    def place_all(self, owner: object, sizes: Iterable[int]) -> list[Span]:
        """Room for several spans and the end of this owner; takes nothing if they do not all fit.

        Raises HostFull.
        """
        spans: list[Span] = []
        try:
            for nbytes in sizes:
                spans.append(self.place(owner, nbytes))
        except HostFull:
            for span in spans:
                self.free(span)
            raise
        finally:
            self.close(owner)
        return spans

    def close(self, owner: object) -> None:
        """The owner places nothing more for now: others may use what is left of its slab."""
        self._cursors.pop(owner, None)
        self._expected.pop(owner, None)

    def free(self, span: Span) -> None:
        self.used_nbytes -= self._free[span.slab].give(span.offset)

    def check(self) -> None:
        """Assert that every slab is tiled exactly and that the budget is exact."""
        for slab in self._free:
            slab.check()
        assert self.used_nbytes == sum(slab.capacity - slab.free_nbytes for slab in self._free)
        assert self.used_nbytes <= self.budget_nbytes
