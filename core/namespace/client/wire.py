"""Calls on the wire, the meaning of answers, and the rule by which a call is sent again: pure, for both clients.

A call is a generator: it yields the next act, ``ToSend`` or ``Rest``, and is sent the outcome.
"""

import json
import random
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from dormouse.client.errors import (
    ApiError,
    BadAnswer,
    CallTimeout,
    ConnectionBroke,
    FunctionRefused,
    Unreached,
    kind_of,
)

JSON: Final = "application/json"
NPY: Final = "application/x-npy"
OCTETS: Final = "application/octet-stream"
SSE: Final = "text/event-stream"

MAX_PAUSE_S: Final = 60.0
WAIT_S: Final = 30
"""The time for which the node holds a query for a job that has not ended."""

SLOW_S: Final = 30.0
"""Further time that such a query may take on its way, and while the node is being restarted."""

NOT_RUN: Final = frozenset({"bodies_full", "too_many_connections"})
"""Codes of status 503 with which nothing has run."""


class ToSend(NamedTuple):
    """One request. ``timeout_s``: the call's remaining time."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    content: bytes = b""
    timeout_s: float | None = None


class Rest(NamedTuple):
    seconds: float


class HttpReply(NamedTuple):
    """``headers`` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    content: bytes


Came = HttpReply | Unreached | ConnectionBroke | CallTimeout
Steps = Generator[ToSend | Rest, Came | None, HttpReply]


@dataclass(slots=True)
class Again:
    """Limits for sending one call again: how often, and until when; ``whole``: it may be even if it has run."""

    most: int
    due_s: float | None  # by the clock of ``now_s``
    whole: bool = False
    tries: int = 0
    spread: random.Random = field(default_factory=random.Random)

    def left_s(self, now_s: float) -> float | None:
        return None if self.due_s is None else max(0.0, self.due_s - now_s)

    def pause_s(self, failure: Exception, now_s: float) -> float | None:
        """The pause before it is sent again; None: not again."""
        if isinstance(failure, ApiError):
            if failure.retry_after_s is None or isinstance(failure, FunctionRefused):
                return None
            if not (self.whole or has_not_run(failure)):
                return None
            least_s = failure.retry_after_s
        elif isinstance(failure, Unreached) or (self.whole and isinstance(failure, ConnectionBroke)):
            least_s = 0.1
        else:
            return None
        spread = 1.0 + self.spread.random() / 2  # clients that were turned away together come back apart
        pause_s = min(MAX_PAUSE_S, max(least_s, 0.1 * 2.0**self.tries) * spread)
        if self.tries >= self.most or (self.due_s is not None and now_s + pause_s >= self.due_s):
            return None
        self.tries += 1
        return pause_s


def has_not_run(error: ApiError) -> bool:
    """Whether the node says that the function has not begun."""
    return error.status in (429, 504) or error.code in NOT_RUN


def calling(send: ToSend, again: Again, clock: Any) -> Steps:
    """One call, sent until it is answered. Raises the last try's error."""
    while True:
        came = yield send._replace(timeout_s=again.left_s(clock()))
        failure: Exception
        if isinstance(came, HttpReply):
            if came.status < 400:
                return came
            failure = error_of(came)
        else:
            assert came is not None, "what was sent is answered, or was not"
            failure = came
        pause_s = again.pause_s(failure, clock())
        if pause_s is None:
            raise failure
        yield Rest(pause_s)


def waiting(job: str, again: Again, clock: Any) -> Steps:
    """Wait until a job has ended; returns its answer. Raises CallTimeout, and the error of a failed job."""
    while True:
        left_s = again.left_s(clock())
        wait_s = WAIT_S if left_s is None else min(WAIT_S, ceil(left_s))
        asked = ToSend("GET", f"{job_path(job)}/result", {"Prefer": f"wait={wait_s}"})
        answers = Again(again.most, clock() + wait_s + SLOW_S, whole=True)
        reply = yield from calling(asked, answers, clock)
        if reply.status != 202:
            return reply
        if left_s is not None and clock() >= (again.due_s or 0.0):
            raise CallTimeout(f"job {job} has not ended in time; it goes on: ask again, or cancel it")


def job_path(job: str) -> str:
    return f"/jobs/{quote(job, safe='')}"


# --- bodies


def invoke_path(function: str) -> str:
    return f"/functions/{quote(function, safe='')}/invoke"


