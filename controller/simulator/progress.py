"""Progress of long simulations on a terminal: one line on stderr, gone when there is something else to read."""

import shutil
import sys
import time
from typing import Final

from dormouse.core.terminal import own

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
            share = f": {done / count:.0%} of {count:,} requests"
            room = shutil.get_terminal_size().columns - 1 - len(share)  # two lines would not be emptied
            own(sys.stderr).write(f"{CLEAR}{what[: max(0, room)]}{share}")
            sys.stderr.flush()
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            own(sys.stderr).write(CLEAR)
            sys.stderr.flush()
            self._shown = False
