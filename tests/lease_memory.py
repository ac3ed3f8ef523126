"""Memory that knows whose bytes it has, what the machine of leases has given out of it, and what copies bring."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.memory.pools.pages import Pages
from dormouse.core.decisions.memory.pools.protocol import Move, Pool, PoolChange, Span
from dormouse.core.decisions.memory.pools.regions import Regions

UNIT: Final = 512  # what pools round to
SEGMENTS: Final = 6  # that models share
ODD: Final = 100  # no segment is a whole number of units
WRONG: Final = -1  # bytes that are nobody's, or of several

POOLS: Final[dict[str, Callable[[], Pool]]] = {
    "regions": lambda: Regions(12 * UNIT),
    "pages": lambda: Pages([(2 * UNIT, 2), (4 * UNIT, 2)], 4096 * UNIT),
}


def size(units: int) -> int:
    return units * UNIT - ODD


class Memory:
    """Whose bytes are where. Behind each address of a pool of pages there is a granule, or nothing."""

    def __init__(self, pool: Pool) -> None:
        self.paged = isinstance(pool, Pages)
        self._pool = pool
        self._units: dict[int, tuple[int, int]] = {}  # (value, which of its units) by physical unit
        self._behind: dict[int, tuple[int, int]] = {}  # (granule, physical unit) by address unit
        self.torn = False  # a plan was not carried out as it says

    def read(self, offset: int, nbytes: int) -> int:
        return self._value(self._where(offset, nbytes))

    def read_extents(self, spans: list[tuple[int, int]]) -> int:
        """As another GPU does, which knows nothing of addresses."""
        units = [unit for start, nbytes in spans for unit in range(start // UNIT, -(-(start + nbytes) // UNIT))]
        return self._value(units)

    def write(self, offset: int, nbytes: int, value: int) -> None:
        for index, unit in enumerate(self._where(offset, nbytes)):
            self._units[unit] = (value, index)

    def move(self, move: Move) -> None:
        found = [self._units.get(unit, (WRONG, 0)) for unit in self._where(move.source, move.nbytes)]
        for unit, content in zip(self._where(move.target, move.nbytes), found, strict=True):
            self._units[unit] = content

    def poison(self, span: Span) -> None:
        for unit in range(span.offset // UNIT, (span.offset + span.nbytes) // UNIT):
            self._units.pop(unit, None)

    def remap(self, plan: PoolChange, fails: bool) -> None:
        for each in plan.unmapped:
            if self._behind.get(each.offset // UNIT, (None, 0))[0] == each.granule:  # not so after one that failed
                for unit in _units(each.offset, each.nbytes):
                    del self._behind[unit]
        for each in plan.mapped[: len(plan.mapped) // 2] if fails else plan.mapped:
            assert each.granule not in {granule for granule, _ in self._behind.values()}, "at two addresses"
            start = self._pool._granules.physical(each.granule) // UNIT  # type: ignore[attr-defined]
            for index, unit in enumerate(_units(each.offset, each.nbytes)):
                self._behind[unit] = (each.granule, start + index)
                self._units.pop(start + index, None)

    @property
    def mapped_nbytes(self) -> int:
        return UNIT * len(self._behind)

    def _where(self, offset: int, nbytes: int) -> list[int]:
        units = _units(offset, nbytes)
        if not self.paged:
            return list(units)
        assert all(unit in self._behind for unit in units), "nothing is behind this address"
        return [self._behind[unit][1] for unit in units]

    def _value(self, units: list[int]) -> int:
        found = [self._units.get(unit, (WRONG, 0)) for unit in units]
        value = found[0][0]
        return value if found == [(value, index) for index in range(len(units))] else WRONG


def _units(offset: int, nbytes: int) -> range:
    return range(offset // UNIT, -(-(offset + nbytes) // UNIT))


class Ledger:
    """What the machine has given out, by what it has ordered."""

    def __init__(self) -> None:
        self._units: set[int] = set()  # of a contiguous pool
        self._granules: dict[int, int] = {}  # nbytes of those that are mapped
        self.limit_nbytes = 0

    @property
    def nbytes(self) -> int:
        return UNIT * len(self._units) + sum(self._granules.values())

    def arrange(self, arrange: o.Arrange) -> None:
        for plan in arrange.plans:
            for span in plan.freed:
                units = set(_units(*span))
                assert units <= self._units, "freed twice"
                self._units -= units
            for each in plan.unmapped:
                assert self._granules.pop(each.granule) == each.nbytes
            for move in plan.moves:
                self._units -= set(_units(move.source, move.nbytes))
                self._give(move.target, move.nbytes)
            for each in plan.mapped:
                assert each.granule not in self._granules
                self._granules[each.granule] = each.nbytes
        self.limit_nbytes = arrange.limit_nbytes

    def give(self, spans: Iterable[tuple[int, int]], paged: bool) -> None:
        for offset, nbytes in spans:
            if not paged:
                self._give(offset, nbytes)

    def _give(self, offset: int, nbytes: int) -> None:
        units = set(_units(offset, nbytes))
        assert not units & self._units, "given out twice"
        self._units |= units


class Stage(Enum):
    WANTED = 0
    COPYING = 1
    THERE = 2
    LOST = 3
    CANCELLED = 4


@dataclass
class Coming:
    """A segment that a wake brings."""

    segment: int
    offset: int
    nbytes: int
    stage: Stage = Stage.WANTED

    @property
    def open(self) -> bool:
        return self.stage in (Stage.WANTED, Stage.COPYING)


@dataclass
class Board:
    """A wake, as its copies go."""

    serial: int
    segments: dict[int, Coming]
    stopped: bool = False
    cancelled: bool = False
    ahead: bool = False  # for no lease
