"""Explains why a text is not TOML: the parser's message, the line that it names, and the TOML wanted there. Pure: no
I/O.
"""

import re
from typing import Final

_PLACE: Final = re.compile(r"\(at (?:line (\d+), column \d+|end of document)\)")
_PAIR: Final = re.compile(r"([\w.\"'-]+)\s*([=:])\s*(.*)")
_WORDS: Final = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}

SHOWN_CHARS: Final = 60
"""Of the line."""


def cause(text: str, error: Exception) -> str:
    """``error``: the parser's exception."""
    said, lines = str(error), text.splitlines()
    found = _PLACE.search(said)
    if found is None or not lines:
        return said
    line = lines[min(int(found[1] or len(lines)), len(lines)) - 1].strip()
    wanted = _wanted(line)
    return said + (f", in {line[:SHOWN_CHARS]!r}" if line else "") + (f"; {wanted}" if wanted else "")


def _wanted(line: str) -> str:
    """ "" if nobody knows."""
    pair = _PAIR.fullmatch(line)
    if pair is None:
        return ""
    key, sign, value = pair[1], pair[2], pair[3].partition(" #")[0].strip()
    if sign == ":":
        return "TOML has NAME = VALUE"
    if not value:
        return "a value is missing"
    if value.lower() in _WORDS:
        return f"write {key} = {_WORDS[value.lower()]}"
    if re.fullmatch(r"[\d.,_ ]+", value):
        return "a number is written as 1000 or 0.5"
    if value[0] in "\"'[{":
        return ""
    return f'text is in double quotes: {key} = "{value[:SHOWN_CHARS]}"' if '"' not in value else ""
