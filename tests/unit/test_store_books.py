"""The store's books without a store: segments, models, packs, functions' records."""

from collections import deque
from collections.abc import Iterator

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dormouse.gpuserver.store.ingest import steps as o
from dormouse.gpuserver.store.ingest.coverage import MAX_RANGES, Coverage
from dormouse.gpuserver.store.ingest.drafts import Piece
from dormouse.gpuserver.store.ingest.models import MAX_STORAGES, ModelError, StoredModel
from dormouse.gpuserver.store.ingest.packing import SMALL_NBYTES, pack
from dormouse.gpuserver.store.ingest.uploads import Uploads
from dormouse.gpuserver.store.memory.fingerprint import HashKeys, fingerprint, scope_of
from dormouse.gpuserver.store.memory.functions import KeptFunctions
from dormouse.gpuserver.store.memory.segments import Segment, Segments
from dormouse.gpuserver.store.memory.slabs import Slabs, SlabSpan
from dormouse.gpuserver.store.report import instance_bytes
from dormouse.schemas import messages as m
from dormouse.schemas.errors import RemoteProtocolError

MIB = 1 << 20
LARGE = SMALL_NBYTES + 1


class Bench:
    """The books as the shell uses them; a storage's bytes are a label, and every step is over at once."""

    def __init__(self) -> None:
        self.slabs = Slabs(1 << 40)
        self.segments = Segments()
        self.labels: dict[SlabSpan, bytes] = {}
        self.uploads: dict[StoredModel, Uploads] = {}

    def span(self, nbytes: int) -> SlabSpan:
        return self.slabs.place("test", nbytes)

    def say(self, model: StoredModel, event: o.Event, label: str = "") -> bool:
        """Whether there is a new version. Raises ModelError if that is the answer."""
        if model not in self.uploads:
            self.uploads[model] = Uploads(model, self.segments, "s", 1 << 40)
        events, published = deque([event]), False
        while events:
            for effect in self.uploads[model].handle(events.popleft()):
                match effect:
                    case o.GoOn():
                        events.append(effect)
                    case o.FindSpan(nbytes=nbytes):
                        events.append(o.SpanFound(self.span(nbytes)))
                    case o.CopyFromArena(span=span):
                        self.labels[span] = label.encode()
                        events.append(o.BytesWritten())
                    case o.Hash(number=number, span=span, parts=parts):
                        labels = [self.labels[part] for part, _ in parts] if parts else [self.labels[span]]
                        content = b"|".join(labels) + str(span.nbytes).encode()
                        events.append(o.Hashed(number, blake3(content).digest()))
                    case o.GiveBack(spans=spans):
                        for span in spans:
                            self.slabs.free(span)
                    case o.Say(message=m.StoreFailed(text=text)):
                        raise ModelError(text)
                    case o.Publish():
                        published = True
        return published

    def upload(self, model: StoredModel, storage: int, nbytes: int, label: str) -> None:
        """All of a storage; a large one is settled at once."""
        self.say(model, whole(storage, nbytes), label)

    def commit(self, model: StoredModel) -> bool:
        changed = self.say(model, m.Commit())
        self.settle()
        return changed

    def free(self, model: StoredModel, storages: list[int]) -> None:
        self.say(model, m.StoreFree(storages=storages))

    def close(self, model: StoredModel) -> None:
        self.say(model, o.Gone())

    def settle(self) -> None:
        for span in self.segments.freed:
            self.slabs.free(span)
        self.segments.freed.clear()
        self.segments.check()
        self.slabs.check()

    def model(self, name: str = "i", quota: int = 0, **storages: tuple[int, str]) -> StoredModel:
        model = StoredModel(name, self.segments, quota, {})
        for storage, (nbytes, label) in storages.items():
            self.upload(model, int(storage[1:]), nbytes, label)
        self.commit(model)
        return model

    def write(
        self, model: StoredModel, storages: dict[int, int], freed: list[int] | None = None, label: str = ""
    ) -> dict[int, Segment]:
        """As an executor's write-back; with a label its hash comes too."""
        model.admit_write(storages)
        new = {each: self.segments.new(nbytes, "s", self.span(nbytes)) for each, nbytes in storages.items()}
        for segment in new.values():
            self.segments.hold(segment, ("ticket", 1))
        self.say(model, o.WrittenBack(new, freed or []))
        for segment in new.values():
            if label:
                self.segments.pin(segment)
            self.segments.release(segment, ("ticket", 1))
        for segment in new.values() if label else ():
            content = label.encode() + str(segment.nbytes).encode()  # as of an upload that is alone in its segment
            self.segments.identify(segment, blake3(content).digest())
            self.segments.unpin(segment)
        self.slabs.close("test")
        for span in self.segments.freed:
            self.slabs.free(span)
        self.segments.freed.clear()
        return new


