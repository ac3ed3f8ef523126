"""Classes that a function's file may import to return more than a value: the status and headers of an answer, and an
error that is meant for the caller.

::

    from dormouse import PublicError, Response

    def handle(state, request):
        if request["id"] not in state:
            raise PublicError(404, "there is no such image", code="no_such_image")
        return Response({"id": request["id"]}, status=201, headers={"cache-control": "no-store"})

Neither decides anything: the values are checked where the answer is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Response:
    """``body`` is whatever ``handle`` may return, also a generator. ``kind`` is its content type, if it is not the one
    that the body has by itself; text of a kind is sent as text.
    """

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""


class PublicError(Exception):
    """A mistake of who has asked: answered with this status (400 to 499), and not counted as one of the function's."""

    def __init__(
        self, status: int, message: str = "", *, code: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, dict(headers or {})
