"""Every strategy for a GPU's memory keeps the same promises: one suite over all of them, executed on real bytes."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from pool_costs import place

from dormouse.core.decisions.memory.freelist import aligned
from dormouse.core.decisions.memory.pools.buddy import Buddy
from dormouse.core.decisions.memory.pools.pages import Pages
from dormouse.core.decisions.memory.pools.protocol import Mapping, Pool, PoolChange, PoolFull
from dormouse.core.decisions.memory.pools.regions import Regions

UNIT = 512
SMALL, LARGE = 4 * UNIT, 16 * UNIT
POISON, NEW = 0xDB, 0xEE

POOLS: dict[str, Callable[[], Pool]] = {
    "regions": lambda: Regions(256 * UNIT),
    "regions, odd capacity": lambda: Regions(200 * UNIT + 100),
    "regions, Algorithm 1": lambda: Regions(256 * UNIT, "algorithm-1"),
    "regions, global merge": lambda: Regions(256 * UNIT, "global"),
    "pages": lambda: Pages([(SMALL, 16), (LARGE, 12)], 4096 * UNIT),
    "pages, few small": lambda: Pages([(SMALL, 3), (LARGE, 15)], 4096 * UNIT),
    "pages, few large": lambda: Pages([(SMALL, 56), (LARGE, 2)], 4096 * UNIT),
    "pages, one class": lambda: Pages([(LARGE, 16)], 4096 * UNIT),
    "buddy": lambda: Buddy(4 * 64 * 2 * UNIT, slot_nbytes=2 * UNIT),
}


@pytest.fixture(params=list(POOLS))
def pool(request: pytest.FixtureRequest) -> Pool:
    return POOLS[request.param]()


def even(segment: int) -> float:
    return 1.0


def content(segment: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes of a segment that no other has (among any few) and that are neither poison nor fresh."""
    return (np.arange(nbytes, dtype=np.int64) * 7 + segment * 31).astype(np.uint8) % 199


