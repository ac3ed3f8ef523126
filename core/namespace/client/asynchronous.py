"""The client of asyncio programs: calls.py has its methods' work, and synchronous.py is the same otherwise."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self

import httpx2

from dormouse.client import transport, wire
from dormouse.client.calls import RETRIES, Call, Calls, T
from dormouse.client.wire import Came, HttpReply, Rest, ToSend


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
        self._url, self._calls = url, Calls(retries)
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
        """Returns the function's answer. ``timeout_s``: for all tries together. With an ``idempotency_key``, a call
        whose answer was lost is sent again too: the node runs it once. Raises CallError.
        """
        return await self._drive(self._calls.invoke(function, request, timeout_s, idempotency_key, headers))

    async def infer(
        self,
        function: str,
        tensors: Mapping[str, Any],
        *,
        outputs: list[str] | None = None,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Arrays by name to arrays by name, as bytes (docs/open-inference.md). ``outputs``: only these. Raises
        CallError.
        """
        return await self._drive(self._calls.infer(function, tensors, outputs, timeout_s, headers))

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
        call = self._calls.submit(function, request, timeout_s, idempotency_key, headers)
        return AsyncJobHandle(self, await self._drive(call))

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
        next. Closing it early ends the function's work. Raises CallError.
        """
        send = wire.sent(function, request, headers or {})._replace(timeout_s=pause_timeout_s)
        again = self._calls.again()
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
        parts = wire.AnswerReader(transport.headers(response))
        try:
            async for data in response.aiter_raw():
                for part in parts.feed(data):
                    yield part
        except httpx2.TransportError as error:
            failure = transport.failed(error, self._url)
            assert isinstance(failure, Exception)
            raise failure from error
        for part in parts.end():
            yield part

    async def ready(self) -> bool:
        """Whether every function that can be loaded is. Raises CallError."""
        return await self._drive(self._calls.ready())

    # --- parts

    async def _drive(self, call: Call[T]) -> T:
        came: Came | None = None
        while True:
            try:
                step = call.send(came)
            except StopIteration as end:
                value: T = end.value
                return value
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
        return await self._client._drive(self._client._calls.job(self.id, "GET"))

    async def result(self, timeout_s: float | None = None) -> Any:
        """Returns the function's answer, once there is one. Raises CallTimeout, and the job's error if it failed."""
        return await self._client._drive(self._client._calls.result(self.id, timeout_s))

    async def cancel(self) -> dict[str, Any]:
        """Cancels it if it waits or runs; one that has ended is forgotten. Raises CallError."""
        return await self._client._drive(self._client._calls.job(self.id, "DELETE"))
