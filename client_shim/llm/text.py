"""Ends an answer's text, as it comes, at a stop string, which may span tokens and may have special ones. Pure."""

from collections.abc import Collection, Sequence
from typing import Final

from dormouse.client_shim.llm.decoding import Decoding

_MARKS: Final = 0xD800
"""Halves of characters, which no decoded text has: they stand for special tokens while stop strings are looked for."""


class TextStream:
    """The text of one sequence. ``stops`` are strings that end it. ``shown``: special tokens that are text here. The
    others are in no text, but a stop string that names one ends it where that token comes. Raises UnreadableTokens.
    """

    def __init__(self, decoding: Decoding, stops: Sequence[str] = (), shown: Collection[int] = ()) -> None:
        self._tokens = decoding.text(shown)
        self.told = self._tokens.told
        self._marks: dict[int, str] = {}
        given = marked = {stop for stop in stops if stop}
        hidden = (name for name, token in decoding.special.items() if name and token not in shown)
        for name in sorted(hidden, key=len, reverse=True):
            if any(name in stop for stop in marked):
                mark = self._marks[decoding.special[name]] = chr(_MARKS + len(self._marks))
                marked = {stop.replace(name, mark) for stop in marked}
        self._stops = given | marked
        self._longest = max(map(len, self._stops), default=0)
        self._text = ""  # that was not given out: it may begin a stop string
        self.stopped = False

    def put(self, tokens: Sequence[int], last: bool = False) -> str:
        """The text that can be given out now, without a stop string and anything after it."""
        if self.stopped:
            return ""
        for token in tokens if self._marks else ():
            self._text += self._tokens.put([token], last=token in self._marks) + self._marks.get(token, "")
        self._text += self._tokens.put(() if self._marks else tokens, last)
        found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        self.stopped = bool(found)
        end = min(found) if found else len(self._text) - (0 if last else self._held())
        given, self._text = self._text[:end], self._text[end:]
        for mark in self._marks.values():
            given = given.replace(mark, "")
        return given

    def _held(self) -> int:
        """Characters at the end that may begin a stop string."""
        for length in range(min(len(self._text), self._longest - 1), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
