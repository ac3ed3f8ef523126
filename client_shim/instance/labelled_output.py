"""Labels the standard output and error of an instance that has several requests at once: each request's output bears
its number (core/loglabels.py), whether by `print`, through `logging` or as bytes.

A line of text is of one request: `print` writes it in parts, between which another thread may print. Each write to the
pipe has its label and is short enough to be whole there.
"""

import io
import logging
import os
import select
import sys
import threading
from typing import Any, Final, TextIO

from dormouse.client_shim.instance import context
from dormouse.core.loglabels import NOBODYS

MAX_TEXTS: Final = 1024
"""Of one file, that wait for their line's end."""


class _LabelledFile(io.FileIO):
    """Of the text that comes next."""

    label = b""

    def write(self, data: Any) -> int:
        head, tail = (self.label, NOBODYS) if self.label else (b"", b"")
        text = memoryview(data)[: select.PIPE_BUF - len(head) - len(tail)]
        done = super().write(b"".join((head, text, tail)))
        return min(max(0, done - len(head)), len(text))


class _LabelledBuffer(io.BufferedWriter):
    """Keeps each request's text until that is flushed, which a text file does at the end of a line; of all requests
    when it is closed.
    """

    def __init__(self, file: _LabelledFile) -> None:
        super().__init__(file)
        self._file = file
        self._forked()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._lock = threading.RLock()  # else another thread's, which is not there
        self._texts = dict[bytes, bytearray]()

    def write(self, data: Any) -> int:
        with self._lock:
            if (label := context.label()) not in self._texts and len(self._texts) >= MAX_TEXTS:
                self._flush_all()  # from threads of requests that have ended
            text = self._texts.setdefault(label, bytearray())
            text += data
            if len(text) >= io.DEFAULT_BUFFER_SIZE:
                self._flush(label)
            return memoryview(data).nbytes

    def flush(self) -> None:
        with self._lock:
            self._flush(context.label())

    def close(self) -> None:
        with self._lock:
            self._flush_all()
            super().close()

    def _flush_all(self) -> None:
        for label in tuple(self._texts):
            self._flush(label)

    def _flush(self, label: bytes) -> None:
        if text := self._texts.pop(label, None):
            self._file.label = label
            super().write(text)
            super().flush()


def install() -> None:
    """In the place of both; also of handlers of ``logging`` that have been made for them."""
    for name in ("stdout", "stderr"):
        before, after = {getattr(sys, name), getattr(sys, f"__{name}__")}, _opened(getattr(sys, name).fileno())
        setattr(sys, name, after)
        for logger in (logging.root, *logging.root.manager.loggerDict.values()):
            for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
                if isinstance(handler, logging.StreamHandler) and handler.stream in before:
                    handler.setStream(after)


def _opened(fd: int) -> TextIO:
    buffer = _LabelledBuffer(_LabelledFile(fd, "w", closefd=False))
    return io.TextIOWrapper(buffer, "utf-8", "backslashreplace", line_buffering=True, write_through=True)
