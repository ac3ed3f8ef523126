"""Removes secrets from a function's output: pure. Text and streams of bytes go in, and come out without them.

Known are the values that an instance was given, each as it is and as Python and JSON write it; of one that has several
lines also each longer line. Other encodings that a function makes are its own doing.

A tenant chooses both the secrets and the output, and the loop that masks serves everybody. So no place in the data
costs more than a few searches by halves among the forms, and no form is longer than `PIECE_NBYTES`.
"""

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from typing import Final

MIN_NBYTES: Final = 4
"""A shorter secret stands in any text by chance: it could not be masked."""

LINE_NBYTES: Final = 8
"""A shorter line of a secret is text like any other."""

PIECE_NBYTES: Final = 512
"""A longer form is known by its pieces: a place costs a look at no more, and no more is held back."""

TEXT_NBYTES: Final = 16 << 10
"""Of a longer text only the last lines are masked and kept: a traceback's most telling ones."""


class SecretMask:
    """Replaces each secret by text that names it. A copy has the same secrets and a stream of its own."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._instead: dict[bytes, bytes] = {}
        for name, value in secrets.items():
            for form in _forms(value):
                for piece in _pieces(form):
                    self._instead.setdefault(piece, f"[secret {name}]".encode())
        self._sorted = sorted(self._instead)
        self._chains: dict[bytes, tuple[bytes, ...]] = {}  # by form: those that it begins with, longer and longer
        chain: tuple[bytes, ...] = ()
        for form in self._sorted:
            while chain and not form.startswith(chain[-1]):
                chain = chain[:-1]
            chain = self._chains[form] = (*chain, form)
        self._longest = max(map(len, self._sorted), default=0)
        self._starts = {form[:size] for form in self._sorted for size in range(1, MIN_NBYTES)}
        self._heads = {form[:MIN_NBYTES] for form in self._sorted}
        places = [{form[at] for form in self._sorted} for at in range(MIN_NBYTES)]
        first, *after = [b"[%b]" % b"".join(re.escape(bytes([each])) for each in sorted(place)) for place in places]
        self._maybe = re.compile(b"%b(?=%b)" % (first, b"".join(after)) if self._sorted else rb"(?!)")
        self._held = b""
        self._after = b""  # what stands instead of the secret that the stream's last piece ended with

    def __bool__(self) -> bool:
        return bool(self._instead)

    def text(self, text: str) -> str:
        if not self._instead:
            return text
        data = text.encode(errors="surrogatepass")
        if len(data) > TEXT_NBYTES:  # a line that is cut may have a part of a secret
            data = b"...\n" + data[-TEXT_NBYTES:].partition(b"\n")[2]
        return self.data(data).decode(errors="replace")

    def data(self, data: bytes) -> bytes:
        """All of it; beside the stream."""
        return self._masked(data, b"", whole=True)[0] if self._instead else data

    def feed(self, data: bytes) -> bytes:
        """The next piece of a stream: all of it but an end with which a secret may begin."""
        if not self._instead:
            return data
        out, self._held, self._after = self._masked(self._held + data, self._after, whole=False)
        return out

    def rest(self) -> bytes:
        """The bytes held back, at the stream's end."""
        out, self._held, self._after = self._masked(self._held, self._after, whole=True)
        return out

    def _masked(self, data: bytes, after: bytes, whole: bool) -> tuple[bytes, bytes, bytes]:
        """The bytes that may go, those held back, and the text in place of the secret right before the latter."""
        at = done = 0
        out: list[bytes] = []
        while found := self._maybe.search(data, at):
            at = found.start()
            if data[at : at + MIN_NBYTES] not in self._heads:
                at += 1
                continue
            form, more = self._at(data[at : at + self._longest])
            if more and not whole and at + self._longest > len(data):
                break
            if not form:
                at += 1
                continue
            instead = self._instead[form]
            if at > done or instead != after:  # else a piece of the same one
                out += [data[done:at], instead]
            at = done = at + len(form)
            after = instead
        else:
            ends = range(max(done, len(data) - MIN_NBYTES + 1), len(data))
            at = len(data) if whole else next((at for at in ends if data[at:] in self._starts), len(data))
        out.append(data[done:at])
        return b"".join(out), data[at:], after if at == done else b""

    def _at(self, data: bytes) -> tuple[bytes, bool]:
        """The longest form that it begins with, and whether more may come that makes a longer one of it."""
        above = bisect_right(self._sorted, data)
        more = above < len(self._sorted) and self._sorted[above].startswith(data)
        chain = self._chains[self._sorted[above - 1]] if above else ()
        length = bisect_left(chain, True, key=lambda form: not data.startswith(form))
        return chain[length - 1] if length else b"", more


NO_MASK: Final = SecretMask({})
"""Of an instance without secrets; it holds nothing back, so all can have the same one."""


def _forms(value: str) -> list[bytes]:
    lines = [line.strip() for line in value.splitlines()]
    lines = [line for line in lines if len(line.encode()) >= LINE_NBYTES]
    written = [repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)]
    forms = [value, value.strip(), *(text[1:-1] for text in written)]
    found = [form.encode() for form in dict.fromkeys([*forms, *lines])]
    return [form for form in found if len(form) >= MIN_NBYTES]


def _pieces(form: bytes) -> Iterator[bytes]:
    """Of about the same size: a short one could stand in any text."""
    size = math.ceil(len(form) / math.ceil(len(form) / PIECE_NBYTES))
    for start in range(0, len(form), size):
        yield form[start : start + size]
