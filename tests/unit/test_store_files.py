"""What outlives the store: files, the index, restarts, damage, full disks, death in the middle of a write."""

import asyncio
import itertools
import os
import random
import resource
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from storekit import StoreKit

from dormouse.gpuserver.store.disk import files as files_module
from dormouse.gpuserver.store.disk.file_reads import FileReads
from dormouse.gpuserver.store.disk.files import Damaged, SegmentFiles
from dormouse.gpuserver.store.disk.index import ID_BLOCK, FiledSegment, Identity, Index
from dormouse.gpuserver.store.disk.writer import Writer
from dormouse.gpuserver.store.memory.fingerprint import HashKeys, load_keys
from dormouse.gpuserver.store.memory.functions import KeptFunctions
from dormouse.gpuserver.store.memory.segments import Segment, Segments
from dormouse.gpuserver.store.memory.slabs import HostFull, Slabs
from dormouse.gpuserver.store.memory.store_memory import StoreMemory
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError

MIB = 1 << 20
KEY = bytes(range(32))
MakeKit = Callable[..., StoreKit]


@pytest.fixture(params=["host", "cuda"])
def make_kit(request: pytest.FixtureRequest) -> Iterator[MakeKit]:
    kits: list[StoreKit] = []

    def make(host: int = 64 * MIB, disk: str = "") -> StoreKit:
        kits.append(StoreKit(host, disk, cuda=request.param == "cuda"))
        return kits[-1]

    yield make
    for kit in kits:
        kit.close()


# --- files


def written(files: SegmentFiles, *contents: bytes) -> list[bytes]:
    files.open()
    prints = [blake3(data, key=KEY).digest() for data in contents]
    files.write([(each, memoryview(data)) for each, data in zip(prints, contents, strict=True)])
    return prints


def test_files_are_read_back_and_checked(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "segments", None)
    contents = [b"", b"x", os.urandom(9 * MIB)]
    for each, data in zip(written(files, *contents), contents, strict=True):
        into = bytearray(len(data))
        files.read(each, KEY, memoryview(into))
        assert into == data
        assert stat.S_IMODE(os.stat(files.path(each)).st_mode) == 0o600
        with pytest.raises(Damaged, match="other bytes"):
            files.read(each, bytes(32), memoryview(into))


@pytest.mark.parametrize("harm", ["flip", "short", "long", "gone", "folder"])
def test_every_harm_to_a_file_is_seen(tmp_path: Path, harm: str) -> None:
    files = SegmentFiles(tmp_path / "segments", None)
    [each] = written(files, os.urandom(5 * MIB))
    path = files.path(each)
    data = bytearray(path.read_bytes())
    path.unlink()
    match harm:
        case "flip":
            data[random.Random(1).randrange(len(data))] ^= 1
            path.write_bytes(data)
        case "short":
            path.write_bytes(data[:-1])
        case "long":
            path.write_bytes(data + b"x")
        case "folder":
            path.mkdir()
    with pytest.raises(Damaged):
        files.read(each, KEY, memoryview(data))


def test_half_written_files_are_removed_at_the_start_and_unknown_ones_by_the_sweep(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "segments", None)
    kept, lost = written(files, b"kept", b"lost")
    (tmp_path / "segments" / f".{'ab' * 32}").write_bytes(b"half")
    (tmp_path / "segments" / "ab").mkdir(exist_ok=True)
    (tmp_path / "segments" / "ab" / "README").write_bytes(b"not ours")
    files.open()
    assert [name for name in os.listdir(tmp_path / "segments") if name.startswith(".")] == []
    assert files.sweep(lambda each: each == kept) == 1
    assert files.path(kept).exists()
    assert not files.path(lost).exists()


