"""Requests made at the node by its administrators, and answers of jobs: sent in pieces, as they come."""

from collections.abc import AsyncGenerator
from itertools import count

import orjson

from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import queueing, splits
from dormouse.core.decisions.requests.state import RouterState
from dormouse.router.access import tenancy
from dormouse.router.access.access import Caller
from dormouse.router.admin.permits import Permits
from dormouse.router.front.bodies import TYPE_NBYTES, Body
from dormouse.router.front.exchange import HttpError, refused
from dormouse.router.front.requests import Labels, Requests
from dormouse.router.front.streams import AnswerStream
from dormouse.router.front.tracing import traced
from dormouse.router.jobs import answers
from dormouse.router.jobs.book import Job, JobState
from dormouse.router.jobs.jobs import Jobs, KeptRequest
from dormouse.schemas import admin as a
from dormouse.schemas.messages import Failure


class Invoking:
    """``epoch`` is the router's: no two of its requests have the same label."""

    def __init__(self, epoch: int, permits: Permits, requests: Requests, picture: RouterState, jobs: Jobs) -> None:
        self._epoch, self._permits, self._requests, self._picture = epoch, permits, requests, picture
        self._jobs = jobs
        self._numbers = count(1)

    async def invoke(self, caller: Caller, act: a.Invoke, body: Body) -> AsyncGenerator[a.Said, None]:
        """One request, answered in pieces; left when it is closed. Raises HttpError. The body is its own."""
        try:
            await self._permits.may_informed(caller, act)
            name = splits.named(self._picture, act.name)
            if not tenancy.serves(caller, self._picture, name):
                raise HttpError(queueing.absent(self._picture, act.name))
            trace = traced(None, (), self._requests.trace_share)
            labels = Labels(f"c{self._epoch}-{next(self._numbers)}", trace)  # of a command
            if (refusal := self._requests.refusal(name)) is not None:
                error = refused(refusal)
                self._requests.turned_away(error.failure, name, labels)
                raise error
        except BaseException:  # cancelled, too: the caller has left
            body.close()
            raise
        body.kind = act.kind[:TYPE_NBYTES]
        if act.detach:
            job, _ = await self._jobs.take(KeptRequest(act.name, "", labels, "", True), body)
            yield a.Said(data=self._jobs.kept.told(job))
            return
        request, future = self._requests.submit(splits.picked(self._picture, act.name), body, labels=labels)
        try:
            answer = await future
            if isinstance(answer, AnswerStream):
                async for part in answer.parts():
                    yield a.Said(data=part, kind=answer.kind)
                outcome = answer.outcome
            else:
                outcome, data = answer
                if data:
                    yield a.Said(data=data, kind=outcome.kind if isinstance(outcome, e.Answer) else "")
        finally:
            self._requests.leave(request)  # nothing, if it was answered
        if not isinstance(outcome, e.Answer):
            assert isinstance(outcome, e.Fail)
            raise HttpError(outcome.failure)

    async def job(self, caller: Caller, act: a.AskJob | a.JobResult | a.CancelJob) -> Job:
        """One that the caller may know of. Raises HttpError."""
        await self._permits.may_informed(caller, act)
        await self._jobs.kept.knows_jobs()
        return self._jobs.kept.find(caller, act.id)

    async def result(self, caller: Caller, act: a.JobResult) -> AsyncGenerator[a.Said, None]:
        """A job's answer. Raises HttpError, also with what the job failed with."""
        job = await self.job(caller, act)
        if job.state is not JobState.ENDED:
            raise HttpError(answers.not_so(job))
        result = await self._jobs.kept.answer(job)
        if result.code:
            text = str(orjson.loads(result.body)["error"]["message"])
            raise HttpError(Failure(code=result.code, status=result.status, text=text, own=result.code))
        yield a.Said(data=result.body, kind="" if result.kind == "application/json" else result.kind)