class Memory:
    """Carries out plans on bytes: one array where addresses are memory, granules behind a map where they are not."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.physical = np.full(pool.capacity, NEW, dtype=np.uint8)
        self.pages = isinstance(pool, Pages)
        self.mapped: dict[int, tuple[int, int]] = {}  # (granule, nbytes) by address
        self.tenants: dict[int, str] = {}  # whose bytes a granule has
        self.owners: dict[int, str] = {}  # tenant that a segment got its address for
        self.roaming: set[int] = set()  # of what is resident
        self.segments: dict[int, int] = {}  # content by segment: the number that it had when it was copied
        self.offsets: dict[int, int] = {}

    def carry_out(self, plan: PoolChange, tenant: str = "") -> None:
        for segment in plan.evicted:
            del self.segments[segment], self.offsets[segment]
            if segment in self.roaming:
                del self.owners[segment]
        self.roaming.difference_update(plan.evicted)
        for offset, nbytes in plan.freed:
            self.physical[offset : offset + nbytes] = POISON
        for mapping in plan.unmapped:
            assert self.mapped.pop(mapping.offset) == (mapping.granule, mapping.nbytes)
        for move in plan.moves:
            assert self.offsets[move.segment] == move.source
            moved = self.physical[move.source : move.source + move.nbytes].copy()
            self.physical[move.target : move.target + move.nbytes] = moved
            self.offsets[move.segment] = move.target
        for mapping in plan.mapped:
            assert mapping.offset % mapping.nbytes == 0
            assert mapping.granule not in {granule for granule, _ in self.mapped.values()}
            assert all(
                mapping.offset + mapping.nbytes <= at or at + nbytes <= mapping.offset
                for at, (_, nbytes) in self.mapped.items()
            )
            self.mapped[mapping.offset] = (mapping.granule, mapping.nbytes)
            start = self.start(mapping.granule)
            if mapping.clear:
                self.physical[start : start + mapping.nbytes] = 0
        for segment, offset in plan.placed.items():
            assert segment not in self.segments
            self.segments[segment], self.offsets[segment] = segment, offset
            self.owners.setdefault(segment, tenant)
            self.write(segment)
        for mapping in plan.mapped:
            self.check_tenant(mapping, plan)

    def check_tenant(self, mapping: Mapping, plan: PoolChange) -> None:
        """A granule is cleared exactly if its bytes were another tenant's, and two tenants never share one."""
        end = mapping.offset + mapping.nbytes
        touching = [
            segment
            for segment, offset in self.offsets.items()
            if offset < end and mapping.offset < offset + self.pool.nbytes(segment)
        ]
        (owner,) = {self.owners[segment] for segment in touching}
        assert mapping.clear == (self.tenants.get(mapping.granule, owner) != owner)
        self.tenants[mapping.granule] = owner

    def start(self, granule: int) -> int:
        assert isinstance(self.pool, Pages)
        return self.pool._granules.physical(granule)

    def cells(self, segment: int) -> npt.NDArray[np.int64]:
        """Index in the physical memory of each byte of a segment, by what has been carried out."""
        addresses = np.arange(self.offsets[segment], self.offsets[segment] + self.pool.nbytes(segment))
        if not self.pages:
            return addresses
        cells = np.full(len(addresses), -1)
        for at, (granule, nbytes) in self.mapped.items():
            inside = (addresses >= at) & (addresses < at + nbytes)
            cells[inside] = addresses[inside] - at + self.start(granule)
        assert (cells >= 0).all(), "a byte of a resident segment is not mapped"
        return cells

    def write(self, segment: int) -> None:
        self.physical[self.cells(segment)] = content(self.segments[segment], self.pool.nbytes(segment))

    def check(self) -> None:
        """Books and bytes agree: contents, addresses, extents and counts."""
        pool = self.pool
        pool.check()
        assert sorted(pool.segments()) == sorted(self.segments)
        used = 0
        for segment, written in self.segments.items():
            assert segment in pool
            nbytes = pool.nbytes(segment)
            used += aligned(nbytes)
            assert pool.offset(segment) == self.offsets[segment]
            assert pool.offset(segment) % UNIT == 0
            cells = self.cells(segment)
            assert (self.physical[cells] == content(written, nbytes)).all(), f"segment {segment} has been overwritten"
            extents = np.concatenate([np.arange(at, at + length) for at, length in pool.extents(segment)])
            assert (extents == cells).all()
        assert pool.used_nbytes == used
        held = sum(nbytes for _, nbytes in self.mapped.values())
        if self.pages:
            assert pool.free_nbytes == pool.capacity - held
        assert pool.used_nbytes + pool.lost_nbytes + pool.free_nbytes == pool.capacity
        assert 0 <= pool.largest_nbytes <= pool.free_nbytes


def snapshot(pool: Pool) -> object:
    return (
        {segment: (pool.offset(segment), pool.nbytes(segment), pool.extents(segment)) for segment in pool.segments()},
        pool.used_nbytes,
        pool.lost_nbytes,
        pool.free_nbytes,
        pool.largest_nbytes,
    )


def test_an_empty_pool_is_all_free_and_takes_its_largest(pool: Pool) -> None:
    assert (pool.used_nbytes, pool.lost_nbytes, pool.free_nbytes) == (0, 0, pool.capacity)
    memory = Memory(pool)
    assert pool.largest_nbytes == pool.capacity // UNIT * UNIT
    plan = pool.adopt(1, pool.largest_nbytes)
    assert plan is not None
    memory.carry_out(plan)
    memory.check()
    assert pool.adopt(2, 1) is None
    memory.carry_out(pool.drop([1, 2]))
    memory.check()
    assert pool.free_nbytes == pool.capacity


