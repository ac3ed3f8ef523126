"""Outcomes of requests, minute by minute, for an hour: rings of counts, of one size under any load. Pure: no I/O, no
clock.

Minutes are numbered by the caller's clock. Those before the router's start are not known: every view of this says so.
"""

from array import array
from collections.abc import Iterable
from operator import add
from typing import Final

IN_TIME, LATE, FAILED, OTHER = range(4)
"""Of an answer; OTHER: turned away, given up by its client, or malformed."""

KINDS: Final = 4
MINUTE_S: Final = 60.0
KEPT: Final = 60
"""Minutes, the one that runs included."""

_NONE: Final = array("I", [0] * KINDS)


class Minutes:
    """960 bytes."""

    __slots__ = ("_counts", "_minute")

    def __init__(self) -> None:
        self._counts = _NONE * KEPT  # a minute's place is its number modulo KEPT
        self._minute = -1  # the newest that has a place

    def add(self, kind: int, now_s: float) -> None:
        minute = int(now_s // MINUTE_S)
        if minute != self._minute:
            self._turn(minute)
        self._counts[minute % KEPT * KINDS + kind] += 1

    def _turn(self, minute: int) -> None:
        for passed in range(max(self._minute + 1, minute - KEPT + 1), minute + 1):
            place = passed % KEPT * KINDS
            self._counts[place : place + KINDS] = _NONE
        self._minute = minute

    def kept(self, now_s: float) -> "array[int]":
        """Those of the last hour, each in its place."""
        self._turn(int(now_s // MINUTE_S))
        return self._counts


def together(rings: Iterable[Minutes], now_s: float) -> dict[str, list[int]]:
    """Of all of these, how many there were of each kind, by minute, for JSON; a minute without any is left out."""
    newest, sums = int(now_s // MINUTE_S), [0] * (KEPT * KINDS)
    for ring in rings:
        sums = list(map(add, sums, ring.kept(now_s)))
    places = ((minute, minute % KEPT * KINDS) for minute in range(max(0, newest - KEPT + 1), newest + 1))
    return {str(minute): counts for minute, at in places if any(counts := sums[at : at + KINDS])}
