"""Which request is being answered, for the function's own code and its log.

``current()`` is right in tasks and, where a library copies its caller's context, in threads too.
"""

import logging
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from dormouse.schemas.messages import Run


class CurrentRequest(NamedTuple):
    """``id`` is the answer's X-Request-Id. ``traceparent`` and ``tracestate``, as W3C's Trace Context has them, are for
    what the function asks of others; "" if the request has none. All are "" outside a request.
    """

    id: str = ""
    traceparent: str = ""
    tracestate: str = ""

    @property
    def trace(self) -> str:
        """The number of the whole trace."""
        return self.traceparent[3:35]

    def __str__(self) -> str:
        return f"request {self.id}" + (f" of trace {self.trace}" if self.trace else "")


OUTSIDE: Final = CurrentRequest()

_CURRENT: Final[ContextVar[CurrentRequest]] = ContextVar("dormouse_request", default=OUTSIDE)


def of(run: Run) -> CurrentRequest:
    return CurrentRequest(run.id, run.trace, run.tracestate)


def begin(run: Run) -> None:
    _CURRENT.set(of(run))


def end() -> None:
    _CURRENT.set(OUTSIDE)


def current() -> CurrentRequest:
    return _CURRENT.get()


def label_log_records() -> None:
    """Records of ``logging`` have ``request_id`` and ``trace_id``, for the function's own formats."""
    make = logging.getLogRecordFactory()

    def labelled(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        request = current()
        record.request_id, record.trace_id = request.id, request.trace
        return record

    logging.setLogRecordFactory(labelled)
