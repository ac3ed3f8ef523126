"""Reports a user's exception: a stable code, and the traceback without our own frames.

Pure: no I/O. An exception crosses processes as text, never as an object.
"""

import errno
import os
import traceback
from pathlib import Path
from typing import Final

import torch

from dormouse.client_shim.instance.codec import BadRequest, BadResponse
from dormouse.client_shim.instance.context import CurrentRequest
from dormouse.client_shim.llm.requests import RefusedRequest
from dormouse.client_shim.stream.failures import ExecutorLost, LeaseLost, ModelDamaged, SeatLost, WakeFailed

MAX_CHARS: Final = 32 << 10
"""Of a report: enough for a deep recursion's ends, and small enough to travel with the answer."""

CLIENTS: Final = (
    *("bad_json", "bad_body", "content_type", "invalid_request"),
    "function_refused",
    *("invalid_value", "unsupported_parameter", "context_length_exceeded"),
)
"""Codes of the client's mistakes."""

_OURS: Final = str(Path(__file__).absolute().parents[1]) + os.sep


def code(error: BaseException, otherwise: str) -> str:
    """The failure's code; ``otherwise`` if it is simply an error of the user's code."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:  # user code may wrap our exceptions
        seen.add(id(cause))
        if isinstance(cause, SeatLost):
            return "seat_lost"
        if isinstance(cause, ExecutorLost | LeaseLost):
            return "executor_lost"
        if isinstance(cause, WakeFailed):
            return "model_damaged" if isinstance(cause, ModelDamaged) else "wake_failed"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out_of_memory"
    if isinstance(error, BadResponse):
        return "bad_response"
    if isinstance(error, BadRequest):
        return error.code
    return error.code if isinstance(error, RefusedRequest) else otherwise


def param(error: BaseException) -> str:
    """The field of the request that is wrong, if it is known."""
    return error.param if isinstance(error, RefusedRequest | BadRequest) else ""


_LIMITS: Final = {
    errno.EMFILE: "open_files",
    errno.ENOSPC: "scratch",
    errno.EDQUOT: "scratch",
}


def limit(error: BaseException) -> str:
    """The limit of the sandbox, by its setting, that an error of the user's code shows; "" if none does."""
    text = _text(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't allocate memory" in text):
        return "memory"
    if isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN:
        return "processes"
    if isinstance(error, RuntimeError) and text == "can't start new thread":
        return "processes"
    return _LIMITS.get(error.errno or 0, "") if isinstance(error, OSError) else ""


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # user code
        return ""


def describe(error: BaseException, where: str = "") -> str:
    """The traceback as the user would see it, or just the sentence where there is nothing to trace. It can travel."""
    text = _described(error, where).encode(errors="backslashreplace").decode()  # half a surrogate pair is no text
    if len(text) > MAX_CHARS:
        half = MAX_CHARS // 2
        text = f"{text[:half]}\n[{len(text) - MAX_CHARS} characters left out]\n{text[-half:]}"
    return text


def record(request: CurrentRequest, text: str) -> str:
    """The failure of a request, as the function's log has it: indented, so that all of it is one record of the log
    (core/logrecords.py), whatever lines the exception's own text has.
    """
    return f"dormouse: {request} failed\n{_indented(text)}"


def together(count: int, text: str) -> str:
    """The same for a batch that failed, of which no request may."""
    return f"dormouse: a batch of {count} failed; each of its requests is tried alone\n{_indented(text)}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _described(error: BaseException, where: str) -> str:
    if isinstance(error, BadRequest | BadResponse | RefusedRequest):
        return _text(error)
    try:
        summary = traceback.TracebackException(type(error), error, error.__traceback__)
        _strip(summary)
        text = "".join(summary.format()).rstrip()
    except Exception as other:  # user code: exceptions make their own text
        text = f"{type(error).__qualname__}, of which nothing more can be said: that raised {type(other).__qualname__}"
    if isinstance(error, SystemExit):
        text += f"\n{where or 'the module'} asked to exit; return a value or raise an error instead"
    return text


def _strip(summary: traceback.TracebackException) -> None:
    """Of it, and of all that led to it: there may be thousands, and each is there once, also of those in a circle."""
    left = [summary]
    while left:
        each = left.pop()
        kept = [frame for frame in each.stack if not frame.filename.startswith(_OURS)]
        each.stack = traceback.StackSummary.from_list(kept)
        left += [other for other in (each.__cause__, each.__context__, *(each.exceptions or ())) if other is not None]
