"""A pool's books: what a wake evicts, where it puts things, and that nothing ever overlaps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dormouse.core.freelist import FreeList, aligned
from dormouse.gpuserver.residency import ModelTooLarge, Residency
from dormouse.gpuserver.transfer import Copy, chunked
from dormouse.schemas.messages import Segment

UNIT = 512


def model(first: int, *units: int) -> list[Segment]:
    return [
        Segment(storage=index, segment=first + index, slab=0, offset=0, nbytes=size * UNIT)
        for index, size in enumerate(units)
    ]


def ended(pool: Residency, instance: str, segments: list[Segment], evict: tuple[str, ...] = ()) -> list[str]:
    plan = pool.wake(instance, segments, evict)
    pool.end_lease()
    pool.check()
    return plan.evicted


def test_missing_segments_lie_side_by_side_in_manifest_order() -> None:
    pool = Residency(100 * UNIT)
    plan = pool.wake("a", model(1, 10, 20, 30))
    assert [span.offset for _, span in plan.missing] == [0, 10 * UNIT, 30 * UNIT]
    assert plan.copy_nbytes == 60 * UNIT
    pool.end_lease()
    assert pool.wake("a", model(1, 10, 20, 30)).missing == []


def test_the_least_recently_leased_goes_first_and_only_as_many_as_needed() -> None:
    pool = Residency(100 * UNIT)
    for number, name in enumerate("abc"):
        ended(pool, name, model(10 * number, 30))
    ended(pool, "a", model(0, 30))
    assert ended(pool, "d", model(90, 30, 10)) == ["b"]
    assert sorted(pool._spans) == ["a", "c", "d"]


def test_the_controllers_choice_goes_before_the_least_recently_leased() -> None:
    pool = Residency(100 * UNIT)
    for number, name in enumerate("abc"):
        ended(pool, name, model(10 * number, 30))
    assert ended(pool, "d", model(90, 40), evict=("c", "unknown")) == ["c"]
    assert ended(pool, "e", model(100, 10), evict=("a",)) == ["a"]  # 40 + 30 + 30 leave no room


def test_a_stale_segment_is_dropped_before_anyone_is_evicted() -> None:
    pool = Residency(100 * UNIT)
    ended(pool, "a", model(1, 50))
    ended(pool, "b", model(2, 50))
    plan = pool.wake("b", model(7, 50))
    assert plan.evicted == []
    assert [span.nbytes for span in plan.freed] == [50 * UNIT]


def test_fragments_are_filled_one_by_one_or_emptied() -> None:
    pool = Residency(100 * UNIT)
    for number, name in enumerate("abcd"):
        ended(pool, name, model(10 * number, 25))
    pool.evict("b")
    pool.evict("d")
    plan = pool.wake("e", model(100, 25, 25))
    assert plan.evicted == []
    assert [span.offset for _, span in plan.missing] == [25 * UNIT, 75 * UNIT]
    pool.end_lease()
    pool.check()
    assert len(ended(pool, "f", model(200, 60))) == 3


def test_a_models_own_fragments_are_placed_anew_when_nothing_else_helps() -> None:
    pool = Residency(100 * UNIT)
    ended(pool, "a", model(1, 20, 20, 20))
    pool.drop("a", [1, 3])
    segments = [*model(1, 20, 20, 20), Segment(storage=9, segment=9, slab=0, offset=0, nbytes=40 * UNIT)]
    segments = [segments[1], Segment(storage=8, segment=8, slab=0, offset=0, nbytes=70 * UNIT)]
    plan = pool.wake("a", segments)
    assert [segment.segment for segment, _ in plan.missing] == [2, 8]
    pool.check()


def test_too_large_is_refused_with_the_numbers_and_changes_nothing() -> None:
    pool = Residency(100 * UNIT)
    ended(pool, "a", model(1, 30))
    with pytest.raises(ModelTooLarge, match=r"61,440 bytes.*51,200"):
        pool.wake("b", model(2, 120))
    with pytest.raises(ModelTooLarge, match=r"10,240 are in use for activations"):
        pool.wake("b", model(2, 90), reserved_nbytes=20 * UNIT)
    assert pool.leased is None
    assert pool.resident_nbytes("a") == 30 * UNIT


def test_relief_leaves_the_lease_alone() -> None:
    pool = Residency(100 * UNIT)
    ended(pool, "a", model(1, 30))
    ended(pool, "b", model(2, 30))
    pool.wake("c", model(3, 30))
    victims, freed = pool.relieve()
    assert victims == ["a", "b"]
    assert len(freed) == 2
    assert pool.relieve() == ([], [])
    assert pool.used_nbytes == 30 * UNIT


def test_what_was_written_keeps_its_place_and_what_was_made_gets_one() -> None:
    pool = Residency(100 * UNIT)
    pool.wake("a", model(1, 30))
    span = pool.spans("a")[1]
    pool.rename("a", 1, 50)
    assert pool.spans("a") == {50: span}
    made = Segment(storage=5, segment=51, slab=0, offset=0, nbytes=20 * UNIT)
    assert pool.adopt("a", made, 0) is not None
    assert pool.adopt("a", made, 60 * UNIT) is None
    pool.check()


INSTANCES = st.sampled_from("abcd")
OPERATIONS = st.one_of(
    st.tuples(
        st.just("wake"), INSTANCES, st.lists(st.integers(0, 20_000), max_size=5), st.lists(INSTANCES, max_size=3)
    ),
    st.tuples(st.just("end")),
    st.tuples(st.just("relieve")),
    st.tuples(st.just("change"), INSTANCES, st.integers(0, 4)),
    st.tuples(st.just("adopt"), INSTANCES, st.integers(0, 20_000)),
    st.tuples(st.just("forget"), INSTANCES),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(OPERATIONS, max_size=30))
def test_no_overlap_exact_accounting_and_nothing_leased_is_evicted(operations: list[tuple[object, ...]]) -> None:
    pool = Residency(64 * 1024)
    models: dict[str, list[Segment]] = {}
    last_id = 0
    for operation in operations:
        before = dict(pool.spans(pool.leased)) if pool.leased else {}
        holder = pool.leased
        match operation:
            case ("wake", str(name), list(sizes), list(evict)) if pool.leased is None:
                if name not in models:
                    models[name] = []
                    for storage, nbytes in enumerate(sizes):
                        last_id += 1
                        models[name].append(Segment(storage=storage, segment=last_id, slab=0, offset=0, nbytes=nbytes))
                needed = sum(aligned(segment.nbytes) for segment in models[name])
                if needed > pool.capacity:
                    with pytest.raises(ModelTooLarge):
                        pool.wake(name, models[name], evict)
                    del models[name]
                else:
                    plan = pool.wake(name, models[name], evict)
                    assert set(pool.spans(name)) == {segment.segment for segment in models[name]}
                    assert name not in plan.evicted
                    assert len(set(plan.evicted)) == len(plan.evicted)
            case ("end",):
                pool.end_lease()
            case ("relieve",):
                victims, _ = pool.relieve()
                assert holder not in victims
            case ("change", str(name), int(index)) if name in models and index < len(models[name]):
                old = models[name][index]
                last_id += 1
                models[name][index] = Segment(storage=old.storage, segment=last_id, slab=0, offset=0, nbytes=old.nbytes)
                if old.segment in pool.spans(name):
                    pool.rename(name, old.segment, last_id)
                    before[last_id] = before.pop(old.segment, pool.spans(name)[last_id])
            case ("adopt", str(name), int(nbytes)) if name in models and name == holder:
                last_id += 1
                segment = Segment(storage=100 + last_id, segment=last_id, slab=0, offset=0, nbytes=nbytes)
                if pool.adopt(name, segment, 0) is not None:
                    models[name].append(segment)
            case ("forget", str(name)) if name != holder:
                pool.evict(name)
                assert pool.resident_nbytes(name) == 0
        pool.check()
        if holder is not None:
            assert before.items() <= pool.spans(holder).items() or holder not in models


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3000)), max_size=30))
def test_a_freelist_takes_exactly_where_it_is_told(requests: list[tuple[int, int]]) -> None:
    free = FreeList(64 * UNIT)
    taken: dict[int, int] = {}
    for unit, nbytes in requests:
        offset, size = unit * UNIT, aligned(nbytes)
        possible = offset + size <= 64 * UNIT and all(
            offset + size <= other or other + length <= offset for other, length in taken.items()
        )
        assert free.take_at(offset, nbytes) == possible
        if possible:
            taken[offset] = size
        free.check()


COPIES = st.lists(st.tuples(st.integers(0, 9000), st.booleans(), st.booleans()), min_size=1, max_size=12)


@given(COPIES, st.sampled_from([512, 2048, 1 << 20]))
def test_chunks_copy_every_byte_once_and_finish_copies_in_order(shape: list[tuple[int, bool, bool]], size: int) -> None:
    copies, host, device = [], 0, 0
    for nbytes, host_gap, device_gap in shape:
        host += 512 * host_gap
        device += 512 * device_gap
        copies.append(Copy(0, host, device, nbytes))
        host, device = host + aligned(nbytes), device + aligned(nbytes)
    source = bytearray((index * 7 + index // 512) % 251 for index in range(host))
    target = bytearray(device)
    finished = 0
    for chunk in chunked(copies, size):
        assert chunk.nbytes <= size
        target[chunk.device : chunk.device + chunk.nbytes] = source[chunk.host : chunk.host + chunk.nbytes]
        assert chunk.finished >= finished
        finished = chunk.finished
        for copy in copies[:finished]:
            assert target[copy.device : copy.device + copy.nbytes] == source[copy.host : copy.host + copy.nbytes], (
                "finished too early"
            )
    assert finished == len(copies)


def test_neighbours_are_copied_together() -> None:
    copies = [Copy(0, index * 1024, 4096 + index * 1024, 1000) for index in range(10)]
    assert [(chunk.nbytes, chunk.finished) for chunk in chunked(copies, 4096)] == [(4096, 4), (4096, 8), (2024, 10)]
