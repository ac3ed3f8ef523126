"""Statuses, headers and public errors that a function sets for its answer beyond the value. Pure.

An error is meant for the client if it is a PublicError, or if its class is of the function's own files or of a web
framework and it has a status of 400 to 499. Exceptions of other libraries have such a status too, when a service that
the function called has refused: that says nothing of the function's client.
"""

import sys
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import orjson

from dormouse.client_shim.instance import answer_bodies
from dormouse.client_shim.instance.codec import BadResponse
from dormouse.core import answerhead
from dormouse.core.answers import PublicError, Response
from dormouse.schemas.messages import AnswerHead

FRAMEWORKS: Final = ("starlette", "fastapi", "litestar", "quart", "sanic", "aiohttp.web_exceptions")

_REPLACED: Final = ("content-length", "content-type")
"""Headers that frameworks set beside the body: the node sends its length, and ``kind`` is its type."""

_PHRASES: Final = {each.value: each.phrase for each in HTTPStatus}


class PublicWord(NamedTuple):
    """An error as reported to the client."""

    text: str
    head: AnswerHead


def response_of(value: Any) -> Response | None:
    """The result of handle(), if it is more than a value. Raises BadResponse."""
    if isinstance(value, Response):
        return value
    framework = sys.modules.get("starlette.responses")  # a function with a response has imported it
    if framework is not None and isinstance(value, framework.Response):
        if not hasattr(value, "body"):
            raise BadResponse(f"handle() returned a {type(value).__name__}: yield the parts, or return Response(parts)")
        return Response(bytes(value.body), value.status_code, dict(value.headers))
    if isinstance(value, tuple) and len(value) in (2, 3) and type(value[1]) is int:
        least = 100 if len(value) == 3 and isinstance(value[2], Mapping) else 400
        if least <= value[1] <= 599 and (least == 100 or isinstance(value[0], Mapping | bytes | bytearray)):
            raise BadResponse(
                f"handle() returned a tuple with {value[1]}: `from dormouse import Response` and return "
                f"Response(body, status={value[1]}, headers={{...}}), or a list if a list is meant"
            )
    return None


def head_of(response: Response) -> AnswerHead | None:
    """None if there is nothing to say. Raises BadResponse."""
    head = _checked("answered with", response.status, response.headers, 200)
    return None if head == AnswerHead(status=200) else head


def kind_of(response: Response) -> str:
    """Its content type; "" if it does not say. Raises BadResponse."""
    said = {str(name).lower(): str(value) for name, value in response.headers.items()}
    kind = response.kind or said.get("content-type", "")
    if kind and not answer_bodies.TYPE.fullmatch(kind):
        raise BadResponse(f"handle() answered with the type {kind[:80]!r}: name one such as 'text/plain'")
    return "" if kind == "application/json" else kind


def word_of(error: BaseException, folder: str) -> PublicWord | None:
    """``folder`` has the function's files. None: it is an error like any other. Raises BadResponse."""
    if isinstance(error, PublicError):
        status, code = error.status, error.code
        if code and not answerhead.CODE.fullmatch(code):
            raise BadResponse(f"PublicError has the code {code[:80]!r}: at most 64 letters, digits, '_', '-' and '.'")
    elif _meant(type(error), folder) and (found := _status(error)) is not None:
        status, code = found, getattr(error, "code", "")
    else:
        return None
    head = _checked("raised an error with", status, getattr(error, "headers", None) or {}, 400)
    detail = getattr(error, "detail", None)
    said = str(error) if detail is None else detail if isinstance(detail, str) else _json(detail)
    phrase = _PHRASES.get(status, f"status {status}")
    own = code if isinstance(code, str) and answerhead.CODE.fullmatch(code) else _word(phrase)
    text = said.encode(errors="backslashreplace").decode() or phrase
    return PublicWord(text, AnswerHead(status=head.status, headers=head.headers, code=own))


def _meant(kind: type, folder: str) -> bool:
    """Whether such an exception is the function's word, and not one that a library has for it."""
    for each in kind.__mro__:
        name = str(each.__module__)
        if any(name == root or name.startswith(f"{root}.") for root in FRAMEWORKS):
            return True
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if folder and file.startswith(f"{folder}/") and "/site-packages/" not in file:
            return True
    return False


def _status(error: BaseException) -> int | None:
    for name in ("status_code", "status"):
        found = getattr(error, name, None)
        if isinstance(found, int) and 400 <= found <= 499:
            return int(found)
    return None


def _checked(what: str, status: Any, headers: Any, least: int) -> AnswerHead:
    """Raises BadResponse."""
    pairs = [(str(name).lower(), str(value)) for name, value in dict(headers).items()]
    found = {name: value for name, value in pairs if name not in _REPLACED}
    if not isinstance(status, int) or isinstance(status, bool):
        raise BadResponse(f"handle() {what} the status {status!r:.80}, which is no number")
    if wrong := answerhead.wrong(int(status), found, least):
        raise BadResponse(f"handle() {what} {wrong}")
    return AnswerHead(status=int(status), headers=found)


def _word(phrase: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in phrase.lower())


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return str(value)
