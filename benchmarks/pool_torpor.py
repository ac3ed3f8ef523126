"""The part of ``benchmarks.pool`` that allocates by blocks, Torpor's Fig. 13: its scheme and blocks of exact sizes."""

import random
from collections.abc import Sequence
from typing import Final

from benchmarks.pool_models import segments_of, torpor_models
from benchmarks.pool_trace import Planned, thread_ms
from dormouse.core.decisions.memory.pools.blocks import blocks_of
from dormouse.core.decisions.memory.pools.buddy import SLOT_NBYTES, Buddy
from dormouse.core.decisions.memory.pools.protocol import PoolFull

MALLOC_S: Final = 230e-6
FREE_S: Final = 49e-6
"""Seconds per cudaMalloc and cudaFree, for which the same source's create + map + access, and unmap with vAttention's
23 us of release stand in: not measured here, and a cudaFree also waits for the GPU, which is not counted.
"""


class FixedBlocks:
    """Torpor's baseline: blocks of exact sizes are cached when released; for another size idle ones are given back to
    the driver, the largest first, and a new one is asked for. Only sizes are kept: addresses are the driver's.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.reserved = capacity, 0
        self.idle: dict[int, int] = {}  # count by size

    def take(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Blocks of these sizes; returns how often the driver allocated and freed."""
        allocated = freed = 0
        for size in sizes:
            if self.idle.get(size):
                self.idle[size] -= 1
                continue
            while self.reserved + size > self.capacity:
                largest = max(each for each, count in self.idle.items() if count)
                self.idle[largest] -= 1
                self.reserved -= largest
                freed += 1
            self.reserved += size
            allocated += 1
        return allocated, freed

    def give(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            self.idle[size] = self.idle.get(size, 0) + 1


class Everything:
    """Contains every segment: nothing may be evicted by the pool."""

    def __contains__(self, segment: object) -> bool:
        return True


def _placed(pool: Planned, needs: Sequence[tuple[int, int]]) -> bool:
    try:
        pool.place(needs, cost=lambda segment: 1.0, fixed=Everything())
    except PoolFull:
        return False
    return True


def fig13(functions: int, count: int) -> dict[str, dict[str, float]]:
    """Time to allocate a model's blocks over its run time (Torpor's Fig. 13): many functions on one GPU, the least
    recently used model leaves.
    """
    capacity = 25 << 30
    kinds = torpor_models()
    buddy, fixed = Buddy(capacity), FixedBlocks(capacity)
    needs = [
        [(function * 10_000 + n, nbytes) for n, nbytes in enumerate(segments_of(kinds[function % len(kinds)][1]))]
        for function in range(functions)
    ]
    blocks = [[block.slots * SLOT_NBYTES for block in blocks_of(need, SLOT_NBYTES)] for need in needs]
    resident: dict[int, None] = {}  # functions with blocks in ``buddy``, the least recently used first
    awake: dict[int, None] = {}  # functions with blocks in ``fixed``, the least recently used first
    ratios: dict[str, list[float]] = {"buddy": [], "FixedBlocks": []}
    rng = random.Random(13)
    for _ in range(count):
        function = rng.randrange(functions)
        run_s = kinds[function % len(kinds)][2]
        began = thread_ms()
        if function not in resident:
            while buddy.free_nbytes < sum(blocks[function]) or not _placed(buddy, needs[function]):
                oldest = next(iter(resident))
                del resident[oldest]
                buddy.drop([segment for segment, _ in needs[oldest]])
        resident.pop(function, None)
        resident[function] = None
        took = thread_ms() - began
        ratios["buddy"].append(took / 1e3 / run_s)
        spent = 0.0
        if function not in awake:
            while awake and sum(sum(blocks[each]) for each in awake) + sum(blocks[function]) > capacity:
                oldest = next(iter(awake))
                del awake[oldest]
                fixed.give(blocks[oldest])
            allocated, freed = fixed.take(blocks[function])
            spent = allocated * MALLOC_S + freed * FREE_S
        awake.pop(function, None)
        awake[function] = None
        ratios["FixedBlocks"].append(spent / run_s)
    table = {}
    print("\nFig. 13: time to allocate / run time, p50 p90 p99 max")
    for name, found in ratios.items():
        steady = sorted(found[count // 2 :])
        at = {f"p{share}": steady[int(share / 100 * (len(steady) - 1))] for share in (50, 90, 99, 100)}
        table[name] = at
        print(f"  {name:12} " + " ".join(f"{value:8.4f}" for value in at.values()))
    return table
