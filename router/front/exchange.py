"""One HTTP request and its answer, and the wording of errors as answers.

A body is read in chunks and never beyond its limit (bodies.py). The content of answers is decided elsewhere.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

import orjson
from msgspec import structs

from dormouse.core.answerhead import BODILESS
from dormouse.core.quantities import size
from dormouse.router.access.access import Refusal
from dormouse.router.access.doorkeeper import Pairs
from dormouse.router.front.bodies import Bodies, Body, NoRoom
from dormouse.router.front.cycle import Cycle, Headers
from dormouse.router.front.unpacking import CODINGS, BadCoding, Unpacker
from dormouse.schemas.messages import AnswerHead, Failure

STREAM_HEADERS: Final = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
"""So that no proxy keeps parts back."""

JSON: Final = b"application/json"

_FOREIGN: Final = ((b"x-content-type-options", b"nosniff"), (b"content-security-policy", b"sandbox"))

_TYPES: Final = {429: "rate_limit_error", 503: "service_unavailable", 504: "timeout_error"}


class HttpError(Exception):
    """Ends a request with an error answer; ``close`` when its body has not been read."""

    def __init__(self, failure: Failure, close: bool = False, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.close = close
        self.headers = headers


def refuse(status: int, code: str, text: str, close: bool = False) -> HttpError:
    return HttpError(Failure(code=code, status=status, text=text), close)


def refused(refusal: Refusal, close: bool = False) -> HttpError:
    failure = Failure(code=refusal.code, status=refusal.status, text=refusal.text)
    return HttpError(failure, close, refusal.headers)


class Exchange:
    """One request and its answer."""

    def __init__(self, cycle: Cycle, request_id: bytes) -> None:
        self.scope = cycle.scope
        self.request_id = request_id
        self.extra: Pairs = ()  # headers of any answer
        self.function: str | None = None  # that it is for, once that is known, until it is its request
        self.reads = False  # whether the caller may read functions' logs
        self.when_left = cycle.when_left
        self.chunk = cycle.chunk
        self.chunk_now = cycle.chunk_now
        self.end = cycle.end
        self.cut = cycle.cut
        self.asks_for = cycle.asks_for
        self._cycle = cycle
        self._unpacker: Unpacker | None = None

    def unpacks(self) -> None:
        """Decode its body by its Content-Encoding from now on. Raises HttpError."""
        said = b",".join(self.fields(b"content-encoding")).lower().split(b",")
        codings = [coding.strip() for coding in said if coding.strip() not in (b"", b"identity")]
        if len(codings) > 1 or (codings and codings[0] not in CODINGS):
            raise foreign_coding(b", ".join(codings), "send gzip, deflate, or the body as it is")
        self._unpacker = Unpacker(codings[0]) if codings else None

    async def read(self) -> list[bytes]:
        """Pieces of the body that have come since the last call, if need be after waiting; none at its end. Raises
        ClientLeft, HttpError.
        """
        if self._unpacker is None:
            return await self._cycle.read()
        try:
            while not (piece := self._unpacker.step()):
                if not (pieces := await self._cycle.read()):
                    self._unpacker.end()
                    return []
                self._unpacker.add(b"".join(pieces))
        except BadCoding as error:
            raise refuse(400, "bad_body", str(error), close=True) from None
        await asyncio.sleep(0)  # the others' turn
        return [piece]

    def never_ends(self) -> None:
        """The answer goes on until one of the two leaves: a node that ends does not wait for it."""
        self._cycle.endless = True

    @property
    def begun(self) -> bool:
        """Whether its answer is."""
        return self._cycle.response_started

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.scope["headers"] if key == name), None)

    def fields(self, name: bytes) -> Iterator[bytes]:
        """All of a header that may be there more than once."""
        return (value for key, value in self.scope["headers"] if key == name)

    async def receive_body(self, limit_nbytes: int, bodies: Bodies, owner: str = "") -> Body:
        """The whole body, which is the caller's to close. Raises HttpError, before reading what is announced too large
        or has no room, and ClientLeft. ``owner``: the tenant that sends it.
        """
        announced = self.header(b"content-length") if self._unpacker is None else None
        expected_nbytes = limit_nbytes if announced is None else int(announced)
        if expected_nbytes > limit_nbytes:
            raise too_large(limit_nbytes)
        with receiving(bodies, owner) as body:
            while pieces := await self.read():
                for piece in pieces:
                    if body.nbytes + len(piece) > limit_nbytes:
                        raise too_large(limit_nbytes)
                    await body.add(piece, expected_nbytes)
                if announced is not None and (rest := body.rest()):
                    with rest:
                        if await self._cycle.fill(rest):
                            body.filled()
            return body.complete()

    async def answer(self, status: int, body: bytes, headers: Headers = (), kind: bytes = JSON) -> None:
        if status in BODILESS:
            self._cycle.answer_empty(status, self._headers(kind, headers))
            return
        await self._cycle.answer(status, self._headers(kind, headers), body)

    def begin(self, status: int, kind: bytes, headers: Headers = ()) -> None:
        """:meth:`chunk` and :meth:`end` or :meth:`cut` follow."""
        self._cycle.begin(status, self._headers(kind, headers))

    def answer_empty(self, status: int, kind: bytes = b"text/plain") -> None:
        self._cycle.answer_empty(status, self._headers(kind, ()))

    def _headers(self, kind: bytes, more: Headers) -> Headers:
        return ((b"content-type", kind), (b"x-request-id", self.request_id), *self.extra, *more)

    async def answer_json(self, status: int, value: Any) -> None:
        await self.answer(status, orjson.dumps(value))

    def told(self, failure: Failure) -> Failure:
        """As the caller may read it."""
        return structs.replace(failure, text=failure.whole) if self.reads and failure.whole else failure

    async def fail(self, failure: Failure, headers: Headers, close: bool = False) -> None:
        failure = self.told(failure)
        word = inference_error if self.scope["path"].startswith("/v2") else error_answer
        status = _PLAIN.get(failure.status, failure.status) if word is inference_error else failure.status
        body, said = word(failure, self.request_id.decode())
        if close:
            self._cycle.keep_alive = False
        await self.answer(status, body, [*headers, *said])


_PLAIN: Final = {415: 400, 422: 400}
"""The Open Inference Protocol has one status for what is wrong with a request."""


def inference_error(failure: Failure, request_id: str) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """As the Open Inference Protocol has errors."""
    text = orjson.dumps({"error": f"{failure.own or failure.code}: {failure.text}"})
    return text, error_answer(failure, request_id)[1]


def error_answer(failure: Failure, request_id: str) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Body and headers of an error."""
    fallback = "server_error" if failure.status >= 500 else "invalid_request_error"
    kind = "function_error" if failure.own else _TYPES.get(failure.status, fallback)
    error = {"code": failure.own or failure.code, "message": failure.text, "type": kind, "request_id": request_id}
    if failure.param:
        error["param"] = failure.param
    own = [(name.encode(), value.encode()) for name, value in failure.headers.items()]
    return orjson.dumps({"error": error}), own + ([(b"retry-after", b"1")] if failure.retryable else [])


