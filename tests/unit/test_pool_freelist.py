"""The steps of a free list that change many spans at once."""

from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.freelist import FreeList, aligned


def test_spans_side_by_side_are_all_taken_or_none() -> None:
    free = FreeList(10 * 512)
    assert free.take_all(512, [100, 513, 512])
    assert dict(free.taken) == {512: 512, 1024: 1024, 2048: 512}
    assert list(free.holes) == [(0, 512), (2560, 10 * 512 - 2560)]
    assert not free.take_all(2560, [512] * 6)
    assert free.free_nbytes == 6 * 512
    free.check()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2000)), max_size=20), st.integers(0, 3))
def test_reset_has_exactly_the_spans_given(spans: list[tuple[int, int]], rest: int) -> None:
    position, taken = 0, []
    for gap, nbytes in spans:
        position += gap * 512
        taken.append((position, nbytes))
        position += aligned(nbytes)
    free = FreeList(position + rest * 512)
    free.take(1)
    free.reset(taken)
    free.check()
    assert dict(free.taken) == {offset: aligned(nbytes) for offset, nbytes in taken}
    for offset, _ in taken:
        free.give(offset)
    free.check()
    assert free.largest == free.free_nbytes == free.capacity
