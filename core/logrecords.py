"""Groups the lines of a function's log into records: pure. A record is a line and its continuation: indented lines, and
a traceback as Python prints it. A function prints what it likes, so each line of other text is a record of its own.

Marks in the log give the time, the instance and the request of the text that follows::

    \\x1e 2026-11-28T13:19:40.123Z <space> 3-16 <space> request's id, or ids with commas, if known \\x1f

A function's own text has no \\x1e in it: the router takes these out.
"""

import re
from collections.abc import Generator, Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple

BEGINS_MARK: Final = b"\x1e"
_MARK: Final = re.compile(rb"\x1e([^\x1e\x1f\n]*)\x1f?")
"""Or the rest of one on a full disk."""


class LineOrigin(NamedTuple):
    """When a line was printed, by which instance, during which request (of a batch: all, with commas); "" for what is
    not known.
    """

    time: str = ""
    instance: str = ""
    request: str = ""


class LogLine(NamedTuple):
    text: bytes
    origin: LineOrigin

    def told(self) -> dict[str, str]:
        return self.origin._asdict() | {"text": self.text.decode(errors="replace").rstrip("\r\n")}

    def long(self) -> bytes:
        return " ".join(part or "-" for part in self.origin).encode() + b" | " + self.text

    def has(self, text: str) -> bool:
        instance, request = self.origin[1:]
        names = (instance, request, *request.split(","))  # those of a batch
        return text.casefold() in map(str.casefold, names) or _has(self.text, text)


def mark(now_s: float, instance: str, request: str) -> bytes:
    time = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return f"\x1e{time} {instance} {request}\x1f".encode()


def unmarked(data: bytes) -> bytes:
    return _MARK.sub(b"", data)


def last_mark(data: bytes) -> bytes:
    """That goes on after this; nothing if there is none."""
    found = _MARK.match(data, max(0, data.rfind(BEGINS_MARK)))
    return b"" if found is None else found[0]


def lines_of(pieces: Iterable[bytes]) -> Generator[LogLine, None, None]:
    """Of a log with marks. A line that several printed is a line of each, with the time when that began."""
    origin = LineOrigin()
    for line in _whole_lines(pieces):
        text, begun = b"", origin
        for number, part in enumerate(_MARK.split(line)):
            if number % 2 == 0:
                text += part
                continue
            origin = _origin(part)
            if text and origin[1:] == begun[1:]:
                continue
            if text:
                yield LogLine(text + b"\n", begun)
            text, begun = b"", origin
        if text:
            yield LogLine(text, begun)


def _origin(said: bytes) -> LineOrigin:
    parts = said.decode(errors="replace").split(" ")
    return LineOrigin(*parts) if len(parts) == 3 else LineOrigin()


RECORD_LINES: Final = 2000
"""A longer one becomes several records: a log may have indented lines alone. A report of a failure has 32 KiB of text.
"""

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
        begins = self._begins(unmarked(line).rstrip(b"\r\n")) or not 0 < self._count < RECORD_LINES
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
    return [b"".join(line.text for line in record) for record in _records(data)]


def _records(data: bytes) -> list[list[LogLine]]:
    known, found = RecordLines(), list[list[LogLine]]()
    for line in lines_of((data,)):
        if known.begins(line.text):
            found.append([])
        found[-1].append(line)
    return found


def begun(before: bytes, data: bytes) -> bytes:
    """The end of ``before`` that is the beginning of ``data``'s first record; nothing if that begins with ``data``."""
    if not before or not data:
        return b""
    known, start, at = RecordLines(), 0, 0
    for line in _whole_lines((before + data[: data.find(b"\n") + 1 or None],)):
        if known.begins(line):
            start = at
        at += len(line)
    return before[start:]


def having(data: bytes, text: str) -> list[list[LogLine]]:
    """The records of a part of a log that have this text in any line, in small or capital letters, or have a line that
    was printed by the instance or during the request of that name.
    """
    return [record for record in _records(data) if any(line.has(text) for line in record)]


def searched(pieces: Iterable[bytes], text: str) -> Generator[LogLine, None, None]:
    """The same of a log that goes on, in pieces: a record as soon as it is known to have the text, and then what
    continues it.
    """
    known, record, found = RecordLines(), list[LogLine](), False
    for line in lines_of(pieces):
        if known.begins(line.text):
            record, found = [], False
        if found:
            yield line
            continue
        record.append(line)
        if found := line.has(text):
            yield from record


def _has(data: bytes, text: str) -> bool:
    return text.casefold() in data.decode(errors="replace").casefold()


def _whole_lines(pieces: Iterable[bytes]) -> Generator[bytes, None, None]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest
