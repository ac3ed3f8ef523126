"""The steps of a free list that change many spans at once."""

from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.decisions.memory.freelist import FreeList, Holes, aligned, aligned_all, check_tiling


def test_spans_side_by_side_are_all_taken_or_none() -> None:
    free = FreeList(10 * 512)
    assert free.take_all(512, [100, 513, 512])
    assert dict(free.taken) == {512: 512, 1024: 1024, 2048: 512}
    assert not free.take_all(2560, [512] * 6)
    assert free.free_nbytes == 6 * 512
    free.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=20), st.integers(0, 3))
def test_reset_has_exactly_the_spans_given_free(spans: list[tuple[int, int]], rest: int) -> None:
    position, taken, free = 0, [], []
    for gap, units in spans:
        free.append((position, position + gap))  # empty ones among them
        taken.append((position + gap, units))
        position += gap + units
    holes = Holes(position + rest)
    holes.reset([*free, (position, position + rest)])
    check_tiling(taken, holes)
    for offset, units in taken:
        holes.give(offset, units)
    check_tiling([], holes)
    assert holes.largest == holes.free_nbytes == holes.capacity


def test_only_what_is_wholly_free_can_be_taken() -> None:
    holes = Holes(10)
    assert holes.take(2, 3)
    assert (holes.starts, holes.ends, holes.free_nbytes) == ([0, 5], [2, 10], 7)
    assert not any(holes.take(offset, size) for offset, size in [(1, 2), (2, 1), (4, 2), (5, 6), (11, 1)])
    assert (holes.find(2), holes.find(3), holes.find(6)) == (0, 5, None)
    check_tiling([(2, 3)], holes)


def test_many_sizes_are_aligned_as_one_is() -> None:
    sizes = [0, 1, 511, 512, 513, 1 << 40]
    assert aligned_all(sizes) == [aligned(nbytes) for nbytes in sizes]
