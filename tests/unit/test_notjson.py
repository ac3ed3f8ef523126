"""What is said of a body that is not JSON names the header that is missing, where its bytes tell."""

import gzip

import pytest

from dormouse.client_shim.instance import codec
from dormouse.router.front import openai
from dormouse.router.front.exchange import HttpError


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "it is empty; what is sent needs a Content-Length"),
        (gzip.compress(b"{}", mtime=0), "no Content-Encoding: gzip says so"),
        (b"\x28\xb5\x2f\xfd\x04", "packed by zstd"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        ('{"a": 1}'.encode("utf-16-le"), "UTF-16"),
        ('{"a": 1}'.encode("utf-16-be"), "UTF-16"),
        (b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--\r\n', "multipart/form-data"),
        (b"\x89PNG\r\n", "say what it is in Content-Type"),
        (b"\0\0\0\0\0\0\x80\x3f", "say what it is in Content-Type"),
        (b"model=a&prompt=b", "fields of a form"),
        (b"{'a': 1}", "byte 1"),
    ],
)
def test_the_cause_is_named(body: bytes, why: str) -> None:
    with pytest.raises(codec.BadRequest, match=f"^the body is not JSON: .*{why}"):
        codec.decode(body)
    with pytest.raises(HttpError, match=why) as caught:
        openai.addressed(body)
    assert caught.value.failure.status == 400
