"""Instances' uploads with every step answered when Hypothesis likes: what the machine of uploads promises.

Memory is real bytes here, by span; a shadow says what each instance's storages must have, from what was said alone.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dormouse.gpuserver.store.disk.index import Identity
from dormouse.gpuserver.store.ingest import steps as o
from dormouse.gpuserver.store.ingest.drafts import TABLE, Change, DraftState, Working
from dormouse.gpuserver.store.ingest.models import StoredModel
from dormouse.gpuserver.store.ingest.packing import SMALL_NBYTES
from dormouse.gpuserver.store.ingest.uploads import MAX_WAITING, Uploads
from dormouse.gpuserver.store.memory.segments import Segment, Segments
from dormouse.gpuserver.store.memory.slabs import Slabs, SlabSpan
from dormouse.schemas import messages as m

SIZES = [100, 64, 66_000, 66_000, 0, 1000]  # by storage
FILE_NBYTES = 70_000
STREAM_NBYTES = 67_000
KINDS = {m.StoreUpload: m.Uploaded, m.StoreFile: m.Uploaded, m.Commit: m.Committed}
TICKET = ("ticket", 1)


@dataclass(eq=False)
class Instance:
    model: StoredModel
    uploads: Uploads
    steps: list[o.Step] = field(default_factory=list)  # ordered, and not over
    asked: deque[m.InstanceToStore] = field(default_factory=deque)  # and not answered
    shadow: dict[int, bytearray] = field(default_factory=dict)  # by storage
    file: int = 0  # as the request at hand has seen it
    wrote: bool = False  # of that request
    replaced: bool = False  # what it writes to, by a write-back
    may_fail: bool = False
    broken: bool = False
    late: int = 0  # answers since it broke
    over: int = 0
    gone: bool = False


class Play:
    """Memory, a file and instances."""

    def __init__(self) -> None:
        self.slabs = Slabs(1 << 40)
        self.segments = Segments()
        self.bytes: dict[SlabSpan, bytearray] = {}  # of every span that is taken
        self.covered: dict[SlabSpan, bytearray] = {}  # a 1 for each byte that has come
        self.spoiled: set[SlabSpan] = set()  # a read to them has failed
        self.filed: dict[bytes, bytes] = {}  # bytes by fingerprint
        self.known: dict[Identity, bytes] = {}
        self.file = 1  # changes with the file
        self.instances: list[Instance] = []
        self.unidentified: list[Segment] = []
        self._names = itertools.count()

    def attach(self) -> Instance:
        model = StoredModel(f"i{next(self._names)}", self.segments, 1 << 40, {})
        self.instances.append(Instance(model, Uploads(model, self.segments, "s", STREAM_NBYTES)))
        return self.instances[-1]

    # --- the shell

    def place(self, nbytes: int) -> SlabSpan:
        span = self.slabs.place("test", nbytes)
        self.bytes[span], self.covered[span] = bytearray(nbytes), bytearray(nbytes)
        return span

    def give_back(self, spans: list[SlabSpan]) -> None:
        for span in spans:
            assert span in self.bytes, "given back twice"
            assert not self.segments._lying[span], "a segment lies there"
            assert all(span not in spans_of(step) for who in self.instances for step in who.steps), "it is in use"
            del self.bytes[span], self.covered[span]
            self.spoiled.discard(span)
            self.slabs.free(span)

    def collect(self) -> None:
        freed, self.segments.freed = self.segments.freed, []
        self.give_back(freed)

    def ask(self, who: Instance, message: m.InstanceToStore) -> None:
        if not (who.broken or who.gone):
            who.asked.append(message)
            self.forget(who)
        self.tell(who, message)

    def forget(self, who: Instance) -> None:
        """What is freed next."""
        while who.asked and isinstance(free := who.asked[0], m.StoreFree):
            who.asked.popleft()
            for storage in free.storages:
                who.shadow.pop(storage, None)

    def tell(self, who: Instance, event: o.Event) -> None:
        effects = deque(who.uploads.handle(event))
        while effects:
            match effect := effects.popleft():
                case o.GoOn():
                    assert not effects
                    effects += who.uploads.handle(effect)
                case o.GiveBack(spans=spans):
                    self.give_back(spans)
                case o.Unpin(segment=segment):
                    assert segment.pins
                    self.segments.unpin(segment)
                case o.NoteFileRange(identity=identity, fingerprint=fingerprint):
                    self.known[identity] = fingerprint
                case o.Say(message=message):
                    self.answered(who, message)
                case o.Publish():
                    assert who.broken or self.contents(who) == who.shadow
                case o.ReadersGone():
                    who.over += 1
                case o.Warn():
                    who.broken = True
                case o.DonePlacing():
                    pass
                case _:
                    who.replaced = who.replaced and isinstance(effect, o.Hash)
                    who.steps.append(effect)
        self.collect()
        who.uploads.check()

    def answered(self, who: Instance, message: m.StoreToInstance) -> None:
        assert not who.gone, "a dead instance is answered"
        if who.broken:  # it is told so, and what was at hand may have its own answer
            who.late += 1
            assert who.late <= 2
            return
        asked = who.asked.popleft()  # raises if nothing was asked
        kind = KINDS[type(asked)]
        assert isinstance(message, m.StoreFailed if who.may_fail else kind)
        if isinstance(asked, m.StoreFile) and isinstance(message, m.Uploaded) and not who.wrote:
            who.shadow[asked.storage] = bytearray(content(asked, who.file))  # known without reading
        who.wrote = who.may_fail = False
        self.forget(who)

    def contents(self, who: Instance) -> dict[int, bytes]:
        """What an executor would read now."""
        found = {}
        for entry in who.model.manifest().entries:
            segment = self.segments.by_id[entry.segment]
            data = self.filed[segment.fingerprint or b""] if segment.span is None else self.bytes[segment.span]
            found[entry.storage] = bytes(data[entry.offset : entry.offset + entry.nbytes])
        return found

    def write(self, span: SlabSpan, offset: int, data: bytes) -> None:
        assert not self.segments._lying[span], "a segment is written"
        hashes = [step for who in self.instances for step in who.steps if isinstance(step, o.Hash)]
        assert all(span not in spans_of(step) for step in hashes), "written under a hash"
        self.bytes[span][offset : offset + len(data)] = data

    def finish(self, who: Instance, step: o.Step, fails: bool = False) -> None:
        """A step that is over, or has failed."""
        who.steps.remove(step)
        if fails and isinstance(step, o.Hash | o.CopyFromArena):
            self.tell(who, o.Broke("raised"))
        elif fails:
            who.may_fail = True
        self.tell(who, self.outcome(who, step, fails))

    def outcome(self, who: Instance, step: o.Step, fails: bool) -> o.Event:
        match step:
            case o.Hash(number=number) if fails:
                return o.Hashed(number, None)
            case o.ReadFile(part=part, file=file, span=span) if fails or file != self.file:
                return o.BytesWritten(self.read_half(who, part, span))
            case _ if fails:
                return o.Failed("no", raised=who.broken)
            case o.FindSpan(nbytes=nbytes):
                return o.SpanFound(self.place(nbytes))
            case o.Look(part=part, whole=whole):
                identity = Identity(0, 0, 0, self.file, 0, part.file_offset, part.nbytes, "s") if whole else None
                who.file = self.file
                who.may_fail = part.file_offset + part.nbytes > FILE_NBYTES
                return o.Seen(FILE_NBYTES, self.file, identity, self.known.get(identity) if identity else None)
            case o.CopySegment(segment=segment, offset=offset, span=target):
                assert segment.pins
                self.segments.touch(segment)
                if segment.span is None:
                    span = self.place(segment.nbytes)
                    self.bytes[span][:] = self.filed[segment.fingerprint or b""]
                    self.segments.move_up(segment, span)
                assert segment.span is not None
                self.write(target, 0, bytes(self.bytes[segment.span][offset : offset + target.nbytes]))
                self.covered[target][:] = b"\1" * target.nbytes
                return o.Copied()
            case o.CopyFromArena(upload=part, span=span) | o.ReadFile(part=part, span=span):
                self.write(span, part.offset, data := content(part, self.file))
                self.covered[span][part.offset : part.offset + part.nbytes] = b"\1" * part.nbytes
                who.wrote = True
                if not who.replaced:
                    shadow = who.shadow.setdefault(part.storage, bytearray(part.total_nbytes))
                    shadow[part.offset : part.offset + part.nbytes] = data
                return o.BytesWritten()
            case o.Hash(number=number, span=span, parts=parts):
                for source, offset in parts:
                    self.bytes[span][offset : offset + source.nbytes] = self.bytes[source]
                data = bytes(self.bytes[span])
                self.filed[blake3(data).digest()] = data
                return o.Hashed(number, blake3(data).digest())

    def read_half(self, who: Instance, part: m.StoreFile, span: SlabSpan) -> str:
        """The file changes: what has been written is whatever it is, and the storage is as before, or none."""
        who.may_fail = True
        self.spoiled.add(span)
        self.write(span, part.offset, data := content(part, self.file)[: part.nbytes // 2])
        if not who.replaced and any(self.covered[span]):
            who.shadow[part.storage][part.offset : part.offset + len(data)] = data
        elif not who.replaced:
            who.shadow.pop(part.storage, None)
        return "no longer the same"

    # --- others

    def write_back(self, who: Instance, storages: dict[int, int], freed: list[int]) -> None:
        """``storages``: a byte by storage."""
        new: dict[int, Segment] = {}
        for storage, value in storages.items():
            span = self.place(SIZES[storage])
            self.bytes[span][:] = bytes([value]) * SIZES[storage]
            new[storage] = self.segments.new(SIZES[storage], "s", span)
            self.segments.hold(new[storage], TICKET)
        for storage in {*freed} - new.keys():
            who.shadow.pop(storage, None)
        for storage, value in storages.items():
            who.shadow[storage] = bytearray([value]) * SIZES[storage]
        for step in who.steps:
            part = (
                step.upload
                if isinstance(step, o.CopyFromArena)
                else step.part
                if isinstance(step, o.ReadFile)
                else None
            )
            who.replaced = who.replaced or (part is not None and part.storage in {*new, *freed})
        self.tell(who, o.WrittenBack(new, freed))
        assert new.keys() <= {entry.storage for entry in who.model.manifest().entries}
        for segment in new.values():
            self.segments.pin(segment)
            self.unidentified.append(segment)
            self.segments.release(segment, TICKET)
        self.collect()

    def identify(self, segment: Segment) -> None:
        self.unidentified.remove(segment)
        assert segment.span is not None
        data = bytes(self.bytes[segment.span])
        self.filed[blake3(data).digest()] = data
        self.segments.identify(segment, blake3(data).digest())
        self.segments.unpin(segment)
        self.collect()

    def move_down(self) -> None:
        for segment in self.segments.by_id.values():
            if segment.fingerprint is not None:
                self.segments.mark_filed(segment)
        self.segments.move_down(1 << 40)
        self.collect()

    def leave(self, who: Instance) -> None:
        who.gone = True
        self.tell(who, o.Gone())

    def drain(self) -> None:
        while steps := [(who, step) for who in self.instances for step in who.steps]:
            self.finish(*steps[0])

    def end(self) -> None:
        self.drain()
        for who in self.instances:
            self.ask(who, m.Commit())
            self.drain()
            assert who.broken or who.gone or self.contents(who) == who.shadow
        for who in self.instances:
            if not who.gone:
                self.leave(who)
        for segment in list(self.unidentified):
            self.identify(segment)
        self.check()
        assert self.bytes == {}
        assert self.segments.by_id == {}
        assert self.slabs.used_nbytes == 0

    def check(self) -> None:
        """No span is leaked, and what has come is what is covered."""
        used = {segment.span for segment in self.segments.by_id.values() if segment.span is not None}
        for who in self.instances:
            for step in who.steps:
                used |= spans_of(step)
            request = who.uploads._request
            used |= {request.working.span} if request is not None and request.working is not None else set()
            for item in who.model.draft.items.values():
                if not isinstance(item, Working):
                    continue
                used.add(item.span)
                if item.state is DraftState.BUSY:
                    continue
                assert item.coverage.complete == all(self.covered[item.span])
                assert item.coverage.empty == (not any(self.covered[item.span]))
                if item.nbytes > SMALL_NBYTES and item.coverage.complete and item.span not in self.spoiled:
                    assert item.state is DraftState.SEALED
            assert who.steps or who.broken or who.gone or not who.asked, "nobody answers"
            assert who.over == (who.gone and all(isinstance(step, o.Hash) for step in who.steps))
        assert set(self.bytes) == used


def spans_of(step: o.Step) -> set[SlabSpan]:
    match step:
        case o.CopySegment(span=span) | o.CopyFromArena(span=span) | o.ReadFile(span=span):
            return {span}
        case o.Hash(span=span, parts=parts):
            return {span, *(part for part, _ in parts)}
        case _:
            return set()


def content(part: m.StoreUpload | m.StoreFile, file: int) -> bytes:
    """``arena_offset`` and ``file_offset`` stand for what is there."""
    value = 1 + part.arena_offset % 9 if isinstance(part, m.StoreUpload) else 10 + (2 * file + part.file_offset % 2)
    return bytes([value % 256]) * part.nbytes


STORAGES = st.sampled_from([0, 1, 2, 2, 2, 3, 4, 5])
WHO = st.integers(0, 1)
PARTS = st.sampled_from([(0, 1), (0, 1), (0, 2), (1, 2), (1, 3)])  # of a storage: all, a half, ...


class LoadingMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.play = Play()
        self.play.attach()
        self.play.attach()

    def who(self, number: int) -> Instance:
        return self.play.instances[-1 - number]  # and then there are those that are gone

    @rule(who=WHO, storage=STORAGES, part=PARTS, value=st.integers(0, 8))
    def upload(self, who: int, storage: int, part: tuple[int, int], value: int) -> None:
        nbytes = SIZES[storage] // part[1]
        self.play.ask(
            self.who(who),
            m.StoreUpload(
                storage=storage,
                total_nbytes=SIZES[storage],
                offset=nbytes * part[0],
                arena_offset=value,
                nbytes=nbytes,
            ),
        )

    @rule(who=WHO, storage=STORAGES, part=PARTS, file_offset=st.sampled_from([0, 1, 5000]))
    def read(self, who: int, storage: int, part: tuple[int, int], file_offset: int) -> None:
        nbytes = SIZES[storage] // part[1]
        self.play.ask(
            self.who(who),
            m.StoreFile(
                storage=storage,
                total_nbytes=SIZES[storage],
                offset=nbytes * part[0],
                file=7,
                file_offset=file_offset,
                nbytes=nbytes,
            ),
        )

    @rule(who=WHO, storages=st.lists(STORAGES, max_size=2))
    def free(self, who: int, storages: list[int]) -> None:
        self.play.ask(self.who(who), m.StoreFree(storages=storages))

    @rule(who=WHO)
    def commit(self, who: int) -> None:
        self.play.ask(self.who(who), m.Commit())

    @rule(number=st.integers(0, 7), fails=st.integers(0, 19))
    def finish(self, number: int, fails: int) -> None:
        if steps := [(who, step) for who in self.play.instances for step in who.steps]:
            self.play.finish(*steps[number % len(steps)], fails == 19)

    @rule(who=WHO, count=st.integers(1, 5))
    def finish_some(self, who: int, count: int) -> None:
        for _ in range(count):
            steps = [step for step in self.who(who).steps if not isinstance(step, o.Hash)]
            if steps:
                self.play.finish(self.who(who), steps[0])

    @rule(who=WHO, storage=STORAGES, value=st.integers(1, 3), freed=st.lists(STORAGES, max_size=2))
    def write_back(self, who: int, storage: int, value: int, freed: list[int]) -> None:
        if not self.who(who).gone:
            self.play.write_back(self.who(who), {storage: value}, freed)

    @rule(number=st.integers(0, 3))
    def identify(self, number: int) -> None:
        if segments := self.play.unidentified:
            self.play.identify(segments[number % len(segments)])

    @rule()
    def forget_host_copies(self) -> None:
        self.play.move_down()

    @rule()
    def change_the_file(self) -> None:
        self.play.file += 1

    @rule(who=WHO, how=st.integers(0, 9))
    def leave(self, who: int, how: int) -> None:
        if self.who(who).gone:
            self.play.attach()
        elif self.who(who).broken or how == 0:
            self.play.leave(self.who(who))
        elif how == 1:
            self.play.tell(self.who(who), o.Broke("garbage"))

    @invariant()
    def sound(self) -> None:
        self.play.check()

    def teardown(self) -> None:
        if hasattr(self, "play"):
            self.play.end()


LoadingMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestLoading = LoadingMachine.TestCase


# --- one rule each


@pytest.fixture
def play() -> Iterator[Play]:
    play = Play()
    yield play
    play.end()


def whole(storage: int, value: int = 0) -> m.StoreUpload:
    nbytes = SIZES[storage]
    return m.StoreUpload(storage=storage, total_nbytes=nbytes, offset=0, arena_offset=value, nbytes=nbytes)


def test_every_working_ends_in_a_segment_or_is_given_back() -> None:
    assert set(TABLE) == set(DraftState)
    ends = {state for state, changes in TABLE.items() if not changes}
    assert ends == {DraftState.SETTLED, DraftState.FREED}
    for state in set(DraftState) - ends:  # it can always be given up, and whoever has it in hand says so once
        assert Change.DROP in TABLE[state] or state is DraftState.LOST
    assert {change for changes in TABLE.values() for change in changes} == set(Change)


def test_a_commit_packs_small_storages_when_large_ones_are_hashed(play: Play) -> None:
    """Not before, when it would have to hash them one by one."""
    who = play.attach()
    for storage in (2, 0, 1):
        play.ask(who, whole(storage))
        while steps := [step for step in who.steps if not isinstance(step, o.Hash)]:
            play.finish(who, steps[0])
    play.ask(who, m.Commit())
    [hashing] = who.steps
    assert isinstance(hashing, o.Hash)
    play.finish(who, hashing)
    [place] = who.steps
    assert isinstance(place, o.FindSpan)
    play.drain()
    segments = {entry.storage: entry.segment for entry in who.model.manifest().entries}
    assert segments[0] == segments[1] != segments[2]


def test_what_is_sealed_is_not_written_until_it_is_hashed(play: Play) -> None:
    who = play.attach()
    play.ask(who, whole(2, 1))
    while not isinstance(who.steps[0], o.Hash):
        play.finish(who, who.steps[0])
    play.ask(who, whole(2, 2))
    assert [type(step) for step in who.steps] == [o.Hash]
    play.finish(who, who.steps[0])
    assert [type(step) for step in who.steps] == [o.FindSpan]
    play.drain()
    assert not who.asked


def test_a_segment_that_is_replaced_while_it_is_copied_is_copied_anew(play: Play) -> None:
    who = play.attach()
    for message in (whole(5, 1), m.Commit()):
        play.ask(who, message)
        play.drain()
    play.ask(who, m.StoreUpload(storage=5, total_nbytes=1000, offset=0, arena_offset=2, nbytes=1))
    while not isinstance(who.steps[0], o.CopySegment):
        play.finish(who, who.steps[0])
    play.write_back(who, {5: 77}, [])
    play.ask(who, m.Commit())
    play.drain()
    assert play.contents(who) == {5: bytes([3] + 999 * [77])}


def test_a_pack_is_of_what_is_there_when_it_has_room(play: Play) -> None:
    who = play.attach()
    for storage in (0, 1, 5):
        play.ask(who, whole(storage, storage))
    play.drain()
    play.ask(who, m.Commit())
    assert who.steps == [o.FindSpan(2024)]
    play.write_back(who, {5: 7}, [])
    play.finish(who, who.steps[0])
    assert who.steps == [o.FindSpan(576)]
    play.write_back(who, {0: 7}, [])
    play.finish(who, who.steps[0])
    assert [step.parts for step in who.steps if isinstance(step, o.Hash)] == [[]]
    play.drain()
    assert not who.asked
    assert play.contents(who) == {0: b"\7" * 100, 1: b"\2" * 64, 5: b"\7" * 1000}


def test_each_version_is_published_before_the_next_request(play: Play) -> None:
    who = play.attach()
    for message in (whole(0), m.Commit(), m.StoreFree(storages=[0]), m.Commit()):
        play.ask(who, message)
    play.drain()
    assert who.model.version == 2
    assert not who.asked


def test_too_much_that_waits_breaks_the_instance(play: Play) -> None:
    who = play.attach()
    play.ask(who, whole(0))
    play.ask(who, m.StoreFree(storages=list(range(MAX_WAITING))))
    assert who.broken
    play.drain()
    assert who.late == 2  # it is told, and its upload has an answer
    play.ask(who, m.Commit())
    assert (who.late, who.steps) == (2, [])


def test_who_breaks_the_protocol_is_told_once(play: Play) -> None:
    who = play.attach()
    play.ask(who, whole(0))
    play.ask(who, m.StoreUpload(storage=0, total_nbytes=99, offset=0, arena_offset=0, nbytes=1))
    play.ask(who, m.Commit())
    play.drain()
    assert (who.broken, who.late) == (True, 1)
