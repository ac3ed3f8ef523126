"""Decides which segments leave a pool that is short of room: minimal-cost eviction, first stage of Tangram §3.2.2.

Evicting moves no bytes, so its cost is what bringing back would cost (its Eq. 2, which the caller computes). Finding
the cheapest set that frees enough is a knapsack problem. Greedy in ascending cost *per byte* is its usual
approximation; a second pass takes back whatever the last and largest picks made needless, and where a shorter greedy
start completed by one well-fitting segment is clearly cheaper, that is taken. The paper orders by the cost itself, and
under its own Eq. 2 that evicts the small tensors of every model before the large ones of any: each wake then finds all
models incomplete and the memory in crumbs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from dormouse.gpuserver.pools.protocol import Cost

STEPS: Final = 64
"""Steps per doubling of the cost per byte. Segments of one model differ in it only by rounding; within a step (about
1 %) the order is the caller's, which is by address, so that what leaves lies together.
"""

ENDINGS: Final = 24
"""Shorter starts that are tried with another ending: only the last picks can be much better chosen."""

GAIN: Final = 0.02
"""Least share of the cost that another ending must save: what leaves then lies together less."""


class Unit(NamedTuple):
    """Something that can be evicted: a segment, or a block of them."""

    name: int
    nbytes: int
    cost: float


def ascending(units: Iterable[tuple[int, int]], cost: Cost) -> list[Unit]:
    """``(name, nbytes)`` with the cheapest per byte first; equals stay in the order given."""
    listed = list(units)
    costs = [cost(name) for name, _ in listed]
    density = np.maximum(np.array(costs), 0.0) / np.array([nbytes for _, nbytes in listed])
    with np.errstate(divide="ignore"):
        steps = np.floor(np.log2(density) * STEPS)  # minus infinity for what costs nothing
    return [
        Unit(listed[index][0], listed[index][1], costs[index]) for index in np.argsort(steps, kind="stable").tolist()
    ]


def enough(ordered: Sequence[Unit], short_nbytes: int) -> list[Unit]:
    """The cheapest of ``ordered`` that are ``short_nbytes`` together; all of them if they are less."""
    count, total = 0, 0
    while total < short_nbytes and count < len(ordered):
        total += ordered[count].nbytes
        count += 1
    if total <= short_nbytes:
        return list(ordered[:count])
    best = _undone(ordered[:count], total - short_nbytes)
    least = sum(unit.cost for unit in best) * (1 - GAIN)
    sizes = np.array([unit.nbytes for unit in ordered], dtype=np.int64)
    costs = np.array([unit.cost for unit in ordered])
    freed, spent = sum(unit.nbytes for unit in ordered[: count - 1]), sum(unit.cost for unit in ordered[: count - 1])
    for start in range(count - 1, max(-1, count - 1 - ENDINGS), -1):
        fitting = np.where(sizes[start:] >= short_nbytes - freed, costs[start:], math.inf)
        last = int(fitting.argmin())
        if spent + fitting[last] < least:
            chosen = [*ordered[:start], ordered[start + last]]
            best = _undone(chosen, sum(unit.nbytes for unit in chosen) - short_nbytes)
            least = sum(unit.cost for unit in best)
        if start:
            freed -= ordered[start - 1].nbytes
            spent -= ordered[start - 1].cost
    return best


def _undone(chosen: Sequence[Unit], surplus_nbytes: int) -> list[Unit]:
    """Without what is not needed, the dearest per byte first: undoing them saves most."""
    kept: list[Unit] = []
    for unit in reversed(chosen):
        if unit.nbytes <= surplus_nbytes:
            surplus_nbytes -= unit.nbytes
        else:
            kept.append(unit)
    return kept[::-1]


class Shelf:
    """Segments by address, to find the run of addresses that is cheapest to clear.

    Greedy eviction takes the cheapest wherever they are; a run may cost a little more and needs no moves.

    Args:
        regions: ``(offset, nbytes, segment)`` by offset.
        price: cost of each segment that may go; the others stay.
    """

    def __init__(self, regions: Sequence[tuple[int, int, int]], price: Mapping[int, float], capacity: int) -> None:
        self._segments = [segment for _, _, segment in regions]
        # run (i, j) of regions leaves the addresses [left[i], right[j]) when regions i to j-1 are gone
        self._left = np.array([0, *(offset + nbytes for offset, nbytes, _ in regions)], dtype=np.int64)
        self._right = np.array([*(offset for offset, _, _ in regions), capacity], dtype=np.int64)
        self._cost = np.array([price.get(segment, math.inf) for segment in self._segments])

    def clear(self, totals: Iterable[int]) -> list[int] | None:
        """Segments to evict so that there is a free run of each of ``totals`` bytes, the largest chosen first; None if
        what must stay leaves no such run.
        """
        cost, gone = self._cost.copy(), list[int]()
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
