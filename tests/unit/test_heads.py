"""What a head asks for, by RFC 9112, where the parser leaves it to others."""

import pytest

from dormouse.router.front.heads import scope_of
from dormouse.schemas.messages import Failure

HOST = (b"host", b"localhost")


def read(
    target: bytes, *headers: tuple[bytes, bytes], method: bytes = b"GET", version: str = "1.1"
) -> dict[str, object]:
    scope = scope_of(method, target, version, [HOST, *headers])
    assert not isinstance(scope, Failure), scope
    return scope


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_target_that_is_whole_says_whom_it_is_for(version: str) -> None:
    found = read(b"http://evil.example:81/a%20b?c=%20", (b"x", b"y"), version=version)
    assert (found["path"], found["query_string"]) == ("/a b", b"c=%20")
    assert found["headers"] == [(b"host", b"evil.example:81"), (b"x", b"y")]
    assert read(b"HTTPS://[::1]:8700", version=version)["headers"] == [(b"host", b"[::1]:8700")]
    assert read(b"http://a", HOST, version=version)["headers"] == [(b"host", b"a")] * 2, "and two are two"
    old = scope_of(b"GET", b"http://a/", "1.0", [])
    assert not isinstance(old, Failure)
    assert old["headers"] == [(b"host", b"a")]


def test_targets() -> None:
    assert read(b"//evil/x")["path"] == "//evil/x"
    assert read(b"*", method=b"OPTIONS")["path"] == "*"
    assert read(b"http://localhost", method=b"OPTIONS")["path"] == "*"
    assert read(b"http://localhost?a")["path"] == "/"
    for bad in (
        b"*",
        b"/a#b",
        b"/a#",
        b"http://u@localhost/",
        b"ftp://localhost/",
        b"localhost:80",
        b"http:///a",
        b"http://a:99999/",
    ):
        refused = scope_of(b"GET", bad, "1.1", [HOST])
        assert isinstance(refused, Failure), bad
        assert (refused.status, refused.code) == (400, "bad_http")
    assert isinstance(scope_of(b"CONNECT", b"/a", "1.1", [HOST]), Failure)


def test_what_the_parser_lets_pass_is_refused_by_name() -> None:
    for version, headers, named in (
        ("2.0", [HOST], "HTTP/2.0"),
        ("0.9", [HOST], "HTTP/0.9"),
        ("1.1", [], "no Host"),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip, chunked")], "'gzip, chunked'"),
        ("1.0", [HOST, (b"transfer-encoding", b"chunked")], "HTTP/1.0 has no Transfer-Encoding"),
        ("1.1", [HOST, (b"expect", b"100-continue"), (b"expect", b"tea")], "'tea'"),
    ):
        refused = scope_of(b"POST", b"/", version, headers)
        assert isinstance(refused, Failure)
        assert refused.status == (417 if "tea" in named else 400)
        assert named in refused.text
    assert not isinstance(scope_of(b"POST", b"/", "1.0", [(b"expect", b"tea")]), Failure), "it is as if not said"
    assert read(b"/", (b"transfer-encoding", b"Chunked"), method=b"POST")["path"] == "/"
    assert not isinstance(scope_of(b"GET", b"/healthz", "1.0", []), Failure)
