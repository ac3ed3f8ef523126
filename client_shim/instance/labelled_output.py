"""The standard output and error of an instance that has several requests at once: what is printed for a request bears
its number (core/loglabels.py), whether by `print`, through `logging` or as bytes.

A buffer has text of one request at a time. Each write to the pipe has its label and is short enough to be whole there.
"""

import io
import logging
import os
import select
import sys
import threading
from typing import Any, TextIO

from dormouse.client_shim.instance import context
from dormouse.core.loglabels import NOBODYS


class _LabelledFile(io.FileIO):
    """Of the text that comes next."""

    label = b""

    def write(self, data: Any) -> int:
        head, tail = (self.label, NOBODYS) if self.label else (b"", b"")
        text = memoryview(data)[: select.PIPE_BUF - len(head) - len(tail)]
        done = super().write(b"".join((head, text, tail)))
        return min(max(0, done - len(head)), len(text))


class _LabelledBuffer(io.BufferedWriter):
    def __init__(self, file: _LabelledFile) -> None:
        super().__init__(file)
        self._file = file
        self._forked()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._lock = threading.RLock()  # else another thread's, which is not there

    def write(self, data: Any) -> int:
        with self._lock:
            if (label := context.label()) != self._file.label:
                self.flush()
                self._file.label = label
            return super().write(data)


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