def sent(function: str, request: Any, headers: Mapping[str, str]) -> ToSend:
    """A function's call: JSON, bytes as they are, an array as ``numpy.save`` writes it. Raises TypeError."""
    content, kind = encoded(request)
    accept = {"Accept": f"{NPY}, */*"} if kind == NPY else {}
    return ToSend("POST", invoke_path(function), {"Content-Type": kind, **accept, **headers}, content)


def encoded(request: Any) -> tuple[bytes, str]:
    """The body and its content type. Raises TypeError, ValueError."""
    if isinstance(request, bytes | bytearray | memoryview):
        return bytes(request), OCTETS
    numpy = sys.modules.get("numpy")  # a caller with an array has imported it
    if numpy is not None and isinstance(request, numpy.ndarray):
        import io

        file = io.BytesIO()
        numpy.save(file, request, allow_pickle=False)
        return file.getvalue(), NPY
    return json.dumps(request, allow_nan=False, separators=(",", ":")).encode(), JSON


def decoded(reply: HttpReply) -> Any:
    """The value of an answer: of JSON, an array, the list of a stream's events, or bytes. Raises BadAnswer."""
    kind = content_type(reply.headers)
    try:
        if kind == JSON:
            return json.loads(reply.content)
        if kind == NPY:
            return _array(reply.content)
        if kind == SSE:
            events = Events()
            return [*events.feed(reply.content), *events.end()]
    except (ValueError, RecursionError) as error:
        raise BadAnswer(f"the answer is said to be {kind} and is not: {error}") from error
    return reply.content


def _array(data: bytes) -> Any:
    """Raises ValueError."""
    import io

    import numpy

    try:
        return numpy.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # NumPy may raise anything for untrusted bytes
        raise ValueError(error) from error


def content_type(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def error_of(reply: HttpReply) -> ApiError | BadAnswer:
    """Of an answer with a status of 400 or more, or of an event with an error (status 0)."""
    try:
        error = json.loads(reply.content)["error"]
        if isinstance(error, str):  # below /v2
            code, message = error.split(": ", 1)
            error = {"code": code, "message": message, "request_id": reply.headers.get("x-request-id")}
        code, message = str(error["code"] or ""), str(error["message"])
        request_id, param, type_ = (str(error.get(key) or "") for key in ("request_id", "param", "type"))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return BadAnswer(f"an answer of status {reply.status} that is not a Dormouse node's: {reply.content[:200]!r}")
    kind = kind_of(reply.status, code, type_)
    return kind(reply.status, code, message, request_id, retry_after_s(reply.headers), param)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None


# --- streams


class Events:
    """Values of an event stream, from its bytes as they come. An error in it is raised when its value is taken."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # of a line that has not ended
        self._data: list[bytes] = []
        self._kind = b""
        self._ended = False

    def feed(self, data: bytes) -> list[Any]:
        """The values that are whole by now. Raises ApiError, BadAnswer."""
        first, *more = data.split(b"\n")
        self._rest.append(first)
        if not more:
            return []
        lines = [b"".join(self._rest), *more[:-1]]
        self._rest = [more[-1]]
        values = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"event:"):
                self._kind = line[6:].strip()
            elif not line.strip(b"\r") and self._data:
                text, kind = b"\n".join(self._data), self._kind
                self._data, self._kind = [], b""
                if kind == b"error":
                    raise error_of(HttpReply(0, {}, text))
                values.append(_value(text))
        return values

    def end(self) -> list[Any]:
        """Nothing more comes. Raises BadAnswer."""
        if any(self._rest) or self._data:
            raise BadAnswer("the stream ended in the middle of an event")
        return []


class AnswerReader:
    """Of an answer with these headers, from its bytes as they come: events, bytes, or, where it was not answered in
    parts, its one value. Raises ApiError, BadAnswer.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers, kind = headers, content_type(headers)
        self._events = Events() if kind == SSE else None
        self._raw = kind == OCTETS
        self._whole = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        if self._events is not None:
            return self._events.feed(data)
        if self._raw:
            return [data]
        self._whole += data
        return []

    def end(self) -> list[Any]:
        """Nothing more comes."""
        if self._events is not None:
            return self._events.end()
        return [] if self._raw else [decoded(HttpReply(200, self._headers, bytes(self._whole)))]


def _value(text: bytes) -> Any:
    """Events that are no JSON are text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text.decode("utf-8", errors="replace")
