"""Odd requests, by why they are answered as they are: ``TAKEN``, and the one behind it as well; ``LAST``, taken, and it
ends its connection; ``REFUSED``, and nothing behind it is read.

Kinds of oddity that suites of parsers have (llhttp's, h11's), and those of RFC 9112, whose sections are named alone.
"""

from collections.abc import Callable
from typing import Final


def _form(text: bytes) -> Callable[..., tuple[bytes, ...]]:
    """Of requests: ``|`` ends a line, and what they are given is put in place of ``~``."""
    return lambda *given: tuple(text.replace(b"|", b"\r\n").replace(b"~", each) for each in given)


_POST: Final = b"POST /functions/echo/invoke HTTP/1.1|Host: localhost|Content-Type: application/json|"
posts: Final = _form(_POST + b"~")
lengths: Final = _form(_POST + b"Content-Length:~||4321")
fields: Final = _form(_POST + b"Content-Length: 4|~||4321")
codings: Final = _form(_POST + b"~||4|4321|0||")
chunks: Final = _form(_POST + b"Transfer-Encoding: chunked||~")
sizes: Final = _form(_POST + b"Transfer-Encoding: chunked||~|4321|0||")
trailers: Final = _form(_POST + b"Transfer-Encoding: chunked||4|4321|0|~||")
lines: Final = _form(b"~|Host: localhost||")
targets: Final = _form(b"GET ~ HTTP/1.1|Host: localhost||")
versions: Final = _form(b"GET /healthz ~|Host: localhost||")
heads: Final = _form(b"GET /healthz HTTP/1.1|~")
EITHER: Final = b"Content-Length: 4\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 4"

TAKEN: Final[dict[str, tuple[bytes, ...]]] = {
    "a length is digits between blanks; RFC 9110, 8.6": lengths(b"4", b" \t4\t ", b"04", b"0" * 30 + b"4"),
    "names and codings in either case; RFC 9110, 5.1": codings(b"tRANSFER-eNCODING:  cHuNkEd "),
    "a name with another sign is another name": fields(b"Content_Length: 9", b"Transfer_Encoding: chunked"),
    "all signs of a name, and each value that is one; RFC 9110, 5.5": fields(
        b"!#$%&'*+-.^_`|~1: a", b"X:", b"X: \t ", b"X:a", b"X: a\tb", b"X: \xe9\xff"
    ),
    "a size is hexadecimal digits; 7.1": sizes(b"4", b"0004", b"0" * 100 + b"4")
    + chunks(b"0003\r\n432\r\n01\r\n1\r\n000\r\n\r\n"),
    "extensions are passed over; 7.1.1": sizes(b"4;a", b"4;a=b;c", b'4;a="b;c"', b'4;a="b\\"c"', b'4;a="\xe9"')
    + chunks(b"4\r\n4321\r\n0;a=b\r\n\r\n"),
    "what a trailer says counts for nothing; RFC 9110, 6.5.1": trailers(
        b"X: y", b"Host: evil.example", b"Expect: tea", b"Content-Type: a/b", b"Upgrade: h2c"
    ),
    "empty lines before a request, and blanks in its line, are passed over; 2.2, 3": lines(
        *(start + b"GET /healthz HTTP/1.1" for start in (b"\r\n", b"\n", b"\r\n\r\n\r\n", b"\r")),
        b"GET  /healthz  HTTP/1.1",
    )
    + posts(b"Content-Length: 4\r\n\r\n4321\r\n"),
    "a body that means nothing is read all the same; RFC 9110, 9.3.1": heads(
        b"Host: localhost\r\nContent-Length: 4\r\n\r\n4321",
        b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n4321\r\n0\r\n\r\n",
    ),
    "forms of targets; 3.2": targets(
        b"/healthz?", b"/healthz?a=%zz", b'/healthz?<>"{}|^`', b"/%68ealthz", b"http://localhost/healthz",
        b"HTTPS://LOCALHOST:80/healthz", b"http://[::1]/healthz",
    ),
    "Upgrade is ignored; RFC 9110, 7.8": fields(
        b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk", b"Upgrade: x",
        b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x", b"Connection: upgrade",
    ),
    "other words of Connection are none; RFC 9110, 7.6.1": fields(
        *(b"Connection: " + word for word in (b"", b"Keep-Alive", b"closed", b"xclose", b'"close"', b"content-length"))
    ),
    "an expectation that is met; RFC 9110, 10.1.1": fields(
        b"Expect: 100-continue", b"Expect: 100-Continue", b"Expect:"
    ),
}  # fmt: skip

LAST: Final[dict[str, tuple[bytes, ...]]] = {
    "close, among others and in either case; 9.6": fields(
        b"Connection: close", b"Connection: CLOSE", b"Connection: keep-alive, close", b"Connection: close, keep-alive",
        b"Connection: a,, ,close", b"Connection: keep-alive\r\nConnection: close", b"Connection: upgrade, close",
        b"Connection: upgrade, close\r\nUpgrade: x",
    ),
    "HTTP/1.0: one request, whatever it wishes for; 9.3, RFC 9110, 10.1.1": versions(
        *(b"HTTP/1.0" + more for more in (b"", b"\r\nConnection: keep-alive", b"\r\nUpgrade: x", b"\r\nExpect: tea"))
    ),
}  # fmt: skip

