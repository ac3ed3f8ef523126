"""A request's head, once it is whole: its meaning by RFC 9112, and the faults of heads. Pure: no I/O.

The parser knows which bytes may stand where. It passes some heads that must be refused: other versions, codings of a
transfer that it leaves to others, targets that are none, a missing Host. The names of the node are access/'s.
"""

import urllib.parse
from typing import Any, Final

import httptools

from dormouse.schemas.messages import Failure

HEAD_NBYTES: Final = 64 << 10
HEADERS: Final = 128
"""Browsers and proxies send some twenty; a field costs a hundred times its bytes here."""

OF_HEADS: Final = (b"connection", b"proxy-connection")
"""In a trailer the parser obeys them too, and reads nothing more."""

Fields = list[tuple[bytes, bytes]]


def scope_of(method: bytes, target: bytes, version: str, headers: Fields) -> dict[str, Any] | Failure:
    """Method, path, query_string and headers, as ASGI has them."""
    if version not in ("1.0", "1.1"):
        return bad_http(f"it is HTTP/{version}; send HTTP/1.1")
    if version == "1.1" and not any(name == b"host" for name, _ in headers):
        return bad_http("its head has no Host")
    for name, value in headers:
        shown = value[:40].decode("latin-1")
        if name == b"transfer-encoding" and version == "1.0":
            return bad_http("HTTP/1.0 has no Transfer-Encoding; send HTTP/1.1, or a Content-Length")
        if name == b"transfer-encoding" and value.lower() != b"chunked":
            return bad_http(f"its Transfer-Encoding is {shown!r}; send chunked, and say gzip as Content-Encoding")
        if name == b"expect" and version == "1.1" and value.lower() not in (b"", b"100-continue"):
            return expectation_failed(shown)
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        url = None
    if url is None or b"#" in target or url.userinfo is not None or method == b"CONNECT":
        return bad_http("its target is not one of this node; send a path and a query")
    path = (url.path or b"/").decode("ascii")
    if url.schema is not None:
        if url.schema.lower() not in (b"http", b"https"):
            return bad_http("its target is not one of this node; send a path and a query")
        headers = _called(headers, _authority(url))
        path = "*" if method == b"OPTIONS" and url.path is None else path
    if not path.startswith("/") and (path, method) != ("*", b"OPTIONS"):
        return bad_http("its target is not one of this node; send a path and a query")
    return {
        "method": method.decode("ascii"),
        "path": urllib.parse.unquote(path) if "%" in path else path,
        "query_string": url.query or b"",
        "headers": headers,
    }


def _authority(url: Any) -> bytes:
    host = b"[%b]" % url.host if b":" in url.host else bytes(url.host)
    return host if url.port is None else b"%b:%d" % (host, url.port)


def _called(headers: Fields, authority: bytes) -> Fields:
    """A request to a proxy names the server in its target, and a Host that says something else counts for nothing
    (RFC 9112, 3.2.2). That there is one too many is still seen.
    """
    if not any(name == b"host" for name, _ in headers):
        return [*headers, (b"host", authority)]
    return [(name, authority if name == b"host" else value) for name, value in headers]


def again(method: bytes, target: bytes, version: str, headers: Fields) -> bytes:
    """The same head without its Upgrade, which nothing here takes: it is ignored (RFC 9110, 7.8). The parser has read
    its fields, so none can hold a line's end.
    """
    lines = b"".join(b"%b: %b\r\n" % field for field in headers if field[0] != b"upgrade")
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), lines)


def head_too_large() -> Failure:
    text = f"the request's header may have {HEAD_NBYTES} bytes and {HEADERS} fields; send what is large in the body"
    return Failure(code="header_too_large", status=431, text=text)


def too_slow(what: str) -> Failure:
    text = f"the request's {what} did not come in time; send it without pauses"
    return Failure(code="request_timeout", status=408, text=text)


def bad_http(why: str = "send one well-formed request at a time") -> Failure:
    return Failure(code="bad_http", status=400, text=f"this is not HTTP/1.1 as it should be: {why}")


def expectation_failed(shown: str) -> Failure:
    text = f"the request's Expect is {shown!r}; send 100-continue, or no Expect"
    return Failure(code="expectation_failed", status=417, text=text)


def too_many_connections(most: int) -> Failure:
    text = f"{most} connections are open already (limits.connections); close some, or come back later"
    return Failure(code="too_many_connections", status=503, text=text, retryable=True)


def part_is_taken(most: int, whose: str) -> Failure:
    text = (
        f"of the node's {most} connections (limits.connections), all that {whose} may have are taken; end some of "
        "those requests or streams, or send this again later"
    )
    return Failure(code="too_many_connections", status=503, text=text, retryable=True)
