"""Bodies of requests as ``handle`` is given them: forms cut anywhere, arrays, bytes; and all that is malformed."""

import io
import json
import random
from contextlib import suppress

import numpy as np
import pytest

from dormouse.client_shim.instance import multipart, request_bodies
from dormouse.client_shim.instance.codec import BadRequest
from dormouse.client_shim.instance.request_bodies import RequestFile, value_of

FORM = "multipart/form-data; boundary=xyz"


def form(*parts: tuple[str, bytes], last: bytes = b"--xyz--\r\n") -> bytes:
    return b"".join(b"--xyz\r\n%b\r\n\r\n%b\r\n" % (head.encode(), data) for head, data in parts) + last


def field(name: str, data: bytes, more: str = "") -> tuple[str, bytes]:
    return f'Content-Disposition: form-data; name="{name}"{more}', data


def test_a_form_has_text_files_and_json() -> None:
    body = form(
        field("text", "grüße".encode()),
        field("file", b"\x00\xff", '; filename="a \\"b\\".png"\r\nContent-Type: image/png'),
        field("value", b'{"k": [1]}', "\r\nContent-Type: application/json"),
        *(field("many", data) for data in (b"1", b"2", b"3")),
        field("empty", b""),
        field("list", b"[1]", "\r\nContent-Type: application/json"),
        field("list", b"2"),
    )
    fields = value_of(body, FORM)
    file = fields.pop("file")
    assert fields == {
        "text": "grüße",
        "value": {"k": [1]},
        "many": ["1", "2", "3"],
        "empty": "",
        "list": [[1], "2"],
    }
    assert file == RequestFile(b"\x00\xff", 'a "b".png', "image/png")


