"""Which lines of a function's log belong together: pure. A record is a line and what continues it: indented lines, and
a traceback as Python prints it. A function prints what it likes, so of other text each line is a record of its own.
"""

from collections.abc import Generator, Iterable
from typing import Final

RECORD_LINES: Final = 2000
"""What is longer is several records: a log may have indented lines alone. A report of a failure has 32 KiB of text."""

_TRACEBACK: Final = b"Traceback (most recent call last):"
_ANOTHER: Final = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
_PLAIN, _FRAMES, _RAISED, _LED_TO = range(4)  # what the last line was


class RecordLines:
    """Told each line of a log in turn, says whether it begins a record. As tracebacks go::

    last line       this line                     it is     begins
    any             indented                      the same  no
    plain, led to   "Traceback ...:"              frames    no
    frames, raised  "Traceback ...:"              frames    yes
    frames          other                         raised    no
    not plain       empty                         the same  no
    raised          "... following exception:"    led to    no
    else                                          plain     yes
    """

    def __init__(self) -> None:
        self._last, self._count = _PLAIN, 0

    def begins(self, line: bytes) -> bool:
        begins = self._begins(line.rstrip(b"\r\n")) or not 0 < self._count < RECORD_LINES
        self._count = 1 if begins else self._count + 1
        return begins

    def _begins(self, line: bytes) -> bool:
        last = self._last
        if line[:1] in (b" ", b"\t") or (not line and last != _PLAIN):
            return False
        if line == _TRACEBACK:
            self._last = _FRAMES
            return last in (_FRAMES, _RAISED)
        if last == _FRAMES:
            self._last = _RAISED
            return False
        if last == _RAISED and line in _ANOTHER:
            self._last = _LED_TO
            return False
        self._last = _PLAIN
        return True


def records(data: bytes) -> list[bytes]:
    """Of a part of a log; the first may lack its beginning."""
    lines, found = RecordLines(), list[list[bytes]]()
    for line in _whole_lines((data,)):
        if lines.begins(line):
            found.append([])
        found[-1].append(line)
    return [b"".join(record) for record in found]


def begun(before: bytes, data: bytes) -> bytes:
    """The end of ``before`` that is the beginning of ``data``'s first record; nothing if that begins with ``data``."""
    if not before or not data:
        return b""
    lines, start, at = RecordLines(), 0, 0
    for line in _whole_lines((before + data[: data.find(b"\n") + 1 or None],)):
        if lines.begins(line):
            start = at
        at += len(line)
    return before[start:]


def having(data: bytes, text: str) -> list[bytes]:
    """The records of a part of a log that have this text in any line, in small or capital letters."""
    return [record for record in records(data) if _has(record, text)]


def searched(pieces: Iterable[bytes], text: str) -> Generator[bytes, None, None]:
    """The same of a log that goes on, in pieces: a record as soon as it is known to have the text, and then what
    continues it.
    """
    lines, record, found = RecordLines(), b"", False
    for line in _whole_lines(pieces):
        if lines.begins(line):
            record, found = b"", False
        if found:
            yield line
            continue
        record += line
        if found := _has(line, text):
            yield record


def _has(data: bytes, text: str) -> bool:
    return text.casefold() in data.decode(errors="replace").casefold()


def _whole_lines(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest
