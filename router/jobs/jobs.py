"""Carries out what jobs need: keeps them in their file, has them run as requests, and tells those who wait.

Which of them begins and which are forgotten is decided in book.py.
"""

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Final, NamedTuple, Protocol

import orjson

from dormouse.core.config import NodeConfig, parse_nbytes
from dormouse.core.due_timer import DueTimer
from dormouse.core.paths import StatePaths
from dormouse.router.access.access import Caller
from dormouse.router.decisions import events as e
from dormouse.router.decisions import failures
from dormouse.router.decisions.state import InstanceState, Phase, RouterState, most_open
from dormouse.router.front.bodies import Body, NoRoom
from dormouse.router.front.exchange import JSON, HttpError, error_answer, foreign, refuse
from dormouse.router.front.http import server_timing
from dormouse.router.front.requests import Labels, Requests, not_run
from dormouse.router.front.streams import AnswerStream
from dormouse.router.front.tracing import Trace
from dormouse.router.jobs.book import Job, JobBook, JobLimits, JobState
from dormouse.router.jobs.file import JobFile, JobRow, NotKept, Result
from dormouse.schemas.messages import Failure

AT_ONCE: Final = 16
"""Jobs of a function that may have begun whose instances have many requests at once, as language models have: others
have places there too.
"""

PARTS: Final = 2
"""Of what may have begun on a node of many tenants, one of which a tenant has."""

READ_S: Final = 20.0
"""In which the file is to be read after a start."""

MOST_LISTED: Final = 1000
"""Of a caller's jobs, the newest."""


class Node(Protocol):
    """What is asked of the router."""

    config: NodeConfig
    state: StatePaths
    log: Any
    requests: Requests

    @property
    def picture(self) -> RouterState: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class NotRun(NamedTuple):
    """What a request was turned away with: it has not run."""

    result: Result


class KeptRequest(NamedTuple):
    """A request that is to become a job. ``key`` is its Idempotency-Key, or ""."""

    function: str
    route: str
    labels: Labels
    key: str
    patient: bool


