"""Runs jobs as requests: each from its file through its function, and its answer back.

book.py decides which of them begins.
"""

import time
from collections import Counter
from contextlib import aclosing
from typing import Final, NamedTuple

from dormouse.core.config import parse_nbytes
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures, splits
from dormouse.core.decisions.requests.state import InstanceState, Phase, ServedFunction, most_open
from dormouse.core.due_timer import DueTimer
from dormouse.router.front.answers import told
from dormouse.router.front.bodies import Body, NoRoom
from dormouse.router.front.exchange import JSON, foreign, own_head
from dormouse.router.front.requests import Labels, not_run
from dormouse.router.front.streams import AnswerStream
from dormouse.router.front.tracing import Trace
from dormouse.router.jobs import answers
from dormouse.router.jobs.book import Job, JobState
from dormouse.router.jobs.file import NotKept, Result
from dormouse.router.jobs.kept import KeptJobs, Node

AT_ONCE: Final = 16
"""Jobs of a function that may have begun whose instances have many requests at once, as language models have: others
have places there too.
"""


class NotRun(NamedTuple):
    """The answer that turned a request away: it has not run."""

    result: Result


class JobRuns:
    """See the module."""

    def __init__(self, node: Node, kept: KeptJobs) -> None:
        self._node, self._kept, self._book = node, kept, kept.book
        self._answer_nbytes = parse_nbytes(node.config.limits.response)
        self._answers = Counter[str]()  # bytes that are here of jobs that have not ended, by tenant
        self._stopping = False
        self._paused = False
        self._timer = DueTimer(self.go_on)

    # --- which begin

    def go_on(self) -> None:
        """Begin the jobs that may begin, and forget old ones."""
        drain = self._node.requests.drain
        drain.look()
        if self._stopping or not self._kept.known.is_set():
            return
        now_s = time.monotonic()
        if expired := self._book.expired(now_s):
            self._kept.forget(expired)
            self._node.spawn(self._kept.erase([job.id for job in expired]))
        patient = not drain.on and not self._paused  # else those that nobody waits for rest
        while self._node.picture.catalogue_known and (job := self._book.next(self.room, now_s, patient=patient)):
            self._node.spawn(self._runs(job))
        due_s = self._book.next_due_s(now_s)
        self._timer.set(None if due_s == float("inf") else due_s)

    @property
    def left(self) -> int:
        """How many have begun and not ended, or will begin though the node drains."""
        jobs = self._book.jobs.values()
        return sum(job.state is JobState.BEGUN or (job.state is JobState.QUEUED and not job.patient) for job in jobs)

    def pause(self) -> None:
        """No more begins here of those that nobody waits for: a successor has them."""
        self._paused = True

    def resume(self) -> None:
        """Jobs may begin again."""
        self.go_on()

    def room(self, function: str) -> int:
        """How many of its jobs may wait in its queue or run: one more than run, so that its instances have always one
        to do.
        """
        known = self._function(function)
        if known is None:
            return 1  # it was removed: its jobs fail
        if self._answers[known.spec.tenant] >= self._book.limits.begun_nbytes // self._book.limits.parts:
            return 0
        if known.spec.llm is not None:
            return AT_ONCE
        picture = self._node.picture
        instances = (picture.instances[name] for name in known.instances)
        serving = sum(each.state in (InstanceState.IDLE, InstanceState.BUSY) for each in instances)
        return 1 + max(serving, min(AT_ONCE, serving * most_open(known.spec)))

    def _function(self, name: str) -> ServedFunction | None:
        """The function served under a job's name."""
        picture = self._node.picture
        return picture.functions.get(splits.named(picture, name))

    def stop(self) -> None:
        """Before requests are notified of the router's end."""
        self._stopping = True
        self._timer.close()

    def waits(self, job: Job) -> bool:
        """Whether it has begun and has not run: it is on its way into its function's queue, or there."""
        request = self._node.picture.requests.get(job.request or 0)
        return job.request is None or (request is not None and request.phase is not Phase.RUNNING and not request.rerun)

    # --- one that has

    async def _runs(self, job: Job) -> None:
        try:
            await self._run(job)
        finally:
            self._has(job, -job.came_nbytes)
            self.go_on()

    async def _run(self, job: Job) -> None:
        """From its file through its function and back."""
        function = self._function(job.function)
        outcome: Result | NotRun
        if function is None or function.spec.tenant != job.tenant:
            outcome = answers.failed(failures.unknown_function(job.function), "")
        else:
            job.idempotent = function.spec.idempotent
            try:
                outcome = await self._outcome(job)
            except NotKept as error:
                outcome = NotRun(answers.failed(answers.disk_full(str(error)), ""))
            except NoRoom:
                outcome = NotRun(answers.failed(answers.bodies_full(), ""))
        if self._stopping:
            return
        if isinstance(outcome, Result):
            await self._kept.end(job, outcome)
        elif job.cancelled:
            await self._kept.end(job, answers.failed(answers.cancelled(), ""))
        elif not job.patient:  # sending it again is another try
            self._book.forget(job)
            self._kept.tell(job, outcome.result)
            await self._kept.erase([job.id])
        elif time.monotonic() > job.tried_until_s:
            await self._kept.end(job, outcome.result)
        else:
            self._book.back(job, time.monotonic())
            try:
                await self._kept.file.do(self._kept.file.back, [job.id])
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
        """The answer of its function. Raises NotKept, NoRoom."""
        body, requests = Body(self._node.requests.bodies), self._node.requests
        try:
            await body.expect(job.nbytes)
            given = await self._kept.file.do(self._kept.file.begin, job.id, job.idempotent)
            await body.add(given.body, len(given.body))
            body.complete()
            body.kind, body.accept = given.kind, given.accept
        except BaseException:
            body.close()
            raise
        if job.cancelled or self._stopping:
            body.close()
            return answers.failed(answers.cancelled(), given.label)
        labels = Labels(given.label, Trace.read(given.trace), again=job.patient)
        function = splits.picked(self._node.picture, job.function)
        number, future = requests.submit(function, body, job.route, labels)
        job.request = number
        answer = await future
        kind, timing, head = "", e.Timing(), None
        if isinstance(answer, AnswerStream):
            kind, parts = answer.kind, []
            async with aclosing(answer.parts()) as coming:
                async for part in coming:
                    self._has(job, len(part))
                    if job.came_nbytes > self._answer_nbytes:
                        requests.leave(number)
                        return answers.failed(answers.too_large(self._answer_nbytes), given.label)
                    parts.append(part)
            outcome, data, timing, head = answer.outcome, b"".join(parts), answer.timing, answer.head
        else:
            outcome, data = answer
            self._has(job, len(data))
        match outcome:
            case e.Answer():
                status, own = own_head(outcome.head or head)
                said = [*told(timing if kind else outcome.timing), *own, *foreign(outcome.kind)]
                return Result(status, "", kind or outcome.kind or JSON.decode(), tuple(said), data)
            case e.Fail(failure=failure, timing=timing):
                failed = answers.failed(failure, given.label, *told(timing))
                return NotRun(failed) if not_run(outcome) else failed
            case _:
                return answers.failed(answers.cancelled(), given.label)