def raw_error(failure: Failure) -> bytes:
    """A whole answer, for what no application has seen: it closes its connection."""
    body, headers = error_answer(failure, "")
    length = (b"content-length", b"%d" % len(body))
    headers += [(b"connection", b"close"), (b"content-type", b"application/json"), length]
    lines = b"".join(b"%s: %s\r\n" % header for header in headers)
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (
        failure.status,
        HTTPStatus(failure.status).phrase.encode(),
        lines,
        body,
    )


def foreign(kind: str) -> Pairs:
    """Of a function's answer of this type: a browser shall not take what is not JSON for a page of this node."""
    return _FOREIGN if kind else ()


def own_head(head: AnswerHead | None) -> tuple[int, Pairs]:
    """Status and headers of a function's answer."""
    if head is None:
        return 200, ()
    return head.status, tuple((name.encode(), value.encode()) for name, value in head.headers.items())


def too_large(limit_nbytes: int, why: str = "limits.body") -> HttpError:
    text = f"the body may have at most {size(limit_nbytes)} ({why}); send less"
    return refuse(413, "body_too_large", text, close=True)


def foreign_coding(coding: bytes, do: str) -> HttpError:
    text = f"Content-Encoding is {coding[:40].decode('latin-1')!r}; {do}"
    failure = Failure(code="content_encoding", status=415, text=text)
    return HttpError(failure, close=True, headers=[(b"accept-encoding", b"gzip, deflate")])


@contextmanager
def receiving(bodies: Bodies, owner: str = "") -> Iterator[Body]:
    """A body that comes in; one that does not come whole is closed. Raises HttpError if there is no room for it."""
    body = Body(bodies, owner)
    try:
        yield body
    except BaseException as error:
        body.close()
        if isinstance(error, NoRoom):
            most = size(bodies.budget_nbytes)
            whose = f", or those of tenant {owner!r} their part" if bodies.part_nbytes < bodies.budget_nbytes else ""
            text = f"bodies of requests have taken all of their {most} (limits.bodies){whose}; send it again later"
            raise HttpError(Failure(code="bodies_full", status=503, text=text, retryable=True), close=True) from None
        raise
