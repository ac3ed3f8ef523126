"""Decides which segments leave a pool that is short of room: minimal-cost eviction, first stage of Tangram §3.2.2.

Evicting moves no bytes, so its cost is that of bringing back (its Eq. 2, which the caller computes). Finding the
cheapest set that frees enough is a knapsack problem. Greedy in ascending cost *per byte* is its usual approximation; a
second pass takes back segments made needless by the last and largest picks, and a shorter greedy start completed by one
well-fitting segment is taken if it is clearly cheaper. The paper orders by the cost itself, and under its own Eq. 2
that evicts the small tensors of every model before the large ones of any: each wake then finds all models incomplete
and the memory in crumbs.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dormouse.core.decisions.memory.pools.protocol import Cost

STEPS: Final = 64
"""Steps per doubling of the cost per byte. Segments of one model differ in it only by rounding; within a step (about 1
%) the order is the caller's, which is by address, so that evicted segments lie together.
"""

ENDINGS: Final = 24
"""Shorter starts that are tried with another ending: only the last picks can be much better chosen."""

GAIN: Final = 0.02
"""Least share of the cost that another ending must save: its evicted segments lie less together."""


class Ranking(NamedTuple):
    """Segments or blocks that can be evicted, the cheapest per byte first."""

    names: list[int]
    nbytes: npt.NDArray[np.int64]
    costs: npt.NDArray[np.float64]


def ascending(names: Sequence[int], nbytes: Sequence[int] | npt.NDArray[np.int64], cost: Cost) -> Ranking:
    """The ranking of ``names``, each with its bytes; equals stay in the order given."""
    costs, sizes = np.array(list(map(cost, names)), dtype=np.float64), np.asarray(nbytes, dtype=np.int64)
    with np.errstate(divide="ignore"):
        steps = np.floor(np.log2(np.maximum(costs, 0.0) / sizes) * STEPS)  # minus infinity for a cost of nothing
    order = np.argsort(steps, kind="stable")
    return Ranking([names[index] for index in order.tolist()], sizes[order], costs[order])


def enough(ranking: Ranking, short_nbytes: int) -> list[int]:
    """Names of the cheapest that are ``short_nbytes`` together; of all if they are less."""
    names, nbytes, costs = ranking
    freed = np.concatenate([[0], np.cumsum(nbytes)])  # by the first so many
    count = int(np.searchsorted(freed, short_nbytes)) if short_nbytes > 0 else 0
    if count == len(freed):
        return names.copy()
    surplus = int(freed[count]) - short_nbytes
    if not count or not surplus:
        return names[:count]
    best = _undone(ranking, list(range(count)), surplus)
    least = float(costs[best].sum()) * (1 - GAIN)
    starts = np.arange(count - 1, max(-1, count - 1 - ENDINGS), -1)
    spent = np.concatenate([[0.0], np.cumsum(costs)])[starts]
    possible = (nbytes >= short_nbytes - freed[starts, None]) & (np.arange(len(names)) >= starts[:, None])
    fitting = np.where(possible, costs, math.inf)
    lasts = fitting.argmin(axis=1)
    together = spent + fitting[np.arange(len(starts)), lasts]
    for start, last, price in zip(starts.tolist(), lasts.tolist(), together.tolist(), strict=True):
        if price < least:
            best = _undone(ranking, [*range(start), last], int(freed[start] + nbytes[last]) - short_nbytes)
            least = float(costs[best].sum())
    return [names[index] for index in best]


def _undone(ranking: Ranking, chosen: Sequence[int], surplus_nbytes: int) -> list[int]:
    """Indices without the needless ones, the dearest per byte first: undoing them saves most."""
    kept: list[int] = []
    for index, nbytes in zip(reversed(chosen), reversed(ranking.nbytes[chosen].tolist()), strict=True):
        if nbytes <= surplus_nbytes:
            surplus_nbytes -= nbytes
        else:
            kept.append(index)
    return kept[::-1]
