"""Text from tokens as they come: whole characters only, and stop strings that may lie across tokens."""

from collections.abc import Callable, Sequence
from typing import Final

BROKEN: Final = "\N{REPLACEMENT CHARACTER}"
WINDOW: Final = 8
"""Tokens before the new ones that are decoded with them, at least: what a token's text is may depend on some before it.
"""


class UnreadableTokens(Exception):
    """The tokenizer fails to make text of them."""


class TextStream:
    """The text of one sequence. ``decode`` makes text of tokens; ``stops`` are strings that end it. ``window``: tokens
    before the new ones that are decoded with them; 0 if a token's text is its bytes, whatever is before it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), window: int = WINDOW) -> None:
        self._decode, self._window = decode, window
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._tokens: list[int] = []  # the last ones
        self._read = 0  # of these, those whose text is in `_text`
        self._before = ""  # and that text: what is new is what comes behind it
        self._text = ""  # that was not given out: it may begin a stop string
        self.stopped = False

    def put(self, tokens: Sequence[int], last: bool = False) -> str:
        """What can be given out now. Nothing after a stop string, nor it itself."""
        if self.stopped:
            return ""
        self._tokens += tokens
        text = self._decode(self._tokens)
        if last or not text.endswith(BROKEN):
            self._text += text[len(self._before) :]
            self._before, self._read = text, len(self._tokens)
        if self._read > 2 * self._window:
            del self._tokens[: self._read - self._window]
            self._read = self._window
            self._before = self._decode(self._tokens[: self._window]) if self._window else ""
        if not self._stops:
            given, self._text = self._text, ""
            return given
        found = [at for stop in self._stops if (at := self._text.find(stop)) >= 0]
        if found:
            self.stopped = True
            given, self._text = self._text[: min(found)], ""
            return given
        held = 0 if last else self._held()
        given, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
        return given

    def _held(self) -> int:
        """Characters at the end that may begin a stop string."""
        for length in range(min(len(self._text), self._longest - 1), 0, -1):
            end = self._text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
