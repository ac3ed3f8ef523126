"""The jobs of a node, alike in its book and its file, and the callers that wait for each of them.

book.py decides which are forgotten, file.py has those on the disk. None is run here.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final, Protocol

from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.core.decisions.requests import failures
from dormouse.core.decisions.requests.state import Phase, RouterState
from dormouse.core.paths import StatePaths
from dormouse.router.access.access import Caller
from dormouse.router.front.bodies import Body
from dormouse.router.front.exchange import HttpError, refuse
from dormouse.router.front.requests import Labels, Requests
from dormouse.router.jobs import answers
from dormouse.router.jobs.book import Job, JobBook, JobLimits, JobState
from dormouse.router.jobs.file import JobFile, JobRow, NotKept, Result

PARTS: Final = 2
"""Of what may have begun on a node of many tenants, one of which a tenant has."""

READ_S: Final = 20.0
"""In which the file is to be read after a start."""

MAX_LISTED: Final = 1000
"""Of a caller's jobs, the newest."""


class Node(Protocol):
    """The part of the router that this module uses."""

    config: NodeConfig
    state: StatePaths
    log: Any
    requests: Requests

    @property
    def picture(self) -> RouterState: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class KeptJobs:
    """See the module."""

    def __init__(self, node: Node) -> None:
        self._node = node
        section, limits = node.config.jobs, node.config.limits
        self.book = JobBook(
            JobLimits(
                keep_s=section.keep_ms / 1000,
                tenant_jobs=section.tenant_jobs,
                tenant_nbytes=parse_nbytes(section.tenant_store),
                nbytes=parse_nbytes(section.store),
                begun_nbytes=parse_nbytes(limits.bodies) // 4,
                parts=1 if node.config.node.tenants == "one" else PARTS,
            )
        )
        self.wait_s = section.wait_ms / 1000
        """For so long refused requests are tried again."""
        self.known = asyncio.Event()
        """Those of before the restart are."""
        self.when_read: Callable[[], object] = int
        """Called where that was late."""
        self._file: JobFile | None = None
        self._number = 0
        self._waiting: dict[str, list[asyncio.Future[Result | None]]] = {}  # by job

    # --- life

    def open(self) -> None:
        self._file = JobFile(self._node.state.jobs, self._node.log)

    @property
    def file(self) -> JobFile:
        assert self._file is not None, "nobody asks before the start"
        return self._file

    async def restore(self) -> None:
        """The jobs from before the restart. Of those that had begun, only those run again that may."""
        file, now_s, unix_s = self.file, time.monotonic(), time.time()
        rows = await file.do(file.read)
        rows.sort(key=lambda each: (each[0].ended is not None, each[0].ended or 0.0, each[0].number))
        broken, lost = list[tuple[Job, str]](), list[str]()
        for row, nbytes in rows:
            self._number = max(self._number, row.number)
            job = Job(row.id, row.function, row.tenant, row.created, nbytes, row.route, row.scope)
            job.digest, job.patient, job.idempotent = row.digest, row.patient, row.idempotent
            job.tried_until_s = now_s + min(self.wait_s, max(0.0, row.created + self.wait_s - unix_s))
            if row.ended is not None:
                job.state, job.status, job.code, job.ended = JobState.ENDED, row.status, row.code, row.ended
                job.ended_s = now_s - min(self.book.limits.keep_s, max(0.0, unix_s - row.ended))
            broke = row.begun and row.ended is None and not row.idempotent
            if row.ended is None and not row.patient and not broke:
                lost.append(job.id)  # its client sends it again
                continue
            self.book.add(job)
            if broke:
                broken.append((job, row.label))
        if lost:
            await self.erase(lost)
        for job, label in broken:
            await self.end(job, answers.failed(answers.interrupted(), label))
        self.known.set()

    async def close(self, waiting: list[str]) -> None:
        """Those that wait in their functions' queues have not run."""
        if self._file is None:
            return
        try:
            if waiting:
                await self._file.do(self._file.back, waiting)
        except NotKept as error:  # they are as if the node had been killed; the rest of the router ends in order
            self._node.log.error("jobs_not_kept", jobs=len(waiting), reason=str(error))
        self._file.close()

    async def knows_jobs(self) -> None:
        """Wait until those of before the restart are known. If the disk did not let them be read, they are read now, if
        it does. Raises HttpError.
        """
        if self.known.is_set() and self.file.unread:
            self.known.clear()
            await asyncio.shield(self._node.spawn(self._read_late()))
        try:
            await asyncio.wait_for(self.known.wait(), READ_S)
        except TimeoutError:
            raise HttpError(failures.starting()) from None

    async def _read_late(self) -> None:
        try:
            await self.restore()
        finally:
            self.known.set()
        self.when_read()

    # --- what happens to jobs

    async def add(self, job: Job, labels: Labels, body: Body, data: bytes) -> None:
        """A new one, for which others of its tenant that have ended make room. Raises HttpError: then it is not there,
        and callers that wait for it are notified.
        """
        forgotten, full = self.book.room(job.tenant, len(data))
        if full is not None:
            raise HttpError(full)
        self.forget(forgotten)
        self._number += 1
        job.due_s = float("inf")  # not before it is kept
        self.book.add(job)
        row = JobRow(
            job.id, self._number, job.function, job.tenant, job.route, job.scope, job.digest, job.patient, False,
            labels.id, str(labels.trace), body.kind, body.accept, job.created, False, None, 0, "", "", "",
        )  # fmt: skip
        try:
            await self.file.do(self.file.add, row, data, [old.id for old in forgotten])
        except NotKept as error:
            if job.id in self.book.jobs:
                self.book.forget(job)
                self.tell(job, None)
            raise HttpError(answers.disk_full(str(error))) from None
        job.due_s = 0.0

    def forget(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.book.forget(job)

    async def erase(self, jobs: list[str]) -> None:
        try:
            await self.file.do(self.file.forget, jobs)
        except NotKept as error:
            self._node.log.error("jobs_not_forgotten", jobs=len(jobs), reason=str(error))

    async def end(self, job: Job, result: Result) -> None:
        """It is over; callers that wait receive its outcome, also if that cannot be kept."""
        kept = result
        forgotten, full = self.book.room_for_answer(job, len(result.body))
        if full is not None:
            kept = answers.failed(answers.not_kept(full.text), "")
            forgotten, _ = self.book.room_for_answer(job, len(kept.body))
        self.forget(forgotten)
        self.book.end(job, len(kept.body), kept.status, kept.code, time.monotonic(), time.time())
        try:
            await self.file.do(self.file.end, job.id, job.ended, kept, [old.id for old in forgotten])
        except NotKept as error:
            self._node.log.error("answer_of_a_job_not_kept", job=job.id, reason=str(error))
            job.status, job.code = 507, "not_kept"
        self.tell(job, result)

    # --- waiting callers

    def tell(self, job: Job, result: Result | None) -> None:
        for future in self._waiting.pop(job.id, ()):
            if not future.done():
                future.set_result(result)

    async def ended(self, job: Job, seconds: float | None) -> Result | None:
        """Its answer, once it has ended: None if it has not in this time, or its answer could not be kept."""
        if job.state is JobState.ENDED:
            return await self.answer(job)
        future: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job.id, []).append(future)
        try:
            return await asyncio.wait_for(future, seconds)
        except TimeoutError:
            return None
        finally:
            if (waiting := self._waiting.get(job.id)) is not None and future in waiting:
                waiting.remove(future)
                if not waiting:
                    del self._waiting[job.id]

    async def answer(self, job: Job) -> Result:
        """Of one that has ended."""
        try:
            found = await self.file.do(self.file.result, job.id)
        except NotKept as error:
            return answers.failed(answers.disk_full(str(error)), "")
        return found or answers.failed(answers.not_kept("its answer could not be written"), "")

    # --- queries

    def find(self, caller: Caller, id: str) -> Job:
        """One that this caller may know of. Raises HttpError."""
        job = self.book.jobs.get(id)
        if job is None or not caller.sees(job.function, job.tenant):
            text = f"there is no job {id[:100]!r}: it was never there, or its answer is not kept any more"
            raise refuse(404, "unknown_job", text)
        return job

    def listed(self, caller: Caller, function: str = "") -> bytes:
        """The caller's, the newest first."""
        own = [
            job
            for job in self.book.jobs.values()
            if function in ("", job.function) and caller.sees(job.function, job.tenant)
        ]
        rows = b",".join(self.told(job) for job in own[: -MAX_LISTED - 1 : -1])
        return b'{"jobs":[%b],"more":%d}' % (rows, max(0, len(own) - MAX_LISTED))

    def told(self, job: Job) -> bytes:
        """How it is."""
        return answers.said(job, self.running(job), self.book.limits)

    def running(self, job: Job) -> bool:
        """Whether its function has it, as far as that is known."""
        request = self._node.picture.requests.get(job.request or 0)
        return request is not None and request.phase is Phase.RUNNING
