"""The written bytes of a storage: a set of ranges, merged as they meet; pure."""

import bisect
from typing import Final

MAX_RANGES: Final = 4096
"""Ranges that are kept apart. Uploads come in a row, so there is one; a storage with more scattered ranges is hashed at
Commit instead of as soon as it is complete.
"""


class Coverage:
    """Written bytes of ``[0, nbytes)``."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges: list[tuple[int, int]] = []  # (start, end), sorted, apart
        self._lost = False

    @property
    def empty(self) -> bool:
        return not self._ranges and not self._lost

    @property
    def complete(self) -> bool:
        return self._nbytes == 0 or self._ranges == [(0, self._nbytes)]

    def add(self, offset: int, nbytes: int) -> None:
        if nbytes == 0 or self._lost:
            return
        start, end = offset, offset + nbytes
        first = bisect.bisect_left(self._ranges, start, key=lambda span: span[1])
        last = bisect.bisect_right(self._ranges, end, key=lambda span: span[0])
        if first < last:
            start = min(start, self._ranges[first][0])
            end = max(end, self._ranges[last - 1][1])
        self._ranges[first:last] = [(start, end)]
        if len(self._ranges) > MAX_RANGES:
            self._lost = True
            self._ranges.clear()
