"""Jobs between their file and requests, without a node: how many of a function begin, and what is counted of them."""

import asyncio
import sqlite3
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from router_rig import failure, loaded, spec

from dormouse.core.config import LimitsSection, NodeConfig
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests.state import RouterState
from dormouse.core.paths import StatePaths
from dormouse.router.access.limits import TenantLimits
from dormouse.router.front.bodies import Body
from dormouse.router.front.counts import ServedCounts
from dormouse.router.front.drain import Draining
from dormouse.router.front.exchange import HttpError
from dormouse.router.front.requests import Labels, Requests
from dormouse.router.jobs.book import Job, JobState
from dormouse.router.jobs.file import JobFile, JobRow, NotKept, Result
from dormouse.router.jobs.jobs import Jobs, KeptRequest
from dormouse.router.jobs.runs import AT_ONCE
from dormouse.schemas import messages as m


class Log:
    def __init__(self) -> None:
        self.errors: list[tuple[str, dict[str, Any]]] = []

    def error(self, event: str, **said: Any) -> None:
        self.errors.append((event, said))


class Node:
    """What jobs ask of a router; a request that arrives waits in ``arrived``."""

    def __init__(self, directory: Path, picture: RouterState) -> None:
        self.config = NodeConfig(limits=LimitsSection(bodies="16MiB"))
        self.state, self.log, self.picture = StatePaths(directory), Log(), picture
        self.arrived: list[e.Event] = []
        self.requests = Requests(
            self.config.limits,
            picture,
            self.arrived.append,
            ServedCounts(_told),
            TenantLimits({}),
            Draining(directory / "drained", int),
        )
        self.tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task


