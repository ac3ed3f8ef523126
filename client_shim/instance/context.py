"""The request that is being answered, for the function's own code and its log.

``current()`` is right in tasks, in threads that a request starts, and in work that it gives to a thread pool.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from dormouse.client_shim.patches import patch
from dormouse.core import loglabels
from dormouse.schemas.messages import Run


class CurrentRequest(NamedTuple):
    """``id`` is the answer's X-Request-Id. ``traceparent`` and ``tracestate``, as W3C's Trace Context has them, are for
    the function's own requests to others; "" if the request has none. All are "" outside a request.
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


class _Handled(NamedTuple):
    """``label`` marks the output printed meanwhile; b"" if that is no request's."""

    request: CurrentRequest = OUTSIDE
    label: bytes = b""
    number: int = 0  # of Run; 0: no request's, or several requests'


_NOBODY: Final = _Handled()

_HANDLED: Final[ContextVar[_Handled | None]] = ContextVar("dormouse_request", default=None)

_STARTED_FOR: Final = "_dormouse_started_for"
"""Of a thread."""


def of(run: Run) -> CurrentRequest:
    return CurrentRequest(run.id, run.trace, run.tracestate)


def begin(run: Run) -> None:
    _HANDLED.set(_Handled(of(run), loglabels.label([run.request]), run.request))


def begin_together(runs: Sequence[Run]) -> None:
    """Of several, none is the current one; printed output belongs to all."""
    _HANDLED.set(_Handled(OUTSIDE, loglabels.label(run.request for run in runs)))


def end() -> None:
    _HANDLED.set(_NOBODY)


def current() -> CurrentRequest:
    return _handled().request


def number() -> int:
    """Of the request, as Run has it; 0 outside a request."""
    return _handled().number


def label() -> bytes:
    return _handled().label


def _handled() -> _Handled:
    found = _HANDLED.get()
    return getattr(threading.current_thread(), _STARTED_FOR, _NOBODY) if found is None else found


def carry_into_threads() -> None:
    """A thread is of the request that starts it, and a pool's for as long as it does something of a request."""
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    def started(thread: threading.Thread) -> None:
        setattr(thread, _STARTED_FOR, _handled())
        start(thread)

    def submitted(pool: ThreadPoolExecutor, code: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return submit(pool, _carried, _handled(), code, *args, **kwargs)

    patch(threading.Thread, "start", started)
    patch(ThreadPoolExecutor, "submit", submitted)


def _carried(handled: _Handled, code: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before = _HANDLED.set(handled)
    try:
        return code(*args, **kwargs)
    finally:
        _HANDLED.reset(before)


def label_log_records() -> None:
    """Records of ``logging`` have ``request_id`` and ``trace_id``, for the function's own formats."""
    make = logging.getLogRecordFactory()

    def labelled(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        request = current()
        record.request_id, record.trace_id = request.id, request.trace
        return record

    logging.setLogRecordFactory(labelled)
