"""What only a pool of pages promises: an address for life, granules shared by neighbours, tenants kept apart."""

import pytest

from dormouse.core.memory.pools.granules import Granules
from dormouse.core.memory.pools.pages import Pages
from dormouse.core.memory.pools.protocol import PoolFull

UNIT = 512
SMALL, LARGE = 4 * UNIT, 16 * UNIT


def even(segment: int) -> float:
    return 1.0


def pages(large: int, small: int, address: int = 64 * LARGE) -> Pages:
    return Pages([(SMALL, small), (LARGE, large)], address)


def test_large_granules_cover_whole_windows_and_small_ones_the_end() -> None:
    pool = pages(4, 8)
    plan = pool.place([(1, LARGE + 3 * UNIT), (2, LARGE), (3, 2 * UNIT)], cost=even)
    assert [mapping.nbytes for mapping in plan.mapped] == [LARGE, LARGE, SMALL, SMALL]
    assert (pool.used_nbytes, pool.lost_nbytes) == (2 * LARGE + 5 * UNIT, 3 * UNIT)


def test_small_granules_step_in_for_large_ones_and_the_other_way_round() -> None:
    pool = pages(1, 8)
    plan = pool.place([(1, 2 * LARGE)], cost=even)
    assert sorted(mapping.nbytes for mapping in plan.mapped) == [SMALL] * 4 + [LARGE]
    pool = pages(3, 1)
    plan = pool.place([(1, 2 * SMALL)], cost=even)
    assert [mapping.nbytes for mapping in plan.mapped] == [LARGE]
    assert pool.lost_nbytes == 2 * SMALL


def test_what_fits_in_a_granule_lies_in_one() -> None:
    """Whichever of its neighbours are here with it."""
    pool = pages(0, 8)
    for segment in range(4):
        pool.place([(2 * segment, UNIT), (2 * segment + 1, 2 * UNIT)], cost=even)
    assert [pool.offset(2 * segment) for segment in range(4)] == [0, SMALL, 2 * SMALL, 3 * SMALL]
    pool.place([(8, UNIT)], cost=even)
    assert pool.offset(8) == 3 * SMALL + 3 * UNIT
    pool.place([(9, SMALL + UNIT)], cost=even)  # more than a granule has: beside what is there
    assert pool.offset(9) == 4 * SMALL
    pool.place([(10, 2 * SMALL)], cost=even)
    assert pool.offset(10) == 5 * SMALL + UNIT
    pool.check()


def test_a_segment_keeps_its_address_until_it_is_forgotten() -> None:
    pool = pages(2, 4, address=4 * LARGE)
    first = pool.place([(1, LARGE)], cost=even).placed[1]
    pool.place([(2, 2 * LARGE + SMALL)], cost=even)
    assert 1 not in pool
    assert pool.place([(1, LARGE)], cost=even).placed == {1: first}
    pool.drop([1, 2])
    with pytest.raises(PoolFull, match="forget"):
        pool.place([(3, LARGE)], cost=even)
    pool.forget([2, 77])
    assert pool.place([(3, LARGE)], cost=even).placed[3] != first
    pool.forget([3])  # resident: keeps its address
    assert pool.place([(1, LARGE)], cost=even).placed == {1: first}
    pool.drop([1])
    with pytest.raises(ValueError, match="another size"):
        pool.place([(1, 5 * LARGE)], cost=even)
    pool.check()


def test_a_granule_stays_while_a_neighbour_needs_it_and_eviction_counts_what_is_freed() -> None:
    pool = pages(0, 4)
    pool.place([(n, UNIT) for n in range(8)], cost=even)  # 4 to a granule
    pool.place([(8, 2 * SMALL)], cost=even)
    assert pool.free_nbytes == 0
    plan = pool.drop([0, 1, 2])
    assert (plan.unmapped, pool.free_nbytes, pool.lost_nbytes) == ([], 0, 3 * UNIT)
    # 4 to 6 alone would free nothing: all of the second granule's must go, and 3 may stay
    price = {4: 1.0, 5: 1.0, 6: 1.0, 3: 50.0, 7: 2.0, 8: 1000.0}
    plan = pool.place([(9, SMALL)], cost=price.__getitem__, tenant="other")
    assert sorted(plan.evicted) == [4, 5, 6, 7]
    assert len(plan.unmapped) == len(plan.mapped) == 1


def test_evictions_that_freed_nothing_are_undone() -> None:
    pool = pages(0, 4)
    pool.place([(n, UNIT) for n in range(4)], cost=even)
    pool.place([(4, 3 * SMALL)], cost=even, tenant="b")
    plan = pool.place([(5, SMALL)], cost={0: 1.0, 1: 1.0, 2: 1.0, 3: 1e9, 4: 1e6}.__getitem__, tenant="c")
    assert plan.evicted == [4]


def test_another_tenants_granule_is_cleared_and_ones_own_is_preferred() -> None:
    pool = pages(2, 0)
    (first,) = pool.place([(1, LARGE)], cost=even, tenant="a").mapped
    assert not first.clear
    pool.drop([1])
    (own,) = pool.place([(2, LARGE)], cost=even, tenant="a").mapped
    assert (own.granule, own.clear) == (first.granule, False)
    pool.drop([2])
    (unused,) = pool.place([(3, LARGE)], cost=even, tenant="b").mapped
    assert (unused.granule == first.granule, unused.clear) == (False, False)
    (others,) = pool.place([(4, LARGE)], cost=even, tenant="b").mapped
    assert (others.granule, others.clear) == (first.granule, True)


def test_later_segments_of_a_tenant_use_up_its_last_granule() -> None:
    pool = pages(2, 8)
    for n in range(4):
        pool.adopt(n, UNIT, tenant="a")
    assert (pool.free_nbytes, pool.lost_nbytes) == (pool.capacity - SMALL, 0)
    pool.adopt(9, UNIT, tenant="b")
    assert pool.lost_nbytes == SMALL - UNIT
    pool.check()


def test_extents_name_the_physical_bytes() -> None:
    pool = pages(2, 4)
    pool.place([(1, LARGE + SMALL + 100)], cost=even)
    assert pool.extents(1) == [(0, LARGE), (2 * LARGE, SMALL + 100)]


@pytest.mark.parametrize(
    "classes", [[], [(SMALL, 1), (LARGE, 1), (2 * LARGE, 1)], [(SMALL, 1), (SMALL + 512, 1)], [(100, 1)]]
)
def test_sizes_that_do_not_divide_are_refused(classes: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="granules"):
        Granules(classes)
