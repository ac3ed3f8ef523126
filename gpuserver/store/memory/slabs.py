"""Decides where segments lie in the store's slabs; pure, the memory itself belongs to store_memory.py.

A slab is a range that is far larger than most models, so that an owner's consecutive spans lie in a row and are copied
in a row. To keep it so while several instances load at once, an owner that has begun has a slab to itself until it is
closed, as far as there is room.

An owner may announce a span before its bytes come: it *owes* them, and only bytes that come count. Where all of a slab
counts, so does that.

The cost of a slab depends on whether executors pin it. If not, address space only: pages are taken when written and
given back when a segment is freed, and the budget counts live segments. If they do, all of it from the start: the
budget counts slabs, and one that empties goes.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from dormouse.core.decisions.memory.freelist import ALIGNMENT, FreeList, aligned
from dormouse.core.quantities import size

SLAB_NBYTES: Final = 256 << 20
"""Smallest slab. Executors map every slab: a few hundred mappings for a large host's memory, and most models fit into
one."""


_UNIT: Final = 2 << 20
"""Of a slab's size: a huge page."""

PINNABLE_SHARE: Final = 16
"""Slabs that a budget has room for at least, where each costs all of its bytes."""


class HostFull(Exception):
    """There is no room; the text has the numbers and a remedy. At least ``lacking_nbytes`` must be freed; more, if the
    free bytes lie in pieces.
    """

    def __init__(self, text: str, lacking_nbytes: int) -> None:
        super().__init__(text)
        self.lacking_nbytes = lacking_nbytes


@dataclass(frozen=True, slots=True)
class SlabSpan:
    """Bytes ``[offset, +nbytes)`` of a slab."""

    slab: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class _Cursor:
    slab: int
    offset: int


