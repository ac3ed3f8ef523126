"""Decides, for a wake into one contiguous range, which segments are evicted and the layout of the needs in the holes:
the two stages of Tangram §3.2.2 and the steps between them.

Nothing is changed here: the caller applies a :class:`PlacementChoice` to the books.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Final, NamedTuple

from dormouse.core.decisions.memory.pools import algorithm1, eviction, packing
from dormouse.core.decisions.memory.pools.packing import Layout, Line
from dormouse.core.decisions.memory.pools.protocol import Cost
from dormouse.core.decisions.memory.pools.shelf import Shelf

RETRIES: Final = 16
"""Most evictions that are tried to be taken back when obstacles made more of them than the sizes: each packs anew."""

MOVE_NBYTES_S: Final = 300e9
"""Bytes that a GPU moves in its own memory per second, for weighing moves against evictions: an L40's 864 GB/s of reads
and writes, less the loss of overlapping copies. Only its order of magnitude matters.
"""

NEGLIGIBLE: Final = 1e-3
"""Share of a plan's cost below which its moves are not worth looking for others."""

PARTS: Final = (4, 2, 1)
"""Into how many runs of addresses a wake is divided when runs are cleared for it; more runs are cheaper to clear."""


def partitioned_gain(line: Line, sizes: Sequence[int], order: Sequence[int]) -> Layout | None:
    """The cheaper of ``windows`` and ``partition``; the former where it moves nothing or there are so many needs that
    the latter's work would end before it got anywhere.
    """
    upwards = packing.windows(line, sizes, order)
    if upwards is not None and (len(order) * 8 > algorithm1.STEPS or not upwards.runs):
        return upwards
    found = [layout for layout in (upwards, algorithm1.partition(line, sizes, order)) if layout is not None]
    return min(found, key=lambda layout: packing.moved_nbytes(line, layout), default=None)


MERGES: Final[dict[str, Callable[[Line, Sequence[int], Sequence[int]], Layout | None]]] = {
    "partitioned-gain": partitioned_gain,
    "algorithm-1": algorithm1.partition,
    "global": algorithm1.global_merge,
}
"""Ways to find room in pieces; the second and third are baselines for the first."""


class PlacementChoice(NamedTuple):
    """Evicted segments, the holes then, and the layout of needs in them."""

    evicted: Collection[int]
    line: Line
    layout: Layout

    def moved_nbytes(self) -> int:
        return packing.moved_nbytes(self.line, self.layout)


class Planner:
    """One wake of needs of ``sizes``, aligned.

    Args:
        holes: as they are now.
        shelf: makes the view by address, which costs more than a wake that fits as it is.
        spare_nbytes: free bytes beyond the sizes and the reserve; below nothing where some must be freed.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        spare_nbytes: int,
        holes: tuple[list[int], list[int]],
        shelf: Callable[[], Shelf],
        merge: str,
        cost: Cost,
    ) -> None:
        self._sizes = sizes
        self._spare = spare_nbytes
        self._holes = holes
        self._make_shelf = shelf
        self._merge = MERGES[merge]
        self._clears = merge == "partitioned-gain"
        self._cost = cost

    @cached_property
    def shelf(self) -> Shelf:
        return self._make_shelf()

    @cached_property
    def _order(self) -> list[int]:
        return packing.descending(self._sizes)

    @cached_property
    def _ranking(self) -> eviction.Ranking:
        return eviction.ascending(*self.shelf.movable(), self._cost)

    @cached_property
    def _price(self) -> dict[int, float]:
        return dict(zip(self._ranking.names, self._ranking.costs.tolist(), strict=True))

    def choose(self) -> PlacementChoice | None:
        """None if there is no room even with all evicted that may be."""
        if self._spare < 0 and -self._spare > sum(self.shelf.movable()[1]):
            return None
        extra = 0
        while True:
            evicted = eviction.enough(self._ranking, extra - self._spare) if extra > self._spare else []
            choice = self._pack(evicted)
            if choice is not None:
                break
            if len(evicted) == len(self._ranking.names):
                return None
            # obstacles are in the way: more must go
            extra = max(extra + max(self._sizes), extra * 5 // 4, self._spare + 1)
        if extra:
            freed = sum(map(self.shelf.size, choice.evicted))  # less than was asked for, if all have left
            choice = self._needed(choice, min(extra, self._spare + freed))
        if self._clears and choice.moved_nbytes():
            choice = self._cheaper(choice)
        return choice

    def _pack(self, gone: Collection[int]) -> PlacementChoice | None:
        """The holes once these are gone, and the layout of needs in them."""
        line = self.shelf.line(set(gone)) if gone else Line(*self._holes, lambda: self.shelf.barrier())
        layout = packing.side_by_side(line, self._sizes)
        if layout is None:
            layout = self._merge(line, self._sizes, self._order)
        return None if layout is None else PlacementChoice(gone, line, layout)

    def _needed(self, choice: PlacementChoice, surplus_nbytes: int) -> PlacementChoice:
        """Takes back evictions beyond the sum of sizes, made to get around obstacles, that did not help."""
        tries = RETRIES
        for segment in reversed(list(choice.evicted)):
            nbytes = self.shelf.size(segment)
            if nbytes <= surplus_nbytes and tries:
                tries -= 1
                again = self._pack([each for each in choice.evicted if each != segment])
                if again is not None:
                    choice, surplus_nbytes = again, surplus_nbytes - nbytes
        return choice

    def _cheaper(self, choice: PlacementChoice) -> PlacementChoice:
        """Against evictions that need moves: clear whole runs of addresses for the needs in one, two or four parts, if
        that costs less by Eq. 1, evictions and moves together.
        """
        least = self._total_s(choice)
        if choice.moved_nbytes() / MOVE_NBYTES_S < NEGLIGIBLE * least:
            return choice
        for parts in PARTS:
            gone = self.shelf.clear(packing.split(self._sizes, parts), self._price)
            if gone is None:
                continue
            if sum(map(self._price.__getitem__, gone)) >= least:
                break  # longer runs are dearer still
            if self._spare + sum(map(self.shelf.size, gone)) < 0:
                continue
            again = self._pack(gone)
            if again is not None and (total_s := self._total_s(again)) < least:
                choice, least = again, total_s
        return choice

    def _total_s(self, choice: PlacementChoice) -> float:
        """Eq. 1: evictions and moves."""
        return sum(map(self._price.__getitem__, choice.evicted)) + choice.moved_nbytes() / MOVE_NBYTES_S
