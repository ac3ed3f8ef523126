"""A memory without addresses: what leaves, and that nothing is lost; and what an eviction costs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_costs import place

from dormouse.core.decisions.memory.eviction_cost import WakeEvictionCost
from dormouse.core.decisions.memory.models import KnownModels, ModelLayout
from dormouse.core.decisions.memory.pools.ideal import Ideal
from dormouse.core.decisions.memory.pools.protocol import PoolFull, Span
from dormouse.core.decisions.memory.pools.regions import Regions

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=8)


def filled(sizes: list[int], capacity: int = 100) -> Ideal:
    pool = Ideal(capacity)
    place(pool, list(enumerate(sizes)), cost=float)
    return pool


def test_the_cheapest_per_byte_leave_until_there_is_room() -> None:
    pool = filled([20, 20, 20, 20, 20])
    plan = place(pool, [(9, 30)], cost={0: 5.0, 1: 1.0, 2: 4.0, 3: 2.0, 4: 3.0}.__getitem__)
    assert (plan.evicted, plan.placed) == ([1, 3], {9: 0})
    assert sorted(pool.segments()) == [0, 2, 4, 9]
    assert (pool.used_nbytes, pool.free_nbytes, pool.lost_nbytes) == (90, 10, 0)
    pool.check()


def test_what_the_last_of_them_made_needless_stays() -> None:
    pool = filled([10, 10, 60])
    assert place(pool, [(9, 70)], cost={0: 1.0, 1: 2.0, 2: 600.0}.__getitem__).evicted == [2]


def test_what_is_fixed_stays_and_no_room_changes_nothing() -> None:
    pool = filled([40, 40])
    with pytest.raises(PoolFull, match=r"^60 bytes and 10 bytes of reserve do not fit a pool of 100 bytes: 10 "):
        place(pool, [(9, 60)], cost=float, fixed={1}, reserve_nbytes=10)
    assert sorted(pool.segments()) == [0, 1]
    assert place(pool, [(9, 60)], cost=float, fixed={1}).evicted == [0]


def test_what_cannot_be_asked() -> None:
    pool = filled([10])
    for needs in ([(0, 5)], [(1, 5), (1, 5)]):
        with pytest.raises(ValueError, match="a segment is named twice or is there already"):
            place(pool, needs, cost=float)
    with pytest.raises(ValueError, match="segment 0 is there already"):
        pool.adopt(0, 5)
    with pytest.raises(ValueError, match="segment 0 is there already"):
        pool.rename(5, 0)
    with pytest.raises(KeyError):
        pool.offset(7)


def test_what_else_a_pool_can() -> None:
    pool = filled([10, 20])
    assert pool.adopt(5, 71) is None
    assert pool.adopt(5, 60, reserve_nbytes=11) is None
    change = pool.adopt(5, 60, reserve_nbytes=10)
    assert change is not None
    assert change.placed == {5: 0}
    pool.rename(5, -1)
    assert (-1 in pool, 5 in pool, pool.nbytes(-1), pool.extents(-1)) == (True, False, 60, [Span(0, 60)])
    assert pool.drop([0, 0, 99]).evicted == [0]
    assert (pool.free_nbytes, pool.largest_nbytes) == (20, 20)
    pool.check()


@given(SIZES, SIZES, st.data())
def test_it_evicts_no_more_than_it_must(sizes: list[int], wanted: list[int], data: st.DataObject) -> None:
    """Beside a pool that plans addresses: the same needs fit both, and without those that it evicted they would not."""
    capacity = 512 * 30 * 8
    needs = [(100 + number, 512 * units) for number, units in enumerate(wanted)]
    prices = data.draw(st.lists(st.floats(0.01, 100.0), min_size=len(sizes), max_size=len(sizes)))
    reserve_nbytes = data.draw(st.integers(0, capacity - sum(nbytes for _, nbytes in needs)))
    ideal, regions = Ideal(capacity), Regions(capacity)
    plans = []
    for pool in (ideal, regions):
        place(pool, [(number, 512 * units) for number, units in enumerate(sizes)], cost=float)
        plans.append(place(pool, needs, cost=prices.__getitem__, reserve_nbytes=reserve_nbytes))
        pool.check()
        assert pool.free_nbytes >= reserve_nbytes
    evicted = plans[0].evicted
    assert bool(evicted) == bool(plans[1].evicted)
    assert all(ideal.free_nbytes - 512 * sizes[segment] < reserve_nbytes for segment in evicted)


# --- costs


def known(**models: list[int]) -> KnownModels:
    """Segments of 10 bytes."""
    found = KnownModels()
    for instance, segments in models.items():
        found.learn(instance, ModelLayout([(segment, 10) for segment in segments]))
        found.check()
    return found


def test_a_segment_is_worth_what_it_is_to_all_who_share_it() -> None:
    models = known(a=[1, 2], b=[2, 3], c=[4])
    cost = WakeEvictionCost(models, lambda: {"a": 1.0, "b": 2.0}, 5.0, lambda segment: 10)
    assert [cost(segment) for segment in (1, 2, 3, 4)] == [2.0, 6.0, 4.0, 0.0]
    assert list(cost.ascending({1: 10, 2: 10, 3: 10, 4: 10})) == [4, 1, 3, 2]


def test_where_nobody_shares_models_go_one_after_the_other() -> None:
    models = known(a=[1, 2], b=[3, 4], c=[5, 6])
    cost = WakeEvictionCost(models, lambda: {"b": 1.0, "a": 3.0}, 1.0, lambda segment: 10)
    assert list(cost.ascending({1: 10, 2: 10, 4: 10, 5: 10})) == [4, 1, 2, 5]


def test_who_shares_what_is_known_as_models_change() -> None:
    models = known(a=[1, 2], b=[2, 3])
    assert models.shared == 1
    assert models.learn("b", ModelLayout([(1, 10), (2, 10)])) == [2, 3]
    models.check()
    assert (models.shared, models.sharers) == (2, {1: {"a", "b"}, 2: {"a", "b"}})
    assert models.forget("a") == [1, 2]
    assert models.forget("a") == []
    models.check()
    assert models.shared == 0
