"""The ring that hands out the arena: regions never overlap, never leave the arena, and come back in order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.client_shim.stream.arena_ring import ArenaRing


@settings(deadline=None)
@given(st.integers(64, 4096), st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 3)), max_size=60))
def test_regions_do_not_overlap(capacity: int, steps: list[tuple[int, int]]) -> None:
    ring = ArenaRing(capacity)
    live: list[tuple[int, int, int]] = []  # (frame, start, end)
    frame = settled = 0
    for nbytes, settle in steps:
        if nbytes > ring.capacity:
            with pytest.raises(ValueError, match="cannot pass"):
                ring.take(nbytes, frame)
            continue
        frame += 1
        start = ring.take(nbytes, frame)
        if start is None:
            assert live, "an empty ring has room for whatever fits the arena"
        else:
            assert start % 64 == 0
            assert 0 <= start <= start + nbytes <= capacity
            assert all(end <= start or start + nbytes <= first for _, first, end in live if first < end and nbytes)
            live.append((frame, start, start + nbytes))
        settled = min(frame, settled + settle)
        ring.settle(settled)
        live = [region for region in live if region[0] > settled]
    ring.settle(frame)
    assert ring.empty
    assert ring.take(ring.capacity, frame) == 0


def test_a_region_may_end_exactly_at_the_end() -> None:
    ring = ArenaRing(256)
    assert [ring.take(128, 1), ring.take(128, 2)] == [0, 128]
    assert ring.take(64, 3) is None
    ring.settle(1)
    assert ring.take(64, 3) == 0