REFUSED: Final[dict[str, tuple[int, str, tuple[bytes, ...]]]] = {
    "a length is digits, once; RFC 9110, 8.6": (400, "bad_http", lengths(
        b"+4", b"-4", b"-0", b"0x4", b"4.0", b"4e0", b"4_0", b"4 4", b"4;", b"", b" ", b"four", b"\xb2", b"4\x0b",
        b"4, 4", b"4,4", b"4,", b",4", b"4\r\nContent-Length: 4", b"4\r\ncontent-length: 5", b"18446744073709551620",
        b"9" * 40,
    )),
    "a length that no body can have": (413, "body_too_large", lengths(b"9223372036854775808")),
    "one coding, chunked, once; 6.1": (400, "bad_http", codings(*(b"Transfer-Encoding:" + value for value in (
        b"", b"identity", b"gzip", b"xchunked", b"chunkedx", b"chunked, chunked", b"chunked,", b",chunked",
        b"gzip, chunked", b"chunked, identity", b"identity, chunked", b"chunked;a=b", b"chunked chunked",
        b'"chunked"', b"\x0bchunked", b"chunked\0", b"\r\n chunked", b" chunked\r\nTransfer-Encoding: chunked",
        b" identity\r\nTransfer-Encoding: chunked", b"\r\nTransfer-Encoding: chunked",
    )))),
    "a name ends at its colon; 5.1": (400, "bad_http", codings(
        b"Transfer-Encoding : chunked", b"Transfer-Encoding\t: chunked", b"Transfer-Encoding\x0b: chunked",
    )),
    "a length beside a coding; 6.1": (400, "bad_http", codings(*EITHER) + posts(
        *(each.replace(b"chunked", value) + b"\r\n\r\n4321" for each in EITHER for value in (b"identity", b"")),
    )),
    "HTTP/1.0 has no codings; 6.1": (400, "bad_http", tuple(
        each.replace(b"HTTP/1.1", b"HTTP/1.0") for each in codings(b"Transfer-Encoding: chunked")
    )),
    "a size is hexadecimal digits that end with CR LF; 7.1": (400, "bad_http", sizes(
        b"+4", b"-4", b"0x4", b"4.0", b"4_0", b"g", b"", b" 4", b"4 ", b"\t4", b"4\t", b"4\0", b"4\x0b", b"4,a", b"4\r",
        b"10000000000000004", b"f" * 17,
    ) + chunks(
        b"4\n4321\r\n0\r\n\r\n", b"4\r4321\r\n0\r\n\r\n", b"4\r\n4321\n0\r\n\r\n", b"4\r\n4321\r\n0\n\r\n",
        b"4\r\n4321\r\n0\r\n\n", b"4\n4321\n0\n\n", b"4\r\n43210\r\n0\r\n\r\n", b"4\r\n432\r\n0\r\n\r\n",
        b"4\r\n43210\r\n\r\n", b"4\r\n4321\r\n0x0\r\n\r\n", b"4\r\n4321\r\n-0\r\n\r\n",
    )),
    "extensions without blanks, control bytes or open quotes; 7.1.1": (400, "bad_http", sizes(
        b"4;", b"4 ;a", b"4; a", b"4;a =b", b'4;a="b', b'4;a="b"c', b"4;a\nb", b"4;a\rb", b"4;a\0b", b"4;a\x7f",
        b"4;a\xe9", b'4;a="\n"', b'4;a="\r\n"',
    )),
    "a trailer frames nothing, and is written as a field is; RFC 9110, 6.5.1": (400, "bad_http", trailers(
        b"Content-Length: 9", b"Content-Length: x", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip",
        b"Connection: close", b"connection: keep-alive", b"Proxy-Connection: close",
        b"Upgrade: h2c\r\nConnection: upgrade", b"X y", b"X : y", b": y", b" X: y", b"X: a\0", b"X: a\rb", b"X: y\n",
        b"X: y\r\n z",
    )),
    "no folded line; 5.2": (400, "bad_http", fields(
        b"X: a\r\n b", b"X: a\r\n\tb", b"X:\r\n b", b"X: a\r\n ", b" X: a", b"\tX: a", b"X\r\n: a",
    ) + heads(b" Host: localhost\r\n\r\n", b" X: y\r\nHost: localhost\r\n\r\n")),
    "a field is a name, a colon and a value; 5": (400, "bad_http", fields(
        b"X", b": a", b"X : a", b"X\t: a", b"X\0: a", b"X\r: a", b"\r: a", b"\rX: a", b"X\x7f: a", b"X\xe9: a",
        b"X[]: a", b"X(: a", b"X@: a", b'X"y: a', b"X y: a",
    )),
    "no control byte in a value; RFC 9110, 5.5": (400, "bad_http", fields(
        b"X: a\0b", b"X: a\rb", b"X: a\r", b"X:\rContent-Length: 9", b"X: a\nY: b", b"X:\nY: b", b"X: a\x01b",
        b"X: a\x0bb", b"X: a\x7fb",
    )),
    "lines end with CR LF; 2.2": (400, "bad_http", (
        b"GET /healthz HTTP/1.1\nHost: localhost\n\n", b"GET /healthz HTTP/1.1\rHost: localhost\r\r",
        b"GET /healthz HTTP/1.1\nHost: localhost\r\n\r\n", *heads(b"Host: localhost\r\n\n", b"Host: localhost\n\n"),
        *heads(b"Host: localhost\r\n\rXGET /evil HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    )),
    "methods go by name; RFC 9110, 9.1": (400, "bad_http", lines(*(
        method + b" /healthz HTTP/1.1"
        for method in (b"get", b"Get", b"GETX", b"G", b"FROB", b"A" * 5000, b"GET\0", b"\xe9GET", b"\xef\xbb\xbfGET",
                       b"\0GET", b" GET", b"\tGET", b"CONNECT", b"")
    ))),
    "methods that nothing takes; RFC 9110, 15.5.6": (405, "method_not_allowed", lines(*(
        method + b" /healthz HTTP/1.1" for method in (b"TRACE", b"PUT", b"PROPFIND", b"M-SEARCH", b"SOURCE")
    ))),
    "a request line has three words; 3": (400, "bad_http", lines(
        b"GET\t/healthz HTTP/1.1", b"GET /healthz\tHTTP/1.1", b"GET /healthz HTTP/1.1 ", b"GET /healthz", b"GET",
        b"GET /healthz ", b"GET HTTP/1.1", b"GET  HTTP/1.1", b"GET /a b HTTP/1.1", b"GARBAGE", b"SSH-2.0-x",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\nGET / HTTP/1.1",
    )),
    "HTTP/1.1 and HTTP/1.0; 2.3": (400, "bad_http", versions(
        b"HTTP/1.2", b"HTTP/1.10", b"HTTP/1.01", b"HTTP/01.1", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/2", b"HTTP/1",
        b"HTTP/1.", b"HTTP/.1", b"HTTP/1,1", b"HTTP 1.1", b"HTTP/1.1x", b"http/1.1", b"HTTPS/1.1", b"HTTP//1.1",
        b"HTTP/-1.1", b"HTTP/9.9", b"HTTP/1.\xb9", b"HTTP/ 1.1", b"HTTP/1.1\r", b"HTTP/1.1\0", b"ICE/1.0", b"RTSP/1.0",
    ) + lines(b"PRI * HTTP/2.0", b"OPTIONS /healthz RTSP/1.0", b"\r\nGET /healthz RTSP/1.0")),
    "a target is a path or a whole address; 3.2": (400, "bad_http", targets(
        b"*", b"?a", b"#a", b"healthz", b"localhost", b"localhost:80", b"127.0.0.1:80/healthz", b"\\healthz",
        b"/healthz#", b"/healthz#a", b"/healthz?a#b", b"/health z", b"/healthz\x01", b"/healthz\x7f", b"/healthz\0",
        b"/\xe9", b"/healthz?\xe9", b"/healthz?\0", b"http:/healthz", b"http:healthz", b"http:///healthz",
        b"http://me@localhost/healthz", b"http://me:pw@localhost/healthz", b"http://localhost:/healthz",
        b"http://localhost:99999/healthz", b"http://localhost:x/healthz", b"http://[::1/healthz",
        b"http://local host/healthz", b"http://localhost/healthz#a", b"ftp://localhost/healthz", b"javascript:alert(1)",
    ) + lines(b"CONNECT localhost:80 HTTP/1.1")),
    "a path is what it says, and is not tidied up": (404, "unknown_route", targets(
        b"//healthz", b"/./healthz", b"/x/../healthz", b"/%2e%2e/healthz", b"/healthz/", b"/healthz;a", b"/healthz%00",
        b"/%zz", b"/%", b"/healthz\\",
    )),
    "one Host; 3.2": (400, "bad_http", heads(b"\r\n")),
    "not two Hosts; 3.2": (400, "bad_headers", heads(
        b"Host: localhost\r\nHost: localhost\r\n\r\n", b"Host: localhost\r\nHost: evil.example\r\n\r\n",
    )),
    "a Host that is none of the node's; RFC 9110, 7.4": (421, "unknown_host", heads(*(
        b"Host: %b\r\n\r\n" % host
        for host in (b"", b"localhost, localhost", b"a b", b"me@localhost", b"[::1", b"localhost/", b"http://localhost",
                     b"localhost#", b"localhost:x", b"localhost:+80", b"127.1", b"\xe9", b"evil.example")
    )) + targets(b"http://evil.example/healthz")),
    "an expectation that nobody meets; RFC 9110, 10.1.1": (417, "expectation_failed", fields(
        b"Expect: tea", b"Expect: 100-continue, tea", b"Expect: 100-continue;a", b"Expect: 200-ok",
        b"Expect: 100-continue\r\nExpect: tea",
    )),
}  # fmt: skip
