"""What is said of a body that is not JSON names the header that is missing, where its bytes tell."""

import gzip

import msgspec
import pytest

from dormouse.client_shim.instance import codec
from dormouse.core import notjson
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
    ],
)
def test_the_cause_is_named(body: bytes, why: str) -> None:
    with pytest.raises(codec.BadRequest, match=f"^the body is not JSON: .*{why}"):
        codec.decode(body)
    with pytest.raises(HttpError, match=why) as caught:
        openai.addressed(body)
    assert caught.value.failure.status == 400


_QUOTES = "names and text are in double quotes, which a shell takes away unless single ones are around all"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{'a': 1}", """expected '"' at byte 1, "'a': 1}"; JSON has double quotes"""),
        (b"{\"a\": 'x'}", """invalid character at byte 6, "'x'}"; JSON has double quotes"""),
        (b"'{\"a\": 1}'", """invalid character at byte 0, '\\'{"a": 1}\\''; leave out the quotes around it"""),
        (b'{\\"a\\": 1}', """expected '"' at byte 1, '\\\\"a\\\\": 1}'; leave out the backslashes before quotes"""),
        (b"{first_key: 1}", f"""expected '"' at byte 1, 'first_key: 1}}'; {_QUOTES}: '{{"first_key": ...}}'"""),
        (b"[true_story]", f"""invalid character at byte 1, 'true_story]'; {_QUOTES}: '{{"true_story": ...}}'"""),
        (b"hello", f"""invalid character at byte 0, 'hello'; {_QUOTES}: '"hello"'"""),
        (
            b'"\\u12zz"',
            """invalid character in unicode escape at byte 5, 'zz"'; \\u in a text has four digits behind it""",
        ),
        (b"{1: 2}", """expected '"' at byte 1, '1: 2}'; names are in double quotes"""),
        ("{\u201ca\u201d: 1}".encode(), 'its quotes are typographic; JSON has straight ones (")'),
        (
            '{"a": \u2018b\u2019}'.encode(),
            """invalid character at byte 6, '\u2018b\u2019}'; its quotes are typographic; JSON has straight ones (")""",
        ),
        (b'{"a": True}', "invalid character at byte 6, 'True}'; JSON writes true"),
        (b'{"a": None}', "invalid character at byte 6, 'None}'; JSON writes null"),
        (b'{"a": NaN}', "invalid character at byte 6, 'NaN}'; JSON has no such number, write null"),
        (b'{"a": nan}', "invalid character at byte 6, 'nan}'; JSON has no such number, write null"),
        (b'{"a": -Infinity}', "invalid character at byte 6, '-Infinity}'; JSON has no such number, write null"),
        (b'{"a": (1, 2)}', "invalid character at byte 6, '(1, 2)}'; JSON has lists, in [ ]"),
        (b'{"a": .5}', "invalid character at byte 6, '.5}'; numbers begin with a digit, as 0.5 does"),
        (b'{"a": 01}', "invalid number at byte 6, '01}'; numbers are written as 1, 0.5 or -2e3"),
        (b'{"a": 1 /* one */}', "expected ',' or '}' at byte 8, '/* one */}'; JSON has no comments"),
        (b'{"a": 1} // one', "trailing characters at byte 9, '// one'; JSON has no comments"),
        (
            b'{"a": 1}\n{"b": 2}',
            """trailing characters at byte 9, '{"b": 2}'; """
            "a body is one value: text is in double quotes, and several values are in [ ]",
        ),
        (
            b'{"a": 1}}',
            "trailing characters at byte 8, '}'; "
            "a body is one value: text is in double quotes, and several values are in [ ]",
        ),
        (b'{"a": 1,}', "trailing comma in object at byte 8, '}'"),
        (
            b'{"a": "x\ny"}',
            """invalid character at byte 8, '\\ny"}'; a line's end in a text is written \\n, a tab \\t""",
        ),
        (
            b'{"a": "C:\\path"}',
            """invalid escaped character at byte 10, 'path"}'; a backslash in a text is written \\\\""",
        ),
        (b'{"a": "say "hi""}', """expected ',' or '}' at byte 12, 'hi""}'; a quote in a text is written \\\""""),
        (b'{"a": 1', "it ends too early; a bracket, a quote or a value is missing"),
        (b"@request.json", "invalid character at byte 0, '@request.json'; send what is in the file, not its name"),
        (b'{"a" 1}', "expected ':' at byte 5, '1}'"),
        (b'{"a"; 1}', "expected ':' at byte 4"),
        (b'["' + 4000 * b"a" + b'", b]', f"""invalid character at byte 4005, 'b]'; {_QUOTES}: '{{"b": ...}}'"""),
    ],
)
def test_what_is_wrong_is_shown_with_what_json_has_there(body: bytes, why: str) -> None:
    with pytest.raises(codec.BadRequest) as caught:
        codec.decode(body)
    assert str(caught.value) == f"the body is not JSON: {why}" + ("" if "; " in why else "; send a JSON value")


@pytest.mark.parametrize("body", [b"{x: 1}", b"{'x': 1}", b"{1: 1}"])
def test_another_parsers_words_for_a_name_mean_the_same(body: bytes) -> None:
    """That of values is not that of what is only looked through."""
    with pytest.raises(codec.BadRequest) as ours:
        codec.decode(body)
    with pytest.raises(msgspec.DecodeError, match="object keys must be strings") as caught:
        msgspec.json.decode(body)
    assert notjson.cause(body, str(caught.value)).partition("; ")[2] == str(ours.value).partition("; ")[2]
