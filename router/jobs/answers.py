"""Answers about jobs, and the outcomes of those that do not run to their end: pure."""

from typing import Any

import orjson

from dormouse.core.quantities import size
from dormouse.router.front.exchange import error_answer
from dormouse.router.jobs.book import Job, JobLimits, JobState
from dormouse.router.jobs.file import Result
from dormouse.schemas.messages import Failure


def failed(failure: Failure, label: str, *headers: tuple[bytes, bytes]) -> Result:
    body, said = error_answer(failure, label)
    return Result(failure.status, failure.own or failure.code, "application/json", (*headers, *said), body)


def interrupted() -> Failure:
    text = (
        "the node ended while this job ran, or was about to: it may have run, in part or whole, and is not run again, "
        "because its function is not declared idempotent; send it again if that does no harm"
    )
    return Failure(code="interrupted", status=503, text=text)


def cancelled() -> Failure:
    return Failure(code="cancelled", status=503, text="the job was cancelled")


def bodies_full() -> Failure:
    text = "bodies of requests have taken all of their room (limits.bodies); send it again later"
    return Failure(code="bodies_full", status=503, text=text, retryable=True)


def not_so(job: Job) -> Failure:
    """The failure of a cancel that comes too late, or of a removal that comes too early."""
    if job.state is not JobState.ENDED:
        return Failure(code="not_ended", status=409, text=f"job {job.id} has not ended: wait for it, or cancel it")
    text = (
        f"job {job.id} has ended already ({job.word}): there is nothing to cancel; `dormouse job {job.id} --result` "
        "shows what came of it, and --forget forgets that"
    )
    return Failure(code="job_ended", status=409, text=text)


def not_kept(why: str) -> Failure:
    return Failure(code="not_kept", status=507, text=f"the node cannot keep this: {why}")


def disk_full(why: str) -> Failure:
    return Failure(code="disk_full", status=507, text=why)


def too_large(limit_nbytes: int) -> Failure:
    text = f"the answer has more than {size(limit_nbytes)} (limits.response); have it in parts, without a job"
    return Failure(code="bad_response", status=500, text=text)


def said(job: Job, running: bool, limits: JobLimits) -> bytes:
    """For people and programs."""
    state = job.word if job.state is JobState.ENDED else "running" if running else "queued"
    value: dict[str, Any] = {"id": job.id, "function": job.function, "state": state, "created": round(job.created, 3)}
    if job.state is JobState.ENDED:
        value |= {"ended": round(job.ended, 3), "expires": round(job.ended + limits.keep_s, 3), "status": job.status}
        value |= {"code": job.code} if job.code else {}
    return orjson.dumps(value | {"result": f"/jobs/{job.id}/result"})
