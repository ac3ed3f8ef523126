"""Calls of tools in a model's text, as it comes. What only looks like a call comes out as text. Pure."""

import json
import os
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

import orjson

from dormouse.client_shim.llm.tools import MISTRAL, ToolFormat

_ALPHABET: Final = string.ascii_letters + string.digits
_BLANK: Final = " \n\r\t"


@dataclass(frozen=True)
class ToolCall:
    """``arguments``: a JSON object, as text."""

    id: str
    name: str
    arguments: str


Piece = str | ToolCall


class JsonEnd:
    """Finds where a JSON object or array ends, in text that comes in parts."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> int | None:
        """How many characters of this part belong to it, once it ends."""
        for index, sign in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif sign == "\\":
                    self._escaped = True
                elif sign == '"':
                    self._in_string = False
            elif sign == '"':
                self._in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


class ToolCallStream:
    """The answer of a model that calls tools in one form; only those of ``names`` are calls::

    text --opening--> call --its JSON ends--> after --closing, or anything else--> text
                        +-- it is no call: all of it is text --> text
    """

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form, self._names = form, names
        self._text = ""  # that was not given out
        self._step: Callable[[list[Piece], bool], bool] = self._in_text
        self._end = JsonEnd()  # of the call that has begun
        self._scanned = 0  # of the text, by it
        self._opened = ""  # what the call began with
        self._fresh = True  # nothing but blanks has come: a bare call may begin
        self._called = False

    def put(self, text: str, last: bool = False) -> list[Piece]:
        """What can be given out now."""
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces, last):
            pass
        if last:
            rest = self._opened + self._text
            if rest.strip(_BLANK) or not self._called:
                pieces.append(rest)
            self._text = self._opened = ""
        return [piece for piece in pieces if piece]

    def _in_text(self, pieces: list[Piece], last: bool) -> bool:
        form = self._form
        start = self._text.lstrip(_BLANK)
        if form.bare and self._fresh and start.startswith("{"):
            return self._open(len(self._text) - len(start))
        at = self._text.find(form.opening)
        if at < 0:
            kept = self._text[: len(self._text) - _held(self._text, form.opening)].rstrip(_BLANK)
            self._say(pieces, kept)
            return False
        after = self._text[at + len(form.opening) :]
        ready = after.lstrip(_BLANK)
        if ready.startswith("[" if form.listed else "{"):
            self._say(pieces, self._text[:at].rstrip(_BLANK))
            return self._open(len(self._text) - len(ready))
        if not ready and not last:  # what it opens is to be seen yet
            self._say(pieces, self._text[:at].rstrip(_BLANK))
            return False
        self._say(pieces, self._text[: at + len(form.opening)])
        return True

    def _say(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(text)
            self._text, self._fresh = self._text[len(text) :], False

    def _open(self, length: int) -> bool:
        """A call begins after ``length`` characters."""
        self._opened, self._text = self._text[:length], self._text[length:]
        self._end, self._scanned, self._step = JsonEnd(), 0, self._in_call
        return True

    def _in_call(self, pieces: list[Piece], last: bool) -> bool:
        size = self._end.feed(self._text[self._scanned :])
        if size is None:
            self._scanned = len(self._text)
            return False
        size += self._scanned
        body, self._text = self._text[:size], self._text[size:]
        calls = self._calls(body)
        if calls is None:
            pieces.append(self._opened + body)
            self._step = self._in_text
        else:
            pieces += calls
            self._called, self._step = True, self._after
        self._opened, self._fresh = "", False
        return True

    def _after(self, pieces: list[Piece], last: bool) -> bool:
        end = self._form.closing or ";"
        rest = self._text.lstrip(_BLANK)
        if rest.startswith(end):
            self._text, self._fresh = rest[len(end) :], not self._form.closing
        elif end.startswith(rest):  # blanks, or the end's first half: no more may come
            self._text = "" if last else self._text
            return False
        self._step = self._in_text
        return bool(self._text)

    def _calls(self, body: str) -> list[ToolCall] | None:
        """None if it is something else."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            return None
        found = [self._call(each) for each in (value if self._form.listed else [value])]
        calls = [call for call in found if call is not None]
        return calls if calls and len(calls) == len(found) else None

    def _call(self, value: Any) -> ToolCall | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
        if not isinstance(arguments, dict):
            return None
        try:
            text = orjson.dumps(arguments).decode()
        except (TypeError, ValueError):  # lone surrogates, numbers beyond 64 bits
            text = json.dumps(arguments)
        return ToolCall(self._number(), name, text)

    def _number(self) -> str:
        """Mistral's templates want nine letters and digits."""
        if self._form is MISTRAL:
            return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in os.urandom(9))
        return f"call_{os.urandom(12).hex()}"


def _held(text: str, opening: str) -> int:
    """Characters at the end that may begin it."""
    return next((n for n in range(min(len(text), len(opening) - 1), 0, -1) if opening.startswith(text[-n:])), 0)
