"""Secrets in what a function says: pure. Text and streams of bytes go in, and come out without them.

Known are the values that an instance was given, each as it is and as Python and JSON write it; of one that has several
lines also each longer line. What a function encodes in other ways is its own doing.
"""

import json
import re
from collections.abc import Mapping
from typing import Final

LINE_NBYTES: Final = 8
"""A shorter line of a secret is text like any other."""


class SecretMask:
    """What stands instead of a secret names it."""

    def __init__(self, secrets: Mapping[str, str]) -> None:
        self._instead: dict[bytes, bytes] = {}
        for name, value in secrets.items():
            for form in _forms(value):
                self._instead.setdefault(form, f"[secret {name}]".encode())
        longest_first = sorted(self._instead, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first)) or rb"(?!)")
        self._longest = max(map(len, self._instead), default=0)
        self._held = b""

    def __bool__(self) -> bool:
        return bool(self._instead)

    def text(self, text: str) -> str:
        if not self._instead:
            return text
        return self._replaced(text.encode(errors="surrogatepass")).decode(errors="replace")

    def feed(self, data: bytes) -> bytes:
        """The next piece of a stream: all of it but an end with which a secret may begin."""
        if not self._instead:
            return data
        data = self._held + data
        done, out = 0, []
        for found in self._pattern.finditer(data):
            if self._begins(data[found.start() :]):
                break  # of a longer one that has this one as its beginning
            out += [data[done : found.start()], self._instead[found[0]]]
            done = found.end()
        rest = data[done:]
        ends = range(max(0, len(rest) - self._longest + 1), len(rest))
        start = next((at for at in ends if self._begins(rest[at:])), len(rest))
        self._held = rest[start:]
        return b"".join([*out, rest[:start]])

    def rest(self) -> bytes:
        """What was held back, at the stream's end."""
        held, self._held = self._held, b""
        return self._replaced(held)

    def _replaced(self, data: bytes) -> bytes:
        return self._pattern.sub(lambda found: self._instead[found[0]], data)

    def _begins(self, data: bytes) -> bool:
        """Whether more may come that makes a secret of it."""
        return any(len(form) > len(data) and form.startswith(data) for form in self._instead)


NO_MASK: Final = SecretMask({})
"""Of an instance without secrets; it holds nothing back, so all can have the same one."""


def _forms(value: str) -> list[bytes]:
    lines = [line.strip() for line in value.splitlines()]
    lines = [line for line in lines if len(line.encode()) >= LINE_NBYTES]
    written = [repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False)]
    forms = [value, value.strip(), *(text[1:-1] for text in written)]
    return [form.encode() for form in dict.fromkeys([*forms, *lines]) if form]
