"""How heads are mutated, and why two servers that are both right may say different things of them.

Kinds of oddity that the test suites of parsers have (llhttp's, h11's), and those of RFC 9112.
"""

from typing import Final

BASES: Final = (
    b"GET /a?b HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody",
    b"POST /a HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
)
H: Final = rb"(?<=\r\nHost: localhost\r\n)"  # behind the first field
UPGRADE: Final = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
MUTATIONS: Final[dict[str, tuple[bytes, bytes]]] = {  # a pattern, and what is put in its place once
    "none": (rb"^", b""), "lower-case method": (rb"^(GET|POST)", b"get"), "unknown method": (rb"^(GET|POST)", b"FROB"),
    "method with a space": (rb"^", b" "), "CONNECT": (rb"^(GET|POST)", b"CONNECT"), "HEAD": (rb"^GET", b"HEAD"),
    "empty line first": (rb"^", b"\r\n"), "two empty lines first": (rb"^", b"\r\n\r\n"),
    "bare LF first": (rb"^", b"\n"), "two spaces": (rb" /", b"  /"), "tab in the request line": (rb" /", b"\t/"),
    "no target": (rb" /\S*", b" "), "absolute target": (rb" /", b" http://localhost/"),
    "absolute, another name": (rb" /", b" http://other/"), "target with a user": (rb" /", b" http://me@localhost/"),
    "asterisk": (rb"/\S*", b"*"), "fragment": (rb"(/\S*)", rb"\1#f"), "no slash": (rb"/a", b"a"),
    "byte above 127 in the target": (rb"/a", b"/\xe9"), "control byte in the target": (rb"/a", b"/\x01"),
    "HTTP/1.0": (rb"HTTP/1.1", b"HTTP/1.0"),
    "1.0 with keep-alive": (rb"HTTP/1.1\r\n", b"HTTP/1.0\r\nConnection: keep-alive\r\n"),
    "HTTP/2.0": (rb"HTTP/1.1", b"HTTP/2.0"), "HTTP/0.9": (rb"HTTP/1.1", b"HTTP/0.9"),
    "HTTP/1.2": (rb"HTTP/1.1", b"HTTP/1.2"), "lower-case version": (rb"HTTP", b"http"),
    "no version": (rb" HTTP/1.1", b""), "no Host": (rb"Host: localhost\r\n", b""),
    "two Hosts": (H, b"Host: localhost\r\n"), "empty Host": (rb"Host: \w+", b"Host:"), "bare LF": (rb"\r\n", b"\n"),
    "empty value": (H, b"X:\r\n"), "blanks around a value": (H, b"X: \t y \t \r\n"), "no colon": (H, b"X y\r\n"),
    "blank before the colon": (H, b"X : y\r\n"), "folded value": (H, b"X: a\r\n b\r\n"),
    "folded first": (rb"\r\n", b"\r\n a: b\r\n"), "empty name": (H, b": y\r\n"),
    "byte above 127 in a name": (H, b"X\xe9: y\r\n"), "byte above 127 in a value": (H, b"X: \xe9\r\n"),
    "NUL in a value": (H, b"X: a\0b\r\n"), "control byte in a value": (H, b"X: a\x01b\r\n"),
    "CR in a value": (H, b"X: a\rb\r\n"), "DEL in a value": (H, b"X: a\x7fb\r\n"),
    "bracket in a name": (H, b"X[]: a\r\n"), "large field": (H, b"X: " + b"a" * 70_000 + b"\r\n"),
    "many fields": (H, b"X: a\r\n" * 200), "Upgrade": (H, UPGRADE), "Upgrade alone": (H, b"Upgrade: h2c\r\n"),
    "Connection: upgrade": (H, b"Connection: upgrade\r\n"),
    "websocket": (H, b"Connection: Upgrade\r\nUpgrade: websocket\r\n"),
    "close": (H, b"Connection: keep-alive, close\r\n"), "Expect": (H, b"Expect: 100-continue\r\n"),
    "another Expect": (H, b"Expect: tea\r\n"), "equal lengths": (rb"(Content-Length: 4\r\n)", rb"\1\1"),
    "list of lengths": (rb"Length: 4", b"Length: 4, 4"),
    "two lengths": (rb"(Content-Length: )4\r\n", rb"\g<1>4\r\n\g<1>5\r\n"),
    "signed length": (rb"Length: 4", b"Length: +4"), "length with a zero": (rb"Length: 4", b"Length: 04"),
    "hexadecimal length": (rb"Length: 4", b"Length: 0x4"), "empty length": (rb"Length: 4", b"Length:"),
    "huge length": (rb"Length: 4", b"Length: 18446744073709551620"),
    "length and coding": (rb"Content-Length: 4", b"Content-Length: 4\r\nTransfer-Encoding: chunked"),
    "Chunked": (rb"chunked", b"Chunked"), "gzip, chunked": (rb"chunked", b"gzip, chunked"),
    "xchunked": (rb"chunked", b"xchunked"), "chunked, identity": (rb"chunked", b"chunked, identity"),
    "chunked twice": (rb"(Transfer-Encoding: chunked\r\n)", rb"\1\1"),
    "length with a coding": (rb"(Transfer-Encoding)", rb"Content-Length: 4\r\n\1"),
    "extension": (rb"\n4\r", b"\n4;a=b\r"), "quoted extension": (rb"\n4\r", b'\n4;a="b;c"\r'),
    "blank behind a size": (rb"\n4\r", b"\n4 \r"), "size 04": (rb"\n4\r", b"\n04\r"),
    "size 0x4": (rb"\n4\r", b"\n0x4\r"), "size with LF alone": (rb"\n4\r\n", b"\n4\n"),
    "chunk too long": (rb"body", b"bodyx"), "trailer": (rb"0\r\n\r\n$", b"0\r\nX: y\r\n\r\n"),
    "bad trailer": (rb"0\r\n\r\n$", b"0\r\nX y\r\n\r\n"),
}  # fmt: skip
WHY: Final[dict[str, str]] = {
    name: why
    for why, names in {
        "methods go by name, xGET is none; RFC 9110, 9.1": "lower-case method, unknown method, CONNECT, chunk too long",
        "an empty line first is passed over; RFC 9112, 2.2": "empty line first, two empty lines first, bare LF first",
        "a server may take more blanks; RFC 9112, 3": "two spaces",
        "not a target, or not one of a server; RFC 9112, 3.2": "asterisk, no slash, fragment, target with a user",
        "only 1.0 and 1.1 are spoken; RFC 9112, 2.3": "HTTP/0.9, HTTP/1.2, HTTP/2.0",
        "a line ends with CR LF; a server may insist; RFC 9112, 2.2 and 7.1": "bare LF, size with LF alone",
        "no control byte is part of a value; RFC 9110, 5.5": "DEL in a value, control byte in a value",
        "folded lines are to be refused; RFC 9112, 5.2": "folded value",
        "its bounds are smaller; RFC 6585, 5": "large field, many fields",
        "what is here already is not asked for; RFC 9110, 10.1.1": "Expect",
        "an expectation that nobody meets may be refused; RFC 9110, 10.1.1": "another Expect",
        "a length that is said twice may be refused; RFC 9110, 8.6": "equal lengths, list of lengths",
        "HTTP/1.0 has no codings, its framing is at fault; RFC 9112, 6.1": "HTTP/1.0, 1.0 with keep-alive",
        "no number that it can be; RFC 9112, 6.3": "huge length",
        "a length beside a coding may be refused; RFC 9112, 6.1": "length and coding, length with a coding",
        "no blank is behind a chunk's size; RFC 9112, 7.1": "blank behind a size",
    }.items()
    for name in names.split(", ")
}
