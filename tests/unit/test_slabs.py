"""Where segments lie: rows, budgets, and no overlap."""

import os
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.core.shm import PAGE_NBYTES, SharedMemory
from dormouse.gpuserver.store.memory.slabs import SLAB_NBYTES, HostFull, Slabs

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
    assert slabs.slabs == {0: 10 * MIB}


def test_the_budget_is_said_with_numbers_and_a_failed_batch_takes_nothing() -> None:
    slabs = Slabs(4 * MIB, 8 * MIB)
    full = r"models use 3\.0 MiB of 4\.0 MiB; remove functions, or raise limits\.host"
    with pytest.raises(HostFull, match=full) as raised:
        slabs.place_all("a", [MIB, MIB, MIB, 2 * MIB])
    assert raised.value.lacking_nbytes == MIB
    assert slabs.used_nbytes == 0
    assert len(slabs.place_all("a", [MIB] * 4)) == 4
    with pytest.raises(HostFull) as raised:
        slabs.place("a", 1)
    assert raised.value.lacking_nbytes == 512


def test_a_row_is_not_broken_by_small_holes() -> None:
    slabs = Slabs(8 * MIB, 4 * MIB)
    spans = slabs.place_all("a", [MIB] * 4)
    slabs.close("a")
    slabs.free(spans[0])
    slabs.free(spans[2])
    slabs.expect("b", [MIB] * 2)
    assert [(span.slab, span.offset) for span in slabs.place_all("b", [MIB] * 2)] == [(1, 0), (1, MIB)]
    slabs.close("b")
    assert slabs.place("c", MIB).slab == 0
    for _ in range(2):
        slabs.expect("d", [3 * MIB])
        slabs.place("d", 10)
        slabs.close("d")
    assert sum(slabs.slabs.values()) <= 16 * MIB
    slabs.check()


def pinnable() -> Slabs:
    """Eight slabs of 4 MiB fit."""
    slabs = Slabs(32 * MIB, 4 * MIB, pinnable=True)
    slabs._slab_nbytes = 4 * MIB  # not a sixteenth
    return slabs


def test_pinnable_slabs_count_whole_and_go_when_they_empty() -> None:
    slabs = pinnable()
    a = slabs.place("a", 3 * MIB)
    b = slabs.place("b", 1000)
    assert slabs.slabs == {0: 4 * MIB, 1: 4 * MIB}
    assert slabs.held_nbytes == 8 * MIB
    slabs.free(a)
    assert slabs.gone == []  # its owner may place more
    slabs.close("a")
    assert slabs.gone == [0]
    slabs.close("b")
    assert slabs.gone == [0]
    slabs.free(b)
    assert slabs.gone == [0, 1]
    assert slabs.held_nbytes == 0
    assert slabs.place("c", 1).slab == 2  # no number is used again
    slabs.check()


def test_pinnable_slabs_fill_every_hole_before_they_are_full() -> None:
    slabs = pinnable()
    spans = [slabs.place(owner, 3 * MIB) for owner in range(8)]  # none is closed: each has a slab of its own
    assert slabs.held_nbytes == 32 * MIB
    more = [slabs.place("late", MIB) for _ in range(8)]  # rather in another's slab than nowhere
    assert sorted(span.slab for span in more) == list(range(8))
    for nbytes in (512, 2 * MIB):
        with pytest.raises(HostFull, match=r"models use 32\.0 MiB of 32\.0 MiB, slabs 32\.0 MiB;") as raised:
            slabs.place("later", nbytes)
        assert raised.value.lacking_nbytes == nbytes
    slabs.free(more[0])
    with pytest.raises(HostFull) as raised:
        slabs.place("later", 2 * MIB)
    assert raised.value.lacking_nbytes == MIB
    slabs.free(spans[3])
    assert slabs.place("later", 3 * MIB) == spans[3]
    slabs.check()


