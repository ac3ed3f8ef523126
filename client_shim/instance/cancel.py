"""Cancelling a running request: SIGUSR1 raises RequestCancelled in the main thread, but never inside the shim.

An exception between two lines of the shim could leave its books wrong. So a signal that arrives there is held back and
sent again until the main thread is in user code or in a wait of the shim, which is a place where errors are expected.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

RETRY_S: Final = 0.001  # the shim leaves a critical section within tens of microseconds

_HERE: Final = Path(__file__).absolute().parent
_SHIM: Final = str(_HERE.parent) + os.sep
_BELOW_USER_CODE: Final = frozenset(
    str(_HERE / name) for name in ("runner.py", "handler.py", "session.py", "cancel.py")
)


class RequestCancelled(BaseException):
    """The client went away. Not an Exception, so that user code which retries on errors does not swallow it."""


class Cancellation:
    """One per process. ``armed`` while a request may be cancelled; ``word`` is the arena's control word
    (`schemas/messages/shared.py`, Arena).
    """

    def __init__(self, word: memoryview) -> None:
        self.armed = False
        self._word = word
        self._request = 0
        self._pending = False
        self._main = threading.main_thread().ident
        self._lock = threading.RLock()  # so that no signal is sent again for a request that has ended meanwhile

    def install(self) -> None:
        signal.signal(signal.SIGUSR1, self._on_signal)

    @contextmanager
    def window(self, request: int) -> Iterator[None]:
        """Within it, the main thread may be interrupted. Raises RequestCancelled if the client has left already."""
        with self._lock:
            self._pending, self.armed, self._request = False, True, request
            if self._asked():
                self._raise()
        try:
            yield
        finally:
            with self._lock:
                self._pending = self.armed = False

    def checkpoint(self) -> None:
        """Called by the shim where it is about to wait: raises if a cancellation is due."""
        if self._pending and threading.get_ident() == self._main:
            self._raise()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not (self.armed and self._asked()):
            return
        if not _inside_shim(frame):
            self._raise()
        if not self._pending:
            self._pending = True
            threading.Thread(target=self._retry, name="dormouse-cancel", daemon=True).start()

    def _asked(self) -> bool:
        return int.from_bytes(self._word, "little") == self._request

    def _raise(self) -> None:
        with self._lock:
            self.armed = self._pending = False
        raise RequestCancelled("the request was cancelled")

    def _retry(self) -> None:
        while True:
            time.sleep(RETRY_S)
            with self._lock:
                if not (self._pending and self.armed and self._main is not None):
                    return
                signal.pthread_kill(self._main, signal.SIGUSR1)


def _inside_shim(frame: FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_code.co_filename
        if name in _BELOW_USER_CODE:
            if frame.f_code.co_name != "_on_signal":
                return False
            # a signal sent again met the handler of the one before: what that one has interrupted decides
            frame = frame.f_back
            continue
        if name.startswith(_SHIM):
            return frame.f_code.co_name != "interruptible"
        frame = frame.f_back
    return False
