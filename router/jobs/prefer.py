"""Preferences of a request for its answer, from its headers: Prefer (RFC 7240) and Idempotency-Key. Pure.

Unknown preferences are ignored, as the RFC wants it; malformed ones are refused, because their sender wishes something
that would not happen.
"""

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from dormouse.router.front.exchange import refuse

_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_VALUE: Final = rf'(?:{_TOKEN}|"(?:[^"\\]|\\.)*")'
_PARAMETER: Final = rf"{_TOKEN}\s*(?:=\s*(?:{_VALUE}\s*)?)?"
_PREFERENCE: Final = re.compile(rf"\s*({_TOKEN})\s*(?:=\s*(?:({_VALUE})\s*)?)?(?:;\s*(?:{_PARAMETER})?)*(?:,|$)")
"""There is one way to read a text: where two parts of it could have the same spaces, thirty would take for ever."""

_KEY: Final = re.compile(rb"[\x21-\x7e]{1,255}")

MAX_WAIT_S: Final = 60
"""Longer waits are cut to this, as a proxy would."""


class Preferences(NamedTuple):
    """``wait_s``: how long the client would wait for an answer. ``key``: its Idempotency-Key, or ""."""

    respond_async: bool = False
    wait_s: int | None = None
    key: str = ""


NOTHING: Final = Preferences()


def wished(headers: Iterable[tuple[bytes, bytes]]) -> Preferences:
    """Raises HttpError."""
    wish = NOTHING
    for name, value in headers:
        if name == b"prefer":
            wish = _preferring(wish, value.decode("latin-1"))
        elif name == b"idempotency-key":
            if wish.key or _KEY.fullmatch(value) is None:
                text = "an Idempotency-Key has 1 to 255 visible characters and stands once; send a random one"
                raise refuse(400, "bad_headers", text, close=True)
            wish = wish._replace(key=value.decode())
    return wish


def _preferring(wish: Preferences, text: str) -> Preferences:
    at = 0
    while at < len(text):
        match = _PREFERENCE.match(text, at)
        if match is None:
            said = f"Prefer is {text[:100]!r}, which cannot be read; write `Prefer: respond-async` or `wait=30`"
            raise refuse(400, "bad_headers", said, close=True)
        name, value, at = match[1].lower(), match[2], match.end()
        if name == "respond-async":
            wish = wish._replace(respond_async=True)
        elif name == "wait" and wish.wait_s is None:
            if value is None or re.fullmatch("[0-9]{1,9}", value) is None:
                raise refuse(400, "bad_headers", "Prefer: wait is a number of seconds, as in wait=30", close=True)
            wish = wish._replace(wait_s=min(MAX_WAIT_S, int(value)))
    return wish
