"""Explains why a body is not JSON: by its first bytes, where its client has left out a header, or by the place that a
parser names. Pure: no I/O.
"""

import re
from typing import Final

_STARTS: Final = (
    (b"\x1f\x8b", "it is packed by gzip, and no Content-Encoding: gzip says so"),
    (b"\x28\xb5\x2f\xfd", "it is packed by zstd, which is not read here"),
    (b"\xef\xbb\xbf", "it begins with a byte order mark, which JSON has not"),
    (b"\xff\xfe", "it is UTF-16, and JSON is UTF-8"),
    (b"\xfe\xff", "it is UTF-16, and JSON is UTF-8"),
    (b"--", "it looks like a form, and no Content-Type: multipart/form-data; boundary=... says so"),
)
_FORM: Final = re.compile(rb"[A-Za-z_][\w.%+-]*=")
_WIDE: Final = re.compile(rb"\0{0,3}[\[{\"]\0|\0{1,3}[\[{\"]")
_TEXT: Final = frozenset(b"\t\n\r") | frozenset(range(0x20, 0x7F))


_PLACE: Final = re.compile(r" \(byte (\d+)\)")
_BEGUN: Final = re.compile(rb"(?<![\w\"])(?:[ntf][a-z]*|-|/)\Z")
_TRUNCATED: Final = "Input data was truncated"
_CURLY: Final = tuple(quote.encode() for quote in "\u201c\u201d\u201e\u2018\u2019")
_STRAIGHT: Final = 'its quotes are typographic; JSON has straight ones (")'
_KEY: Final = ("expected '\"'", "object keys must be strings")
"""Two ways of a parser to say that a name is wanted."""

_COMMENT: Final = re.compile(rb"//|/\*|#")
_WORD: Final = re.compile(rb"-?[A-Za-z_$][\w$]*")
_WORDS: Final = {
    b"True": "true",
    b"False": "false",
    b"None": "null",
    b"TRUE": "true",
    b"FALSE": "false",
    b"NULL": "null",
}
_NO_NUMBERS: Final = (b"NaN", b"Infinity", b"-Infinity", b"nan", b"inf", b"-inf", b"undefined")
_SIGNS: Final = {
    b"\\": "leave out the backslashes before quotes",
    b"(": "JSON has lists, in [ ]",
    b"<": "it is HTML or XML",
    b"@": "send what is in the file, not its name",
    b".": "numbers begin with a digit, as 0.5 does",
    b"+": "numbers begin with a digit or -",
}

_BY_ERROR: Final = {  # where the text that is wrong need not be looked at
    "invalid escaped character": "a backslash in a text is written \\\\",
    "invalid character in unicode escape": "\\u in a text has four digits behind it",
    "invalid number": "numbers are written as 1, 0.5 or -2e3",
    "trailing characters": "a body is one value: text is in double quotes, and several values are in [ ]",
}

_BEHIND: Final = ("trailing characters", "invalid number", "invalid character in unicode escape")
"""The place is behind what is wrong."""

AROUND_CHARS: Final = 30
"""Shown of the text that is wrong."""


def _advice(body: bytes | memoryview, error: str) -> str:
    """The parser's message, with the text at the place that it names, and the JSON wanted there."""
    if error == _TRUNCATED:
        return "it ends too early; a bracket, a quote or a value is missing"
    if (found := _PLACE.search(error)) is None:
        return error
    said, at = _PLACE.sub("", error).removeprefix("JSON is malformed: "), int(found[1])
    if said in _BEHIND:
        at -= 1
    if begun := _BEGUN.search(bytes(body[max(0, at - AROUND_CHARS) : at])):  # a word that begins as one of JSON's
        said, at = "invalid character", at - len(begun[0])
    rest = bytes(body[at : at + 4 * AROUND_CHARS])
    shown = rest.decode(errors="replace")[:AROUND_CHARS].partition("; ")[0]  # after which our own advice follows
    wanted = "JSON has no comments" if _COMMENT.match(rest) else _BY_ERROR.get(said) or _wanted(said, body, at, rest)
    return f"{said} at byte {at}" + (f", {shown!r}" if shown else "") + (f"; {wanted}" if wanted else "")


def _wanted(said: str, body: bytes | memoryview, at: int, rest: bytes) -> str:
    """ "" if nobody knows."""
    if b"" < rest[:1] < b" ":
        return "a line's end in a text is written \\n, a tab \\t"
    if rest[:1] == b"'":
        return "leave out the quotes around it" if at == 0 and rest[1:2] in (b"{", b"[") else "JSON has double quotes"
    if rest.startswith(_CURLY):
        return _STRAIGHT
    if said not in ("invalid character", *_KEY):  # so a value has ended there
        ends = bytes(body[at - 1 : at]) == b'"' and _WORD.match(rest)
        return 'a quote in a text is written \\"' if ends else ""
    if (word := _WORD.match(rest)) is None:
        return _SIGNS.get(rest[:1], "names are in double quotes" if said in _KEY else "")
    if word[0] in _WORDS:
        return f"JSON writes {_WORDS[word[0]]}"
    if word[0] in _NO_NUMBERS:
        return "JSON has no such number, write null"
    text = f'"{word[0].decode()}"'
    named = f"'{text}'" if at == 0 else f"'{{{text}: ...}}'"
    return f"names and text are in double quotes, which a shell takes away unless single ones are around all: {named}"


def cause(body: bytes | memoryview, error: str) -> str:
    """``error``: a parser's message."""
    return _beginning(body) or _advice(body, error)


def _beginning(body: bytes | memoryview) -> str:
    """ "" if the first bytes say nothing."""
    if not len(body):
        return "it is empty; what is sent needs a Content-Length, or to be chunked"
    start = bytes(body[:64])
    if found := next((why for begins, why in _STARTS if start.startswith(begins)), ""):
        return found
    if _WIDE.match(start):
        return "it is UTF-16 or UTF-32, and JSON is UTF-8"
    if start.lstrip(b"[{ \t\r\n").startswith(_CURLY):
        return _STRAIGHT
    if not start[:4].isascii() or not _TEXT.issuperset(start[:4]):
        return "it does not begin as text; say what it is in Content-Type (application/octet-stream)"
    if _FORM.match(start):
        return "it looks like fields of a form (name=value), which are not read here"
    return ""
