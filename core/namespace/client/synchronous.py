"""The client of programs that wait: calls.py has its methods' work, and asynchronous.py is the same otherwise."""

import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import httpx2

from dormouse.client import transport, wire
from dormouse.client.calls import RETRIES, Call, Calls, T
from dormouse.client.wire import Came, HttpReply, Rest, ToSend


class Client:
    """One node. ``key``: an API key, if it wants one. ``retries``: how often a call is sent again at most. Threads may
    share it. To be closed, or used in ``with``.
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
        self._http = httpx2.Client(**transport.settings(url, key, headers, verify))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- calls

    def invoke(
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
        return self._drive(self._calls.invoke(function, request, timeout_s, idempotency_key, headers))

    def infer(
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
        return self._drive(self._calls.infer(function, tensors, outputs, timeout_s, headers))

    def submit(
        self,
        function: str,
        request: Any = None,
        *,
        timeout_s: float | None = None,
        idempotency_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "JobHandle":
        """A job: it runs without this program. It is made once, however often it must be sent. Raises CallError."""
        call = self._calls.submit(function, request, timeout_s, idempotency_key, headers)
        return JobHandle(self, self._drive(call))

    def job(self, id: str) -> "JobHandle":
        """One that was made before."""
        return JobHandle(self, id)

    def stream(
        self,
        function: str,
        request: Any = None,
        *,
        pause_timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Generator[Any, None, None]:
        """The parts of an answer, as they are made: JSON values, text, or bytes. ``pause_timeout_s``: from one to the
        next. Closing it early ends the function's work. Raises CallError.
        """
        send = wire.sent(function, request, headers or {})._replace(timeout_s=pause_timeout_s)
        again = self._calls.again()
        while True:
            with self._begun(send) as came:
                if isinstance(came, httpx2.Response):
                    yield from self._parts(came)
                    return
                failure = wire.error_of(came) if isinstance(came, HttpReply) else came
            pause_s = again.pause_s(failure, time.monotonic())
            if pause_s is None:
                raise failure
            time.sleep(pause_s)

    @contextmanager
    def _begun(self, send: ToSend) -> Iterator[httpx2.Response | Came]:
        try:
            response = self._http.send(self._http.build_request(**transport.request(send)), stream=True)
        except httpx2.TransportError as error:
            yield transport.failed(error, self._url)
            return
        try:
            if response.status_code >= 400:
                response.read()
                yield transport.reply(response)
            else:
                yield response
        finally:
            response.close()

    def _parts(self, response: httpx2.Response) -> Iterator[Any]:
        parts = wire.AnswerReader(transport.headers(response))
        try:
            for data in response.iter_raw():
                yield from parts.feed(data)
        except httpx2.TransportError as error:
            failure = transport.failed(error, self._url)
            assert isinstance(failure, Exception)
            raise failure from error
        yield from parts.end()

    def ready(self) -> bool:
        """Whether every function that can be loaded is. Raises CallError."""
        return self._drive(self._calls.ready())

    # --- parts

    def _drive(self, call: Call[T]) -> T:
        came: Came | None = None
        while True:
            try:
                step = call.send(came)
            except StopIteration as end:
                value: T = end.value
                return value
            if isinstance(step, Rest):
                time.sleep(step.seconds)
                came = None
            else:
                came = self._send(step)

    def _send(self, send: ToSend) -> Came:
        try:
            return transport.reply(self._http.send(self._http.build_request(**transport.request(send))))
        except httpx2.TransportError as error:
            return transport.failed(error, self._url)


class JobHandle:
    """A job of the node. ``id`` is all that is needed to come back to it: :meth:`Client.job`."""

    def __init__(self, client: Client, id: str) -> None:
        self._client, self.id = client, id

    def status(self) -> dict[str, Any]:
        """``state`` and more (docs/jobs.md). Raises CallError."""
        return self._client._drive(self._client._calls.job(self.id, "GET"))

    def result(self, timeout_s: float | None = None) -> Any:
        """Returns the function's answer, once there is one. Raises CallTimeout, and the job's error if it failed."""
        return self._client._drive(self._client._calls.result(self.id, timeout_s))

    def cancel(self) -> dict[str, Any]:
        """Cancels it if it waits or runs; one that has ended is forgotten. Raises CallError."""
        return self._client._drive(self._client._calls.job(self.id, "DELETE"))
