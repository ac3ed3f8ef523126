"""Why a body is not JSON, where its first bytes say it: mostly, its client has left out a header. Pure: no I/O."""

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


def cause(body: bytes | memoryview) -> str:
    """ "" if they say nothing."""
    if not len(body):
        return "it is empty; what is sent needs a Content-Length, or to be chunked"
    start = bytes(body[:64])
    if found := next((why for begins, why in _STARTS if start.startswith(begins)), ""):
        return found
    if _WIDE.match(start):
        return "it is UTF-16 or UTF-32, and JSON is UTF-8"
    if not start[:4].isascii() or not _TEXT.issuperset(start[:4]):
        return "it does not begin as text; say what it is in Content-Type (application/octet-stream)"
    if _FORM.match(start):
        return "it looks like fields of a form (name=value), which are not read here"
    return ""