def test_a_form_is_the_same_wherever_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins like a boundary and is none lies on every possible edge."""
    values = [b"\r\n--xy", b"\r\n--xyz", b"\r", b"", b"a\r\n--xyza\r\n-", b"\r\n\r\n--xy\r\n--x", bytes(range(256))]
    values = [each + b"!" if each.endswith(b"--xyz") else each for each in values]
    body = form(*(field(f"f{i}", each, '; filename="f"') for i, each in enumerate(values)))
    whole = [each.data for each in value_of(body, FORM).values()]
    assert whole == values
    for step in range(1, 80):
        monkeypatch.setattr(multipart, "STEP_NBYTES", step)
        assert [each.data for each in value_of(body, FORM).values()] == values, step


def test_a_value_is_copied_out_of_the_body_once() -> None:
    body = form(field("f", b"x" * 5_000_000, '; filename="f"'))
    (part,) = multipart.parts(memoryview(body), FORM)
    assert isinstance(part.data, memoryview)
    assert part.data.obj is body
    assert part.data.nbytes == 5_000_000


@pytest.mark.parametrize(
    ("said", "filename"),
    [
        ('; filename="a.png"', "a.png"),
        ("; filename=a.png", "a.png"),
        (";filename=a.png ; x=y", "a.png"),
        ("; filename*=utf-8''gr%C3%B6%C3%9Fe.png", "größe.png"),  # requests over urllib3 1.x
        ("; FileName*=UTF-8'de'gr%C3%B6%C3%9Fe.png", "größe.png"),
        ("; filename*=iso-8859-1''gr%F6%DFe.png", "größe.png"),
        ("; filename=\"gr__e.png\"; filename*=UTF-8''gr%C3%B6%C3%9Fe.png", "größe.png"),  # Spring
        ("; filename*=UTF-8''gr%C3%B6%C3%9Fe.png; filename=\"gr__e.png\"", "größe.png"),
        ('; filename="=?UTF-8?Q?gr=C3=B6=C3=9Fe.png?="', "größe.png"),  # Java's mail library
        ('; filename="=?utf-8?b?Z3LDtsOfZS5wbmc=?="', "größe.png"),
        ('; filename="größe.png"', "größe.png"),  # browsers, Go, requests over urllib3 2
        ('; filename="a%22b;c%0D%0A.png"', 'a"b;c\r\n.png'),  # browsers, curl, httpx, aiohttp
        ('; filename="a\\"b\\\\c;d.png"', 'a"b\\c;d.png'),  # Go, older curl
        ('; filename="100%.png"', "100%.png"),
        ('; filename="C:\\dir\\new.png"', "new.png"),
        ('; filename="\\\\host\\new.png"', "new.png"),
        ('; filename=""', ""),
        ("; filename=", ""),
    ],
)
def test_files_by_each_way_to_say_their_name(said: str, filename: str) -> None:
    for data in (b"plain", b"\x89PNG\xff"):
        (file,) = value_of(form(field("f", data, f"{said}\r\nContent-Type: image/png")), FORM).values()
        assert file == RequestFile(data, filename, "image/png")


def test_names_of_fields_and_charsets_of_text() -> None:
    body = form(
        ("Content-Disposition: form-data; name*=utf-8''gr%C3%B6%C3%9Fe", b"1"),
        ('content-disposition: form-data; name="a%22b"\r\nContent-Transfer-Encoding: 8bit', b"2"),
        field(
            "latin", "größe".encode("latin-1"), "\r\nContent-Type: text/plain; charset=ISO-8859-1"
        ),  # Apache's client
        field("quoted", "größe".encode(), '\r\nContent-Type: text/plain; charset="UTF-8"'),
    )
    assert value_of(body, FORM) == {"größe": "1", 'a"b': "2", "latin": "größe", "quoted": "größe"}


@pytest.mark.parametrize(
    ("body", "kind", "why"),
    [
        (form(field("a", b"1", "; filename*0=a; filename*1=b")), FORM, r"says filename\*0; send filename"),
        (form(field("a", b"1", "; filename*=größe")), FORM, r"filename\* is .* percent-encoded"),
        (form(field("a", b"1", "; filename*=utf-7x''a")), FORM, r"filename\* is"),
        (form(field("a", b"1", "; filename*=utf-8''%FF")), FORM, r"filename\* is"),
        (form(field("a", b"1", '; filename="=?none?q?a?="')), FORM, "not encoded as it says"),
        (form(field("a", b"1", "; filename=a; filename=b")), FORM, "says filename twice"),
        (form(field("a", b"1", '; filename="a')), FORM, "cannot be read"),
        (form(field("a", b"MQ==", "\r\nContent-Transfer-Encoding: base64")), FORM, "content-transfer-encoding: base64"),
        (form(field("a", b"1", "\r\nContent-Encoding: gzip")), FORM, "content-encoding: gzip"),
        (form(field("a", b"1", "\r\nContent-Type: multipart/mixed; boundary=b")), FORM, "part of its own"),
        (form(field("a", b"1", "\r\nContent-Type: text/plain; charset=none")), FORM, "charset is 'none'"),
        (form(field("a", b"\xff", "\r\nContent-Type: text/plain; charset=ascii")), FORM, "not ASCII"),
        (
            b'--xyz\r\nContent-Disposition: form-data; name="a"; filename="gr\xf6\xdfe"\r\n\r\n1\r\n--xyz--\r\n',
            FORM,
            "filename is not UTF-8",
        ),
        (form(field("a", b"1")), "multipart/form-data", "names no boundary"),
        (form(field("a", b"1"), last=b""), FORM, "ends before its last boundary"),
        (b"", FORM, "ends before its last boundary"),
        (b"no form at all", FORM, "not multipart/form-data"),
        (form(("Content-Type: text/plain", b"1")), FORM, "no name"),
        (form(("Broken", b"1")), FORM, "not multipart/form-data"),
        (form(field("a", b"1", "\r\nX: " + "y" * 100_000)), FORM, "eader"),
        (form(*[field("a", b"1")] * 1001), FORM, "more than 1000 parts"),
        (form(field("a", b"\xff\xfe")), FORM, "not UTF-8"),
        (form(field("a", b"{", "\r\nContent-Type: application/json")), FORM, "not JSON"),
        (form(field("a", b"1")), f"multipart/form-data; boundary={'z' * 300}", "oundary"),
    ],
)
def test_bad_forms_are_refused(body: bytes, kind: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        value_of(body, kind)
    assert caught.value.code == ("bad_json" if "JSON" in why else "bad_body")
    assert caplog.records == [], "a client writes nothing into the function's log"


def test_forms_that_are_anything_raise_nothing_else() -> None:
    random.seed(7)
    body = bytearray(form(field("a", b"1"), field("b", b"22", '; filename="x"')))
    for _ in range(3000):
        bad = bytearray(body)
        for _ in range(random.randint(1, 4)):
            bad[random.randrange(len(bad))] = random.choice(b'\r\n-:;="xyz\x00\xff')
        with suppress(BadRequest):
            value_of(bytes(bad[: random.randint(0, len(bad))]), FORM)


@pytest.mark.parametrize("kind", ["", "application/json", "Application/JSON; charset=utf-8", "application/ld+json"])
def test_json_is_json_whatever_kind_of_it(kind: str) -> None:
    assert value_of(b'{"a": 1}', kind) == {"a": 1}
    with pytest.raises(BadRequest, match="not JSON"):
        value_of(b"{", kind)


def test_all_else_is_bytes_that_know_their_type() -> None:
    assert value_of(memoryview(b"abc"), "image/png; q=1") == RequestFile(b"abc", "", "image/png; q=1")


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(3.5),
        np.zeros((0, 4), np.uint8),
        np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.arange(3, dtype=">i2"),
    ],
)
def test_arrays_come_as_they_were_saved(array: np.ndarray) -> None:
    found = value_of(saved(array), request_bodies.NPY)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable  # and its own: the request's memory is used again


def npy(header: str, data: bytes = b"", major: int = 1) -> bytes:
    width = 2 if major == 1 else 4
    return b"\x93NUMPY" + bytes([major, 0]) + len(header).to_bytes(width, "little") + header.encode() + data


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x93NUMPY",
        b"PK\x03\x04 a zip of arrays",
        saved(np.arange(4))[:-1],
        saved(np.arange(4)) + b"x",
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}"),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999, 99999999999)}"),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", b"x" * 8),
        npy("{'descr': '|V0', 'fortran_order': False, 'shape': (99999999999,)}"),
        npy("{'descr': 'nothing', 'fortran_order': False, 'shape': (1,)}"),
        npy("__import__('os').system('true')"),
        npy("{'shape': (1,)}"),
        npy("[" * 5000),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}" + " " * 20_000, b"1234", major=2),
        npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", b"1234", major=9),
    ],
)
def test_bad_arrays_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match=r"no array as numpy\.save writes it") as caught:
        value_of(body, request_bodies.NPY)
    assert caught.value.code == "bad_body"


def test_an_array_of_python_objects_is_not_unpickled() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(BadRequest, match="no numbers"):
        value_of(file.getvalue(), request_bodies.NPY)


def test_fields_that_are_json_lists_are_not_taken_for_several() -> None:
    body = form(field("a", json.dumps([1, 2]).encode(), "\r\nContent-Type: application/json"))
    assert value_of(body, FORM) == {"a": [1, 2]}


def test_large_ones_are_copied_as_small_ones_are() -> None:
    pages = bytearray(np.random.default_rng(1).bytes(request_bodies.LARGE_NBYTES + 12_345))
    view = memoryview(pages)[7:]
    value = value_of(view, "a/b").data
    assert value == bytes(view)
    pages[1000] ^= 1
    assert value != bytes(view)
    assert hash(value) == hash(bytes(value))
