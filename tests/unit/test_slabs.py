"""The store's books: slabs, uploads, versions, tickets, and when a segment may be used again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.core.shm import PAGE_NBYTES, SharedMemory
from dormouse.gpuserver.slabs import HostFull, Slabs
from dormouse.gpuserver.uploads import Model, ModelError
from dormouse.schemas.errors import RemoteProtocolError

MIB = 1 << 20


def test_two_loads_at_once_each_lie_in_a_row() -> None:
    slabs = Slabs(64 * MIB, 8 * MIB)
    places: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    for _ in range(3):
        for owner, row in places.items():
            place = slabs.place(owner, 1000)
            row.append((place.slab, place.offset))
    assert places == {"a": [(0, 0), (0, 1024), (0, 2048)], "b": [(1, 0), (1, 1024), (1, 2048)]}
    slabs.close("a")
    assert slabs.place("c", 1000).slab == 0
    slabs.check()


def test_a_storage_larger_than_a_slab_gets_a_larger_slab() -> None:
    slabs = Slabs(64 * MIB, 8 * MIB)
    assert slabs.place("a", 9 * MIB).nbytes == 9 * MIB
    assert slabs.slabs == [10 * MIB]


def test_the_budget_is_said_with_numbers_and_a_failed_batch_takes_nothing() -> None:
    slabs = Slabs(4 * MIB, 8 * MIB)
    with pytest.raises(HostFull, match=r"models use 3,145,728 of 4,194,304; remove functions, or raise limits\.host"):
        slabs.place_all("a", [MIB, MIB, MIB, 2 * MIB])
    assert slabs.used_nbytes == 0
    assert len(slabs.place_all("a", [MIB] * 4)) == 4


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["place", "free", "close"]), st.integers(0, 2), st.integers(0, 3 * MIB)), max_size=40
    )
)
def test_slabs_never_overlap(operations: list[tuple[str, int, int]]) -> None:
    slabs = Slabs(16 * MIB, MIB)
    live = []
    for kind, owner, size in operations:
        if kind == "place":
            try:
                live.append(slabs.place(owner, size))
            except HostFull:
                assert slabs.used_nbytes + size + 512 > slabs.budget_nbytes
        elif kind == "free" and live:
            slabs.free(live.pop(size % len(live)))
        else:
            slabs.close(owner)
        slabs.check()
    assert len({(place.slab, place.offset) for place in live}) == len(live)


def committed(slabs: Slabs, *sizes: int, quota: int = 0) -> Model:
    model = Model(slabs, quota)
    for storage, nbytes in enumerate(sizes):
        model.upload(storage, nbytes, 0, nbytes)
    model.commit()
    return model


def test_versions_and_order() -> None:
    model = committed(Slabs(MIB), 100, 200, 300)
    manifest = model.manifest("i")
    assert (manifest.version, model.nbytes) == (1, 600)
    assert [(segment.storage, segment.offset) for segment in manifest.segments] == [(0, 0), (1, 512), (2, 1024)]


def test_an_uncommitted_storage_is_written_in_place_and_a_committed_one_is_not() -> None:
    model = Model(Slabs(MIB), 0)
    first, whole, previous = model.upload(1, 100, 0, 50)
    assert (whole, previous) == (False, None)
    assert model.upload(1, 100, 50, 50)[0] is first
    model.commit()
    second, whole, previous = model.upload(1, 100, 0, 10)
    assert second is not first
    assert (whole, previous) == (False, first)
    assert model.manifest("i").segments[0].offset == first.offset
    model.commit()
    assert model.manifest("i").segments[0].offset == second.offset


def test_a_replaced_segment_waits_for_every_executor() -> None:
    slabs = Slabs(MIB)
    model = committed(slabs, 100)
    [old] = model.manifest("i").segments
    [new] = model.place("gpu0", 1, [(0, 100)])
    assert new.offset != old.offset
    model.written("gpu0", 1, [])
    assert model.version == 2
    assert model.collect({"gpu0", "gpu1"}) == []
    model.settled("gpu0", 2)
    assert model.collect({"gpu0", "gpu1"}) == []
    model.settled("gpu1", 1)
    assert model.collect({"gpu0", "gpu1"}) == []
    model.forget_executor("gpu1")
    assert [place.offset for place in model.collect({"gpu0"})] == [old.offset]
    assert model.collect({"gpu0"}) == []


def test_a_ticket_that_is_given_up_leaves_nothing() -> None:
    slabs = Slabs(MIB)
    model = committed(slabs, 100)
    model.place("gpu0", 1, [(0, 100), (7, 1000)])
    model.place("gpu1", 1, [(0, 100)])
    model.settled("gpu0", 1)
    assert not model.has_ticket("gpu0", 1)
    assert model.has_ticket("gpu1", 1)
    for place in model.collect({"gpu0", "gpu1"}):
        slabs.free(place)
    assert slabs.used_nbytes == 1024
    model.forget_executor("gpu1")
    for place in [*model.collect({"gpu0"}), *model.release()]:
        slabs.free(place)
    assert slabs.used_nbytes == 0


def test_freed_storages_leave_with_the_next_version() -> None:
    slabs = Slabs(MIB)
    model = committed(slabs, 100, 200)
    model.free([0, 12345])
    assert len(model.manifest("i").segments) == 2
    model.commit()
    assert [segment.storage for segment in model.manifest("i").segments] == [1]
    assert not model.commit()
    model.place("gpu0", 1, [(5, 10)])
    model.written("gpu0", 1, [1])
    assert [segment.storage for segment in model.manifest("i").segments] == [5]
    model.settled("gpu0", 3)
    assert len(model.collect({"gpu0"})) == 2


def test_growth_is_counted_from_the_first_write_back() -> None:
    model = committed(Slabs(MIB), 1000, quota=500)
    model.place("gpu0", 1, [(5, 10_000)])
    model.written("gpu0", 1, [])
    model.place("gpu0", 2, [(6, 500)])
    with pytest.raises(ModelError, match=r"would grow to 11,501 bytes; after load.. they had 11,000"):
        model.place("gpu0", 3, [(7, 501)])
    with pytest.raises(ModelError, match="larger quota"):
        model.upload(9, 5000, 0, 1)


@pytest.mark.parametrize(
    ("total", "offset", "nbytes"), [(100, 90, 11), (100, -1, 1), (-1, 0, 0), (100, 0, -1), (50, 0, 1)]
)
def test_impossible_bounds(total: int, offset: int, nbytes: int) -> None:
    model = Model(Slabs(MIB), 0)
    model.upload(1, 100, 0, 100)
    with pytest.raises(RemoteProtocolError):
        model.upload(1, total, offset, nbytes)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(10, 100), (0, 3 * PAGE_NBYTES), (100, 2 * PAGE_NBYTES), (5, PAGE_NBYTES)]
)
def test_scrubbed_bytes_read_as_zero_and_their_neighbours_do_not(offset: int, nbytes: int) -> None:
    memory = SharedMemory.create("test", 4 * PAGE_NBYTES)
    memory.view[:] = b"\xff" * memory.nbytes
    memory.scrub(offset, nbytes)
    expected = bytearray(b"\xff" * memory.nbytes)
    expected[offset : offset + nbytes] = bytes(nbytes)
    assert memory.view == expected
    memory.close()