def test_a_wake_into_an_empty_pool_lies_side_by_side_in_order(pool: Pool) -> None:
    plan = place(pool, [(3, UNIT), (1, UNIT - 5), (2, UNIT)], cost=even)
    first = plan.placed[3]
    assert list(plan.placed) == [3, 1, 2]
    assert plan.placed == {3: first, 1: first + UNIT, 2: first + 2 * UNIT}
    assert (plan.evicted, plan.freed, plan.moves, plan.unmapped) == ([], [], [], [])


def test_the_cheapest_go_first_and_no_more_than_needed(pool: Pool) -> None:
    memory = Memory(pool)
    size = pool.capacity // 8 // UNIT * UNIT
    for segment in range(8):
        memory.carry_out(place(pool, [(segment, size)], cost=even))
    while (plan := pool.adopt(100 + len(memory.segments), UNIT)) is not None:
        memory.carry_out(plan)  # whatever was left over
    price = {5: 1.0, 2: 2.0}
    plan = place(pool, [(9, size)], cost=lambda segment: price.get(segment, 100.0))
    memory.carry_out(plan)
    memory.check()
    assert plan.evicted == [5]
    plan = place(pool, [(10, size)], cost=lambda segment: price.get(segment, 100.0))
    assert plan.evicted == [2]


def test_fixed_segments_stay_where_they_are_and_a_refusal_changes_nothing(pool: Pool) -> None:
    memory = Memory(pool)
    size = pool.capacity // 8 // UNIT * UNIT
    for segment in range(8):
        memory.carry_out(place(pool, [(segment, size)], cost=even))
    fixed = {1, 3, 5, 7}
    before = snapshot(pool)
    with pytest.raises(PoolFull, match=str(5 * size)):
        place(pool, [(8, size), *((n, size) for n in range(9, 13))], cost=even, fixed=fixed)
    with pytest.raises(PoolFull):
        place(pool, [(8, size)], cost=even, fixed=fixed, reserve_nbytes=4 * size)
    assert snapshot(pool) == before
    offsets = {segment: pool.offset(segment) for segment in fixed}
    memory.carry_out(place(pool, [(n, size) for n in range(8, 12)], cost=even, fixed=fixed))
    memory.check()
    assert {segment: pool.offset(segment) for segment in fixed} == offsets


