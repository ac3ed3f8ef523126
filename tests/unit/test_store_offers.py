"""Uploads by file: which descriptors are taken, what is read of them, and what a file may do under the store."""

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from storekit import StoreKit

from dormouse.gpuserver.store.ingest.offers import DURABLE, MAX_FILES, file_system, identity_of, refusal
from dormouse.schemas import messages as m

MIB = 1 << 20


@pytest.fixture
def kit() -> Iterator[StoreKit]:
    kit = StoreKit()
    kit.run(kit.start())
    yield kit
    kit.close()


def test_ranges_of_a_file_are_storages(kit: StoreKit, tmp_path: Path) -> None:
    data = os.urandom(5 * MIB)
    path = tmp_path / "weights"
    path.write_bytes(data)

    async def test() -> None:
        instance = await kit.instance("a", "f")
        with path.open("rb") as file:
            assert await instance.offer(7, file.fileno()) == m.FileTaken(file=7)
        path.unlink()  # the descriptor is enough
        assert await instance.file(1, 7, 0, 3 * MIB) == m.Uploaded()
        assert await instance.file(2, 7, 3 * MIB + 5, 100) == m.Uploaded()
        assert await instance.file(3, 7, 4 * MIB, 1000, total=MIB, offset=500) == m.Uploaded()
        assert await instance.upload(3, b"rest", total=MIB, offset=2000) == m.Uploaded()
        assert await instance.upload(4, data[: 3 * MIB]) == m.Uploaded()
        assert isinstance(await instance.commit(), m.Committed)
        executor = await kit.executor()
        contents = await executor.contents("a", 1)
        assert contents[1] == contents[4] == data[: 3 * MIB]
        assert contents[2] == data[3 * MIB + 5 :][:100]
        third = bytearray(MIB)
        third[500:1500] = data[4 * MIB :][:1000]
        third[2000:2004] = b"rest"
        assert contents[3] == third
        assert len(executor.manifests["a"].segments) == 3
        # a part of what is committed is read into a copy
        assert await instance.file(1, 7, 4 * MIB, 10, total=3 * MIB, offset=1) == m.Uploaded()
        assert (await instance.commit()).version == 2
        assert (await executor.contents("a", 2))[1] == data[:1] + data[4 * MIB :][:10] + data[11 : 3 * MIB]

    kit.run(test())


def test_only_readable_regular_files_are_taken(kit: StoreKit, tmp_path: Path) -> None:
    path, fifo = tmp_path / "file", tmp_path / "fifo"
    path.write_bytes(b"x" * 100)
    os.mkfifo(fifo)

    async def test() -> None:
        instance = await kit.instance("a")
        pipe, write_end = os.pipe()
        for number, (fd, text) in enumerate(
            [
                (os.open(path, os.O_PATH), "O_PATH"),
                (os.open(path, os.O_WRONLY), "not open for reading"),
                (os.open(fifo, os.O_RDONLY | os.O_NONBLOCK), "not a regular file"),
                (os.open(tmp_path, os.O_RDONLY), "not a regular file"),
                (os.open("/dev/zero", os.O_RDONLY), "not a regular file"),
                (pipe, "not a regular file"),
            ]
        ):
            answer = await instance.offer(number, fd)
            os.close(fd)
            assert isinstance(answer, m.FileRefused)
            assert text in answer.text
            failed = await instance.file(1, number, 0, 10)
            assert isinstance(failed, m.StoreFailed)
            assert "was not offered" in failed.text
        os.close(write_end)
        assert isinstance(await instance.commit(), m.Committed)

    kit.run(test())


def test_the_number_of_descriptors_is_bounded(kit: StoreKit, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)

    def descriptors() -> int:
        return len(os.listdir(f"/proc/{kit.process.pid}/fd"))

    async def test() -> None:
        instance = await kit.instance("a")
        with path.open("rb") as file:
            for number in range(MAX_FILES):
                await instance.offer(number, file.fileno())
            assert await instance.file(1, 0, 0, 10) == m.Uploaded()
            before = descriptors()
            for number in range(10):
                await instance.offer(number, file.fileno())
            assert await instance.file(1, 10, 0, 10) == m.Uploaded()
            assert await instance.offer(MAX_FILES, file.fileno()) == m.FileTaken(file=MAX_FILES)
        assert descriptors() == before
        assert await instance.file(2, 10, 0, 10) == m.Uploaded()
        assert isinstance(await instance.file(3, 11, 0, 10), m.StoreFailed)
        await kit.forget(instance)
        await kit.status(lambda status: status.host_nbytes == 0)
        assert descriptors() < before - MAX_FILES

    kit.run(test())


def test_ranges_outside_the_file_and_truncation_are_said(kit: StoreKit, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(2 * MIB))

    async def test() -> None:
        instance = await kit.instance("a")
        with path.open("r+b") as file:
            await instance.offer(1, file.fileno())
            for start, nbytes in ((2 * MIB - 9, 10), (-1, 10), (1 << 62, 10), (0, 2 * MIB + 1)):
                failed = await instance.file(1, 1, start, nbytes)
                assert isinstance(failed, m.StoreFailed)
                assert "has 2,097,152 bytes" in failed.text
            file.truncate(MIB)
            failed = await instance.file(1, 1, 0, 2 * MIB)
            assert "truncated" in failed.text
            assert await instance.file(1, 1, 0, MIB) == m.Uploaded()
        assert (await instance.commit()).nbytes == MIB
        impossible = await instance.file(5, 1, 0, 100, total=50)
        assert isinstance(impossible, m.StoreFailed)  # of the protocol: it is heard no more

    kit.run(test())


