"""Checks the header of a GGUF file: every length is checked before a library makes lists of so many things. Pure.

::

    magic, version, number of tensors, number of fields, fields..., tensors...
    field:  key, kind, value        tensor: name, number of dimensions, dimensions, kind, offset
    string: length, bytes           array:  kind of its elements, length, elements
"""

import struct
from typing import Final

MAGIC: Final = b"GGUF"
MAX_FIELDS: Final = 10_000
MAX_TENSORS: Final = 100_000
MAX_ELEMENTS: Final = 4_000_000
"""Of all arrays: tokens, merges, scores and kinds of tokens of the largest vocabulary."""

_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of numbers, by their kinds
_STRING: Final = 8
_ARRAY: Final = 9
_VERSIONS: Final = (2, 3)


class NoGguf(ValueError):
    """The text says what is wrong."""


class _Reader:
    """Reads on, and no further than there is."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0
        self._elements = 0

    def skip(self, nbytes: int) -> None:
        if nbytes > len(self._data) - self._at:
            raise NoGguf(f"it ends in the middle of its header, which wants {nbytes:,} more bytes")
        self._at += nbytes

    def number(self, form: str) -> int:
        begin = self._at
        self.skip(struct.calcsize(form))
        found: int = struct.unpack_from(form, self._data, begin)[0]
        return found

    def count(self, most: int, what: str) -> int:
        found = self.number("<Q")
        if found > most:
            raise NoGguf(f"it has {found:,} {what}")
        return found

    def string(self) -> None:
        self.skip(self.number("<Q"))

    def value(self, kind: int) -> None:
        if kind == _STRING:
            self.string()
        elif kind in _SIZES:
            self.skip(_SIZES[kind])
        elif kind == _ARRAY:
            of = self.number("<I")
            length = self.count(MAX_ELEMENTS - self._elements, "elements in its arrays")
            self._elements += length
            if of in _SIZES:
                self.skip(_SIZES[of] * length)
            elif of == _STRING:
                for _ in range(length):
                    self.string()
            else:
                raise NoGguf(f"it has an array of the unknown kind {of}")
        else:
            raise NoGguf(f"it has a field of the unknown kind {kind}")


def check_header(data: memoryview) -> None:
    """Raises NoGguf."""
    reader = _Reader(data)
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise NoGguf("it does not begin as one")
    reader.skip(len(MAGIC))
    if (version := reader.number("<I")) not in _VERSIONS:
        raise NoGguf(f"it is of version {version}; versions 2 and 3 are read")
    tensors = reader.count(MAX_TENSORS, "tensors")
    for _ in range(reader.count(MAX_FIELDS, "fields")):
        reader.string()
        reader.value(reader.number("<I"))
    for _ in range(tensors):
        reader.string()
        dimensions = reader.number("<I")
        if dimensions > 8:
            raise NoGguf(f"it has a tensor of {dimensions:,} dimensions")
        reader.skip(8 * dimensions + 12)
