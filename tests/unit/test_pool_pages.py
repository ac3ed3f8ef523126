"""What only a pool of pages promises: an address for life, granules shared by neighbours, tenants kept apart."""

import numpy as np
import pytest

from dormouse.core.decisions.memory.pools.granules import Granules
from dormouse.core.decisions.memory.pools.pages import Pages
from dormouse.core.decisions.memory.pools.protocol import PoolFull

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


def test_a_neighbour_that_would_take_the_last_small_granule_does_not_come_back() -> None:
    """Once it has left, a large granule would do for the newcomer, and nobody had to leave; beside it, it would not."""
    pool = Pages([(1024, 2), (2048, 2)], 1 << 20)
    pool.place([(1, 1024)], cost=float, tenant="t")
    pool.place([(2, 512)], cost=float, tenant="t")  # in the other half of the same window
    pool.drop([1])
    pool.place([(3, 1024)], cost=float, tenant="u")  # has the small granule that is free
    pool.place([(4, 2048)], cost=float, tenant="v")
    assert pool.place([(1, 1024)], cost=float, fixed={3, 4}, tenant="t").evicted == [2]
    pool.check()


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


def roamers(pool: Pages, numbers: range, units: int, tenant: str = "t") -> None:
    for n in numbers:
        pool.place([(n, units * UNIT)], cost=even, tenant=tenant, roaming={n})


def test_as_many_roaming_segments_are_resident_as_their_bytes_allow() -> None:
    """Twenty of three quarters of a small granule, whichever twenty of a hundred, in the fifteen that they fill."""
    pool = pages(0, 15)
    roamers(pool, range(20), 3)
    assert (len(pool.segments()), pool.free_nbytes, pool.lost_nbytes) == (20, 0, 0)
    random = np.random.default_rng(3)
    for n in random.permutation(range(20, 100)):
        price = {segment: float(random.integers(1, 9)) for segment in pool.segments()}
        plan = pool.place([(int(n), 3 * UNIT)], cost=price.__getitem__, tenant="t", roaming={int(n)})
        assert [price[segment] for segment in plan.evicted] == [min(price.values())]
        assert (plan.unmapped, plan.mapped) == ([], [])  # it lies where that one lay
        assert (len(pool.segments()), pool.lost_nbytes) == (20, 0)
        pool.check()


def test_what_roams_is_divided_where_its_parts_find_room() -> None:
    pool = pages(0, 8)
    roamers(pool, range(8), 4)
    pool.drop([1, 3, 6])
    plan = pool.place([(10, 4 * UNIT), (11, 4 * UNIT), (12, 2 * UNIT)], cost=even, tenant="t", roaming={10, 11, 12})
    assert plan.evicted == []
    assert {pool.offset(segment) // SMALL for segment in (10, 11, 12)} == {1, 3, 6}
    roamers(pool, range(13, 14), 2)
    assert (len(pool.segments()), pool.lost_nbytes) == (9, 0)
    pool.check()


def test_what_roams_fills_the_last_granule_of_what_stays() -> None:
    pool = pages(0, 2)
    pool.place([(1, 2 * UNIT)], cost=even, tenant="t")
    roamers(pool, range(2, 4), 3)
    assert (sorted(pool.segments()), pool.lost_nbytes) == ([1, 2, 3], 0)
    pool.drop([1, 2])
    roamers(pool, range(4, 5), 3)
    assert pool.offset(4) == 2 * UNIT  # not at the address that 1 keeps
    pool.drop([3, 4])
    assert pool.place([(1, 2 * UNIT)], cost=even, tenant="t").placed == {1: 0}
    pool.check()


def test_another_tenant_gets_no_part_of_a_granule_that_was_left() -> None:
    """And all of it only cleared."""
    pool = pages(0, 2)
    roamers(pool, range(4), 2)
    pool.drop([0])
    plan = pool.place([(9, UNIT)], cost=even, tenant="other", roaming={9})
    assert len(plan.evicted) == 1
    assert [mapping.clear for mapping in plan.mapped] == [True]
    assert pool.owner(9) == "other"
    pool.check()


def test_a_refusal_leaves_roaming_segments_where_they_are() -> None:
    pool = pages(0, 3)
    roamers(pool, range(6), 2)
    before = {segment: pool.offset(segment) for segment in pool.segments()}
    for units, fixed in ((11, {4}), (13, set[int]())):  # with all of them gone it is more than there is
        with pytest.raises(PoolFull):
            pool.place([(9, units * UNIT)], cost=even, fixed=fixed, tenant="t", roaming={9})
        assert {segment: pool.offset(segment) for segment in pool.segments()} == before
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
