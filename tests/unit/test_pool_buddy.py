"""Torpor's block scheme: sizes, strides, consolidation, and the block as the unit of eviction."""

import pytest

from dormouse.core.decisions.memory.pools.blocks import blocks_of
from dormouse.core.decisions.memory.pools.buddy import Buddy
from dormouse.core.decisions.memory.pools.partitions import PartitionKind, Partitions, SlotRange, rounded
from dormouse.core.decisions.memory.pools.protocol import PoolFull

SLOT = 1024


def even(segment: int) -> float:
    return 1.0


def test_requests_are_rounded_as_the_prototype_does() -> None:
    assert [rounded(slots) for slots in (1, 2, 8, 9, 10, 11, 16, 33, 64, 65, 129)] == [
        1, 8, 8, 16, 10, 16, 16, 64, 64, 128, 192,
    ]  # fmt: skip


def test_segments_are_grouped_as_pytorchs_allocator_does() -> None:
    sizes = [SLOT // 2, SLOT, SLOT // 2, 6 * SLOT, 4 * SLOT, SLOT // 2, 4 * SLOT, 9 * SLOT + 1]
    blocks = blocks_of(list(enumerate(sizes)), SLOT)
    assert [(block.slots, [segment for segment, _ in block.members]) for block in blocks] == [
        (1, [0, 2]),
        (10, [1, 4, 6]),
        (6, [3]),
        (1, [5]),
        (10, [7]),
    ]


def test_ten_slots_fit_a_partition_six_times_and_the_rest_takes_single_ones() -> None:
    partitions = Partitions(1)
    tens = 0
    while (place := partitions.find(10, {})) is not None:
        partitions.take(place)
        tens += 1
    assert tens == 6
    ones = 0
    while (place := partitions.find(1, {})) is not None:
        partitions.take(place)
        ones += 1
    assert (ones, partitions.free_slots) == (4, 0)
    assert partitions.find(8, {}) is None


def test_an_empty_partition_is_untyped_again() -> None:
    partitions = Partitions(1)
    partitions.take(SlotRange(0, 1))
    assert partitions.kinds == [PartitionKind.REGULAR]
    assert partitions.find(8, {}) is None
    partitions.give(SlotRange(0, 1))
    assert partitions.find(8, {}) == SlotRange(0, 8)


def test_a_models_blocks_are_kept_together_then_go_where_most_is_free() -> None:
    partitions = Partitions(3)
    partitions.take(SlotRange(0, 10))
    partitions.take(SlotRange(64, 1))
    active: dict[int, None] = {}
    place = partitions.find(10, active)
    assert place == SlotRange(64 + 10, 10)
    partitions.take(place)
    partitions.take(SlotRange(64 + 20, 10))
    assert partitions.find(1, active) == SlotRange(64 + 1, 1)  # although the first partition has more room now
    assert partitions.find(1, {}) == SlotRange(10, 1)


def test_a_block_goes_whole_and_stays_while_one_segment_is_fixed() -> None:
    pool = Buddy(64 * SLOT, slot_nbytes=SLOT)
    pool.place([(1, SLOT // 2), (2, SLOT // 2)], cost=even)
    for n in range(3, 8):
        pool.place([(n, 10 * SLOT)], cost=even)
    pool.place([(n, SLOT // 2) for n in range(20, 46)], cost=even)  # two to a slot, 13 slots
    assert pool.free_nbytes == 0
    price = {1: 0.0, 2: 0.0}
    with pytest.raises(PoolFull):
        pool.place([(50, 100)], cost=even, fixed=set(pool.segments()))
    plan = pool.place([(50, 100)], cost=lambda s: price.get(s, float(s)), fixed={1, *range(3, 8)})
    assert plan.evicted == [20, 21]
    plan = pool.place([(51, 10 * SLOT)], cost=lambda s: price.get(s, 9.0), fixed={3, 4, 5, 6})
    assert plan.evicted == [7]
    pool.check()


def test_a_large_block_takes_the_cheapest_run_of_partitions() -> None:
    pool = Buddy(4 * 64 * SLOT, slot_nbytes=SLOT)
    for n in range(4):
        pool.place([(n, 64 * SLOT)], cost=even)
    plan = pool.place([(9, 100 * SLOT)], cost={0: 1.0, 1: 20.0, 2: 5.0, 3: 6.0}.__getitem__)
    assert sorted(plan.evicted) == [2, 3]
    assert (pool.offset(9), pool.lost_nbytes) == (2 * 64 * SLOT, 28 * SLOT)
    with pytest.raises(PoolFull):
        pool.place([(10, 300 * SLOT)], cost=even)
    pool.check()


def test_slots_must_divide_into_aligned_halves() -> None:
    with pytest.raises(ValueError, match="slots"):
        Buddy(1 << 20, slot_nbytes=512)
