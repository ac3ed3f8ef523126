"""What a stranger's archive says: as tarfile reads it, or refused. Never more work than its bytes."""

import io
import tarfile
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.router.admin.tarreader import BLOCK, DESCRIPTION_NBYTES, DESCRIPTIONS, END_NBYTES, BadArchive, members

LONG = "folder/" * 20 + "é" * 60
NAMES = ["f.py", "a/b.txt", "d" * 99, "d" * 100, f"{'p' * 90}/{'n' * 90}", LONG, "spa ce\n=1"]


def written(form: int, *more: tarfile.TarInfo) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=form) as archive:
        for number, name in enumerate(NAMES if form != tarfile.USTAR_FORMAT else NAMES[:5]):
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = number * 300, 0o644 | number % 2 * 0o111, 1.5 * number
            archive.addfile(info, io.BytesIO(name.encode()[:1] * info.size))
        for info in (tarfile.TarInfo("folder"), tarfile.TarInfo(LONG[:130])):
            info.type = tarfile.DIRTYPE
            archive.addfile(info)
        for info in more:
            archive.addfile(info)
    return sink.getvalue()


def read(data: bytes) -> list[tuple[str, str, bytes, bool, bool]]:
    """With no byte read twice, but for the block that may be the end."""
    seen = 0

    def piece(offset: int, nbytes: int) -> bytes:
        nonlocal seen
        assert offset >= seen - BLOCK, "going back"
        seen = offset + nbytes
        return data[offset:seen]

    found = members(piece, len(data))
    return [(m.name, m.kind, data[m.offset : m.offset + m.nbytes], m.executable, m.sparse) for m in found]


def expected(data: bytes) -> list[tuple[str, str, bytes, bool, bool]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return [
            (
                m.name,
                m.type.decode(),
                b"" if not m.isreg() else archive.extractfile(m).read(),  # type: ignore[union-attr]
                bool(m.mode & 0o111),
                m.issparse(),
            )
            for m in archive
        ]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_what_every_kind_of_archive_has(form: int) -> None:
    data = written(form)
    assert read(data) == expected(data)
    assert len(read(data)) == (7 if form == tarfile.USTAR_FORMAT else 9)


def test_links_devices_and_holes_are_named_for_what_they_are() -> None:
    kinds = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.CONTTYPE)
    more = [tarfile.TarInfo(f"odd{number}") for number in range(len(kinds))]
    for info, kind in zip(more, kinds, strict=True):
        info.type, info.linkname = kind, LONG
    holes = tarfile.TarInfo("holes")
    holes.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(1 << 42)}
    found = read(written(tarfile.PAX_FORMAT, *more, holes))[-6:]
    assert [kind for _, kind, *_ in found] == ["2", "1", "6", "3", "7", "0"]
    assert [sparse for *_, sparse in found] == [False] * 5 + [True]


def header(kind: bytes, size: int, name: str = "x") -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.USTAR_FORMAT)


def described(kind: bytes, said: bytes) -> bytes:
    return header(kind, len(said)) + said + bytes(-len(said) % BLOCK)


END = bytes(2 * BLOCK)
FILE = header(b"0", 0)


def record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return str(length).encode() + rest


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (described(b"x", b"1" * 20_000) + FILE + END, "descriptions, or one of over 4,096 bytes"),  # seconds, once
        (described(b"g", b"1" * 20_000) + FILE + END, "descriptions, or one of over 4,096 bytes"),
        (described(b"L", b"1" * 20_000) + FILE + END, "descriptions, or one of over 4,096 bytes"),
        (described(b"x", record("mtime", "1")) * (DESCRIPTIONS + 1) + FILE + END, "more than 4 descriptions"),
        (described(b"x", b"1" * DESCRIPTION_NBYTES) + FILE + END, "a description is broken"),
        (described(b"x", b"6 path=a\n") + FILE + END, "a description is broken"),
        (described(b"x", b"09 path=a\n") + FILE + END, "a description is broken"),
        (described(b"x", b"99 path=a\n") + FILE + END, "a description is broken"),
        (described(b"x", b"0 path=a\n") + FILE + END, "a description is broken"),
        (described(b"x", b"-9 path=a\n") + FILE + END, "a length is '-9'"),
        (described(b"x", record("size", "1" * 4000)) + FILE + END, "a length is '11111111111111111111'"),
        (described(b"x", record("size", "-1")) + FILE + END, "a length is '-1'"),
        (described(b"x", record("size", "5000")) + FILE + END, "'x' has 5,000 bytes, and the archive ends before"),
        (described(b"x", b"11 path=\xff\xff\n") + FILE + END, "is not UTF-8"),
        (described(b"g", record("path", "all")) + FILE + END, "a description of all members says 'path'"),
        (described(b"g", record("GNU.sparse.map", "0")) + FILE + END, "of all members says 'GNU.sparse.map'"),
        (header(b"0", 5000) + END, "'x' has 5,000 bytes, and the archive ends before"),
        (FILE + END + FILE + END, "something follows it"),  # a second archive, which nobody would have seen
        (FILE + bytes(END_NBYTES + BLOCK), "something follows it"),
        (FILE + bytes(BLOCK), "its end is missing"),
        (FILE, "its end is missing"),
        (b"", "its end is missing"),
        (FILE[:-1], "its end is missing"),
        (b"y" + FILE[1:] + END, "a header's checksum is wrong"),
        (b"\x1f\x8b" + bytes(2000), "a header's checksum is wrong"),
    ],
)
def test_d1_what_takes_long_or_is_read_in_two_ways_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(BadArchive) as caught:
        read(data)
    assert says in str(caught.value)


def test_what_git_and_others_write_beside_names() -> None:
    data = described(b"g", record("comment", "0" * 40)) + described(b"x", record("mtime", "1.5")) + FILE + END
    assert read(data) == [("x", "0", b"", False, False)]


@given(
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    st.lists(st.tuples(st.integers(0, 20_000), st.binary(min_size=1, max_size=40)), max_size=4),
)
def test_d1_mutated_archives_are_read_or_refused(form: int, changes: list[tuple[int, bytes]]) -> None:
    """Nothing but BadArchive comes out, even where the checksums fit again."""
    data = written(form)
    changed = bytearray(data)
    for at, piece in changes:
        at %= len(data)
        changed[at : at + len(piece)] = piece
    changed = changed[: len(data)]
    for start in range(0, len(changed) - BLOCK + 1, BLOCK):
        block = changed[start : start + BLOCK]
        if block[257:262] == b"ustar":
            total = sum(block) - sum(block[148:156]) + 8 * 32
            changed[start + 148 : start + 156] = b"%06o\0 " % total
    with suppress(BadArchive):
        read(bytes(changed))