async def until(holds: Callable[[], bool]) -> None:
    """A thread has the file, and no event says that all is done."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


def _told(served: m.Served) -> None:
    pass


def test_the_rest_of_the_router_ends_in_order_where_jobs_cannot_be_kept(tmp_path: Path) -> None:
    async def ends() -> Node:
        node = Node(tmp_path / "not there", loaded().policy.picture)
        jobs = Jobs(node)
        jobs.open()
        await jobs.kept.knows_jobs()
        jobs.kept.book.add(Job("1", "f", "a", 1000.0, 5))
        assert jobs.kept.book.next(lambda _: 1, 0.0) is not None
        await jobs.stop()
        return node

    event, said = asyncio.run(ends()).log.errors[-1]
    assert (event, said["jobs"]) == ("jobs_not_kept", 1)


def test_a_function_has_as_many_jobs_as_it_can_have_open(tmp_path: Path) -> None:
    def room(serving: bool = True, **settings: Any) -> int:
        rig = loaded(spec(**settings)) if serving else None
        picture = rig.policy.picture if rig is not None else RouterState(2, 100, "i")
        return asyncio.run(_room(Node(tmp_path, picture)))

    async def _room(node: Node) -> int:
        return Jobs(node).runs.room("f")

    assert [room(), room(concurrency=4), room(batch=3), room(concurrency=32)] == [2, 5, 7, 1 + AT_ONCE]
    assert room(serving=False) == 1


def test_a_try_of_a_job_that_is_turned_away_is_no_error_of_its_function(tmp_path: Path) -> None:
    async def outcomes(again: bool) -> dict[str, int]:
        node = Node(tmp_path, loaded().policy.picture)
        requests = node.requests
        tries = [
            e.Fail(0, failure("queue_full", 429), e.Timing()),
            e.Fail(0, failure("timed_out", 504), e.Timing()),
            e.Fail(0, failure("sandbox_died", 503), e.Timing(began=True)),
        ]
        for each in tries:
            number, answer = requests.submit("f", Body(requests.bodies), labels=Labels(again=again))
            requests.settle(e.Fail(number, each.failure, each.timing))
            assert answer.done()
        assert requests.stats["f"].late == len(requests.stats["f"].last.of("")) == (1 if again else 3)
        return dict(requests.stats["f"].outcomes)

    assert asyncio.run(outcomes(again=True)) == {"sandbox_died": 1}
    assert asyncio.run(outcomes(again=False)) == {"queue_full": 1, "timed_out": 1, "sandbox_died": 1}


@pytest.mark.parametrize("why", ["drain", "pause"])
def test_only_jobs_that_nobody_waits_for_rest(tmp_path: Path, why: str) -> None:
    """Whoever has sent a request with a key, and waits for the answer, gets it."""

    async def begun() -> tuple[set[str], int]:
        node = Node(tmp_path, loaded().policy.picture)
        jobs = Jobs(node)
        jobs.open()
        node.requests.catalogue_known.set()
        await jobs.kept.knows_jobs()
        node.requests.drain.begin() if why == "drain" else jobs.runs.pause()
        for key, patient in (("patient", True), ("live", False)):
            body = Body(node.requests.bodies)
            await body.add(b"1", 1)
            await jobs.take(KeptRequest("f", "", Labels(), key, patient), body.complete())
        await until(lambda: bool(node.arrived))
        found = {job.scope.split()[-1] for job in jobs.kept.book.jobs.values() if job.state is JobState.BEGUN}
        left = jobs.runs.left
        await jobs.stop()
        return found, left

    assert asyncio.run(begun()) == ({"live"}, 1)


def test_who_waits_for_an_answer_is_waited_for(tmp_path: Path) -> None:
    """Also before its job has begun."""

    async def left() -> int:
        jobs = Jobs(Node(tmp_path, loaded().policy.picture))
        for number, patient in (("1", True), ("2", False)):
            job = Job(number, "f", "a", 1000.0, 5)
            job.patient = patient
            jobs.kept.book.add(job)
        return jobs.runs.left

    assert asyncio.run(left()) == 1


def test_answers_of_jobs_count_as_bodies_do_until_they_are_kept(tmp_path: Path) -> None:
    async def held() -> list[tuple[int, int]]:
        node = Node(tmp_path, loaded().policy.picture)
        jobs, bodies = Jobs(node), node.requests.bodies
        jobs.open()
        node.requests.catalogue_known.set()
        body = Body(bodies)
        await body.add(b"1", 1)
        asked = KeptRequest("f", "", Labels(), "", True)
        job, _ = await jobs.take(asked, body.complete())
        await until(lambda: bool(node.arrived))
        (arrived,) = node.arrived
        assert isinstance(arrived, e.Arrived)
        most = jobs.kept.book.limits.begun_nbytes
        told = list[tuple[int, int]]()
        node.requests.begun(e.BeginStream(arrived.request, m.SSE, e.Timing()))
        for nbytes in (5, most - 5):
            node.requests.passed([(arrived.request, bytes(nbytes))])
            await until(lambda: bodies.taken_nbytes > (told[-1][0] if told else 0))
            told.append((bodies.taken_nbytes, jobs.runs.room("f")))
        ended = asyncio.ensure_future(jobs.kept.ended(job, None))
        node.requests.settle(e.Drop(arrived.request))
        await ended
        await until(lambda: not bodies.taken_nbytes)
        told.append((bodies.taken_nbytes, jobs.runs.room("f")))
        await jobs.stop()
        return told

    most = 4 << 20
    assert asyncio.run(held()) == [(5, 2), (most, 0), (0, 2)]


@pytest.mark.parametrize("jump_s", [-1e9, 1e9])
def test_a_clock_that_is_set_ends_no_job_and_keeps_none_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    """Forward or back, while one waits, and while the node is down."""
    unix_s = time.time()
    monkeypatch.setattr(time, "time", lambda: unix_s)

    async def lives() -> None:
        nonlocal unix_s
        node = Node(tmp_path, loaded().policy.picture)
        jobs = Jobs(node)
        jobs.open()
        node.requests.catalogue_known.set()
        body = Body(node.requests.bodies)
        await body.add(b"1", 1)
        job, _ = await jobs.take(KeptRequest("f", "", Labels(), "", True), body.complete())
        await until(lambda: bool(node.arrived))
        (arrived,) = node.arrived
        assert isinstance(arrived, e.Arrived)
        unix_s += jump_s
        node.requests.settle(e.Fail(arrived.request, failure("queue_full", 429), e.Timing()))
        await until(lambda: job.state is JobState.QUEUED)
        await jobs.stop()

    async def again() -> float:
        node = Node(tmp_path, loaded().policy.picture)
        jobs = Jobs(node)
        jobs.open()
        await jobs.kept.knows_jobs()
        (job,) = jobs.kept.book.jobs.values()
        await jobs.stop()
        return job.tried_until_s - time.monotonic()

    asyncio.run(lives())
    unix_s -= 2 * jump_s
    day_s = NodeConfig().jobs.wait_ms / 1000
    assert asyncio.run(again()) <= day_s


async def sizes(file: JobFile) -> dict[str, int]:
    """Of all bodies and answers, by job."""
    text = "SELECT id, length(data) FROM (SELECT * FROM bodies UNION ALL SELECT * FROM answers)"
    return dict(await file.do(lambda: file._open.execute(text).fetchall()))


def test_a_full_disk_is_said_to_be_one_and_leaves_each_job_whole_or_not_there(tmp_path: Path) -> None:
    """Wherever within what is written together it becomes full: SQLite may have undone that already."""

    def row(name: str) -> JobRow:
        return JobRow(
            name, 1, "f", "default", "", "", b"", True, False, "r", "", "", "", 1.0, False, None, 0, "", "", ""
        )  # fmt: skip

    async def works() -> None:
        file = JobFile(tmp_path / "jobs.sqlite3", Log())
        assert await file.do(file.read) == []
        await file.do(file.add, row("first"), b"body", [])
        (pages,) = await file.do(lambda: file._open.execute("PRAGMA page_count").fetchone())
        for more in range(4):
            await file.do(lambda most=pages + more: file._open.execute(f"PRAGMA max_page_count={most}"))
            with pytest.raises(NotKept, match="disk is full; free space"):
                await file.do(file.add, row("large"), bytes(1 << 20), ["first"])
            with pytest.raises(NotKept, match="disk is full; free space"):
                await file.do(file.end, "first", 2.0, Result(200, "", "", (), bytes(1 << 20)), [])
            assert await sizes(file) == {"first": 4}
        await file.do(lambda: file._open.execute("PRAGMA max_page_count=4294967294"))
        await file.do(file.add, row("large"), bytes(1 << 20), ["first"])
        assert await sizes(file) == {"large": 1 << 20}
        file.close()

    asyncio.run(works())


def test_jobs_that_could_not_be_read_at_the_start_are_read_once_the_disk_lets_them(tmp_path: Path) -> None:
    """As when a router starts on a full disk, where SQLite cannot make its log."""

    async def take(node: Node, jobs: Jobs) -> None:
        body = Body(node.requests.bodies)
        await body.add(b"1", 1)
        await jobs.take(KeptRequest("f", "", Labels(), "", True), body.complete())

    async def works() -> None:
        there = tmp_path / "there"
        there.mkdir()
        node = Node(there, loaded().policy.picture)
        jobs = Jobs(node)
        jobs.open()
        jobs.runs.pause()
        await jobs.kept.knows_jobs()
        await take(node, jobs)
        await jobs.stop()
        away = there.rename(tmp_path / "away")
        node = Node(there, loaded().policy.picture)
        jobs = Jobs(node)
        jobs.open()
        node.requests.catalogue_known.set()
        for _ in range(2):
            with pytest.raises(HttpError) as refused:
                await take(node, jobs)
            assert refused.value.failure.code == "disk_full"
        assert [event for event, _ in node.log.errors] == ["jobs_not_read"]
        away.rename(there)
        await jobs.kept.knows_jobs()
        await until(lambda: len(node.arrived) == 1)
        await take(node, jobs)
        await until(lambda: len(node.arrived) == 2)
        assert len(jobs.kept.book.jobs) == 2
        await jobs.stop()

    asyncio.run(works())


def test_jobs_whose_sizes_could_not_be_read_are_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails once, behind the rows; then each job has its bytes, of its body or of its answer."""
    failures = [sqlite3.OperationalError("disk I/O error")]

    class FailingConnection(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if "length(" in sql and failures:
                raise failures.pop()
            return super().execute(sql, *arguments)

    async def works() -> None:
        node = Node(tmp_path, loaded().policy.picture)
        jobs = Jobs(node)
        jobs.open()
        jobs.runs.pause()
        for data in (b"12345", b"1"):
            body = Body(node.requests.bodies)
            await body.add(data, len(data))
            await jobs.take(KeptRequest("f", "", Labels(), "", True), body.complete())
        ended = list(jobs.kept.book.jobs.values())[1]
        await jobs.kept.end(ended, Result(200, "", "", (), b"123"))
        await jobs.stop()
        monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=FailingConnection))
        node = Node(tmp_path, loaded().policy.picture)
        jobs = Jobs(node)
        jobs.open()
        jobs.runs.pause()
        await until(jobs.kept.known.is_set)
        assert (jobs.kept.file.unread, jobs.kept.book.jobs) == (True, {})
        await jobs.kept.knows_jobs()
        assert [(job.state, job.nbytes) for job in jobs.kept.book.jobs.values()] == [
            (JobState.QUEUED, 5),
            (JobState.ENDED, 3),
        ]
        assert [event for event, _ in node.log.errors] == ["jobs_not_read"]
        await jobs.stop()

    asyncio.run(works())


def test_a_file_that_is_found_damaged_late_is_set_aside_once_and_a_job_that_runs_goes_on(tmp_path: Path) -> None:
    async def works() -> None:
        node = Node(tmp_path / "there", loaded().policy.picture)
        jobs = Jobs(node)
        jobs.open()
        node.requests.catalogue_known.set()
        await jobs.kept.knows_jobs()
        path = node.state.jobs
        path.parent.mkdir()
        path.write_bytes(b"no database" * 1000)
        body = Body(node.requests.bodies)
        await body.add(b"1", 1)
        await jobs.take(KeptRequest("f", "", Labels(), "", True), body.complete())
        await until(lambda: len(node.arrived) == 1)
        (job,) = jobs.kept.book.jobs.values()
        await jobs.kept.knows_jobs()
        assert list(jobs.kept.book.jobs.values()) == [job]
        assert (job.state, jobs.kept.file.unread) == (JobState.BEGUN, False)
        assert [event for event, _ in node.log.errors] == ["jobs_not_read", "jobs_set_aside"]
        await jobs.stop()

    asyncio.run(works())