def test_a_file_that_changes_while_it_is_read_is_refused(kit: StoreKit, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(30 * MIB))

    async def test() -> None:
        instance = await kit.instance("a")
        stop = asyncio.Event()

        def churn() -> None:
            with path.open("r+b") as file:
                while not stop.is_set():
                    file.seek(0)
                    file.write(b"%d" % time.monotonic_ns())
                    file.flush()

        with path.open("rb") as file:
            await instance.offer(1, file.fileno())
        writer = asyncio.ensure_future(asyncio.to_thread(churn))
        failed = None
        try:
            while not isinstance(failed, m.StoreFailed):  # the thread may not have been given a core yet
                failed = await instance.file(1, 1, 0, 30 * MIB)
        finally:
            stop.set()
            await writer
        assert "has changed under the store" in failed.text
        assert "load it again" in failed.text
        assert (await instance.commit()).nbytes == 0  # nothing of it is left
        await kit.status(lambda status: status.host_nbytes == 0)

    kit.run(test())


def status_of(**changes: int) -> os.stat_result:
    """A file of the disk 8:1, last touched an hour ago."""
    hour_ago_ns = time.time_ns() - 3_600_000_000_000
    values = {"st_dev": os.makedev(8, 1), "st_mtime_ns": hour_ago_ns, "st_ctime_ns": hour_ago_ns} | changes
    return os.stat_result((0o100644, 9, values.pop("st_dev"), 1, 0, 0, 100, 0, 0, 0), values)


@pytest.mark.parametrize(
    "changes",
    [
        {"st_mtime_ns": time.time_ns() + 10**13},
        {"st_ctime_ns": time.time_ns() + 10**13},
    ],
)
def test_what_may_change_unseen_has_no_identity(changes: dict[str, int]) -> None:
    assert identity_of(status_of(), True, 0, 10, "node") is not None
    assert identity_of(status_of(), False, 0, 10, "node") is None  # tmpfs
    assert identity_of(status_of(**changes), True, 0, 10, "node") is None


def old_file() -> str:
    """A file that has rested: the largest that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = {line.split(None, 5)[5] for line in lines if "/" in line}
    path = max((path for path in mapped if os.path.isfile(path)), key=os.path.getsize)
    with open(path, "rb") as file:
        if file_system(file.fileno()) not in DURABLE:
            pytest.skip("needs libraries on a file system with a disk")
    return path


def test_only_files_of_local_file_systems_are_taken(tmp_path: Path) -> None:
    with open(tmp_path / "local", "w+b") as local, open("/proc/self/maps", "rb") as strange:
        assert refusal(local.fileno()) is None
        assert "never return" in (refusal(strange.fileno()) or "")


def test_an_unchanged_file_is_known_again_without_reading(kit: StoreKit) -> None:
    path = old_file()
    nbytes = min(os.path.getsize(path), MIB) - 5
    data = Path(path).read_bytes()[5 : 5 + nbytes]

    async def load(name: str) -> None:
        instance = await kit.instance(name, "f")
        fd = os.open(path, os.O_RDONLY)
        await instance.offer(1, fd)
        os.close(fd)
        assert await instance.file(1, 1, 5, nbytes) == m.Uploaded()
        assert isinstance(await instance.commit(), m.Committed)

    async def test() -> None:
        await load("a")
        await load("b")
        await kit.status(lambda status: status.file_nbytes == nbytes)
        assert await kit.stop() == 0
        await kit.start()
        await load("a")
        status = await kit.status(lambda status: status.segments == 1)
        assert status.host_nbytes == 0  # nobody has read it
        executor = await kit.executor()
        assert await executor.contents("a", 1) == {1: data}
        stranger = await kit.instance("c", "g", tenant="other")
        fd = os.open(path, os.O_RDONLY)
        await stranger.offer(1, fd)
        os.close(fd)
        assert await stranger.file(1, 1, 5, nbytes) == m.Uploaded()
        await stranger.commit()
        await kit.status(lambda status: status.segments == 2)  # another tenant's is its own

    kit.run(test())


def test_a_range_that_fails_leaves_the_others_alone(kit: StoreKit, tmp_path: Path) -> None:
    """The file's times change while it is read, its bytes do not: the instance sends that range itself."""
    path = tmp_path / "weights"
    path.write_bytes(b"\x44" * (60 * MIB))
    over = threading.Event()

    def touch() -> None:
        while not over.is_set():
            path.chmod(0o600)
            path.chmod(0o644)

    async def test() -> None:
        executor, instance = await kit.executor(), await kit.instance("a", "f")
        fd = os.open(path, os.O_RDONLY)
        await instance.offer(1, fd)
        os.close(fd)
        total = 61 * MIB
        assert await instance.upload(1, b"\x11" * MIB, total=total, offset=0) == m.Uploaded()
        toucher = threading.Thread(target=touch)
        toucher.start()
        failed = None
        try:
            while not isinstance(failed, m.StoreFailed):
                failed = await instance.file(1, 1, 0, 60 * MIB, total=total, offset=MIB)
        finally:
            over.set()
            toucher.join()
        assert await instance.upload(1, b"\x44" * (60 * MIB), total=total, offset=MIB) == m.Uploaded()
        await instance.commit()
        content = (await executor.contents("a", 1))[1]
        assert (content[:MIB], content[MIB:]) == (b"\x11" * MIB, b"\x44" * (60 * MIB))

    kit.run(test())
