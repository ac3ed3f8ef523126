"""Says on a terminal how far long simulations are: one line on stderr, gone when there is something else to read."""

import sys
import time
from typing import Final

QUIET_S: Final = 1.0
"""A command shorter than this shows nothing."""

CLEAR: Final = "\r\x1b[K"
"""Empties the line that the cursor is on."""


class Progress:
    """Of one command. Shows nothing where nobody looks."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._seen = sys.stderr.isatty()
        self._shown = False

    def show(self, what: str, done: int, count: int) -> None:
        if self._seen and time.monotonic() - self._began_s >= QUIET_S:
            sys.stderr.write(f"{CLEAR}{what}: {done / count:.0%} of {count:,} requests")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write(CLEAR)
            sys.stderr.flush()
            self._shown = False
