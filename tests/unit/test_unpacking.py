"""Bodies with a coding come out as they went in, however they are cut; what is none is refused in bounded work."""

import gzip
import random
import zlib

import pytest

from dormouse.router.front.unpacking import STEP_NBYTES, USELESS_NBYTES, BadCoding, Unpacker

DATA = random.Random(1).randbytes(70_000) + bytes(3 * STEP_NBYTES) + b"end"


def unpacked(coding: bytes, *pieces: bytes) -> bytes:
    unpacker, found = Unpacker(coding), []
    for piece in pieces:
        unpacker.add(piece)
        while step := unpacker.step():
            assert len(step) <= STEP_NBYTES
            found.append(step)
    unpacker.end()
    return b"".join(found)


@pytest.mark.parametrize("cut", [1, 1000, 10_000_000])
@pytest.mark.parametrize(
    ("coding", "pack"), [(b"gzip", gzip.compress), (b"x-gzip", gzip.compress), (b"deflate", zlib.compress)]
)
@pytest.mark.parametrize("data", [b"", b"a", DATA, bytes(STEP_NBYTES)], ids=["empty", "a", "large", "one step"])
def test_what_was_packed(coding: bytes, pack: object, data: bytes, cut: int) -> None:
    packed = gzip.compress(data) if pack is gzip.compress else zlib.compress(data)
    assert unpacked(coding, *(packed[start : start + cut] for start in range(0, len(packed), cut))) == data
    assert unpacked(coding) == b"", "a body that has nothing was not packed"


def test_files_of_gzip_in_a_row_are_one() -> None:
    assert unpacked(b"gzip", gzip.compress(b"a") + gzip.compress(b"") + gzip.compress(b"b")) == b"ab"


@pytest.mark.parametrize(
    ("coding", "packed", "why"),
    [
        (b"gzip", b"{}", "incorrect header"),
        (b"gzip", gzip.compress(DATA)[:-1], "ends too early"),
        (b"gzip", gzip.compress(DATA) + b"{}", "incorrect header|ends too early"),
        (b"gzip", gzip.compress(DATA)[:-8] + bytes(8), "incorrect data check"),
        (b"deflate", zlib.compress(DATA) + b"{}", "goes on behind its end"),
        (b"deflate", zlib.compressobj(wbits=-15).flush(), "incorrect header"),
        (b"gzip", gzip.compress(b"") * 10_000, "longer than what is in it"),
        (b"gzip", gzip.compress(b"", 0) * (USELESS_NBYTES // 10), "longer than what is in it"),
    ],
)
def test_what_is_none(coding: bytes, packed: bytes, why: str) -> None:
    with pytest.raises(BadCoding, match=why):
        unpacked(coding, packed)


def test_what_would_be_large_comes_in_steps() -> None:
    """Whoever reads it stops at its limit."""
    unpacker = Unpacker(b"gzip")
    unpacker.add(gzip.compress(bytes(100 << 20)))
    assert [len(unpacker.step()) for _ in range(3)] == [STEP_NBYTES] * 3
