"""One HTTP request and its answer, and how errors are worded as answers: raw ASGI.

A body is read in chunks and never beyond its limit (router/bodies.py). What is answered is decided elsewhere.
"""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any, Final

import orjson

from dormouse.router.bodies import Bodies, Body, NoRoom
from dormouse.router.gate import Pairs
from dormouse.schemas.messages import Failure

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
SendFunction = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_TYPES: Final = {429: "rate_limit_error", 503: "service_unavailable", 504: "timeout_error"}


class HttpError(Exception):
    """Ends a request with an error answer; ``close`` when its body has not been read."""

    def __init__(self, failure: Failure, close: bool = False, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.close = close
        self.headers = headers


class ClientLeft(Exception):
    """Nobody to answer."""


def refuse(status: int, code: str, text: str, close: bool = False) -> HttpError:
    return HttpError(Failure(code=code, status=status, text=text), close)


class Exchange:
    """One request and its answer."""

    def __init__(self, scope: Scope, receive: Receive, send: SendFunction, request_id: bytes) -> None:
        self.scope = scope
        self.receive = receive
        self._send = send
        self.request_id = request_id
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.extra: Pairs = ()  # headers of any answer
        self.begun = False

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.scope["headers"] if key == name), None)

    async def receive_body(self, limit_nbytes: int, bodies: Bodies) -> Body:
        """The whole body, which is the caller's to close. Raises HttpError, before reading what is announced too large
        or has no room, and ClientLeft.
        """
        announced = self.header(b"content-length")
        expected_nbytes = limit_nbytes if announced is None else int(announced)
        body = bodies.new()
        try:
            if expected_nbytes > limit_nbytes:
                raise too_large(limit_nbytes)
            while True:
                message = await self.receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                chunk: bytes = message.get("body", b"")
                if body.nbytes + len(chunk) > limit_nbytes:
                    raise too_large(limit_nbytes)
                await body.add(chunk, expected_nbytes)
                if not message.get("more_body", False):
                    return body.complete()
        except NoRoom:
            body.close()
            raise no_room(bodies.budget_nbytes) from None
        except BaseException:
            body.close()
            raise

    async def read(self, limit_nbytes: int, bodies: Bodies) -> bytes:
        """The whole body, for who does not keep it."""
        body = await self.receive_body(limit_nbytes, bodies)
        data = bytes(body.data)
        body.close()
        return data

    async def gone(self) -> None:
        """Returns when the client has left; only after its body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def answer(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), kind: bytes = b"application/json"
    ) -> None:
        await self.begin(status, [*headers, (b"content-length", b"%d" % len(body))], kind)
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, status: int, headers: Headers, kind: bytes) -> None:
        self.begun = True
        headers = [(b"content-type", kind), (b"x-request-id", self.request_id), *self.extra, *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def chunk(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer_json(self, status: int, value: Any) -> None:
        await self.answer(status, orjson.dumps(value))

    async def fail(self, failure: Failure, headers: Headers, close: bool = False) -> None:
        body, said = error_answer(failure, self.request_id.decode(), close)
        await self.answer(failure.status, body, [*headers, *said])


def error_answer(failure: Failure, request_id: str, close: bool) -> tuple[bytes, Headers]:
    """Body and headers of an error."""
    kind = _TYPES.get(failure.status, "server_error" if failure.status >= 500 else "invalid_request_error")
    error = {"code": failure.code, "message": failure.text, "type": kind, "request_id": request_id}
    headers: Headers = [(b"retry-after", b"1")] if failure.retryable else []
    return orjson.dumps({"error": error}), [*headers, (b"connection", b"close")] if close else headers


def raw_error(failure: Failure) -> bytes:
    """A whole answer, for what no application has seen: it closes its connection."""
    body, headers = error_answer(failure, "", close=True)
    headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (
        failure.status,
        HTTPStatus(failure.status).phrase.encode(),
        lines,
        body,
    )


def too_large(limit_nbytes: int) -> HttpError:
    text = f"the body may have at most {limit_nbytes} bytes (limits.body); send less"
    return refuse(413, "body_too_large", text, close=True)


def no_room(budget_nbytes: int) -> HttpError:
    text = f"bodies of requests have taken all of their {budget_nbytes} bytes (limits.bodies); send it again later"
    return HttpError(Failure(code="bodies_full", status=503, text=text, retryable=True), close=True)
