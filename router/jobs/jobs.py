"""Requests whose answers are kept: takes them as jobs, has them run, and ends those that nobody wants any more."""

import hashlib
import secrets
import time
from typing import NamedTuple

from dormouse.core.decisions.requests import failures, splits
from dormouse.router.front.bodies import Body
from dormouse.router.front.exchange import HttpError, refuse
from dormouse.router.front.requests import Labels
from dormouse.router.jobs import answers
from dormouse.router.jobs.book import Job, JobState
from dormouse.router.jobs.kept import KeptJobs, Node
from dormouse.router.jobs.runs import JobRuns


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
        self.kept = KeptJobs(node)
        self.runs = JobRuns(node, self.kept)
        self.kept.when_read = self.runs.go_on

    def open(self) -> None:
        self.kept.open()
        self._node.spawn(self._restore())

    async def _restore(self) -> None:
        await self.kept.restore()
        await self._node.requests.knows_catalogue()
        self.runs.go_on()

    async def stop(self) -> None:
        """Before requests are notified of the router's end: those that wait in its queues have not run."""
        self.runs.stop()
        begun = [job for job in self.kept.book.jobs.values() if job.state is JobState.BEGUN]
        await self.kept.close([job.id for job in begun if self.runs.waits(job)])

    async def take(self, asked: KeptRequest, body: Body) -> tuple[Job, bool]:
        """A job for this request; or the one that was made when it was first sent, and True. The body is closed.
        Raises HttpError.
        """
        try:
            return await self._taken(asked, body)
        finally:
            body.close()  # not before it is in the file: until then it counts

    async def _taken(self, asked: KeptRequest, body: Body) -> tuple[Job, bool]:
        await self.kept.knows_jobs()
        data = bytes(body.data)
        digest = await self.kept.file.do(_digest, data, body.kind) if asked.key else b""
        scope = f"{asked.function}\n{asked.route}\n{asked.key}" if asked.key else ""
        picture = self._node.picture
        function = picture.functions.get(splits.named(picture, asked.function))
        if function is None:  # it was removed meanwhile
            raise HttpError(failures.unknown_function(asked.function))
        tenant = function.spec.tenant
        if (known := self.kept.book.keyed.get(scope)) is not None and known.tenant == tenant:
            if known.digest != digest:
                text = "this Idempotency-Key was sent before, with another body; use a new key for a new request"
                raise refuse(422, "idempotency_key_reused", text)
            return known, True
        job = Job(f"j{secrets.token_hex(12)}", asked.function, tenant, time.time(), len(data), asked.route, scope)
        job.digest, job.patient = digest, asked.patient
        job.tried_until_s = time.monotonic() + self.kept.wait_s
        await self.kept.add(job, asked.labels, body, data)
        self.runs.go_on()
        return job, False

    async def cancel(self, job: Job) -> None:
        """Nobody wants it any more; one that has ended is forgotten."""
        if job.state is JobState.ENDED:
            self.kept.book.forget(job)
            await self.kept.erase([job.id])
        elif job.state is JobState.QUEUED:
            job.cancelled = True
            await self.kept.end(job, answers.failed(answers.cancelled(), ""))
            self.runs.go_on()
        else:
            job.cancelled = True
            if job.request is not None:
                self._node.requests.leave(job.request)
            await self.kept.ended(job, 5.0)


def _digest(data: bytes, kind: str) -> bytes:
    """Of a body, and of its content type, where that is not JSON."""
    return hashlib.blake2b(data, digest_size=16, key=hashlib.blake2b(kind.encode()).digest() if kind else b"").digest()
