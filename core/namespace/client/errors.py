"""Exceptions of calls, by the node's error codes (docs/http.md has all of them). Imports nothing of the node."""

from collections.abc import Mapping
from typing import Final


class CallError(Exception):
    """Any of these."""


class Unreached(CallError):
    """No node answers there: nothing was run."""


class ConnectionBroke(CallError):
    """The connection ended before the answer did: the function may have run."""


class BadAnswer(CallError):
    """The answer is not a node's; is something else listening there?"""


class CallTimeout(CallError):
    """The call's own ``timeout`` is over. The function may have run, or still run."""


class OutsideRequest(CallError):
    """Of ``dormouse.call``: only the code that answers a request may call. A program has a Client."""


class ApiError(CallError):
    """The node answered with an error. ``code`` is stable; ``retry_after_s`` is None if it is not to be sent again."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        request_id: str = "",
        retry_after_s: float | None = None,
        param: str = "",
    ) -> None:
        super().__init__(f"{message} ({code}, status {status})")
        self.status, self.code, self.message = status, code, message
        self.request_id, self.retry_after_s, self.param = request_id, retry_after_s, param


class RequestRefused(ApiError):
    """The request is wrong: sent again, it would be again."""


class NotAllowed(ApiError):
    """There is no such key, or it may not do this."""


class NotThere(ApiError):
    """There is no such function, job or route, or the caller may not see it."""


class NodeBusy(ApiError):
    """Too many requests wait, or were sent: try later. Nothing was run."""


class FunctionFailed(ApiError):
    """The function's own code raised, or met a limit; its log has the whole story."""


class FunctionRefused(ApiError):
    """The function ran, and answered with an error of its own: it defines the meaning of its status and ``code``."""


class OutOfRoom(ApiError):
    """There is no room on the GPU, the host or the disk."""


class TimedOut(ApiError):
    """The function's time limit is over."""


class Unavailable(ApiError):
    """Something of the node died, starts, or is being replaced."""


class CallCancelled(ApiError):
    """The request or the job was cancelled."""


_BY_CODE: Final[Mapping[str, type[ApiError]]] = {
    "function_raised": FunctionFailed,
    "bad_response": FunctionFailed,
    "limit_exceeded": FunctionFailed,
    "sandbox_died": FunctionFailed,
    "violation": FunctionFailed,
    "cancelled": CallCancelled,
    "bodies_full": NodeBusy,
    "too_many_connections": NodeBusy,
    "timed_out": TimedOut,  # in a stream no status comes with it
    "out_of_memory": OutOfRoom,
}

_BY_STATUS: Final[Mapping[int, type[ApiError]]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotThere,
    429: NodeBusy,
    503: Unavailable,
    504: TimedOut,
    507: OutOfRoom,
}


OF_FUNCTION: Final = "function_error"
"""The `type` of a function's own errors."""


def kind_of(status: int, code: str, type_: str = "") -> type[ApiError]:
    if type_ == OF_FUNCTION:
        return FunctionRefused
    fallback = RequestRefused if 400 <= status < 500 else Unavailable
    return _BY_CODE.get(code) or _BY_STATUS.get(status, fallback)
