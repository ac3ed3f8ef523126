"""The work of each method of both clients: pure. The clients differ only in that one of them awaits its sends.

A call is a generator, as in wire.py; its return value is the method's.
"""

import time
import uuid
from collections.abc import Generator, Mapping
from typing import Any, Final, TypeVar

from dormouse.client import wire
from dormouse.client.errors import ApiError, BadAnswer
from dormouse.client.wire import Again, Came, Rest, ToSend

T = TypeVar("T")
Call = Generator[ToSend | Rest, Came | None, T]

RETRIES: Final = 5


class Calls:
    """Of one client. ``retries``: how often each is sent again at most."""

    def __init__(self, retries: int) -> None:
        self._retries = retries

    def again(self, timeout_s: float | None = None, whole: bool = False) -> Again:
        return Again(self._retries, None if timeout_s is None else time.monotonic() + timeout_s, whole)

    def invoke(
        self, function: str, request: Any, timeout_s: float | None, key: str | None, headers: Mapping[str, str] | None
    ) -> Call[Any]:
        said = {**(headers or {}), **({"Idempotency-Key": key} if key else {})}
        again = self.again(timeout_s, whole=key is not None)
        return wire.decoded((yield from wire.calling(wire.sent(function, request, said), again, time.monotonic)))

    def infer(
        self,
        function: str,
        tensors: Mapping[str, Any],
        outputs: list[str] | None,
        timeout_s: float | None,
        headers: Mapping[str, str] | None,
    ) -> Call[dict[str, Any]]:
        from dormouse.client import tensors as arrays  # imports numpy

        send = arrays.sent(function, tensors, outputs, headers or {})
        return arrays.decoded((yield from wire.calling(send, self.again(timeout_s), time.monotonic)))

    def submit(
        self, function: str, request: Any, timeout_s: float | None, key: str | None, headers: Mapping[str, str] | None
    ) -> Call[str]:
        """The job's id."""
        said = {**(headers or {}), "Prefer": "respond-async", "Idempotency-Key": key or str(uuid.uuid4())}
        again = self.again(timeout_s, whole=True)
        told = wire.decoded((yield from wire.calling(wire.sent(function, request, said), again, time.monotonic)))
        return str(_job(told)["id"])

    def result(self, job: str, timeout_s: float | None) -> Call[Any]:
        again = self.again(timeout_s, whole=True)
        return wire.decoded((yield from wire.waiting(job, again, time.monotonic)))

    def job(self, job: str, method: str) -> Call[dict[str, Any]]:
        send = ToSend(method, wire.job_path(job))
        return _job(wire.decoded((yield from wire.calling(send, self.again(whole=True), time.monotonic))))

    def ready(self) -> Call[bool]:
        try:
            yield from wire.calling(ToSend("GET", "/readyz"), Again(0, None), time.monotonic)
        except (ApiError, BadAnswer):
            return False
        return True


def _job(told: Any) -> dict[str, Any]:
    if not isinstance(told, dict) or not isinstance(told.get("id"), str):
        raise BadAnswer("what answers here knows no jobs; is it an older node?")
    return told