class Slabs:
    """The state of all slabs.

    Args:
        budget_nbytes: most bytes of live segments, padding included; of slabs, if they are pinnable.
        pinnable: executors may pin the slabs.

    Attributes:
        gone: numbers of slabs that have emptied, for the caller to give back and clear. No number is used again.
    """

    def __init__(self, budget_nbytes: int, slab_nbytes: int = SLAB_NBYTES, pinnable: bool = False) -> None:
        self.budget_nbytes = budget_nbytes
        self.used_nbytes = 0
        self.pinnable = pinnable
        self.gone: list[int] = []
        self._slab_nbytes = slab_nbytes
        if pinnable:
            self._slab_nbytes = min(slab_nbytes, max(_UNIT, budget_nbytes // PINNABLE_SHARE // _UNIT * _UNIT))
        self._free: dict[int, FreeList] = {}  # by slab
        self._numbers = itertools.count()
        self._cursors: dict[object, _Cursor] = {}  # by owner
        self._expected: dict[object, int] = {}  # bytes by owner
        self._owed: dict[tuple[int, int], int] = {}  # bytes by slab and offset of a span

    @property
    def slabs(self) -> dict[int, int]:
        """Size of every slab, by its number."""
        return {number: slab.capacity for number, slab in self._free.items()}

    @property
    def capacity_nbytes(self) -> int:
        return sum(slab.capacity for slab in self._free.values())

    @property
    def held_nbytes(self) -> int:
        """Bytes that count against the budget."""
        return self.capacity_nbytes if self.pinnable else self.used_nbytes

    def taken(self) -> Iterator[tuple[int, int, int]]:
        """All spans: slab, offset, bytes with padding."""
        for number, slab in self._free.items():
            for offset, nbytes in list(slab.taken.items()):
                yield number, offset, nbytes

    def adopt(self, sizes: Mapping[int, int], spans: Iterable[SlabSpan]) -> None:
        """Before anything is placed: slabs that another store has left, and the spans taken in them. Raises ValueError
        if they do not fit together, or not into the budget; then this object is of no more use.
        """
        assert not self._free, "before anything is placed"
        self._free = {number: FreeList(nbytes) for number, nbytes in sizes.items()}
        self._numbers = itertools.count(max(sizes, default=-1) + 1)
        for span in spans:
            slab = self._free.get(span.slab)
            if (
                slab is None
                or span.offset % ALIGNMENT
                or span.nbytes <= 0
                or not slab.take_at(span.offset, span.nbytes)
            ):
                raise ValueError(f"{span} is not free")
            self.used_nbytes += aligned(span.nbytes)
        for number in sizes:
            self._go_if_empty(number)
        if self.held_nbytes > self.budget_nbytes:
            raise ValueError(f"they hold {self.held_nbytes:,} bytes, of which {self.budget_nbytes:,} may be")

    def expect(self, owner: object, sizes: Iterable[int]) -> None:
        """The owner will place these: its spans shall lie in a row although there are smaller holes."""
        self._expected[owner] = sum(aligned(nbytes) for nbytes in sizes)

    def place(self, owner: object, nbytes: int, owed: bool = False) -> SlabSpan:
        """Room for ``nbytes``, right behind the owner's last span if possible. A slab that is not yet in use may have
        been added. ``owed``: they are to come.

        Raises:
            HostFull: the budget would be exceeded.
        """
        size = aligned(nbytes)
        owed = owed and not self.pinnable
        if not (self.pinnable or owed) and (lacking := self.used_nbytes + size - self.budget_nbytes) > 0:
            raise self._full(nbytes, lacking)
        cursor = self._cursors.get(owner)
        if cursor is None or not self._free[cursor.slab].take_at(cursor.offset, nbytes):
            before, cursor = cursor, self._begin(owner, size)
            self._cursors[owner] = cursor
            if before is not None:
                self._go_if_empty(before.slab)
            taken = self._free[cursor.slab].take_at(cursor.offset, nbytes)
            assert taken
        span = SlabSpan(cursor.slab, cursor.offset, nbytes)
        cursor.offset += size
        if owed:
            self._owed[span.slab, span.offset] = size
        else:
            self.used_nbytes += size
        if owner in self._expected:
            self._expected[owner] -= size
        return span

    def owes(self, span: SlabSpan, nbytes: int) -> int:
        """How many of these count when they come."""
        return min(aligned(nbytes) if nbytes else 0, self._owed.get((span.slab, span.offset), 0))

    def come(self, span: SlabSpan, nbytes: int) -> None:
        """So many bytes of a span are here. Raises HostFull: the budget would be exceeded."""
        size = self.owes(span, nbytes)
        if size and (lacking := self.used_nbytes + size - self.budget_nbytes) > 0:
            raise self._full(nbytes, lacking)
        if size:
            self.used_nbytes += size
            self._owed[span.slab, span.offset] -= size

    def _begin(self, owner: object, size: int) -> _Cursor:
        """A hole in a slab that no other owner is filling, else a new slab. A hole that is too small for a row is used
        only once there are enough slabs, one that another owner is filling only if there is no other. Enough are slabs
        for twice the budget, as address space is cheap but not free; for the budget, where they are pinnable.
        """
        taken = {cursor.slab for other, cursor in self._cursors.items() if other != owner}
        row = max(size, self._expected.get(owner, 0))
        room = (self.budget_nbytes if self.pinnable else 2 * self.budget_nbytes) - self.capacity_nbytes
        new = max(self._slab_nbytes, _whole(size))
        plenty = room < new if self.pinnable else room <= 0
        for wanted in (row, size) if plenty else (row,):
            if (found := self._hole(wanted, taken)) is not None:
                return found
        if self.pinnable and plenty:
            if room < _whole(size):
                if (found := self._hole(size, set())) is not None:
                    return found
                largest = max([room, *(slab.largest for slab in self._free.values())])
                raise self._full(size, max(size - largest, ALIGNMENT))
            new = max(_whole(size), room // _UNIT * _UNIT)
        number = next(self._numbers)
        self._free[number] = FreeList(new)
        return _Cursor(number, 0)

    def _hole(self, nbytes: int, taken: set[int]) -> _Cursor | None:
        for number, slab in self._free.items():
            if number not in taken and (offset := slab.find(nbytes)) is not None:
                return _Cursor(number, offset)
        return None

    def _full(self, nbytes: int, lacking_nbytes: int) -> HostFull:
        pinned = f", slabs {size(self.capacity_nbytes)}" if self.pinnable else ""
        return HostFull(
            f"no host memory for {size(nbytes)}: models use {size(self.used_nbytes)} of {size(self.budget_nbytes)}"
            f"{pinned}; remove functions, or raise limits.host in the node's configuration",
            lacking_nbytes,
        )

    def place_all(self, owner: object, sizes: Iterable[int]) -> list[SlabSpan]:
        """Room for several spans; takes nothing if they do not all fit. Raises HostFull."""
        spans: list[SlabSpan] = []
        try:
            for nbytes in sizes:
                spans.append(self.place(owner, nbytes))
        except HostFull:
            self.leave(owner)
            for span in spans:
                self.free(span)
            raise
        return spans

    def close(self, owner: object) -> None:
        """The owner places nothing more for now: others may use the rest of its slab."""
        self._expected.pop(owner, None)
        self.leave(owner)

    def leave(self, owner: object) -> None:
        """The owner is through: its next span need not lie behind its last one."""
        cursor = self._cursors.pop(owner, None)
        if cursor is not None:
            self._go_if_empty(cursor.slab)

    def free(self, span: SlabSpan) -> None:
        self.used_nbytes -= self._free[span.slab].give(span.offset) - self._owed.pop((span.slab, span.offset), 0)
        self._go_if_empty(span.slab)

    def _go_if_empty(self, number: int) -> None:
        slab = self._free[number]
        begun = any(cursor.slab == number for cursor in self._cursors.values())
        if self.pinnable and slab.free_nbytes == slab.capacity and not begun:
            del self._free[number]
            self.gone.append(number)

    def check(self) -> None:
        """Assert that every slab is tiled exactly and that the budget is exact."""
        for slab in self._free.values():
            slab.check()
        taken = sum(slab.capacity - slab.free_nbytes for slab in self._free.values())
        assert self.used_nbytes == taken - sum(self._owed.values())
        assert self.held_nbytes <= self.budget_nbytes
        if self.pinnable:
            begun = {cursor.slab for cursor in self._cursors.values()}
            assert all(slab.free_nbytes < slab.capacity or n in begun for n, slab in self._free.items())


def _whole(nbytes: int) -> int:
    return -(-nbytes // _UNIT) * _UNIT