def test_the_last_pinnable_slab_is_as_small_as_it_must_be() -> None:
    slabs = Slabs(9 * MIB, 4 * MIB, pinnable=True)
    assert slabs.slabs == {}
    slabs.place("a", 5 * MIB)
    slabs.place("b", 1)
    assert slabs.slabs == {0: 6 * MIB, 1: 2 * MIB}
    with pytest.raises(HostFull):
        slabs.place("c", 2 * MIB)
    slabs.check()
    slabs = Slabs(64 * MIB, 4 * MIB, pinnable=True)
    slabs.place("a", 6 * MIB)  # of its own, because it is larger than a slab
    for number in range(14):
        slabs.place(f"b{number}", 4 * MIB)
    slabs.place("c", 1)
    assert slabs.slabs[15] == 2 * MIB  # what is left of the budget
    with pytest.raises(HostFull):
        slabs.place("d", 3 * MIB)
    slabs.check()


def test_a_large_budget_has_large_pinnable_slabs_and_a_small_one_small_ones() -> None:
    for budget, nbytes in ((64 << 30, SLAB_NBYTES), (1 << 30, 64 * MIB), (8 * MIB, 2 * MIB)):
        slabs = Slabs(budget, pinnable=True)
        slabs.place("a", 1)
        assert slabs.slabs == {0: nbytes}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["place", "owe", "come", "free", "close"]), st.integers(0, 2), st.integers(0, 3 * MIB)
        ),
        max_size=40,
    ),
    st.booleans(),
)
def test_slabs_never_overlap(operations: list[tuple[str, int, int]], pinnable: bool) -> None:
    slabs = Slabs(16 * MIB, MIB, pinnable)
    live = []
    for kind, owner, size in operations:
        if kind == "place":
            try:
                live.append(slabs.place(owner, size))
            except HostFull:
                largest = max((slab.largest for slab in slabs._free.values()), default=0)
                whole = -(-max(size, 512) // (2 * MIB)) * 2 * MIB
                if pinnable:
                    assert largest < size + 512
                    assert slabs.held_nbytes + whole > slabs.budget_nbytes
                else:
                    assert slabs.used_nbytes + size + 512 > slabs.budget_nbytes
        elif kind == "owe":
            with suppress(HostFull):  # where GPUs may pin them, or there is no address space
                live.append(slabs.place(owner, size, owed=True))
        elif kind == "come" and live:
            span = live[size % len(live)]
            before, owes = slabs.used_nbytes, slabs.owes(span, size)
            try:
                slabs.come(span, size)
                assert slabs.used_nbytes == before + owes
            except HostFull:
                assert before + owes > slabs.budget_nbytes == 16 * MIB
        elif kind == "free" and live:
            slabs.free(live.pop(size % len(live)))
        else:
            slabs.close(owner)
        slabs.check()
    assert len({(span.slab, span.offset) for span in live}) == len(live)


def test_pages_of_pinnable_memory_are_not_given_back() -> None:
    for pinnable in (False, True):
        memory = SharedMemory.create("test", 8 * PAGE_NBYTES, pinnable)
        memory.view[:] = b"\xff" * memory.nbytes
        before = os.fstat(memory.fd).st_blocks
        memory.scrub(0, memory.nbytes)
        assert os.fstat(memory.fd).st_blocks == (before if pinnable else 0)
        assert memory.view == bytes(memory.nbytes)
        if pinnable:
            with pytest.raises(ValueError, match="scrub"):
                memory.punch(0, PAGE_NBYTES)
        memory.close()


@pytest.mark.parametrize("pinnable", [False, True])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(10, 100), (0, 3 * PAGE_NBYTES), (100, 2 * PAGE_NBYTES), (5, PAGE_NBYTES)]
)
def test_scrubbed_bytes_read_as_zero_and_their_neighbours_do_not(offset: int, nbytes: int, pinnable: bool) -> None:
    memory = SharedMemory.create("test", 4 * PAGE_NBYTES, pinnable)
    memory.view[:] = b"\xff" * memory.nbytes
    memory.scrub(offset, nbytes)
    expected = bytearray(b"\xff" * memory.nbytes)
    expected[offset : offset + nbytes] = bytes(nbytes)
    assert memory.view == expected
    memory.close()
