"""A GPU's books: who shares what, what a wake evicts and brings back, pins of other GPUs; and chunks of copies."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.core.freelist import aligned
from dormouse.gpuserver.pools.pages import Pages
from dormouse.gpuserver.pools.protocol import Pool
from dormouse.gpuserver.pools.regions import Regions
from dormouse.gpuserver.residency import ModelTooLarge, Residency
from dormouse.gpuserver.transfer import POOL, Copy, chunked, peer, slab
from dormouse.schemas.messages import Entry, Manifest

UNIT = 512


def manifest(instance: str, *segments: tuple[int, int], version: int = 1) -> Manifest:
    """Segments ``(id, units)``."""
    sized = [(segment, units * UNIT) for segment, units in segments]
    entries = [Entry(storage=n, segment=s, offset=0, nbytes=nbytes) for n, (s, nbytes) in enumerate(sized)]
    return Manifest(instance=instance, version=version, entries=entries, segments=sized)


class Gpu:
    """A residency whose wakes arrive at once."""

    def __init__(self, units: int = 100, pool: Pool | None = None) -> None:
        self.books = Residency(pool or Regions(units * UNIT))
        self.manifests: dict[str, Manifest] = {}

    def knows(self, *manifests: Manifest) -> None:
        for each in manifests:
            self.manifests[each.instance] = each
            self.books.learn(each)

    def wake(self, instance: str, **worth: float) -> list[int]:
        """The segments that it copied."""
        plan = self.books.wake(instance, self.manifests[instance], worth, 1e9)
        for segment, _, _ in plan.missing:
            self.books.arrived(segment)
        self.books.end_lease()
        self.books.check()
        return [segment for segment, _, _ in plan.missing]


def test_missing_segments_lie_side_by_side_in_first_use_order() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (3, 10), (1, 20), (2, 30)))
    plan = gpu.books.wake("a", gpu.manifests["a"], {}, 1e9)
    assert plan.missing == [(3, 0, 10 * UNIT), (1, 10 * UNIT, 20 * UNIT), (2, 30 * UNIT, 30 * UNIT)]
    assert plan.copy_nbytes == 60 * UNIT
    gpu.books.end_lease()
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
    gpu.books.wake("b", gpu.manifests["b"], {}, 1e9, wish_nbytes=30 * UNIT)
    gpu.books.end_lease()
    assert list(gpu.books.pool.segments()) == [2]
    gpu.books.wake("c", gpu.manifests["c"], {}, 1e9, wish_nbytes=30 * UNIT)  # it cannot
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
    with pytest.raises(ModelTooLarge, match=f"{101 * UNIT:,} bytes of GPU memory; this GPU has {100 * UNIT:,}"):
        gpu.wake("b")
    with pytest.raises(ModelTooLarge, match="in use for activations"):
        gpu.books.wake("c", gpu.manifests["c"], {}, 1e9, reserve_nbytes=11 * UNIT)
    assert gpu.books.leased is None
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
    gpu.books.wake("a", gpu.manifests["a"], {}, 1e9, tenant="one")
    gpu.books.end_lease()
    gpu.books.unlearn("a")
    gpu.books.wake("b", gpu.manifests["b"], {}, 1e9, tenant=tenant)
    assert gpu.books.may_write("b", 1, tenant) == (tenant == "one")
    gpu.books.check()


def test_pinned_segments_are_neither_evicted_nor_moved_nor_written() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30), (2, 30)), manifest("b", (3, 60)), manifest("c", (4, 70)))
    gpu.wake("a")
    found = gpu.books.pin([2, 9])
    assert found == [(2, [(30 * UNIT, 30 * UNIT)])]
    assert not gpu.books.may_write("a", 2)
    assert gpu.books.may_write("a", 1)
    assert gpu.books.pin([1]) == []
    with pytest.raises(ModelTooLarge, match="run it again"):  # there is room for 70, but not while 2 is read
        gpu.wake("c")
    assert gpu.books.leased is None
    gpu.books.check()
    gpu.books.unlearn("a")
    assert gpu.books.retire([1, 2]).evicted in ([1], [])
    assert 2 in gpu.books.pool
    assert gpu.books.let_go([2]) == [2]
    gpu.books.retire([2])
    assert gpu.books.pool.used_nbytes == 0
    assert gpu.wake("c") == [4]


def test_a_segment_that_is_under_way_is_not_given_to_others() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30)))
    gpu.books.wake("a", gpu.manifests["a"], {}, 1e9)
    assert gpu.books.pin([1]) == []
    gpu.books.arrived(1)
    assert gpu.books.pin([1]) == [(1, [(0, 30 * UNIT)])]
    assert gpu.books.let_go([1]) == []


def test_a_rename_keeps_the_bytes_and_takes_them_from_who_shared_them() -> None:
    gpu = Gpu()
    gpu.knows(manifest("a", (1, 30)))
    gpu.wake("a")
    assert gpu.books.may_write("a", 1)
    gpu.knows(manifest("b", (1, 30)))  # loaded meanwhile, with the bytes that were committed
    gpu.books.changed()
    gpu.books.rename(1, 7)
    gpu.knows(manifest("a", (7, 30), version=2))
    assert dict(gpu.books.changed()) == {"a": 30 * UNIT, "b": 0}
    assert gpu.wake("b") == [1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_any_sequence_keeps_the_books(seed: int) -> None:
    rng = random.Random(seed)
    gpu = Gpu()
    sizes = {segment: rng.randint(1, 25) for segment in range(30)}
    pinned: list[int] = []
    for turn in range(40):
        name = rng.choice("abcdef")
        match rng.randrange(6):
            case 0:
                chosen = rng.sample(sorted(sizes), rng.randint(0, 6))
                before = gpu.books.unlearn(name)
                gpu.knows(manifest(name, *((segment, sizes[segment]) for segment in chosen), version=turn))
                gpu.books.retire(before)
            case 1 | 2 if name in gpu.manifests:
                try:
                    gpu.wake(name, **{other: rng.random() for other in "abc"})
                except ModelTooLarge:
                    pass
                else:
                    assert gpu.books.resident_nbytes(name) == sum(n for _, n in gpu.manifests[name].segments)
            case 3:
                pinned += [segment for segment, _ in gpu.books.pin(rng.sample(sorted(sizes), 3))]
            case 4:
                gpu.books.retire(gpu.books.let_go(pinned))
                pinned.clear()
            case 5:
                gpu.books.relieve(keep=set(rng.sample(sorted(sizes), 5)))
        gpu.books.check()


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