def test_a_failed_batch_leaves_nothing(tmp_path: Path) -> None:
    files = SegmentFiles(tmp_path / "segments", None)
    files.open()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            written(files, b"small", os.urandom(2 * MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path for path in (tmp_path / "segments").rglob("*") if path.is_file()] == []


def test_budgets_are_said_with_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SegmentFiles(tmp_path, 1000)
    assert files.refusal(400, 600) is None
    assert "use 500 B of 1.0 KiB" in (files.refusal(500, 501) or "")
    files = SegmentFiles(tmp_path, None)
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    text = files.refusal(0, free)
    assert text is not None
    assert "a tenth stays free" in text
    assert "set limits.disk" in text


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"\[node\] state"):
        SegmentFiles(tmp_path / "file" / "segments", None).open()
    with pytest.raises(ConfigError, match=r"\[node\] state"):
        load_keys(tmp_path / "file" / "key")


def test_the_key_is_made_once_and_is_ours_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    first = load_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_keys(path).of("node") == first.of("node")
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="has 5 bytes, not 32"):
        load_keys(path)


# --- the index


def test_rows_come_back(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite3"
    index = Index(path)
    stored = [FiledSegment(bytes([number]) * 32, number, "node") for number in range(3)]
    prints = [each.fingerprint for each in stored]
    index.keep(stored, {("f", 1): [prints[2], prints[0]], ("g", 2): [prints[1]]}, {})
    index.keep([], {("f", 1): [prints[0], prints[2]]}, {})
    index.forget([prints[1]], [("g", 2)])
    assert index.has(prints[0])
    assert not index.has(prints[1])
    first = index.first_id
    index.close()
    again = Index(path)
    assert again.first_id == first + ID_BLOCK
    assert sorted(again.segments, key=lambda each: each.nbytes) == [stored[0], stored[2]]
    assert again.functions == {("f", 1): [prints[0], prints[2]]}
    again.close()


def test_identities_are_exact_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dormouse.gpuserver.store.disk.index.MAX_IDENTITIES", 10)
    index = Index(None)
    base = Identity((1 << 64) - 1, 1 << 63, 100, 5, 6, 0, 100, "node")
    index.keep([], {}, {base: b"f"})
    assert index.find(base) == b"f"
    for name in base._fields:
        values = base._asdict()
        values[name] = "tenant t" if name == "scope" else values[name] - 1
        assert index.find(Identity(**values)) is None
    index.keep([], {}, {base._replace(start=start): b"g" for start in range(1, 11)})
    assert index.find(base) is None
    assert index.find(base._replace(start=10)) == b"g"
    index.close()


class SlowIndex(Index):
    """Writes when it is told to, and cannot while it is broken."""

    def __init__(self) -> None:
        super().__init__(None)
        self.begun, self.go = threading.Event(), threading.Event()
        self.broken = True

    def keep(self, *what: Any) -> None:
        self.begun.set()
        assert self.go.wait(60)
        if self.broken:
            raise sqlite3.OperationalError("disk I/O error")
        super().keep(*what)


def test_a_file_is_known_again_while_its_identity_is_being_written_and_when_that_fails() -> None:
    identity, index = Identity(1, 2, 100, 5, 6, 0, 100, "node"), SlowIndex()

    async def body() -> None:
        segments, changed = Segments(), asyncio.Event()
        writer = Writer(segments, KeptFunctions(segments), None, index, changed.set)
        memory = StoreMemory(segments, Slabs(1 << 20), lambda slab: None, lambda slab: None, lambda: None, writer.press)
        running = asyncio.create_task(writer.run(memory))
        writer.note(identity, b"f")
        assert await asyncio.to_thread(index.begun.wait, 30)
        assert writer.find(identity) == b"f"
        index.go.set()
        async with asyncio.timeout(60):
            await changed.wait()
            assert "disk I/O error" in writer.trouble
            assert writer.find(identity) == b"f"
            index.broken = False
            changed.clear()
            writer.poke()
            await changed.wait()
        assert index.find(identity) == b"f"
        running.cancel()
        writer.close()

    asyncio.run(body())
    index.close()


def test_d15_a_damaged_index_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite3"
    path.write_bytes(os.urandom(8192))
    with pytest.raises(ConfigError, match=r"index\.sqlite3: .*restore it from a copy"):
        Index(path)
    path.unlink()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        Index(path)


def test_d15_a_lost_index_is_not_taken_for_that_of_a_new_store(tmp_path: Path) -> None:
    path, segments = tmp_path / "index.sqlite3", tmp_path / "segments"
    segments.mkdir()
    Index(path, segments).close()
    (segments / "ab").mkdir()
    (segments / "ab" / "abcd").write_text("model")
    Index(path, segments).close()  # no row yet: of a crash before it was written
    for _ in range(2):  # it says so again, though SQLite has made the file meanwhile
        path.unlink()
        with pytest.raises(ConfigError, match=r"lost or empty, but .*segments has models.*--forget-models"):
            Index(path, segments)
        with pytest.raises(ConfigError, match="lost or empty"):
            Index(path, segments)
    Index(path).close()  # as with --forget-models, after which it is known again
    Index(path, segments).close()


def test_a_disk_that_is_full_at_the_start_is_not_called_damage(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        with pytest.raises(ConfigError, match="free space") as raised:
            Index(tmp_path / "index.sqlite3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "away" not in str(raised.value)


def test_an_index_on_a_full_disk_is_read_and_its_run_has_ids_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite3"
    killed = Index(path)  # not closed: its log stays, as after SIGKILL
    stored = FiledSegment(bytes(32), 5, "node")
    killed.keep([stored], {("f", 1): [stored.fingerprint]}, {})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        index = Index(path)
        again = Index(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (index.segments, index.functions) == ([stored], {("f", 1): [stored.fingerprint]})
    starts = sorted(each.first_id for each in (killed, index, again))
    assert all(after - first >= ID_BLOCK for first, after in itertools.pairwise(starts))
    assert starts[-1] + ID_BLOCK <= 1 << 63
    for each in (again, index, killed):
        each.close()


# --- restarts


def test_a_restart_finds_what_was_committed(make_kit: MakeKit) -> None:
    kit = make_kit()

    async def test() -> None:
        storages = {1: os.urandom(3 * MIB), 2: os.urandom(100), 3: os.urandom(200), 4: os.urandom(MIB)}
        await kit.start()
        executor = await kit.executor()
        one = await kit.instance("a", "f")
        nbytes = (await one.load(storages)).nbytes
        before = await executor.manifest("a", 1)
        order = [segment for segment, _ in reversed(before.segments)]
        executor.link.send(m.FirstUse(instance="a", version=1, segments=order))
        session = await kit.instance("s")
        await session.load({1: os.urandom(MIB)})  # of a session nothing is kept
        await kit.status(lambda status: status.file_nbytes == nbytes)
        assert await kit.stop() == 0
        written = {path: path.stat().st_mtime_ns for path in kit.files}
        assert len(written) == 3

        await kit.start()
        kit.controller.send(m.Keep(functions=[("f", 1)]))
        status = await kit.status(lambda status: status.file_nbytes == nbytes)
        assert (status.segments, status.host_nbytes) == (3, 0)
        executor = await kit.executor("gpu0")
        one = await kit.instance("a", "f")
        await one.load(storages)
        after = await executor.manifest("a", 1)
        assert [size for _, size in after.segments] == [size for _, size in reversed(before.segments)]
        assert not {segment for segment, _ in after.segments} & set(order)
        assert await executor.model(after) == storages
        assert {path: path.stat().st_mtime_ns for path in kit.files} == written
        kit.controller.send(m.Keep(functions=[]))
        await kit.forget(one)
        await kit.status(lambda status: (status.file_nbytes, status.host_nbytes, status.segments) == (0, 0, 0))
        await asyncio.sleep(0)
        assert await kit.stop() == 0
        assert kit.files == []

    kit.run(test())


def test_a_function_in_memory_alone_is_served_from_its_files_after_a_restart(make_kit: MakeKit) -> None:
    kit = make_kit(host=16 * MIB)

    async def test() -> None:
        storages = {number: os.urandom(6 * MIB) for number in range(4)}
        await kit.start()
        await (await kit.instance("a", "f")).load(storages)
        await kit.status(lambda status: status.file_nbytes == 24 * MIB)
        await kit.stop(kill=True)
        await kit.start()
        executor = await kit.executor()
        await (await kit.instance("a", "f")).load(storages)
        manifest = await executor.manifest("a", 1)
        for segment, _ in manifest.segments:
            ticket, _ = await executor.begin([segment])
            executor.let_go(ticket)
        await kit.status(lambda status: status.file_nbytes == 24 * MIB)

    kit.run(test())


def test_a_damaged_file_is_reported_and_made_again(make_kit: MakeKit) -> None:
    kit = make_kit(host=16 * MIB)

    async def test() -> None:
        await kit.start()
        executor = await kit.executor()
        data, other = os.urandom(6 * MIB), os.urandom(6 * MIB)
        one = await kit.instance("a", "f")
        await one.load({1: data, 2: other})
        await kit.status(lambda status: status.file_nbytes == 12 * MIB)
        await (await kit.instance("b", "g")).load({1: os.urandom(15 * MIB)})  # pushes a down
        manifest = await executor.manifest("a", 1)
        for path in kit.files:
            content = bytearray(path.read_bytes())
            if content == data:
                content[12345] ^= 0x10
                path.write_bytes(content)
        with pytest.raises(AssertionError, match="other bytes than were written"):
            await executor.begin([segment for segment, _ in manifest.segments])
        damaged = await kit.heard.of(m.ModelDamaged)
        assert damaged.instances == ["a"]
        with pytest.raises(AssertionError, match="damaged"):
            await executor.begin([segment for segment, _ in manifest.segments])
        await kit.forget(one)
        again = await kit.instance("c", "f")
        await again.load({1: data, 2: other})
        assert await executor.contents("c", 1) == {1: data, 2: other}
        await kit.status(lambda status: status.file_nbytes == 27 * MIB)
        assert sorted(path.stat().st_size for path in kit.files) == [6 * MIB, 6 * MIB, 15 * MIB]

    kit.run(test())


@pytest.mark.parametrize("disk", ["5MiB", "rlimit"])
def test_a_full_disk_is_said_and_stops_nothing(make_kit: MakeKit, disk: str) -> None:
    kit = make_kit(host=16 * MIB, disk=disk if disk != "rlimit" else "")

    async def test() -> None:
        await kit.start()
        if disk == "rlimit" and kit.config.start.cuda:
            return  # slabs, which come and go, would meet the limit too
        executor = await kit.executor()
        data = os.urandom(6 * MIB)
        one = await kit.instance("a", "f")
        assert await one.upload(1, data) == m.Uploaded()
        if disk == "rlimit":  # a write fails in the middle, as on a full disk; the slab is made already
            resource.prlimit(kit.process.pid, resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB))
        await one.commit()
        status = await kit.status(lambda status: bool(status.trouble))
        assert "a restart will not find" in status.trouble
        assert status.file_nbytes == 0
        assert await executor.contents("a", 1) == {1: data}
        two = await kit.instance("b", "g")
        failed = await two.upload(1, bytes(11 * MIB))
        assert isinstance(failed, m.StoreFailed)
        assert "limits.disk" in failed.text
        assert await two.upload(2, bytes(9 * MIB)) == m.Uploaded()
        await kit.forget(two)
        await kit.forget(one)
        three = await kit.instance("c", "h")  # what no instance has and no file will have makes room
        assert await three.upload(1, bytes(15 * MIB)) == m.Uploaded()

    kit.run(test())


def test_a_removed_function_makes_room_on_the_disk(make_kit: MakeKit) -> None:
    kit = make_kit(disk="8MiB")

    async def test() -> None:
        await kit.start()
        one = await kit.instance("a", "f")
        await one.load({1: os.urandom(6 * MIB)})
        await kit.status(lambda status: status.file_nbytes == 6 * MIB)
        await (await kit.instance("b", "g")).load({1: os.urandom(5 * MIB)})
        await kit.status(lambda status: "use 6.0 MiB of 8.0 MiB" in status.trouble)
        await kit.forget(one)
        kit.controller.send(m.Keep(functions=[("g", 1)]))
        await kit.status(lambda status: status.file_nbytes == 5 * MIB and not status.trouble)

    kit.run(test())


def test_killed_at_any_moment_the_store_opens_again_with_whole_files(make_kit: MakeKit) -> None:
    kit = make_kit(host=256 * MIB)
    known_after: list[int] = []

    async def round_(seed: int) -> None:
        await kit.start()
        names = [("f", number) for number in range(seed + 1)]
        kit.controller.send(m.Keep(functions=names))
        generator = random.Random(seed)
        for number in range(3):
            instance = await kit.instance(f"i{number}", "f", version=(seed + number) % 4)
            await instance.load({each: generator.randbytes(200_000 + each) for each in range(8)})
        if seed == 5:  # at last not too early to have written anything
            await kit.status(lambda status: status.file_nbytes > 0)
        await asyncio.sleep(generator.random() * 0.06)
        await kit.stop(kill=True)
        index = Index(kit.state.store_index)
        files = SegmentFiles(kit.state.store_segments, None)
        files.open()
        known = {each.fingerprint for each in index.segments}
        for each in index.segments:
            key = load_keys(kit.state.store_key).of(each.scope)
            files.read(each.fingerprint, key, memoryview(bytearray(each.nbytes)))
        for fingerprints in index.functions.values():
            assert set(fingerprints) <= known
        known_after.append(len(known))
        index.close()

    for seed in range(6):
        kit.run(round_(seed))
    assert known_after[-1] > 0

    async def last() -> None:
        await kit.start()
        kit.controller.send(m.Keep(functions=[]))
        await kit.status(lambda status: (status.segments, status.file_nbytes) == (0, 0))
        assert await kit.stop() == 0
        assert kit.files == []

    kit.run(last())


def test_an_unreadable_index_stops_the_start_with_a_reason(make_kit: MakeKit) -> None:
    kit = make_kit()

    async def test() -> None:
        kit.state.store.mkdir(parents=True)
        kit.state.store_index.write_bytes(os.urandom(4096))
        await kit.start(ready=False)
        failed = await kit.said.of(m.RoleFailed)
        assert "index.sqlite3" in failed.text
        assert await asyncio.to_thread(kit.process.wait, 30) != 0

    kit.run(test())


def test_reading_is_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "READ_NBYTES", 1000)
    files = SegmentFiles(tmp_path / "segments", None)
    data = os.urandom(12_345)
    [each] = written(files, data)
    into = bytearray(len(data))
    files.read(each, KEY, memoryview(into))
    assert into == data


def test_two_who_want_a_segment_read_it_once(tmp_path: Path) -> None:
    reads: list[bytes] = []

    class Counted(SegmentFiles):
        def read(self, fingerprint: bytes, key: bytes, into: memoryview) -> None:
            reads.append(fingerprint)
            super().read(fingerprint, key, into)

    async def test() -> None:
        files, keys, books = Counted(tmp_path / "segments", None), HashKeys(bytes(32)), Segments()
        files.open()
        contents = [os.urandom(3 * MIB), os.urandom(MIB)]
        segments = []
        for data in contents:
            print_ = blake3(data, key=keys.of("node")).digest()
            files.write([(print_, memoryview(data))])
            segments.append(books.restore(print_, len(data), "node"))
            books.pin(segments[-1])
        memory = StoreMemory(books, Slabs(8 * MIB), lambda _: None, lambda _: None, lambda: None, lambda _: False)
        tasks = set()
        damaged: list[str] = []
        file_reads = FileReads(
            books,
            memory,
            files,
            keys,
            lambda _, text: damaged.append(text),
            lambda work: tasks.add(asyncio.ensure_future(work)),
        )
        await asyncio.gather(*(file_reads.read(segment, who) for who in ("a", "b") for segment in segments))
        for segment, data in zip(segments, contents, strict=True):
            assert segment.span is not None
            assert memory.view(segment.span) == data
            assert segment.pins == 1
        assert sorted(reads) == sorted(segment.fingerprint or b"" for segment in segments)
        assert damaged == []
        assert memory.slabs.used_nbytes == 4 * MIB
        file_reads.close()
        memory.close()

    asyncio.run(test())


def test_a_damaged_file_is_seen_although_an_upload_of_its_bytes_was_faster(tmp_path: Path) -> None:
    reading, uploaded = threading.Event(), threading.Event()

    class Slow(SegmentFiles):
        def read(self, fingerprint: bytes, key: bytes, into: memoryview) -> None:
            reading.set()
            assert uploaded.wait(60)
            super().read(fingerprint, key, into)

    async def test() -> None:
        files, keys, books = Slow(tmp_path / "segments", None), HashKeys(bytes(32)), Segments()
        files.open()
        data = os.urandom(MIB)
        print_ = blake3(data, key=keys.of("node")).digest()
        files.write([(print_, memoryview(data))])
        files.path(print_).write_bytes(bytes(MIB))
        segment = books.restore(print_, MIB, "node")
        books.hold(segment, "i")
        memory = StoreMemory(books, Slabs(8 * MIB), lambda _: None, lambda _: None, lambda: None, lambda _: False)
        damaged: list[str] = []

        def on_damage(segment: Segment, text: str) -> None:
            damaged.append(text)
            assert books.damage(segment.fingerprint or b"") == []

        tasks = set()
        reads = FileReads(books, memory, files, keys, on_damage, lambda work: tasks.add(asyncio.ensure_future(work)))
        read = asyncio.ensure_future(reads.read(segment, "a"))
        await asyncio.to_thread(reading.wait, 30)
        books.settle(MIB, "node", await memory.place("b", MIB), print_)
        uploaded.set()
        await read
        assert len(damaged) == 1
        assert not books.is_filed(segment), "its only good copy could be moved down"
        assert segment.span is not None
        reads.close()
        memory.close()

    asyncio.run(test())


def test_room_that_lies_in_pieces_is_made_whole(tmp_path: Path) -> None:
    """Slabs of 2 MiB, pinnable: for 4 MiB in a row two of them must go, whose segments were not used last in a row."""

    async def test() -> None:
        books, slabs = Segments(), Slabs(8 * MIB, 2 * MIB, pinnable=True)
        made: list[int] = []
        gone: list[int] = []
        memory = StoreMemory(books, slabs, made.append, gone.append, lambda: None, lambda _: False)
        segments = []
        for number in range(8):  # two in each slab
            owner = number // 2
            span = await memory.place(owner, MIB)
            segments.append(books.settle(MIB, "node", span, bytes([number])))
            books.hold(segments[-1], "i")
            books.mark_filed(segments[-1])
        for owner in range(4):
            memory.done_placing(owner)
        assert made == [0, 1, 2, 3]
        for number in (1, 3, 5):  # the oldest are 0, 2, 4, 6 and 7: no two of them fill a slab but the last
            books.touch(segments[number])
        span = await memory.place("large", 4 * MIB)
        assert memory.view(span) == bytes(4 * MIB)
        assert slabs.held_nbytes <= 8 * MIB
        assert set(memory.maps) == set(slabs.slabs) == set(made) - set(gone)
        assert 2 <= len(gone) <= 3
        kept = {number for number, segment in enumerate(segments) if segment.span is not None}
        assert 5 in kept, "used last"
        slabs.check()
        books.check()
        with pytest.raises(HostFull, match="models use"):
            await memory.place("more", 9 * MIB)
        memory.close()

    asyncio.run(test())


def test_each_use_of_host_memory_is_reported() -> None:
    """Also by what waits for room first, and so long after the message that asked for it."""

    async def test() -> None:
        told: list[int] = []
        slabs = Slabs(8 * MIB)
        memory = StoreMemory(
            Segments(), slabs, lambda _: None, lambda _: None, lambda: told.append(slabs.used_nbytes), lambda _: False
        )
        await memory.place("a", MIB)
        await memory.place_all("b", [MIB, MIB])
        memory.close()
        assert told == [MIB, 3 * MIB]

    asyncio.run(test())
