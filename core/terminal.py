"""Untrusted text on somebody's terminal: it is shown, and not obeyed. A function's log, its errors and its answers may
have sequences that change a title or a clipboard, or lines that look like the command's own.

Owns the command's two streams while it runs, so that none of its parts can forget it. JSON stays JSON: see output.py.
"""

import codecs
import json
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO, cast

_ODD: Final = re.compile(r"\r(?!\n)|[^ -~\n\r\t]")
_JOINERS: Final = "\u200c\u200d"
"""Within words of Persian, and within pictures of several signs."""


def harmless(text: str) -> str:
    """Python's escapes in the place of characters that a terminal obeys."""
    return text if text.isascii() and text.isprintable() else _ODD.sub(_shown, text)


def harmless_json(text: str) -> str:
    """The same JSON."""
    return _ODD.sub(_escaped, text)


def _shown(match: re.Match[str]) -> str:
    return match[0] if _is_shown(match[0]) else repr(match[0])[1:-1]


def _escaped(match: re.Match[str]) -> str:
    if match[0] == "\r":  # between values: in one, it cannot be
        return " "
    return match[0] if _is_shown(match[0]) else json.dumps(match[0])[1:-1]


def _is_shown(char: str) -> bool:
    """Whether a terminal does no more than to show it. Of spaces there are many."""
    return char.isprintable() or char in _JOINERS or unicodedata.category(char) == "Zs"


class _HarmlessBytes:
    """The same for bytes, which come in pieces that may end within a character."""

    def __init__(self, beneath: TextIO) -> None:
        self._beneath = beneath
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def write(self, data: bytes) -> int:
        self._beneath.flush()
        self._beneath.buffer.write(harmless(self._decoder.decode(data)).encode())
        return len(data)

    def flush(self) -> None:
        self._beneath.buffer.flush()


class _HarmlessText:
    """A stream of text over one that a person may look at."""

    def __init__(self, beneath: TextIO) -> None:
        self.beneath = beneath
        self.buffer = _HarmlessBytes(beneath)

    def write(self, text: str) -> int:
        self.beneath.write(harmless(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


def own(stream: TextIO) -> TextIO:
    """For what the command itself tells a terminal to do, and for bytes that go to a file."""
    return cast(TextIO, getattr(stream, "beneath", stream))


@contextmanager
def harmless_streams() -> Iterator[None]:
    """Whatever is printed meanwhile."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _HarmlessText(own(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
