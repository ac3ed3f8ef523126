"""Where segments lie: rows, budgets, and no overlap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.core.shm import PAGE_NBYTES, SharedMemory
from dormouse.gpuserver.store.slabs import HostFull, Slabs

MIB = 1 << 20


def test_two_loads_at_once_each_lie_in_a_row() -> None:
    slabs = Slabs(64 * MIB, 8 * MIB)
    places: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    for _ in range(3):
        for owner, row in places.items():
            span = slabs.place(owner, 1000)
            row.append((span.slab, span.offset))
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
    assert slabs.lacking(1) == 512


def test_a_row_is_not_broken_by_small_holes() -> None:
    slabs = Slabs(8 * MIB, 4 * MIB)
    spans = slabs.place_all("a", [MIB] * 4)
    slabs.free(spans[0])
    slabs.free(spans[2])
    slabs.expect("b", [MIB] * 2)
    assert [(span.slab, span.offset) for span in slabs.place_all("b", [MIB] * 2)] == [(1, 0), (1, MIB)]
    assert slabs.place("c", MIB).slab == 0
    for _ in range(2):
        slabs.expect("d", [3 * MIB])
        slabs.place("d", 10)
        slabs.close("d")
    assert sum(slabs.slabs) <= 16 * MIB
    slabs.check()


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
    assert len({(span.slab, span.offset) for span in live}) == len(live)


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