def whole(storage: int, nbytes: int) -> m.StoreUpload:
    return m.StoreUpload(storage=storage, total_nbytes=nbytes, offset=0, arena_offset=0, nbytes=nbytes)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- coverage and packs


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=30))
def test_coverage_is_the_union(ranges: list[tuple[int, int]]) -> None:
    coverage, covered = Coverage(60), set[int]()
    for offset, nbytes in ranges:
        coverage.add(offset, nbytes)
        covered |= set(range(offset, offset + nbytes))
        assert coverage.complete == (covered == set(range(60)))


def test_coverage_of_scattered_writes_is_bounded() -> None:
    coverage = Coverage(1 << 20)
    for offset in range(0, 4 * MAX_RANGES, 2):
        coverage.add(offset, 1)
    assert len(coverage._ranges) <= MAX_RANGES
    coverage.add(0, 1 << 20)
    assert not coverage.complete


@given(st.lists(st.integers(0, 2 * SMALL_NBYTES), max_size=60), st.integers(0, 1 << 30))
def test_packs_hold_the_smallest_and_no_more_than_they_may(sizes: list[int], model_nbytes: int) -> None:
    layout, nbytes = pack(sizes, model_nbytes)
    chosen = {index for index, _ in layout}
    assert [index for index, _ in layout] == sorted(chosen)
    end = 0
    for index, offset in layout:
        assert offset % 512 == 0
        assert offset >= end
        end = offset + sizes[index]
    assert nbytes == end <= max(model_nbytes // 100, 1 << 20)
    left = [size for index, size in enumerate(sizes) if index not in chosen]
    if chosen and left:
        assert max(sizes[index] for index in chosen) <= min(left)
    assert all(sizes[index] <= SMALL_NBYTES for index in chosen)


# --- models


def test_small_storages_share_a_segment_and_large_ones_do_not(bench: Bench) -> None:
    model = bench.model(s1=(100, "a"), s2=(LARGE, "b"), s3=(700, "c"))
    manifest = model.manifest()
    entries = {entry.storage: entry for entry in manifest.entries}
    assert manifest.version == 1
    assert entries[1].segment == entries[3].segment != entries[2].segment
    assert (entries[1].offset, entries[3].offset, entries[2].offset) == (0, 512, 0)
    assert sorted(nbytes for _, nbytes in manifest.segments) == [1212, LARGE]
    assert model.nbytes == 1212 + LARGE


def test_equal_tensors_are_one_segment(bench: Bench) -> None:
    first = bench.model("a", s1=(LARGE, "x"), s2=(10, "y"), s3=(20, "z"), s9=(LARGE, "x"))
    used = bench.slabs.used_nbytes
    second = bench.model("b", s5=(LARGE, "x"), s6=(10, "y"), s7=(20, "z"))
    assert bench.slabs.used_nbytes == used
    assert {segment.id for segment in second.order} == {segment.id for segment in first.order}
    assert len(first.order) == 2
    bench.close(first)
    bench.settle()
    assert bench.slabs.used_nbytes == used
    bench.close(second)
    bench.settle()
    assert bench.slabs.used_nbytes == 0
    assert bench.segments.by_id == {}


def test_a_committed_storage_is_written_in_a_new_segment(bench: Bench) -> None:
    model = bench.model(s1=(LARGE, "a"))
    [before] = model.order
    item = model.draft.find(1, LARGE, 0, 10)
    assert isinstance(item, Piece)
    assert item.segment is before
    bench.upload(model, 1, LARGE, "b")
    assert model.manifest().entries[0].segment == before.id
    assert bench.commit(model)
    assert model.version == 2
    assert model.manifest().entries[0].segment != before.id
    assert before.id not in bench.segments.by_id
    assert not bench.commit(model)


def test_a_storage_freed_while_its_hash_is_under_way_leaves_nothing(bench: Bench) -> None:
    uploads = Uploads(StoredModel("i", bench.segments, 0, {}), bench.segments, "s", LARGE)
    span = bench.span(LARGE)
    assert uploads.handle(whole(1, LARGE)) == [o.FindSpan(LARGE)]
    uploads.handle(o.SpanFound(span))
    assert uploads.handle(o.BytesWritten()) == [o.Hash(1, span, []), o.Say(m.Uploaded())]
    assert uploads.handle(m.StoreFree(storages=[1])) == []
    assert uploads.handle(o.Hashed(1, b"f")) == [o.GiveBack([span])]
    assert bench.segments.by_id == {}


def test_a_storage_replaced_while_it_is_written_is_freed_by_the_writer(bench: Bench) -> None:
    uploads = Uploads(StoredModel("i", bench.segments, 0, {}), bench.segments, "s", LARGE)
    span = bench.span(LARGE)
    uploads.handle(whole(2, LARGE))
    assert uploads.handle(o.SpanFound(span)) == [o.CopyFromArena(whole(2, LARGE), span)]
    new = bench.segments.new(LARGE, "s", bench.span(LARGE))
    assert uploads.handle(o.WrittenBack({2: new}, [])) == []
    assert uploads.handle(o.BytesWritten()) == [o.GiveBack([span]), o.Say(m.Uploaded())]
    assert bench.segments.by_id == {new.id: new}


def test_freed_storages_leave_with_the_next_version(bench: Bench) -> None:
    model = bench.model(s1=(LARGE, "a"), s2=(LARGE, "b"))
    bench.free(model, [1, 12345])
    assert len(model.manifest().entries) == 2
    assert bench.commit(model)
    assert [entry.storage for entry in model.manifest().entries] == [2]
    bench.write(model, {5: 10}, [2])
    assert [entry.storage for entry in model.manifest().entries] == [5]


def test_order_of_first_use(bench: Bench) -> None:
    model = bench.model(s1=(LARGE, "a"), s2=(LARGE + 1, "b"), s3=(LARGE + 2, "c"))
    one, two, three = (segment.id for segment in model.order)
    assert not model.first_use(1, [one, two])
    assert not model.first_use(2, [three])  # not yet
    assert model.first_use(1, [three, 999, three, one])
    assert [segment for segment, _ in model.manifest().segments] == [three, one, two]
    [new] = bench.write(model, {1: LARGE}).values()
    assert [segment for segment, _ in model.manifest().segments] == [three, new.id, two]
    ranks = {segment.fingerprint: rank for rank, segment in enumerate(model.order) if segment.fingerprint}
    again = StoredModel("j", bench.segments, 0, ranks)
    for storage, label in ((1, "b"), (2, "c")):
        bench.upload(again, storage, LARGE + storage, label)
    bench.commit(again)
    assert [segment.id for segment in again.order] == [three, two]


def test_growth_is_counted_from_the_first_write_back(bench: Bench) -> None:
    model = bench.model(quota=500, s1=(1000, "a"))
    bench.write(model, {5: 10_000})
    bench.write(model, {6: 500})
    with pytest.raises(
        ModelError, match=r"would grow to 11.2 KiB; when a request first changed them they had 10.7 KiB"
    ):
        model.admit_write({7: 1})
    with pytest.raises(ModelError, match="larger quota"):
        model.admit(9, 5000)
    model.admit(1, 1000)
    model.admit_write({5: 10_000, 6: 500})


def test_one_live_byte_does_not_hide_a_pack_from_the_quota(bench: Bench) -> None:
    model = bench.model(quota=100_000, s1=(1000, "a"))
    bench.write(model, {1: 1000})

    def grow(turn: int) -> None:
        for storage in (2 * turn + 10, 2 * turn + 11):
            bench.upload(model, storage, 30_000, str(storage))
        bench.commit(model)
        bench.free(model, [2 * turn + 11])

    grow(0)
    with pytest.raises(ModelError, match="larger quota"):
        grow(1)


def test_a_commit_looks_at_all_storages_a_few_times_however_many_are_hashed(bench: Bench) -> None:
    """Once for each hash, twenty thousand small tensors kept the store from all else for minutes."""
    model, looks = bench.model(), 0
    small = model.draft.small

    def counted() -> object:
        nonlocal looks
        looks += 1
        return small()

    model.draft.small = counted  # type: ignore[assignment, method-assign]
    for storage in range(100):
        bench.upload(model, storage, 60_000, f"{storage}")
    assert bench.commit(model)
    assert len(model.order) == 84, "a mebibyte is packed"
    assert looks <= 4


def test_the_number_of_storages_is_bounded(bench: Bench) -> None:
    model = StoredModel("i", bench.segments, 0, {})
    with pytest.raises(ModelError, match="merge small tensors"):
        model.admit_write(dict.fromkeys(range(MAX_STORAGES + 1), 1))


@pytest.mark.parametrize(
    ("total", "offset", "nbytes"), [(100, 90, 11), (100, -1, 1), (-1, 0, 0), (100, 0, -1), (50, 0, 1)]
)
def test_impossible_bounds(bench: Bench, total: int, offset: int, nbytes: int) -> None:
    model = bench.model(s1=(100, "a"))
    with pytest.raises(RemoteProtocolError):
        model.draft.find(1, total, offset, nbytes)


class ModelMachine(RuleBasedStateMachine):
    """Two instances that upload, free, commit and are written back: every version has what was said, and all is freed
    in the end.
    """

    @initialize()
    def begin(self) -> None:
        self.bench = Bench()
        self.models = [StoredModel(name, self.bench.segments, 1 << 40, {}) for name in "ab"]
        self.drafts: list[dict[int, str]] = [{}, {}]

    @rule(who=st.integers(0, 1), storage=st.integers(0, 5), label=st.sampled_from("xyz"))
    def upload(self, who: int, storage: int, label: str) -> None:
        self.bench.upload(self.models[who], storage, [100, 3000, LARGE, LARGE, 0, 50_000][storage], label)
        self.drafts[who][storage] = label

    @rule(who=st.integers(0, 1), storage=st.integers(0, 6))
    def free(self, who: int, storage: int) -> None:
        self.bench.free(self.models[who], [storage])
        self.drafts[who].pop(storage, None)

    @rule(who=st.integers(0, 1))
    def commit(self, who: int) -> None:
        self.bench.commit(self.models[who])
        assert {entry.storage for entry in self.models[who].manifest().entries} == set(self.drafts[who])

    @rule(who=st.integers(0, 1), storage=st.integers(0, 5), gone=st.integers(0, 6), label=st.sampled_from("xyz"))
    def write(self, who: int, storage: int, gone: int, label: str) -> None:
        size = [100, 3000, LARGE, LARGE, 0, 50_000][storage]
        self.bench.write(self.models[who], {storage: size}, [gone], label)
        if gone != storage:
            self.drafts[who].pop(gone, None)
        self.drafts[who][storage] = "written"
        assert storage in {entry.storage for entry in self.models[who].manifest().entries}

    @rule(who=st.integers(0, 1), turn=st.integers(0, 5))
    def learn(self, who: int, turn: int) -> None:
        ids = [segment.id for segment in self.models[who].order]
        self.models[who].first_use(self.models[who].version, ids[turn:])

    @invariant()
    def sound(self) -> None:
        self.bench.settle()
        for model in self.models:
            manifest = model.manifest()
            sizes = dict(manifest.segments)
            assert {entry.segment for entry in manifest.entries} == set(sizes)
            assert len(sizes) == len(manifest.segments)
            for entry in manifest.entries:
                assert entry.offset + entry.nbytes <= sizes[entry.segment]
            assert model.nbytes == sum(sizes.values())
            working = sum(each.nbytes for _, each in model.draft.unsealed())
            pieces = {item.segment for item in model.draft.items.values() if isinstance(item, Piece)}
            assert model.draft.nbytes == working + sum(segment.nbytes for segment in pieces)

    def teardown(self) -> None:
        if hasattr(self, "models"):
            for model in self.models:
                self.bench.close(model)
            self.bench.settle()
            assert self.bench.slabs.used_nbytes == 0
            assert self.bench.segments.by_id == {}


ModelMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestModels = ModelMachine.TestCase


# --- segments


def numbered() -> Iterator[SlabSpan]:
    return (SlabSpan(0, number * 512, 512) for number in range(1 << 20))


def test_there_will_be_room_where_somebody_reads_what_nobody_holds_any_more() -> None:
    books, spans = Segments(), numbered()
    segment = books.settle(512, "s", next(spans), b"x")
    books.hold(segment, "i")
    books.pin(segment)
    assert not books.pinned_room()
    books.release(segment, "i")
    assert books.pinned_room()
    books.unpin(segment)
    assert (books.pinned_room(), len(books.freed)) == (False, 1)


def test_what_is_moved_down_is_oldest_in_a_file_and_not_pinned() -> None:
    books, spans = Segments(), numbered()
    made = [books.settle(512, "s", next(spans), bytes([number])) for number in range(4)]
    for segment in made:
        books.hold(segment, "i")
    assert books.move_down(1) == 0
    assert books.unfiled(600) == made[:2]
    for segment in made[:3]:
        books.mark_filed(segment)
    books.touch(made[0])
    books.pin(made[1])
    assert books.pinned_room()
    assert books.move_down(1) == 512
    assert [segment.span is None for segment in made] == [False, False, True, False]
    assert books.move_down(5000) == 512
    assert [segment.span is None for segment in made] == [True, False, True, False]
    assert len(books.freed) == 2
    books.check()


def test_one_model_moves_down_where_others_do_not_have_it() -> None:
    books, spans = Segments(1), numbered()
    made = [books.settle(512, "s", next(spans), bytes([number])) for number in range(4)]
    for segment in made:
        books.hold(segment, "i")
        books.hold(segment, ("f", 1))
    books.hold(made[1], "j")
    for segment in made[:3]:
        books.mark_filed(segment)
    books.pin(made[2])
    assert books.forget_here(made, ["i"]) == 3 * 512  # another's, one that is copied, one that is in no file
    assert [segment.span is None for segment in made] == [True, False, False, False]
    books.unpin(made[2])
    assert books.forget_here(made, ["i", "j"]) == 512
    books.check()


def test_an_upload_is_the_host_copy_of_what_was_only_in_a_file() -> None:
    books, spans = Segments(100), numbered()
    segment = books.restore(b"f", 512, "s")
    assert segment.id == 100
    books.hold(segment, ("f", 1))
    span = next(spans)
    assert books.settle(512, "s", span, b"f") is segment
    assert segment.span is span
    assert books.freed == []
    second = next(spans)
    assert books.settle(512, "s", second, b"f") is segment
    assert books.freed == [second]
    books.release(segment, ("f", 1))
    assert books.doomed == [b"f"]
    assert books.filed_nbytes == 0


def test_equal_write_backs_share_a_file_and_the_last_one_takes_it_along() -> None:
    books, spans = Segments(), numbered()
    twins = [books.new(512, "s", next(spans)) for _ in range(2)]
    for twin in twins:
        books.hold(twin, "i")
        books.identify(twin, b"f")
    books.mark_filed(twins[0])
    assert books.is_filed(twins[1])
    books.release(twins[0], "i")
    assert books.doomed == []
    books.check()
    books.release(twins[1], "i")
    assert books.doomed == [b"f"]


def test_damage_spares_a_copy_in_memory() -> None:
    books, spans = Segments(), numbered()
    twins = [books.new(512, "s", next(spans)) for _ in range(2)]
    for twin in twins:
        books.hold(twin, "i")
        books.identify(twin, b"f")
    books.mark_filed(twins[0])
    assert books.move_down(1) == 512
    assert twins[0].span is None
    assert books.damage(b"f") == []
    assert twins[0].span == twins[1].span is not None
    assert not any(books.is_filed(twin) for twin in twins)
    books.check()
    for twin in twins:
        books.release(twin, "i")
    assert books.by_id == {}
    assert len(books.freed) == 2


def test_damage_takes_all_twins_that_are_in_files_only() -> None:
    books = Segments()
    twins = [books.restore(b"f", 512, "s") for _ in range(2)]
    for twin in twins:
        books.hold(twin, "i")
    assert books.damage(b"f") == twins
    assert all(twin.damaged for twin in twins)
    assert books.find(b"f") is None
    books.check()


def test_equal_write_backs_lie_once_in_host_memory() -> None:
    books, spans = Segments(), numbered()
    first, second = (books.new(512, "s", next(spans)) for _ in range(2))
    for twin in (first, second):
        books.hold(twin, "i")
        books.pin(twin)
        books.identify(twin, b"f")
    own = second.span
    books.pin(second)  # an executor copies from where it lies
    for twin in (first, second):
        books.unpin(twin)
    assert (second.span, books.freed) == (own, [])
    books.unpin(second)
    assert second.span == first.span
    assert books.freed == [own]
    books.check()
    # It is forgotten when neither is read, and is there for both when one has come back.
    books.mark_filed(first)
    books.pin(second)
    assert books.move_down(1) == 0
    assert first.span is None
    books.touch(first)
    assert first.span == second.span is not None
    books.unpin(second)
    assert books.move_down(1) == 512
    assert first.span is second.span is None
    assert len(books.freed) == 2
    books.move_up(second, next(spans))
    books.touch(first)
    assert first.span == second.span is not None
    for twin in (first, second):
        books.check()
        books.release(twin, "i")
    assert len(books.freed) == 3


def test_a_great_many_twins_cost_no_more_than_others() -> None:
    """A function may write the same zeros to each of its storages; the store's loop must not look at all for each."""
    books, spans = Segments(), numbered()
    twins = [books.new(512, "s", next(spans)) for _ in range(1 << 15)]  # their square is beyond any test's time limit
    for twin in twins:
        books.hold(twin, "i")
        books.pin(twin)
        books.identify(twin, b"f")
        books.unpin(twin)
    books.mark_filed(twins[0])
    assert books.move_down(1) == 512
    for twin in twins:
        books.touch(twin)
    for twin in twins:
        books.release(twin, "i")
    assert len(books.freed) == len(twins)


# --- functions' records


def test_a_record_keeps_its_segments_until_its_function_is_removed() -> None:
    books, spans = Segments(), numbered()
    functions = KeptFunctions(books)
    segment = books.settle(512, "s", next(spans), b"f")
    functions.attach(("f", 1))
    functions.remember(("f", 1), [segment])
    assert functions.unfiled() == [segment]
    assert functions.savable(set()) == {}
    [(key, (generation, fingerprints))] = functions.savable({b"f"}).items()
    assert (key, fingerprints) == (("f", 1), [b"f"])
    functions.remember(("f", 1), [segment, segment])
    functions.saved(key, generation)
    assert not functions.records[key].saved
    functions.keep([])
    assert key in functions.records
    functions.detach(("f", 1))
    assert functions.dropped == {key}
    assert books.by_id == {}


def test_nothing_is_dropped_before_the_controller_has_spoken() -> None:
    books = Segments()
    functions = KeptFunctions(books)
    functions.restore(("f", 1), [books.restore(b"f", 10, "s")])
    functions.attach(("f", 1))
    functions.detach(("f", 1))
    assert functions.ranks(("f", 1)) == {b"f": 0}
    functions.keep([("f", 1)])
    assert books.doomed == []
    functions.keep([("f", 2)])
    assert books.doomed == [b"f"]


def test_a_lost_segment_leaves_all_records() -> None:
    books = Segments()
    functions = KeptFunctions(books)
    kept, lost = books.restore(b"k", 10, "s"), books.restore(b"l", 10, "s")
    functions.restore(("f", 1), [lost, kept])
    books.pin(lost)
    books.damage(b"l")
    functions.lose(lost)
    assert functions.savable(set()) == {("f", 1): (1, [b"k"])}
    books.unpin(lost)
    assert list(books.by_id) == [kept.id]
    assert functions.abandon()
    assert functions.records == {}


def test_bytes_that_are_still_in_memory_are_written_again_when_their_file_is_damaged() -> None:
    books, spans = Segments(), numbered()
    functions = KeptFunctions(books)
    segment = books.settle(512, "s", next(spans), b"f")
    functions.remember(("f", 1), [segment])
    books.mark_filed(segment)
    written = functions.savable(set())
    functions.saved(("f", 1), written[("f", 1)][0])
    assert functions.unfiled() == []
    assert books.damage(b"f") == []
    functions.unsave(b"f")
    assert functions.unfiled() == [segment]
    functions.saved(("f", 1), written[("f", 1)][0])  # a write that was under way changes nothing
    assert functions.unfiled() == [segment]


# --- scopes and reports


def attach(instance: str, function: str, tenant: str) -> m.AttachInstance:
    arena = m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=0)
    return m.AttachInstance(
        instance=instance,
        tenant=tenant,
        function=function,
        function_version=1,
        directory="",
        uid=0,
        arena=arena,
        quota_nbytes=0,
    )


