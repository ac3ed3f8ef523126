"""Spans never overlap, neighbours merge, and the accounting is exact."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.core.decisions.memory.freelist import ALIGNMENT, FreeList, aligned


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5000)), max_size=80))
def test_any_sequence_keeps_the_tiling(steps: list[tuple[bool, int]]) -> None:
    spans = FreeList(64 * 1024)
    live: dict[int, int] = {}
    for take, value in steps:
        if take:
            offset = spans.take(value)
            if offset is None:
                assert spans.largest < aligned(value)
            else:
                assert offset % ALIGNMENT == 0
                assert all(offset + aligned(value) <= o or o + n <= offset for o, n in live.items())
                live[offset] = aligned(value)
        elif live:
            offset = sorted(live)[value % len(live)]
            assert spans.give(offset) == live.pop(offset)
        spans.check()
        assert spans.free_nbytes == spans.capacity - sum(live.values())
    for offset in list(live):
        spans.give(offset)
    assert spans.largest == spans.capacity


def test_giving_twice_is_an_error() -> None:
    spans = FreeList(4096)
    offset = spans.take(1)
    assert offset is not None
    spans.give(offset)
    with pytest.raises(KeyError):
        spans.give(offset)
