"""Splits a body of type multipart/form-data into its parts. Pure: no I/O.

python-multipart finds where each part begins and ends, from pieces of the body; then each value is copied once, out of
the body itself. Imported with the first such body.
"""

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from dormouse.client_shim.instance.dispositions import BadPart, names

logging.getLogger("python_multipart.multipart").disabled = True  # errors in a form are reported to its client

STEP_NBYTES: Final = 256 << 10
"""Of the body, given to the parser at a time: a copy that stays in the cache."""

MAX_PARTS: Final = 1000
"""As many as other servers take: each costs far more than its bytes."""


_PLAIN: Final = (b"", b"identity", b"binary", b"8bit", b"7bit")
"""Values that say that a part is not encoded."""


class BadMultipart(ValueError):
    """The body is not of its content type."""


class FormPart(NamedTuple):
    """One field. ``filename`` is None of one that is no file."""

    name: str
    filename: str | None
    kind: str  # its content type, or ""
    data: memoryview | bytes


class _FormReader:
    """The parser's callbacks, and the parts found."""

    def __init__(self, body: memoryview) -> None:
        self.parts: list[FormPart] = []
        self.ended = False
        self._body = body
        self._piece, self._offset = b"", 0  # the parser's current input, and where that begins
        self._field, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._start: int | None = None  # where the part's value begins in the body, once that is known
        self._nbytes, self._early = 0, b""

    def read(self, boundary: bytes) -> None:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_end": self._all,
            },
        )
        for offset in range(0, len(self._body), STEP_NBYTES):
            self._piece, self._offset = bytes(self._body[offset : offset + STEP_NBYTES]), offset
            parser.write(self._piece)

    def _begin(self) -> None:
        if len(self.parts) == MAX_PARTS:
            raise BadMultipart(f"it has more than {MAX_PARTS} parts; send fewer")
        self._headers, self._start, self._nbytes, self._early = {}, None, 0, b""

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        """Bytes that could have been the boundary, and were not, come out of a buffer of the parser's: a value that is
        all in such buffers is kept as it comes.
        """
        if self._start is None and data is self._piece:
            self._start = self._offset + start - self._nbytes
        elif self._start is None:
            self._early += data[start:end]
        self._nbytes += end - start

    def _end(self) -> None:
        try:
            name, filename = names(self._headers.get(b"content-disposition", b""))
        except BadPart as error:
            raise BadMultipart(f"{error}") from None
        if name is None:
            raise BadMultipart("one of its parts has no name; write content-disposition: form-data; name=... in each")
        value = self._early if self._start is None else self._body[self._start : self._start + self._nbytes]
        kind = self._headers.get(b"content-type", b"").decode("latin-1")
        for header in (b"content-transfer-encoding", b"content-encoding"):
            coding = self._headers.get(header, b"").strip().lower()
            if coding not in _PLAIN:
                said = f"{header.decode()}: {coding[:40].decode('latin-1')}"
                raise BadMultipart(f"its part {name[:80]!r} has {said}; send each part as it is")
        if kind.lower().startswith("multipart/"):
            raise BadMultipart(f"its part {name[:80]!r} is {kind[:40]}; send each file as a part of its own")
        self.parts.append(FormPart(name, filename, kind, value))

    def _all(self) -> None:
        self.ended = True


def parts(body: memoryview, content_type: str) -> Iterator[FormPart]:
    """All of them, in order; values are views of the body. Raises BadMultipart."""
    _, said = parse_options_header(content_type)
    if not said.get(b"boundary"):
        raise BadMultipart("its content-type names no boundary; let your client library write that header")
    reader = _FormReader(body)
    try:
        reader.read(said[b"boundary"])
    except FormParserError as error:
        raise BadMultipart(f"{error}") from error
    if not reader.ended:
        raise BadMultipart("it ends before its last boundary; send all of it")
    yield from reader.parts