class Jobs:
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
        self._answer_nbytes, self._wait_s = parse_nbytes(limits.response), section.wait_ms / 1000
        self._file: JobFile | None = None
        self._read = asyncio.Event()
        self._number = 0
        self._answers = Counter[str]()  # bytes that are here of jobs that have not ended, by tenant
        self._waiting: dict[str, list[asyncio.Future[Result | None]]] = {}  # by job
        self._stopping = False
        self._paused = False
        self._timer = DueTimer(self._go_on)

    # --- life

    def open(self) -> None:
        self._file = JobFile(self._node.state.jobs, self._node.log)
        self._node.spawn(self._restore(self._file))

    async def _restore(self, file: JobFile) -> None:
        """What was there before the restart. Of what had begun, only that runs again which may."""
        now_s, unix_s = time.monotonic(), time.time()
        rows = await file.do(file.read)
        try:
            sizes = await file.do(file.nbytes) if rows else {}
        except NotKept:
            rows, sizes = [], {}
        broken, lost = list[tuple[Job, str]](), list[str]()
        for row in sorted(rows, key=lambda row: (row.ended is not None, row.ended or 0.0, row.number)):
            self._number = max(self._number, row.number)
            job = Job(row.id, row.function, row.tenant, row.created, sizes.get(row.id, 0), row.route, row.scope)
            job.digest, job.patient, job.idempotent = row.digest, row.patient, row.idempotent
            job.tried_until_s = now_s + min(self._wait_s, max(0.0, row.created + self._wait_s - unix_s))
            if row.ended is not None:
                job.state, job.status, job.code, job.ended = JobState.ENDED, row.status, row.code, row.ended
                job.ended_s = now_s - min(self.book.limits.keep_s, max(0.0, unix_s - row.ended))
            broke = row.begun and row.ended is None and not row.idempotent
            if row.ended is None and not row.patient and not broke:
                lost.append(job.id)  # who waited for it sends it again
                continue
            self.book.add(job)
            if broke:
                broken.append((job, row.label))
        if lost:
            await self._erase(lost)
        for job, label in broken:
            await self._end(job, _failed(_interrupted(), label))
        self._read.set()
        await self._node.requests.knows_catalogue()
        self._go_on()

    async def stop(self) -> None:
        """Before requests are told that the router ends: those that wait in its queues have not run."""
        self._stopping = True
        self._timer.close()
        begun = [job for job in self.book.jobs.values() if job.state is JobState.BEGUN]
        waiting = [job.id for job in begun if self._waits(job)]
        if self._file is not None:
            try:
                if waiting:
                    await self._do(self._file.back, waiting)
            except NotKept as error:  # they are as if the node had been killed; the rest of the router ends in order
                self._node.log.error("jobs_not_kept", jobs=len(waiting), reason=str(error))
            self._file.close()

    def _waits(self, job: Job) -> bool:
        """Whether it has begun and has not run: it is on its way into its function's queue, or there."""
        request = self._node.picture.requests.get(job.request or 0)
        return job.request is None or (request is not None and request.phase is not Phase.RUNNING and not request.rerun)

    async def _do(self, work: Any, *arguments: Any) -> Any:
        assert self._file is not None, "nobody asks before the start"
        return await self._file.do(work, *arguments)

    async def knows_jobs(self) -> None:
        """Wait until those of before the restart are known. Raises HttpError."""
        try:
            await asyncio.wait_for(self._read.wait(), READ_S)
        except TimeoutError:
            raise HttpError(failures.starting()) from None

    # --- a new job

    async def take(self, asked: KeptRequest, body: Body) -> tuple[Job, bool]:
        """A job for this request; or the one that was made when it was first sent, and True. The body is closed.
        Raises HttpError.
        """
        try:
            return await self._taken(asked, body)
        finally:
            body.close()  # not before it is in the file: until then it counts

    async def _taken(self, asked: KeptRequest, body: Body) -> tuple[Job, bool]:
        await self.knows_jobs()
        data = bytes(body.data)
        digest = await self._do(_digest, data, body.kind) if asked.key else b""
        scope = f"{asked.function}\n{asked.route}\n{asked.key}" if asked.key else ""
        function = self._node.picture.functions.get(asked.function)
        if function is None:  # it was removed meanwhile
            raise HttpError(failures.unknown_function(asked.function))
        tenant = function.spec.tenant
        if (known := self.book.keyed.get(scope)) is not None and known.tenant == tenant:
            if known.digest != digest:
                text = "this Idempotency-Key was sent before, with another body; use a new key for a new request"
                raise refuse(422, "idempotency_key_reused", text)
            return known, True
        forgotten, full = self.book.room(tenant, len(data))
        if full is not None:
            raise HttpError(full)
        self._forget(forgotten)
        self._number += 1
        job = Job(f"j{secrets.token_hex(12)}", asked.function, tenant, time.time(), len(data), asked.route, scope)
        job.digest, job.patient, job.due_s = digest, asked.patient, float("inf")  # not before it is kept
        job.tried_until_s = time.monotonic() + self._wait_s
        self.book.add(job)
        row = JobRow(
            job.id, self._number, job.function, tenant, job.route, scope, digest, job.patient, False, asked.labels.id,
            str(asked.labels.trace), body.kind, body.accept, job.created, False, None, 0, "", "", "",
        )  # fmt: skip
        try:
            await self._do(self._known_file.add, row, data, [old.id for old in forgotten])
        except NotKept as error:
            if job.id in self.book.jobs:
                self._drop(job)
            raise HttpError(_disk_full(str(error))) from None
        job.due_s = 0.0
        self._go_on()
        return job, False

    @property
    def _known_file(self) -> JobFile:
        assert self._file is not None, "nobody asks before the start"
        return self._file

    def _forget(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self.book.forget(job)

    def _drop(self, job: Job) -> None:
        """It could not be kept: whoever waits for it is told so."""
        self.book.forget(job)
        self._tell(job, None)

    # --- jobs run

    def _go_on(self) -> None:
        """Begin what may begin, and forget what is old."""
        drain = self._node.requests.drain
        drain.look()
        if self._stopping or not self._read.is_set() or drain.on or self._paused:  # those that there are wait
            return
        now_s = time.monotonic()
        if expired := self.book.expired(now_s):
            self._forget(expired)
            self._node.spawn(self._erase([job.id for job in expired]))
        while self._node.picture.catalogue_known and (job := self.book.next(self._room, now_s)) is not None:
            self._node.spawn(self._runs(job))
        due_s = self.book.next_due_s(now_s)
        self._timer.set(None if due_s == float("inf") else due_s)

    @property
    def begun(self) -> int:
        """How many have, and have not ended."""
        return sum(job.state is JobState.BEGUN for job in self.book.jobs.values())

    def pause(self) -> None:
        """No more begins here: a successor has what waits."""
        self._paused = True

    def resume(self) -> None:
        """Jobs may begin again."""
        self._go_on()

    async def _erase(self, jobs: list[str]) -> None:
        try:
            await self._do(self._known_file.forget, jobs)
        except NotKept as error:
            self._node.log.error("jobs_not_forgotten", jobs=len(jobs), reason=str(error))

    def _room(self, function: str) -> int:
        """How many of its jobs may wait in its queue or run: one more than run, so that its instances have always one
        to do.
        """
        known = self._node.picture.functions.get(function)
        if known is None:
            return 1  # it was removed: its jobs fail
        if self._answers[known.spec.tenant] >= self.book.limits.begun_nbytes // self.book.limits.parts:
            return 0
        if known.spec.llm is not None:
            return AT_ONCE
        picture = self._node.picture
        instances = (picture.instances[name] for name in known.instances)
        serving = sum(each.state in (InstanceState.IDLE, InstanceState.BUSY) for each in instances)
        return 1 + max(serving, min(AT_ONCE, serving * most_open(known.spec)))

    async def _runs(self, job: Job) -> None:
        try:
            await self._run(job)
        finally:
            self._has(job, -job.came_nbytes)
            self._go_on()

    async def _run(self, job: Job) -> None:
        """From its file through its function and back."""
        function = self._node.picture.functions.get(job.function)
        outcome: Result | NotRun
        if function is None or function.spec.tenant != job.tenant:
            outcome = _failed(failures.unknown_function(job.function), "")
        else:
            job.idempotent = function.spec.idempotent
            try:
                outcome = await self._outcome(job)
            except NotKept as error:
                outcome = NotRun(_failed(_disk_full(str(error)), ""))
            except NoRoom:
                outcome = NotRun(_failed(_bodies_full(), ""))
        if self._stopping:
            return
        if isinstance(outcome, Result) or job.cancelled:
            await self._end(job, outcome if isinstance(outcome, Result) else _failed(_cancelled(), ""))
        elif not job.patient:  # who sends it again has another try
            self.book.forget(job)
            self._tell(job, outcome.result)
            await self._erase([job.id])
        elif time.monotonic() > job.tried_until_s:
            await self._end(job, outcome.result)
        else:
            self.book.back(job, time.monotonic())
            try:
                await self._do(self._known_file.back, [job.id])
            except NotKept as error:
                self._node.log.error("job_not_kept", job=job.id, reason=str(error))

    def _has(self, job: Job, nbytes: int) -> None:
        """So many bytes more of its answer, or fewer."""
        job.came_nbytes += nbytes
        self._answers[job.tenant] += nbytes
        if not self._answers[job.tenant]:
            del self._answers[job.tenant]
        self._node.requests.bodies.give(-nbytes)

    async def _outcome(self, job: Job) -> Result | NotRun:
        """What its function answers. Raises NotKept, NoRoom."""
        body, requests = Body(self._node.requests.bodies), self._node.requests
        try:
            await body.expect(job.nbytes)
            given = await self._do(self._known_file.begin, job.id, job.idempotent)
            await body.add(given.body, len(given.body))
            body.complete()
            body.kind, body.accept = given.kind, given.accept
        except BaseException:
            body.close()
            raise
        if job.cancelled or self._stopping:
            body.close()
            return _failed(_cancelled(), given.label)
        labels = Labels(given.label, Trace.read(given.trace), again=job.patient)
        number, future = requests.submit(job.function, body, job.route, labels)
        job.request = number
        answer = await future
        kind, timing = "", e.Timing()
        if isinstance(answer, AnswerStream):
            kind, parts = answer.kind, []
            async with aclosing(answer.parts()) as coming:
                async for part in coming:
                    self._has(job, len(part))
                    if job.came_nbytes > self._answer_nbytes:
                        requests.leave(number)
                        return _failed(_too_large(self._answer_nbytes), given.label)
                    parts.append(part)
            outcome, data, timing = answer.outcome, b"".join(parts), answer.timing
        else:
            outcome, data = answer
            self._has(job, len(data))
        match outcome:
            case e.Answer():
                said = [server_timing(timing if kind else outcome.timing)]
                said += foreign(outcome.kind)
                return Result(200, "", kind or outcome.kind or JSON.decode(), tuple(said), data)
            case e.Fail(failure=failure, timing=timing):
                failed = _failed(failure, given.label, server_timing(timing))
                return NotRun(failed) if not_run(outcome) else failed
            case _:
                return _failed(_cancelled(), given.label)

    async def _end(self, job: Job, result: Result) -> None:
        """It is over; whoever waits is told what came of it, also if that cannot be kept."""
        kept = result
        forgotten, full = self.book.room_for_answer(job, len(result.body))
        if full is not None:
            kept = _failed(_not_kept(full.text), "")
            forgotten, _ = self.book.room_for_answer(job, len(kept.body))
        self._forget(forgotten)
        self.book.end(job, len(kept.body), kept.status, kept.code, time.monotonic(), time.time())
        try:
            await self._do(self._known_file.end, job.id, job.ended, kept, [old.id for old in forgotten])
        except NotKept as error:
            self._node.log.error("answer_of_a_job_not_kept", job=job.id, reason=str(error))
            job.status, job.code = 507, "not_kept"
        self._tell(job, result)

    # --- who waits

    def _tell(self, job: Job, result: Result | None) -> None:
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
            found: Result | None = await self._do(self._known_file.result, job.id)
        except NotKept as error:
            return _failed(_disk_full(str(error)), "")
        return found or _failed(_not_kept("its answer could not be written"), "")

    async def cancel(self, job: Job) -> None:
        """Nobody wants it any more; one that has ended is forgotten."""
        if job.state is JobState.ENDED:
            self.book.forget(job)
            await self._erase([job.id])
        elif job.state is JobState.QUEUED:
            job.cancelled = True
            await self._end(job, _failed(_cancelled(), ""))
            self._go_on()
        else:
            job.cancelled = True
            if job.request is not None:
                self._node.requests.leave(job.request)
            await self.ended(job, 5.0)

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
        rows = b",".join(self.told(job) for job in own[: -MOST_LISTED - 1 : -1])
        return b'{"jobs":[%b],"more":%d}' % (rows, max(0, len(own) - MOST_LISTED))

    def told(self, job: Job) -> bytes:
        """How it is."""
        return said(job, self.running(job), self.book.limits)

    def running(self, job: Job) -> bool:
        """Whether its function has it, as far as that is known."""
        request = self._node.picture.requests.get(job.request or 0)
        return request is not None and request.phase is Phase.RUNNING


def _digest(data: bytes, kind: str) -> bytes:
    """Of a body, and of its content type, where that is not JSON."""
    return hashlib.blake2b(data, digest_size=16, key=hashlib.blake2b(kind.encode()).digest() if kind else b"").digest()


def _failed(failure: Failure, label: str, *headers: tuple[bytes, bytes]) -> Result:
    body, said = error_answer(failure, label)
    return Result(failure.status, failure.code, "application/json", (*headers, *said), body)


def _interrupted() -> Failure:
    text = (
        "the node ended while this job ran, or was about to: it may have run, in part or whole, and is not run again, "
        "because its function is not declared idempotent; send it again if that does no harm"
    )
    return Failure(code="interrupted", status=503, text=text)


def _cancelled() -> Failure:
    return Failure(code="cancelled", status=503, text="the job was cancelled")


def _bodies_full() -> Failure:
    text = "bodies of requests have taken all of their room (limits.bodies); send it again later"
    return Failure(code="bodies_full", status=503, text=text, retryable=True)


def _not_kept(why: str) -> Failure:
    return Failure(code="not_kept", status=507, text=f"the node cannot keep this: {why}")


def _disk_full(why: str) -> Failure:
    return Failure(code="disk_full", status=507, text=why)


def _too_large(limit_nbytes: int) -> Failure:
    text = f"the answer has more than {limit_nbytes} bytes (limits.response); have it in parts, without a job"
    return Failure(code="bad_response", status=500, text=text)


def said(job: Job, running: bool, limits: JobLimits) -> bytes:
    """For people and programs."""
    state = job.word if job.state is JobState.ENDED else "running" if running else "queued"
    value: dict[str, Any] = {"id": job.id, "function": job.function, "state": state, "created": round(job.created, 3)}
    if job.state is JobState.ENDED:
        value |= {"ended": round(job.ended, 3), "expires": round(job.ended + limits.keep_s, 3), "status": job.status}
        value |= {"code": job.code} if job.code else {}
    return orjson.dumps(value | {"result": f"/jobs/{job.id}/result"})