def test_a_reserve_is_left_free(pool: Pool) -> None:
    memory = Memory(pool)
    size = pool.capacity // 8 // UNIT * UNIT
    for segment in range(6):
        memory.carry_out(place(pool, [(segment, size)], cost=even))
    assert pool.adopt(6, size, reserve_nbytes=2 * size) is None
    plan = place(pool, [(6, size)], cost=even, reserve_nbytes=2 * size)
    memory.carry_out(plan)
    memory.check()
    assert pool.free_nbytes >= 2 * size
    plan = place(pool, [], cost=even, reserve_nbytes=pool.capacity // 2)
    memory.carry_out(plan)
    assert pool.free_nbytes >= pool.capacity // 2
    memory.check()


def test_unknown_segments_raise_and_known_ones_cannot_come_again(pool: Pool) -> None:
    place(pool, [(1, 100)], cost=even)
    assert 2 not in pool
    for question in (pool.offset, pool.nbytes, pool.extents):
        with pytest.raises(KeyError):
            question(2)
    with pytest.raises(KeyError):
        pool.rename(2, 3)
    with pytest.raises(ValueError, match="already"):
        place(pool, [(1, 100)], cost=even)
    with pytest.raises(ValueError, match="already"):
        pool.adopt(1, 100)
    with pytest.raises(ValueError, match="twice"):
        place(pool, [(2, 100), (2, 100)], cost=even)
    assert pool.drop([2]) == PoolChange()


def test_a_renamed_segment_keeps_its_place(pool: Pool) -> None:
    memory = Memory(pool)
    memory.carry_out(place(pool, [(1, 700), (2, 900)], cost=even))
    at = pool.offset(1)
    pool.rename(1, 5)
    assert (pool.offset(5), pool.nbytes(5), 1 in pool) == (at, 700, False)
    with pytest.raises(ValueError, match="already"):
        pool.rename(2, 5)
    pool.check()


@pytest.mark.parametrize("merge", ["partitioned-gain", "algorithm-1", "global"])
@pytest.mark.parametrize("seed", range(5))
def test_many_moves_in_one_plan_keep_every_byte(merge: str, seed: int) -> None:
    """Neighbours slide into each other's old places and into their own: wrong order would overwrite."""
    random = np.random.default_rng(seed)
    sizes = [int(units) * UNIT for units in random.integers(1, 9, 60)]
    pool = Regions(sum(sizes), merge)
    memory = Memory(pool)
    memory.carry_out(place(pool, list(enumerate(sizes)), cost=even))
    gone = [segment for segment in range(60) if random.random() < 0.3]
    memory.carry_out(pool.drop(gone))
    free, kept = pool.free_nbytes, dict.fromkeys(pool.segments(), 1000000000.0)
    plan = place(pool, [(100, free // 2 // UNIT * UNIT), (101, free // 4)], cost=kept.__getitem__)
    assert len(plan.moves) > 5
    assert not plan.evicted
    memory.carry_out(plan)
    memory.check()


NBYTES = st.one_of(st.integers(1, 8 * UNIT), st.integers(1, 40).map(lambda units: units * UNIT), st.just(70 * UNIT))


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls, each plan carried out on real bytes, leaves every resident segment's bytes intact."""

    make: Callable[[], Pool]

    def __init__(self) -> None:
        super().__init__()
        self.pool = type(self).make()
        self.memory = Memory(self.pool)
        self.serial = 0
        self.lives: dict[int, tuple[int, int]] = {}  # (address, nbytes) of what has been resident, pages only

    def fresh(self) -> int:
        self.serial += 1
        return self.serial

    def carry_out(self, plan: PoolChange, tenant: str = "") -> None:
        if isinstance(self.pool, Pages):
            for segment in self.memory.roaming.intersection(plan.evicted):
                del self.lives[segment]
        self.memory.carry_out(plan, tenant)
        if isinstance(self.pool, Pages):
            for segment, offset in plan.placed.items():
                nbytes = self.pool.nbytes(segment)
                assert self.lives.setdefault(segment, (offset, nbytes)) == (offset, nbytes), "an address has changed"

    @rule(
        sizes=st.lists(NBYTES, max_size=12),
        again=st.integers(0, 3),
        seed=st.integers(0, 2**16),
        fixed=st.floats(0, 0.7),
        reserve=st.sampled_from([0, 0, 5 * UNIT, 60 * UNIT]),
        tenant=st.sampled_from("ab"),
        roam=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
    )
    def place(
        self, sizes: list[int], again: int, seed: int, fixed: float, reserve: int, tenant: str, roam: float
    ) -> None:
        random = np.random.default_rng(seed)
        resident = list(self.pool.segments())
        chosen = {segment for segment in resident if random.random() < fixed}
        price = {segment: float(random.integers(0, 5)) for segment in resident}
        asleep = [(segment, nbytes) for segment, (_, nbytes) in self.lives.items() if segment not in self.pool]
        fresh = [(self.fresh(), nbytes) for nbytes in sizes]
        roaming = {segment for segment, _ in fresh if random.random() < roam}
        needs = [*asleep[:again], *fresh]
        before = snapshot(self.pool)
        offsets = {segment: self.pool.offset(segment) for segment in chosen}
        try:
            plan = place(
                self.pool, needs, cost=price.__getitem__, fixed=chosen, reserve_nbytes=reserve, tenant=tenant,
                roaming=roaming,
            )  # fmt: skip
        except PoolFull:
            assert snapshot(self.pool) == before
            return
        assert list(plan.placed) == [segment for segment, _ in needs]
        assert not chosen & set(plan.evicted)
        assert not chosen & {move.segment for move in plan.moves}
        assert {segment: self.pool.offset(segment) for segment in chosen} == offsets
        assert self.pool.free_nbytes >= reserve
        self.freed_exactly(plan, before)
        self.carry_out(plan, tenant)
        if isinstance(self.pool, Pages):
            self.memory.roaming |= roaming

    @rule(nbytes=NBYTES, reserve=st.sampled_from([0, 30 * UNIT]), tenant=st.sampled_from("ab"))
    def adopt(self, nbytes: int, reserve: int, tenant: str) -> None:
        before, largest = snapshot(self.pool), self.pool.largest_nbytes
        plan = self.pool.adopt(self.fresh(), nbytes, reserve_nbytes=reserve, tenant=tenant)
        if plan is None:
            assert snapshot(self.pool) == before
            assert reserve or nbytes > largest or isinstance(self.pool, Buddy)
        else:
            assert not plan.evicted
            assert not plan.moves
            assert self.pool.free_nbytes >= reserve
            self.carry_out(plan, tenant)

    @rule()
    def adopt_the_largest(self) -> None:
        if self.pool.largest_nbytes:
            plan = self.pool.adopt(self.fresh(), self.pool.largest_nbytes)
            assert plan is not None
            self.carry_out(plan)

    @rule(seed=st.integers(0, 2**16), share=st.floats(0, 1))
    def drop(self, seed: int, share: float) -> None:
        random = np.random.default_rng(seed)
        before = snapshot(self.pool)
        gone = [segment for segment in self.pool.segments() if random.random() < share]
        plan = self.pool.drop([*gone, 10**9])
        assert sorted(plan.evicted) == sorted(gone)
        self.freed_exactly(plan, before)
        self.carry_out(plan)

    @precondition(lambda self: self.memory.segments)
    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        old = data.draw(st.sampled_from(sorted(self.memory.segments)))
        asleep = [segment for segment in self.lives if segment not in self.pool]
        new = data.draw(st.sampled_from([*asleep, self.fresh()]))
        self.pool.rename(old, new)
        self.memory.segments[new] = self.memory.segments.pop(old)
        self.memory.offsets[new] = self.memory.offsets.pop(old)
        self.memory.owners[new] = self.memory.owners.pop(old)
        if isinstance(self.pool, Pages):
            if old in self.memory.roaming:
                self.memory.roaming = self.memory.roaming - {old} | {new}
            self.lives.pop(new, None)
            self.lives[new] = self.lives.pop(old)

    @rule(seed=st.integers(0, 2**16))
    def forget(self, seed: int) -> None:
        if isinstance(self.pool, Pages):
            random = np.random.default_rng(seed)
            gone = [segment for segment in self.lives if random.random() < 0.5]
            self.pool.forget(gone)
            for segment in gone:
                if segment not in self.pool:
                    del self.lives[segment], self.memory.owners[segment]

    @invariant()
    def intact(self) -> None:
        self.memory.check()

    def freed_exactly(self, plan: PoolChange, before: object) -> None:
        """The spans given up are those of the evicted segments, where addresses are memory."""
        if isinstance(self.pool, Pages):
            return
        assert isinstance(before, tuple)
        spans = before[0]
        expected = {cell for s in plan.evicted for cell in range(spans[s][0], spans[s][0] + aligned(spans[s][1]), UNIT)}
        freed = [cell for offset, nbytes in plan.freed for cell in range(offset, offset + nbytes, UNIT)]
        assert sorted(freed) == sorted(expected)


def machine(name: str) -> type[PoolMachine]:
    return type("Machine", (PoolMachine,), {"make": staticmethod(POOLS[name])})


@pytest.mark.parametrize("name", POOLS)
def test_any_sequence_leaves_contents_and_counts_intact(name: str) -> None:
    run_state_machine_as_test(
        machine(name), settings=settings(max_examples=25, stateful_step_count=25, deadline=None, derandomize=True)
    )
