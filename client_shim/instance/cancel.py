"""Cancelling a running request: SIGUSR1 raises RequestCancelled in the main thread, but only in user code and in waits
of the shim, which are places where errors are expected.

An exception between two lines of the shim could leave its state inconsistent. So a signal that arrives there is held
back and sent again. The same is true of the event loop: it could lose a callback, and never end. So a signal that
arrives there cancels the task, which makes the loop end in its own way.

Python only prints an exception in a ``__del__`` or in a callback of a weak reference, and goes on. So such a signal is
sent again, too.
"""

import asyncio
import inspect
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Final

from dormouse.client_shim.instance.coroutines import Coroutines

RETRY_S: Final = 0.001  # the shim leaves a critical section within tens of microseconds

_HERE: Final = Path(__file__).absolute().parent
_SHIM: Final = str(_HERE.parent) + os.sep
_BELOW_USER_CODE: Final = frozenset(
    str(_HERE / name) for name in ("runner.py", "user_function.py", "handler.py", "session.py")
)
_COROUTINES: Final = str(_HERE / "coroutines.py")
_ASYNCIO: Final = os.path.dirname(asyncio.__file__) + os.sep
_HELPERS: Final = (sysconfig.get_path("stdlib") + os.sep, "<frozen")  # called by asyncio, and by user code too
_INSTALLED: Final = "-packages" + os.sep


class RequestCancelled(BaseException):
    """The client went away. Not an Exception, so that user code which retries on errors does not swallow it."""


class SignalPlace(Enum):
    """The place of the main thread when a signal arrived."""

    CODE = auto()
    """In user code, or between two calls of it, or in a wait of the shim."""
    LOOP = auto()
    """In the event loop: between two tasks, or called by one."""
    RECORDER = auto()


class Cancellation:
    """One per process. ``armed`` while a request may be cancelled; ``word`` is the arena's control word
    (`schemas/messages/shared.py`, Arena).
    """

    def __init__(self, word: memoryview, coroutines: Coroutines) -> None:
        self.armed = False
        self._word, self._coroutines = word, coroutines
        self._show = sys.unraisablehook
        self._request: int | None = None
        self._pending = False
        self._main = threading.main_thread().ident
        self._lock = threading.RLock()  # so that no signal is sent again for a request that has ended meanwhile

    def install(self) -> None:
        signal.signal(signal.SIGUSR1, self._on_signal)
        self._show, sys.unraisablehook = sys.unraisablehook, self._unraisable

    @contextmanager
    def window(self, request: int) -> Iterator[None]:
        """Within it, the main thread may be interrupted. Raises RequestCancelled if the client has gone already."""
        with self._lock:
            self._pending, self.armed, self._request = False, True, request
            if self._asked():
                self._raise()
        try:
            yield
        finally:
            with self._lock:
                self._pending = self.armed = False
                self._request = None

    def checkpoint(self) -> None:
        """Called by the shim where it is about to wait: raises if a cancellation is due."""
        if self._pending and threading.get_ident() == self._main:
            self._raise()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not (self.armed and self._asked()):
            return
        place = _place(frame)
        if place is SignalPlace.CODE:
            self._raise()
        if place is SignalPlace.RECORDER or not self._cancel_task():
            self._hold_back()

    def _asked(self) -> bool:
        return int.from_bytes(self._word, "little") == self._request

    def _raise(self) -> None:
        if self._coroutines.aside:  # the request's task may never look at this one's exception
            self._cancel_task()
        self._disarm()
        raise _cancelled()

    def _cancel_task(self) -> bool:
        if not self._coroutines.cancel(_cancelled()):
            return False
        self._disarm()
        return True

    def _disarm(self) -> None:
        with self._lock:
            self.armed = self._pending = False

    def _hold_back(self) -> None:
        if not self._pending:
            self._pending = True
            threading.Thread(target=self._retry, name="dormouse-cancel", daemon=True).start()

    def _unraisable(self, what: "sys.UnraisableHookArgs") -> None:
        if not isinstance(what.exc_value, RequestCancelled):
            self._show(what)
        elif self._asked():
            self.armed = True
            self._hold_back()

    def _retry(self) -> None:
        while True:
            time.sleep(RETRY_S)
            with self._lock:
                if not (self._pending and self.armed and self._main is not None):
                    return
                signal.pthread_kill(self._main, signal.SIGUSR1)


def _cancelled() -> RequestCancelled:
    return RequestCancelled("the request was cancelled")


def _place(frame: FrameType | None) -> SignalPlace:
    """The place of ``frame``, by itself and its callers."""
    inner: SignalPlace | None = None  # of the innermost code that is not a mere helper's
    run = False  # by a handle of the loop's, as all tasks and callbacks are
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_name
        if name == __file__:
            if function in ("window", "_unraisable"):
                return SignalPlace.CODE if function == "window" else SignalPlace.RECORDER
            inner = None  # the code that was interrupted before decides
        elif name == _COROUTINES:
            return inner or SignalPlace.LOOP
        elif name in _BELOW_USER_CODE:
            return SignalPlace.CODE
        elif name.startswith(_SHIM):
            return SignalPlace.CODE if function == "interruptible" else SignalPlace.RECORDER
        elif name.startswith(_ASYNCIO):
            run = run or function == "_run"
            if inner is None or not (run or frame.f_code.co_flags & inspect.CO_COROUTINE):
                inner = SignalPlace.LOOP  # it has called others in the midst of its work, such as a hook of `sys.audit`
        elif not name.startswith(_HELPERS) or _INSTALLED in name:
            inner = inner or SignalPlace.CODE
        frame = frame.f_back
    return SignalPlace.CODE
