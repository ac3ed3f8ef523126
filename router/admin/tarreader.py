"""Reads an untrusted tar archive: the names, kinds and places of its members. Pure but for ``read``; makes nothing.

Only as much of the format as folders need: ustar, with pax records or GNU's long names. Everything else is refused by
name. Python's ``tarfile`` reads more, and has patterns whose time grows with the square of a header's content, while no
other thread runs. Here, time grows with the bytes: descriptions are short, and only a few precede a member.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

BLOCK: Final = 512
DESCRIPTION_NBYTES: Final = 4096
"""Of a description of the next member: four times the longest name that a file may have."""

DESCRIPTIONS: Final = 4
"""Before one member: one of each kind."""

END_NBYTES: Final = 1 << 20
"""Of empty blocks. Two are to be there, or something may be missing; tar fills up what a tape would get at once."""

_OCTAL: Final = frozenset(b"01234567")
_MARKS: Final = frozenset(b"gxLK")
_SAYS_MORE: Final = ("path", "size", "linkpath")
"""Fields that the description of all members cannot have: they would be one file."""


class BadArchive(Exception):
    """The text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """``kind``: as in its header, "0" for a regular file, "5" for a directory. Its bytes begin at ``offset``."""

    name: str
    kind: str
    offset: int
    nbytes: int
    executable: bool
    sparse: bool


def members(read: Callable[[int, int], bytes], nbytes: int) -> Iterator[ArchiveMember]:
    """``read(offset, nbytes)`` of an archive that is ``nbytes`` long. Raises BadArchive."""
    offset, described, said = 0, 0, dict[str, str]()
    while any(block := _read(read, offset, BLOCK)):
        if _number(block[148:156], "a checksum") != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            raise BadArchive("a header's checksum is wrong")
        size, kind = _number(block[124:136], "a size"), block[156] or ord("0")
        offset += BLOCK
        if kind in _MARKS:
            described += 1
            if size > DESCRIPTION_NBYTES or described > DESCRIPTIONS:
                most = f"more than {DESCRIPTIONS} descriptions, or one of over {DESCRIPTION_NBYTES:,} bytes"
                raise BadArchive(f"a member has {most}; archive without extended attributes")
            said |= _said(chr(kind), _read(read, offset, size))
            offset += _padded(size)
            continue
        name = said.get("path", _name(block))
        if "size" in said:
            size = _decimal(said["size"])
        if kind == ord("0") and name.endswith("/"):  # as archives had it before there were kinds
            kind = ord("5")
        size = 0 if kind == ord("5") else size
        if size > nbytes - offset:
            raise BadArchive(f"{name[:200]!r} has {size:,} bytes, and the archive ends before")
        sparse = kind == ord("S") or any(key.startswith("GNU.sparse.") for key in said)
        executable = bool(_number(block[100:108], "a mode") & 0o111)
        yield ArchiveMember(name.rstrip("/"), chr(kind), offset, size, executable, sparse)
        offset, described, said = offset + _padded(size), 0, {}
    if not 2 * BLOCK <= nbytes - offset <= END_NBYTES or _read(read, offset, nbytes - offset).strip(b"\0"):
        raise BadArchive("its end is missing, or something follows it")


def _said(mark: str, data: bytes) -> dict[str, str]:
    """Fields that a description sets for the next member. Raises BadArchive."""
    if mark == "L":
        return {"path": _field(data)}
    if mark == "K":
        return {}  # of a link, which is refused by its kind
    found = dict(_records(data))
    if mark == "x":
        return found
    if odd := [key for key in found if key in _SAYS_MORE or key.startswith("GNU.")]:
        raise BadArchive(f"a description of all members says {odd[0]!r}")
    return {}


def _records(data: bytes) -> Iterator[tuple[str, str]]:
    """``LENGTH KEY=VALUE\\n`` until the end, where the length is the whole record's. Raises BadArchive."""
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 5)
        length = _decimal(data[at:space].decode("latin-1")) if space > 0 else 0
        record = data[at : at + length]
        key, equals, value = record[space + 1 - at : -1].partition(b"=")
        if len(record) != length or not record.endswith(b"\n") or not (key and equals):
            raise BadArchive("a description is broken")
        name = key.decode("latin-1")
        if name in _SAYS_MORE or name.startswith("GNU."):  # times and owners are nobody's here
            yield name, _text(value)
        at += length


def _read(read: Callable[[int, int], bytes], offset: int, nbytes: int) -> bytes:
    """Raises BadArchive."""
    data = read(offset, nbytes) if offset >= 0 else b""
    if len(data) != nbytes:
        raise BadArchive("its end is missing")
    return data


def _name(block: bytes) -> str:
    name, prefix = _field(block[:100]), _field(block[345:500] if block[257:263] == b"ustar\0" else b"")
    return f"{prefix}/{name}" if prefix else name


def _field(data: bytes) -> str:
    return _text(data.partition(b"\0")[0])


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise BadArchive(f"the name {data[:200]!r} is not UTF-8") from None


def _number(field: bytes, what: str) -> int:
    """Octal digits, or GNU's bytes for numbers that these cannot hold. Raises BadArchive."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    digits = field.strip(b" \0")
    if not _OCTAL.issuperset(digits):
        raise BadArchive(f"{what} is {digits[:20]!r}")
    return int(digits or b"0", 8)


def _decimal(text: str) -> int:
    """Raises BadArchive."""
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise BadArchive(f"a length is {text[:20]!r}")
    return int(text)


def _padded(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK
