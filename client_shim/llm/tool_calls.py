"""Finds tool calls in a model's text as it comes. Text that only looks like a call stays text. Pure."""

import json
import os
import re
import string
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

from dormouse.client_shim.llm.tools import MISTRAL, ToolFormat

_ALPHABET: Final = string.ascii_letters + string.digits
_BLANK: Final = " \n\r\t"


@dataclass(frozen=True)
class CallBegun:
    id: str
    name: str


@dataclass(frozen=True)
class CallPart:
    """The next of a call's arguments, which are a JSON object as text."""

    text: str


@dataclass(frozen=True)
class CallEnded:
    """The call is complete."""


Piece = str | CallBegun | CallPart | CallEnded


class JsonEnd:
    """Finds where a JSON object or array ends, in text that comes in parts."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def feed(self, text: str) -> int | None:
        """The number of characters of this part that belong to it, once it ends."""
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

    If an opening is ``certain`` to begin a valid call, the arguments are given out as they come; else when the call is
    complete. A grammar makes it certain.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], certain: bool = False) -> None:
        self._form, self._names, self._certain = form, names, certain
        self._head = re.compile(rf'\{{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"{form.key}"\s*:\s*')
        self._text = ""  # that was not given out
        self._step: Callable[[list[Piece], bool], bool] = self._in_text
        self._end = JsonEnd()  # of the call that has begun
        self._scanned = 0  # of the text, by it
        self._opened = ""  # the text that began the call
        self._fresh = True  # nothing but blanks has come: a bare call may begin
        self._called = False

    def put(self, text: str, last: bool = False) -> list[Piece]:
        """The text and the calls that can be given out now."""
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
        if not ready and not last:  # the thing that it opens is not known yet
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
        self._end, self._scanned = JsonEnd(), 0
        self._step = self._in_head if self._certain else self._in_call
        return True

    def _in_head(self, pieces: list[Piece], last: bool) -> bool:
        head = self._head.match(self._text)
        if head is None or head[1] not in self._names:
            return False
        pieces.append(CallBegun(self._number(), head[1]))
        self._text, self._opened, self._fresh = self._text[head.end() :], "", False
        self._called, self._step = True, self._in_arguments
        return True

    def _in_arguments(self, pieces: list[Piece], last: bool) -> bool:
        size = self._end.feed(self._text)
        if self._text:
            pieces.append(CallPart(self._text[:size]))
        self._text = "" if size is None else self._text[size:]
        if size is not None:
            self._step = self._in_tail
        return size is not None

    def _in_tail(self, pieces: list[Piece], last: bool) -> bool:
        rest = self._text.lstrip(_BLANK)
        if not rest and not last:
            return False
        pieces.append(CallEnded())
        self._text, self._step = rest.removeprefix("}"), self._after
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
            for begun, arguments in calls:
                pieces += [begun, CallPart(arguments), CallEnded()]
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

    def _calls(self, body: str) -> list[tuple[CallBegun, str]] | None:
        """None if it is something else."""
        try:
            value = json.loads(body, parse_constant=_no_json)
        except (ValueError, RecursionError):
            return None
        found = [self._call(each) for each in (value if self._form.listed else [value])]
        calls = [call for call in found if call is not None]
        return calls if calls and len(calls) == len(found) else None

    def _call(self, value: Any) -> tuple[CallBegun, str] | None:
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._names:
            return None
        arguments: Any = next((value[key] for key in ("arguments", "parameters") if key in value), {})
        if not isinstance(arguments, dict):
            return None
        try:
            text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            text.encode()
        except UnicodeEncodeError:  # halves of characters
            text = json.dumps(arguments)
        except ValueError:  # a number as large as infinity
            return None
        return CallBegun(self._number(), name), text

    def _number(self) -> str:
        """Mistral's templates want nine letters and digits."""
        if self._form is MISTRAL:
            return "".join(_ALPHABET[byte % len(_ALPHABET)] for byte in os.urandom(9))
        return f"call_{os.urandom(12).hex()}"


def _no_json(text: str) -> Any:
    """NaN and infinities. Raises ValueError."""
    raise ValueError(text)


def _held(text: str, opening: str) -> int:
    """Characters at the end that may begin it."""
    return next((n for n in range(min(len(text), len(opening) - 1), 0, -1) if opening.startswith(text[-n:])), 0)
