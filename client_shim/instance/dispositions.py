"""Parses the header of a form's part, as browsers, curl and libraries write it. Pure: no I/O.

A name is UTF-8 between quotes (RFC 7578), in which a quote is %22 (browsers, curl) or has a backslash before it (Go,
older ones); or it is name*=utf-8''... (RFC 5987: older libraries and Java), which then counts; or words of RFC 2047.
"""

import re
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from typing import Final
from urllib.parse import unquote_to_bytes

_PARAMETER: Final = re.compile(rb';\s*([^\s;="]+)\s*=\s*("(?:[^"\\]|\\.)*"|[^;"]*)\s*', re.DOTALL)
_EXTENDED: Final = re.compile(r"([A-Za-z0-9!#$%&+^_`{}~-]+)'[^']*'([!#$&+.^_`|~%A-Za-z0-9-]*)")
_WORDS: Final = re.compile(r"=\?[^?\s]+\?[bq]\?[^?\s]*\?=(?:\s+=\?[^?\s]+\?[bq]\?[^?\s]*\?=)*", re.IGNORECASE)


class BadPart(ValueError):
    """The header is malformed, or cannot be understood."""


def names(disposition: bytes) -> tuple[str | None, str | None]:
    """Of the field and of the file; None: it has none. Raises BadPart."""
    said = parameters(disposition)
    filename = _said(said, "filename")
    if filename is not None and (filename[1:3] == ":\\" or filename[:1] == "\\"):
        filename = filename.rpartition("\\")[2]  # some send the file's whole path
    return _said(said, "name"), filename


def charset(kind: bytes) -> str:
    """Of a field that is text. Raises BadPart."""
    said = parameters(kind).get("charset", b"utf-8").decode("latin-1")
    try:
        "".encode(said)
        b"".decode(said)
    except LookupError:
        raise BadPart(f"a field's charset is {said[:40]!r}; send utf-8") from None
    return said


def parameters(header: bytes) -> dict[str, bytes]:
    """By name, in small letters. Raises BadPart."""
    found: dict[str, bytes] = {}
    at = header.find(b";")
    while 0 <= at < len(header) and header[at:].strip(b"; \t"):
        match = _PARAMETER.match(header, at)
        if match is None:
            raise BadPart(f"a header of one of its parts cannot be read: {_shown(header)}")
        name, value = match[1].lower().decode("latin-1"), match[2].strip()
        if name in found:
            raise BadPart(f"a header of one of its parts says {name} twice: {_shown(header)}")
        if value.startswith(b'"'):
            value = re.sub(rb'\\(["\\])', rb"\1", value[1:-1]) if not _is_path(value[1:]) else value[1:-1]
        found[name], at = value, match.end()
    return found


def _is_path(value: bytes) -> bool:
    return value[1:3] == b":\\" and value[3:4] != b"\\"


def _said(said: dict[str, bytes], name: str) -> str | None:
    if odd := next((each for each in said if each.startswith(f"{name}*") and each != f"{name}*"), None):
        raise BadPart(f"one of its parts says {odd}; send {name}, or {name}*=utf-8''...")
    if (extended := said.get(f"{name}*")) is not None:
        match = _EXTENDED.fullmatch(extended.decode("latin-1"))
        try:
            if match is not None:
                return unquote_to_bytes(match[2]).decode(match[1])
        except (LookupError, UnicodeDecodeError):
            pass
        raise BadPart(f"{name}* is {_shown(extended)}; write utf-8'' and the name, percent-encoded")
    if (plain := said.get(name)) is None:
        return None
    try:
        text = plain.decode()
        if _WORDS.fullmatch(text):
            return str(make_header(decode_header(text)))
    except UnicodeDecodeError:
        raise BadPart(f"{name} is not UTF-8: {_shown(plain)}; send it so, or as {name}*=utf-8''...") from None
    except (LookupError, HeaderParseError):
        raise BadPart(f"{name} is not encoded as it says: {_shown(plain)}; send UTF-8") from None
    return re.sub("%(22|0[AD])", lambda match: chr(int(match[1], 16)), text, flags=re.IGNORECASE)


def _shown(value: bytes) -> str:
    return repr(value[:80].decode("utf-8", errors="replace"))
