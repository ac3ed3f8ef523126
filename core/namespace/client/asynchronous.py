"""The client of asyncio programs: see wire.py for what it says, and synchronous.py, which is the same otherwise."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, Self

import httpx2

from dormouse.client import transport, wire
from dormouse.client.errors import ApiError, BadAnswer
from dormouse.client.wire import Again, Came, HttpReply, Rest, Steps, ToSend

RETRIES: Final = 5


class AsyncClient:
    """One node. ``key``: an API key, if it wants one. ``retries``: how often a call is sent again at most. It belongs
    to one event loop. To be closed, or used in ``async with``.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8700",
        key: str | None = None,
        *,
        retries: int = RETRIES,
        headers: Mapping[str, str] | None = None,
        verify: Any = True,
    ) -> None:
        self._url, self._retries = url, retries
        self._http = httpx2.AsyncClient(**transport.settings(url, key, headers, verify))

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- calls

    async def invoke(
        self,
        function: str,
        request: Any = None,
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """What the function answers. ``timeout_s``: for all tries together. With an ``idempotency_key``, a call whose
        answer was lost is sent again too: the node runs it once. Raises CallError.
        """
        said = {**(headers or {}), **({"Idempotency-Key": idempotency_key} if idempotency_key else {})}
        again = self._again(timeout_s, whole=idempotency_key is not None)
        reply = await self._drive(wire.calling(wire.sent(function, request, said), again, time.monotonic))
        return wire.decoded(reply)

    async def submit(
        self,
        function: str,
        request: Any = None,
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "AsyncJobHandle":
        """A job: it runs without this program. It is made once, however often it must be sent. Raises CallError."""
        key = idempotency_key or str(uuid.uuid4())
        said = {**(headers or {}), "Prefer": "respond-async", "Idempotency-Key": key}
        again = self._again(timeout_s, whole=True)
        told = wire.decoded(await self._drive(wire.calling(wire.sent(function, request, said), again, time.monotonic)))
        return AsyncJobHandle(self, _id_of(told))

    def job(self, id: str) -> "AsyncJobHandle":
        """One that was made before."""
        return AsyncJobHandle(self, id)

    async def stream(
        self,
        function: str,
        request: Any = None,
        *,
        pause_timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """The parts of an answer, as they are made: JSON values, text, or bytes. ``pause_timeout_s``: from one to the
        next. To close it early ends the function's work. Raises CallError.
        """
        send = wire.sent(function, request, headers or {})._replace(timeout_s=pause_timeout_s)
        again = self._again(None)
        while True:
            async with self._begun(send) as came:
                if isinstance(came, httpx2.Response):
                    async with aclosing(self._parts(came)) as parts:
                        async for part in parts:
                            yield part
                    return
                failure = wire.error_of(came) if isinstance(came, HttpReply) else came
            pause_s = again.pause_s(failure, time.monotonic())
            if pause_s is None:
                raise failure
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def _begun(self, send: ToSend) -> AsyncIterator[httpx2.Response | Came]:
        try:
            response = await self._http.send(self._http.build_request(**transport.request(send)), stream=True)
        except httpx2.TransportError as error:
            yield transport.failed(error, self._url)
            return
        try:
            if response.status_code >= 400:
                await response.aread()
                yield transport.reply(response)
            else:
                yield response
        finally:
            await response.aclose()

    async def _parts(self, response: httpx2.Response) -> AsyncGenerator[Any, None]:
        kind = wire.content_type(response.headers)
        try:
            if kind == wire.SSE:
                events = wire.Events()
                async for data in response.aiter_raw():
                    for value in events.feed(data):
                        yield value
                events.end()
            elif kind == wire.OCTETS:
                async for data in response.aiter_raw():
                    yield data
            else:  # it was not answered in parts
                await response.aread()
                yield wire.decoded(transport.reply(response))
        except httpx2.TransportError as error:
            failure = transport.failed(error, self._url)
            assert isinstance(failure, Exception)
            raise failure from error

    async def ready(self) -> bool:
        """Whether every function that can be loaded is. Raises CallError."""
        try:
            await self._drive(wire.calling(ToSend("GET", "/readyz"), Again(0, None), time.monotonic))
        except (ApiError, BadAnswer):
            return False
        return True

    # --- parts

    def _again(self, timeout_s: float | None, whole: bool = False) -> Again:
        return Again(self._retries, None if timeout_s is None else time.monotonic() + timeout_s, whole)

    async def _drive(self, steps: Steps) -> HttpReply:
        came: Came | None = None
        while True:
            try:
                step = steps.send(came)
            except StopIteration as end:
                reply: HttpReply = end.value
                return reply
            if isinstance(step, Rest):
                await asyncio.sleep(step.seconds)
                came = None
            else:
                came = await self._send(step)

    async def _send(self, send: ToSend) -> Came:
        try:
            return transport.reply(await self._http.send(self._http.build_request(**transport.request(send))))
        except httpx2.TransportError as error:
            return transport.failed(error, self._url)


class AsyncJobHandle:
    """A job of the node. ``id`` is all that is needed to come back to it: :meth:`AsyncClient.job`."""

    def __init__(self, client: AsyncClient, id: str) -> None:
        self._client, self.id = client, id

    async def status(self) -> dict[str, Any]:
        """``state`` and more (docs/jobs.md). Raises CallError."""
        return await self._asked("GET")

    async def result(self, timeout_s: float | None = None) -> Any:
        """What the function answers, once it has. Raises CallTimeout, and what the job failed with."""
        again = self._client._again(timeout_s, whole=True)
        return wire.decoded(await self._client._drive(wire.waiting(self.id, again, time.monotonic)))

    async def cancel(self) -> dict[str, Any]:
        """Where it waits or runs; one that has ended is forgotten. Raises CallError."""
        return await self._asked("DELETE")

    async def _asked(self, method: str) -> dict[str, Any]:
        send = ToSend(method, wire.job_path(self.id))
        reply = await self._client._drive(wire.calling(send, self._client._again(None, whole=True), time.monotonic))
        told = wire.decoded(reply)
        _id_of(told)
        assert isinstance(told, dict)
        return told


def _id_of(told: Any) -> str:
    if not isinstance(told, dict) or not isinstance(told.get("id"), str):
        raise BadAnswer("what answers here knows no jobs; is it an older node?")
    return str(told["id"])
