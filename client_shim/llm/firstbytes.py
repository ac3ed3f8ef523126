"""Recognizes, by its first bytes, a file that is not of the kind that its name says. Pure.

Such files come from downloads: pointers of Git LFS, pages of a web server, texts of an error, half of a file, and files
of another format that somebody renamed.
"""

import re
from typing import Final

LOOKED_AT: Final = 512
"""Bytes: more than a pointer has."""

_AGAIN: Final = "download it again"
_PAGES: Final = (b"<!doctype", b"<html", b"<head", b"<body", b"<?xml")
_MAGICS: Final = {
    b"GGUF": "GGUF file",
    b"PK\x03\x04": "ZIP archive",
    b"\x1f\x8b": "gzip archive",
    b"\x28\xb5\x2f\xfd": "Zstandard archive",
    b"\x89HDF": "HDF5 file",
}
_PICKLE: Final = re.compile(rb"\x80[\x02-\x05]")
_SAFETENSORS: Final = re.compile(rb".{4}\x00{4}\{\s*\"", re.DOTALL)
_TEXT: Final = re.compile(rb"[\t\n\r -~]*")


def mistaken(start: bytes, nbytes: int, but: str = "") -> str:
    """The message about a file with these first bytes and this size; "" if nothing is known. ``but``: the expected
    kind, as messages have it.
    """
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself: run `git lfs pull` in the folder"
    if nbytes == 0:
        return f"is empty: {_AGAIN}"
    if not start.strip(b"\x00"):
        return f"begins with {len(start)} zeros, as what a download has not reached: {_AGAIN}"
    if start.lstrip(b"\xef\xbb\xbf\t\r\n ").lower().startswith(_PAGES):
        return "is a web page, not the file itself: download that, with `hf download` or by its address with /resolve/"
    if (kind := _kind(start)) and kind != but:
        return f"is a {kind}: its name says something else"
    return ""


def _kind(start: bytes) -> str:
    """As messages have it; "" for any other."""
    if _PICKLE.match(start):
        return "pickle"
    if _SAFETENSORS.match(start):
        return "safetensors file"
    return next((kind for magic, kind in _MAGICS.items() if start.startswith(magic)), "")


def weights_mistaken(start: bytes, nbytes: int, but: str = "") -> str:
    """The same of a file that cannot be a text."""
    if (what := mistaken(start, nbytes, but)) or not _TEXT.fullmatch(start) or _kind(start):
        return what
    first = start.decode("ascii").strip().partition("\n")[0][:80]
    return f"is a text, which begins with {first!r}: {_AGAIN}"
