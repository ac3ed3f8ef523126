"""Jobs over HTTP: requests that become one, and the routes below /jobs.

Decides nothing: admission of jobs is book.py's, their ownership router/access/'s.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from dormouse.router.access.access import Act
from dormouse.router.access.gate import Entered
from dormouse.router.front.bodies import Body
from dormouse.router.front.exchange import Exchange, refuse
from dormouse.router.front.requests import Labels
from dormouse.router.jobs.book import Job, JobState
from dormouse.router.jobs.file import Result
from dormouse.router.jobs.jobs import Jobs, KeptRequest
from dormouse.router.jobs.prefer import Preferences, wished

_AGAIN: Final = (b"retry-after", b"1")


class JobsHttp:
    """See the module."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def wish(self, x: Exchange) -> Preferences | None:
        """The preferences that make this request a job, if it has any. Raises HttpError."""
        wish = wished(x.scope["headers"])
        return wish if wish.respond_async or wish.key else None

    async def take(self, x: Exchange, wish: Preferences, name: str, body: Body, route: str, labels: Labels) -> None:
        """Make a job of it, and answer. The body is its own. Raises HttpError."""
        asked = KeptRequest(name, route, labels, wish.key, wish.respond_async)
        job, again = await self._jobs.take(asked, body)
        if wish.respond_async:
            applied = (b"preference-applied", b"respond-async")
            await self._say(x, 202 if job.state is not JobState.ENDED else 200, job, applied)
            return
        result = await self._while_there(x, self._jobs.kept.ended(job, None))
        if result is None:
            raise refuse(507, "not_kept", "the node cannot keep this request, and has not run it; see its router's log")
        replayed = [(b"idempotency-replayed", b"true")] if again else []
        await x.answer(result.status, result.body, [*result.headers, *replayed], result.kind.encode("latin-1"))

    async def route(self, x: Exchange, entered: Entered) -> None:
        """``GET /jobs``, ``GET`` and ``DELETE /jobs/ID``, ``GET /jobs/ID/result``. Raises HttpError."""
        await self._jobs.kept.knows_jobs()
        if not entered.name:
            await x.answer(200, self._jobs.kept.listed(entered.caller))
            return
        job = self._jobs.kept.find(entered.caller, entered.name)
        if entered.route.act is Act.CANCEL:
            await self._jobs.cancel(job)
            await self._say(x, 200, job)
            return
        wish = wished(x.scope["headers"])
        if wish.wait_s and job.state is not JobState.ENDED:
            await self._while_there(x, self._jobs.kept.ended(job, wish.wait_s))
        if not x.scope["path"].endswith("/result"):
            await self._say(x, 200, job)
        elif job.state is not JobState.ENDED:
            await self._say(x, 202, job)
        else:
            result = await self._jobs.kept.answer(job)
            await x.answer(result.status, result.body, result.headers, result.kind.encode("latin-1"))

    async def _say(self, x: Exchange, status: int, job: Job, *headers: tuple[bytes, bytes]) -> None:
        more = (_AGAIN,) if job.state is not JobState.ENDED else ()
        location = (b"location", f"/jobs/{job.id}".encode())
        await x.answer(status, self._jobs.kept.told(job), [location, *more, *headers])

    async def _while_there(self, x: Exchange, wait: Coroutine[Any, Any, Result | None]) -> Result | None:
        """The result that the client waits for. Raises CancelledError if it leaves; the job goes on."""
        own = asyncio.current_task()
        assert own is not None
        x.when_left(own.cancel)
        try:
            return await wait
        finally:
            x.when_left(None)