def test_scopes_keep_apart_what_they_should() -> None:
    keys = HashKeys(bytes(32))
    data = memoryview(b"the same weights")

    def prints(sharing: str, *attached: m.AttachInstance) -> int:
        return len({fingerprint(keys.of(scope_of(sharing, each)), data) for each in attached})

    same = attach("a", "f", "t"), attach("b", "f", "t")
    functions = attach("a", "f", "t"), attach("b", "g", "t")
    tenants = attach("a", "f", "t"), attach("b", "f", "u")
    sessions = attach("a", "", "t"), attach("b", "", "t")
    assert [prints(sharing, *same) for sharing in ("none", "tenant", "node")] == [1, 1, 1]
    assert [prints(sharing, *functions) for sharing in ("none", "tenant", "node")] == [2, 1, 1]
    assert [prints(sharing, *tenants) for sharing in ("tenant", "node")] == [2, 1]
    assert [prints(sharing, *sessions) for sharing in ("none", "tenant")] == [2, 1]
    assert fingerprint(HashKeys(b"\1" * 32).of("node"), data) != fingerprint(keys.of("node"), data)


def test_the_report_names_who_shares(bench: Bench) -> None:
    one = bench.model("a", s1=(LARGE, "x"), s2=(LARGE + 1, "y"))
    two = bench.model("b", s1=(LARGE, "x"))
    for segment in one.order:
        bench.segments.mark_filed(segment)
    bench.segments.touch(one.order[1])
    bench.segments.move_down(1)
    models = [(attach("a", "f", "t"), one), (attach("b", "g", "t"), two)]
    first, second = instance_bytes(bench.segments, models)
    assert (first.nbytes, first.host_nbytes, first.file_nbytes) == (2 * LARGE + 1, LARGE + 1, 2 * LARGE + 1)
    assert (first.shared_nbytes, first.shared_with) == (LARGE, ["g"])
    assert (second.shared_nbytes, second.shared_with, second.host_nbytes) == (LARGE, ["f"], 0)
