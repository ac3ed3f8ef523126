"""Bodies of answers: what becomes of each value that ``handle`` may return."""

import io

import numpy as np
import pytest
from PIL import Image

from dormouse.client_shim.instance.answer_bodies import encode
from dormouse.client_shim.instance.codec import BadResponse

LIMIT = 1 << 20


def encoded(value: object, accept: str = "") -> tuple[bytes, str]:
    data, kind = encode(value, accept, LIMIT)
    return bytes(data), kind


@pytest.mark.parametrize(
    ("value", "accept", "expected"),
    [
        ({"a": [1]}, "", (b'{"a":[1]}', "")),
        ([1, "image/png"], "", (b'[1,"image/png"]', "")),
        (("a", "image/png"), "", (b'["a","image/png"]', "")),
        (b"\x00\x01", "", (b"\x00\x01", "application/octet-stream")),
        (bytearray(b"ab"), "image/png", (b"ab", "application/octet-stream")),
        (memoryview(b"abcd")[::2], "", (b"ac", "application/octet-stream")),
        (np.arange(2, dtype="<f2").data, "", (b"\x00\x00\x00\x3c", "application/octet-stream")),
        (np.arange(2, dtype=">i2").data, "", (b"\x00\x00\x00\x01", "application/octet-stream")),
        (np.zeros((0, 4)).data, "", (b"", "application/octet-stream")),
        (b"", "", (b"", "application/octet-stream")),
        ((b"x", "image/png"), "", (b"x", "image/png")),
        ((b"x", "text/csv; charset=utf-8"), "", (b"x", "text/csv; charset=utf-8")),
        (np.arange(2), "", (b"[0,1]", "")),
        (np.arange(2), "application/json", (b"[0,1]", "")),
    ],
)
def test_what_is_returned_says_what_is_sent(value: object, accept: str, expected: tuple[bytes, str]) -> None:
    assert encoded(value, accept) == expected


def test_an_array_goes_as_numpy_saves_it_if_the_client_wants_that() -> None:
    array = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    data, kind = encoded(array, "text/html, application/x-npy;q=0.9")
    assert kind == "application/x-npy"
    assert np.load(io.BytesIO(data)).tolist() == array.tolist()


@pytest.mark.parametrize(
    ("accept", "form"),
    [("", "PNG"), ("*/*", "PNG"), ("image/webp", "WEBP"), ("text/html, image/jpeg", "JPEG"), ("image/tiff", "PNG")],
)
def test_a_picture_goes_as_the_client_wants_it(accept: str, form: str) -> None:
    data, kind = encoded(Image.new("RGB", (3, 2), "red"), accept)
    found = Image.open(io.BytesIO(data))
    assert (found.format, found.size, kind) == (form, (3, 2), f"image/{form.lower()}")


@pytest.mark.parametrize(
    ("picture", "accept"),
    [(Image.new("RGBA", (1, 1)), "image/jpeg"), (Image.new("L", (16384, 1)), "image/webp, */*")],
)
def test_a_picture_that_cannot_be_what_the_client_prefers_goes_as_png(picture: Image.Image, accept: str) -> None:
    data, kind = encoded(picture, accept)
    assert (Image.open(io.BytesIO(data)).size, kind) == (picture.size, "image/png")


def test_a_picture_goes_as_the_function_says() -> None:
    data, kind = encoded((Image.new("RGB", (3, 2)), "image/jpeg"), "image/webp")
    assert (Image.open(io.BytesIO(data)).format, kind) == ("JPEG", "image/jpeg")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ((b"x", "png"), "name one such as"),
        ((b"x", "image/png\r\nset-cookie: a=b"), "name one such as"),
        ((Image.new("RGB", (1, 1)), "image/tiff"), "name one of"),
        ((Image.new("RGBA", (1, 1)), "image/jpeg"), "convert it first"),
        ((Image.new("1", (16384, 1)), "image/webp"), "convert it first"),
        (Image.new("F", (1, 1)), "convert it first"),
        (Image.new("RGB", (0, 0)), "convert it first"),
        (b"x" * (LIMIT + 1), "returned 1,048,577 bytes; at most 1,048,576 bytes fit"),
        (object(), "not JSON"),
    ],
)
def test_what_cannot_be_sent_says_what_to_do(value: object, why: str) -> None:
    with pytest.raises(BadResponse, match=why):
        encoded(value)


def test_an_array_of_objects_is_never_pickled() -> None:
    with pytest.raises(BadResponse, match="array of numbers"):
        encoded(np.array([{}], dtype=object), "application/x-npy")
