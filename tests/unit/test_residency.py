"""A GPU's books: who shares what, what a wake evicts and brings, seats, pins of other GPUs; and chunks of copies."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.core.decisions.memory.freelist import aligned
from dormouse.core.decisions.memory.pools.pages import Pages
from dormouse.core.decisions.memory.pools.protocol import Pool
from dormouse.core.decisions.memory.pools.regions import Regions
from dormouse.core.decisions.memory.residency import Residency
from dormouse.core.decisions.memory.transfer import POOL, Copy, chunked, peer, slab
from dormouse.core.decisions.memory.wake_plan import ModelTooLarge
from dormouse.schemas.messages import Entry, Manifest

UNIT = 512


def manifest(instance: str, *segments: tuple[int, int], version: int = 1) -> Manifest:
    """Segments ``(id, units)``."""
    sized = [(segment, units * UNIT) for segment, units in segments]
    entries = [Entry(storage=n, segment=s, offset=0, nbytes=nbytes) for n, (s, nbytes) in enumerate(sized)]
    return Manifest(instance=instance, version=version, entries=entries, segments=sized)


class Gpu:
    """A residency whose wakes arrive at once, and which knows what stays: what is held does not move."""

    def __init__(self, units: int = 100, pool: Pool | None = None) -> None:
        self.books = Residency(pool or Regions(units * UNIT))
        self.manifests: dict[str, Manifest] = {}

    def knows(self, *manifests: Manifest) -> None:
        for each in manifests:
            self.manifests[each.instance] = each
            self.books.learn(each.instance, each.segments)

    def sit(self, instance: str, **worth: float) -> list[int]:
        """The segments that it copied; it keeps its seat."""
        before = self.held()
        plan = self.books.wake(instance, lambda: worth, 1e9)
        for segment in {segment for segment, _, _ in plan.missing} | {
            move.segment for part in plan.plans for move in part.moves
        }:
            self.books.arrived(segment)
        self.books.check()
        assert before.items() <= self.held().items()
        return [segment for segment, _, _ in plan.missing]

    def wake(self, instance: str, **worth: float) -> list[int]:
        """The same, and it leaves at once."""
        copied = self.sit(instance, **worth)
        self.books.leave(instance)
        self.books.check()
        return copied

    def held(self) -> dict[int, int]:
        """Where the segments of all seats are."""
        pool = self.books.pool
        return {segment: pool.offset(segment) for segment in pool.segments() if self.books.seats.held(segment)}


def test_missing_segments_lie_side_by_side_in_first_use_order() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (3, 10), (1, 20), (2, 30)))
    plan = gpu.books.wake("a", dict, 1e9)
    assert plan.missing == [(3, 0, 10 * UNIT), (1, 10 * UNIT, 20 * UNIT), (2, 30 * UNIT, 30 * UNIT)]
    assert plan.copy_nbytes == 60 * UNIT
    assert gpu.books.places("a") == {3: (0, 10 * UNIT), 1: (10 * UNIT, 20 * UNIT), 2: (30 * UNIT, 30 * UNIT)}
    assert gpu.books.leave("a") == [3, 1, 2]
    assert gpu.wake("a") == []


def test_what_two_functions_share_is_brought_once_and_counts_for_both() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 40), (2, 10)), manifest("b", (1, 40), (3, 5)))
    assert gpu.wake("a") == [1, 2]
    assert gpu.wake("b") == [3]
    assert dict(gpu.books.changed()) == {"a": 50 * UNIT, "b": 45 * UNIT}
    assert gpu.books.changed() == []
    assert gpu.books.pool.used_nbytes == 55 * UNIT


def test_what_comes_for_one_is_told_of_all_who_share_it() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 40)), manifest("b", (1, 40)))
    assert dict(gpu.books.changed()) == {"a": 0, "b": 0}
    gpu.wake("a")
    assert dict(gpu.books.changed()) == {"a": 40 * UNIT, "b": 40 * UNIT}


def test_the_least_worth_goes_first_and_what_is_shared_is_worth_the_sum() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30)), manifest("b", (2, 30)), manifest("c", (3, 30), (2, 30)), manifest("d", (4, 30)))
    for name in "ab":
        gpu.wake(name)
    gpu.books.changed()
    # 40 units are free; c needs 30 more than b has: nothing goes. Then d finds 10 and needs 30.
    assert gpu.wake("c", a=0.5, b=0.3) == [3]
    assert gpu.wake("d", a=0.5, b=0.3, c=0.3) == [4]
    assert 3 not in gpu.books.pool  # worth 0.3; 2 is worth 0.6 and 1 is worth 0.5
    assert {1, 2, 4} <= set(gpu.books.pool.segments())
    assert ("c", 30 * UNIT) in gpu.books.changed()


def test_room_for_activations_is_left_if_it_can_be_had() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 40)), manifest("b", (2, 40)), manifest("c", (3, 90)))
    gpu.wake("a")
    gpu.books.wake("b", dict, 1e9, wish_nbytes=30 * UNIT)
    gpu.books.leave("b")
    assert list(gpu.books.pool.segments()) == [2]
    gpu.books.wake("c", dict, 1e9, wish_nbytes=30 * UNIT)  # it cannot
    assert list(gpu.books.pool.segments()) == [3]


def test_segments_that_no_manifest_has_are_retired() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 10), (2, 10)), manifest("b", (2, 10)))
    gpu.wake("a")
    assert gpu.books.unlearn("a") == [1, 2]
    plan = gpu.books.retire([1, 2])
    assert plan.evicted == [1]
    assert list(gpu.books.pool.segments()) == [2]


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 60)), manifest("b", (2, 101)), manifest("c", (3, 90)))
    gpu.wake("a")
    with pytest.raises(ModelTooLarge, match=r"needs 50\.5 KiB of GPU memory; this GPU has 50\.0 KiB"):
        gpu.wake("b")
    with pytest.raises(ModelTooLarge, match="in use for activations"):
        gpu.books.wake("c", dict, 1e9, reserve_nbytes=11 * UNIT)
    assert not any(gpu.books.seated(name) for name in "abc")
    assert gpu.wake("a") == []
    gpu.wake("c")


def test_addresses_kept_for_life_do_not_keep_a_model_out_that_fits() -> None:
    """What is left of segments that came together lies in many granules."""
    gpu = Gpu(pool=Pages([(4 * UNIT, 8)], 1024 * UNIT))
    kept: list[tuple[int, int]] = []
    for turn in range(9):
        gpu.knows(manifest("a", *kept, (100 + turn, 1), (200 + turn, 3), version=turn))
        assert 100 + turn in gpu.wake("a")
        kept.append((100 + turn, 1))
        gpu.knows(manifest("a", *kept, version=turn))
        gpu.books.retire([200 + turn])
    assert gpu.wake("a") == []
    gpu.books.check()


@pytest.mark.parametrize("tenant", ["one", "two"])
def test_what_is_left_in_another_tenants_memory_is_not_written_there(tenant: str) -> None:
    """Where tenants share: its first one, gone meanwhile, would get the granule back uncleared."""
    gpu = Gpu(pool=Pages([(4 * UNIT, 8)], 1024 * UNIT))
    gpu.knows(manifest("a", (1, 3)), manifest("b", (1, 3)))
    gpu.books.wake("a", dict, 1e9, tenant="one")
    gpu.books.leave("a")
    gpu.books.unlearn("a")
    gpu.books.wake("b", dict, 1e9, tenant=tenant)
    assert gpu.books.claim("b", 1, tenant) == (-1 if tenant == "one" else None)
    gpu.books.check()


def test_pinned_segments_are_neither_evicted_nor_moved_nor_written() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30), (2, 30)), manifest("b", (3, 60)), manifest("c", (4, 70)))
    gpu.sit("a")
    found = gpu.books.pin([2, 9])
    assert found == [(2, [(30 * UNIT, 30 * UNIT)])]
    assert gpu.books.claim("a", 2) is None
    assert gpu.books.claim("a", 1) == -1
    assert gpu.books.pin([1]) == []
    assert gpu.books.leave("a") == [1, 2, -1]
    assert gpu.books.forget([-1]).evicted == [-1]
    assert gpu.wake("a") == [1]
    with pytest.raises(ModelTooLarge, match="run it again"):  # there is room for 70, but not while 2 is read
        gpu.wake("c")
    assert not gpu.books.seated("c")
    gpu.books.check()
    gpu.books.unlearn("a")
    assert gpu.books.retire([1, 2]).evicted == [1]
    assert 2 in gpu.books.pool
    assert gpu.books.let_go([2]) == [2]
    gpu.books.retire([2])
    assert gpu.books.pool.used_nbytes == 0
    assert gpu.wake("c") == [4]


def test_a_segment_that_is_under_way_is_not_given_to_others() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30)))
    gpu.books.wake("a", dict, 1e9)
    assert gpu.books.pin([1]) == []
    gpu.books.arrived(1)
    assert gpu.books.pin([1]) == [(1, [(0, 30 * UNIT)])]
    assert gpu.books.let_go([1]) == []


def test_a_rename_keeps_the_bytes_and_takes_them_from_who_shared_them() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30)))
    gpu.sit("a")
    gpu.books.changed()
    assert gpu.books.claim("a", 1) == -1
    assert gpu.books.pool.offset(-1) == 0
    assert gpu.books.changed() == [("a", 0)]
    gpu.knows(manifest("b", (1, 30)))  # loaded meanwhile, with the bytes that were committed
    gpu.books.rename(-1, 7)
    assert gpu.books.pool.offset(7) == 0
    gpu.knows(manifest("a", (7, 30), version=2))
    assert dict(gpu.books.changed()) == {"a": 30 * UNIT, "b": 0}
    assert gpu.wake("b") == [1]
    assert gpu.books.leave("a") == [1, 7]
    assert gpu.wake("a") == []


# --- seats


def test_what_seats_hold_is_in_the_way_of_a_third() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 40)), manifest("b", (2, 40)), manifest("c", (3, 30)), manifest("d", (4, 20)))
    gpu.wake("d")
    gpu.sit("a")
    gpu.sit("b")
    assert gpu.books.fixed_nbytes == 80 * UNIT
    with pytest.raises(ModelTooLarge, match="run it again") as told:
        gpu.sit("c")
    assert told.value.plan.evicted == []
    assert [gpu.books.seated(name) for name in "abc"] == [True, True, False]
    assert sorted(gpu.books.pool.segments()) == [1, 2, 4]
    gpu.books.check()
    gpu.books.leave("a")
    assert gpu.sit("c", a=0.0, d=1.0) == [3]
    assert sorted(gpu.books.pool.segments()) == [2, 3, 4]


def test_others_move_around_what_seats_hold() -> None:
    """Of six places a seat has the first; what is in the third and fifth moves, so that three side by side are free."""
    gpu = Gpu(units=60)
    gpu.knows(*(manifest(f"m{n}", (n, 10)) for n in range(1, 7)), manifest("large", (9, 30)))
    for n in range(1, 7):
        gpu.wake(f"m{n}")
    gpu.sit("m1")
    for n in (2, 4, 6):
        gpu.books.unlearn(f"m{n}")
        gpu.books.retire([n])
    assert gpu.sit("large", m3=1.0, m5=1.0) == [9]
    assert sorted(gpu.books.pool.segments()) == [1, 3, 5, 9]
    assert gpu.books.pool.offset(1) == 0
    assert gpu.books.moved_nbytes > 0


def test_what_two_seats_share_stays_until_both_have_left() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 40), (2, 10)), manifest("b", (1, 40)), manifest("c", (3, 80)))
    assert gpu.sit("a") == [1, 2]
    assert gpu.sit("b") == []
    assert gpu.books.leave("a") == [1, 2]
    with pytest.raises(ModelTooLarge, match="run it again"):
        gpu.sit("c")
    assert [gpu.books.seats.held(segment) for segment in (1, 2)] == [True, False]
    assert gpu.books.leave("b") == [1]
    assert gpu.sit("c") == [3]
    assert list(gpu.books.pool.segments()) == [3]


def test_a_seat_that_is_left_holds_nothing() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30), (2, 30)))
    gpu.sit("a")
    assert gpu.books.claim("a", 1) == -1
    assert [gpu.books.seats.held(segment) for segment in (1, -1, 2)] == [False, True, True]
    gpu.books.unlearn("a")
    assert gpu.books.retire([1, 2]).evicted == []
    assert gpu.books.leave("a") == [1, 2, -1]
    assert not gpu.books.seated("a")
    assert not any(gpu.books.seats.held(segment) for segment in (1, -1, 2))
    assert gpu.books.retire([1, 2]).evicted == [2]
    assert gpu.books.forget([-1]).evicted == [-1]
    assert gpu.books.leave("a") == []
    assert gpu.books.pool.used_nbytes == 0


def test_a_claimed_segment_may_be_brought_anew_by_another() -> None:
    """Who has come to share it while it was written gets the bytes that were committed, beside those that are not."""
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30), (2, 10)), manifest("c", (4, 40)))
    gpu.sit("a")
    gpu.wake("c")
    assert gpu.books.claim("a", 1) == -1
    gpu.knows(manifest("b", (1, 30)))
    assert gpu.sit("b") == [1], "c has gone for it"
    assert sorted(gpu.books.pool.segments()) == [-1, 1, 2]
    assert gpu.books.pool.offset(-1) != gpu.books.pool.offset(1)
    assert gpu.books.claim("b", 1) is None, "a may come back to it"
    assert gpu.books.fixed_nbytes == 70 * UNIT
    assert dict(gpu.books.pin([1, 2])).keys() == {1, 2}
    assert gpu.books.let_go([1, 2]) == []
    gpu.books.leave("a")
    assert gpu.books.forget([-1]).evicted == [-1]
    assert gpu.sit("a") == [], "what was not kept is here as b has it"


def test_a_claim_needs_a_segment_that_is_here_and_nobody_elses() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 10), (2, 10)), manifest("b", (2, 10)))
    gpu.sit("a")
    assert gpu.books.claim("a", 2) is None, "b has it, too"
    assert gpu.books.claim("a", 9) is None, "it is not there"
    assert gpu.books.claim("a", 1) == -1
    assert gpu.books.claim("a", 1) is None, "it has been claimed"
    gpu.books.unlearn("b")
    assert gpu.books.claim("a", 2) == -2, "each has a number of its own"
    gpu.books.check()


def test_what_is_dropped_goes_from_its_seat() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30)), manifest("b", (2, 90)))
    gpu.sit("a")
    gpu.books.claim("a", 1)
    assert gpu.books.forget([-1]).evicted == [-1]
    gpu.books.check()
    assert gpu.sit("b") == [2]
    assert [gpu.books.seated(name) for name in "ab"] == [True, True]


def test_kv_that_comes_and_goes_uses_no_address_up() -> None:
    gpu = Gpu(pool=Pages([(4 * UNIT, 4)], 32 * UNIT))
    gpu.knows(manifest("chat", (1, 1)))
    gpu.sit("chat")
    for _ in range(50):
        grown = gpu.books.grow("chat", 1, 3 * UNIT, dict, 1.0, owner="kv of chat")
        assert grown is not None
        gpu.books.forget(grown[0])
        gpu.books.check()


def test_what_is_on_its_way_for_others_is_coming() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30), (2, 10)), manifest("b", (1, 30)), manifest("c", (3, 10)))
    gpu.books.wake("a", dict, 1e9)
    assert [gpu.books.coming(name) for name in "abcd"] == [True, True, False, False]
    gpu.books.arrived(1)
    assert [gpu.books.coming(name) for name in "abcd"] == [True, False, False, False]
    gpu.books.leave("a")
    assert gpu.books.coming("a")
    gpu.books.forget([2])
    assert not gpu.books.coming("a")


def test_what_was_made_here_is_part_of_the_seat_until_it_is_left() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30)), manifest("b", (2, 60)))
    gpu.sit("a")
    assert gpu.books.adopt("a", 7, 30 * UNIT, 50 * UNIT) is None, "beside activations there is no room"
    plan = gpu.books.adopt("a", 7, 30 * UNIT, 40 * UNIT)
    assert plan is not None
    assert plan.evicted == []
    assert gpu.books.seats.held(7)
    assert gpu.books.pin([7]) == []
    gpu.books.arrived(7)
    assert dict(gpu.books.pin([7])).keys() == {7}
    assert gpu.books.let_go([7]) == []
    gpu.knows(manifest("a", (1, 30), (7, 30), version=2))
    with pytest.raises(ModelTooLarge, match="run it again"):
        gpu.sit("b")
    assert gpu.books.leave("a") == [1, 7]
    assert gpu.wake("a") == []
    assert gpu.sit("b") == [2]


def test_memory_that_runs_out_takes_all_but_what_seats_hold_and_others_read() -> None:
    gpu = Gpu()
    gpu.knows(*(manifest(name, (segment, 20)) for segment, name in enumerate("abcd", 1)))
    for name in "abcd":
        gpu.wake(name)
    gpu.sit("b")
    gpu.sit("d")
    assert gpu.books.claim("d", 4) == -1
    assert dict(gpu.books.pin([1])).keys() == {1}
    assert gpu.books.fixed_nbytes == 60 * UNIT
    assert gpu.books.relieve().evicted == [3]
    assert sorted(gpu.books.pool.segments()) == [-1, 1, 2]
    assert gpu.books.relieve().evicted == []
    assert gpu.books.let_go([1]) == []
    assert gpu.books.fixed_nbytes == 40 * UNIT
    assert gpu.books.relieve().evicted == [1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_sequence_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    gpu = Gpu()
    sizes = {segment: rng.randint(1, 25) for segment in range(30)}
    fresh = itertools.count(100)
    pinned: list[int] = []
    claimed: dict[str, list[int]] = {}  # by instance with a seat
    for turn in range(60):
        name = rng.choice("abcdef")
        held = gpu.held()
        match rng.randrange(9):
            case 0:
                chosen = rng.sample(sorted(sizes), rng.randint(0, 6))
                before = gpu.books.unlearn(name)
                gpu.knows(manifest(name, *((segment, sizes[segment]) for segment in chosen), version=turn))
                gpu.books.retire(before)
            case 1 | 2 if name in gpu.manifests and name not in claimed:
                try:
                    gpu.sit(name, **{other: rng.random() for other in "abc"})
                except ModelTooLarge:
                    assert not gpu.books.seated(name)
                else:
                    assert gpu.books.resident_nbytes(name) == sum(n for _, n in gpu.manifests[name].segments)
                    claimed[name] = []
                    if rng.random() < 0.5:
                        claimed.pop(name)
                        gpu.books.leave(name)
            case 3:
                pinned += [segment for segment, _ in gpu.books.pin(rng.sample(sorted(sizes), 3))]
            case 4:
                gpu.books.retire(gpu.books.let_go(pinned))
                pinned.clear()
            case 5:
                keep = {segment for segment in gpu.books.pool.segments() if gpu.books.seats.held(segment)} | set(pinned)
                fixed_nbytes = gpu.books.fixed_nbytes
                gpu.books.relieve()
                assert set(gpu.books.pool.segments()) == keep
                assert gpu.books.pool.used_nbytes == fixed_nbytes
            case 6 if claimed:
                name = rng.choice(sorted(claimed))
                for segment in rng.sample(sorted(sizes), 5):
                    if gpu.books.seats.held(segment) and (number := gpu.books.claim(name, segment)) is not None:
                        assert gpu.books.pool.offset(number) == held.pop(segment)
                        held[number] = gpu.books.pool.offset(number)
                        claimed[name].append(number)
            case 7 if claimed and claimed[name := rng.choice(sorted(claimed))]:
                number, segment = claimed[name].pop(), next(fresh)
                at = held.pop(number)
                gpu.books.rename(number, segment)
                held[segment] = at
            case 8 if claimed:
                name = rng.choice(sorted(claimed))
                left = gpu.books.leave(name)
                gone = gpu.books.forget(claimed.pop(name)).evicted
                gpu.books.retire([*left, *range(100, next(fresh))])
                held = {segment: at for segment, at in held.items() if gpu.books.seats.held(segment)}
                assert not held.keys() & set(gone)
        gpu.books.check()
        assert held.items() <= gpu.held().items(), "what a seat holds stays where it is"


def test_neighbours_are_copied_together_in_chunks_that_say_what_they_finish() -> None:
    copies = [Copy(slab(0), 0, 4096, 1000), Copy(slab(0), 1024, 5120, 3000), Copy(slab(0), 9000, 9000, 10)]
    chunks = chunked(copies, 2048)
    assert [(chunk.start, chunk.device, chunk.nbytes, chunk.finished) for chunk in chunks] == [
        (0, 4096, 2048, 1),
        (2048, 6144, 1976, 2),
        (9000, 9000, 10, 3),
    ]


def test_different_sources_are_never_merged() -> None:
    copies = [Copy(slab(0), 0, 0, 512), Copy(slab(1), 512, 512, 512), Copy(peer(1), 1024, 1024, 512)]
    assert len(chunked(copies, 1 << 20)) == 3


def test_moves_inside_the_pool_are_whole() -> None:
    chunks = chunked([Copy(POOL, 8192, 0, 100_000), Copy(POOL, 108_192, 100_000, 512)], 4096)
    assert [(chunk.nbytes, chunk.finished) for chunk in chunks] == [(100_000, 1), (512, 2)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.integers(100, 4096))
def test_chunks_cover_every_copy(sizes: list[int], chunk_nbytes: int) -> None:
    copies, position = [], 0
    for nbytes in sizes:
        copies.append(Copy(slab(0), position, position, nbytes))
        position += aligned(nbytes)
    end = 0
    for chunk in chunked(copies, chunk_nbytes):
        assert chunk.start == chunk.device == end  # one run: everything touches
        end += chunk.nbytes
        finished = [copy for copy in copies if copy.start + copy.nbytes <= end]
        assert len(finished) == chunk.finished
    assert finished == copies
