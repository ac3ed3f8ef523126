"""The proxy by which builds reach the index: real sockets, on this machine alone."""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from urllib.parse import urlsplit

import pytest

from dormouse.core.sandbox import way_out
from dormouse.core.sandbox.reach import place_of, places
from dormouse.core.sandbox.way_out import WayOut

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Origin:
    """What stands behind the proxy: keeps the heads of requests, answers each with ``body`` and ends; after requests of
    the method that it ``echoes`` it says what comes.
    """

    def __init__(self, body: bytes = b"hello", status: str = "200 OK", echoes: str = "") -> None:
        self.heads: list[str] = []
        self._body, self._status, self._echoes = body, status, echoes

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            closing(writer),
            suppress(asyncio.IncompleteReadError),
        ):  # a proxy that refuses what it was to ask says nothing
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
            answer = f"HTTP/1.1 {self._status}\r\nContent-Length: {len(self._body)}\r\n\r\n"
            writer.write(answer.encode() + self._body)
            await writer.drain()
            while self._echoes and self.heads[-1].startswith(self._echoes) and (data := await reader.read(1000)):
                writer.write(data)


async def listening(serve: Serve) -> tuple[asyncio.Server, int]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=way_out.HEAD_NBYTES)
    return server, server.sockets[0].getsockname()[1]


async def said(port: int, *parts: bytes) -> bytes:
    """All that it answers, each part sent when something has come for the one before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    with suppress(OSError):  # it may have closed before all was said
        for number, part in enumerate(parts):
            if number:
                found += await asyncio.wait_for(reader.read(4000), 60)
            writer.write(part)
        writer.write_eof()
        found += await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return found


def asked(
    origin: Origin, request: Callable[[int], list[bytes]], allowed: Callable[[int], list[str]] | None = None
) -> str:
    """The answer to a request for an origin at this port."""

    async def ask() -> bytes:
        behind, port = await listening(origin)
        way = WayOut([f"127.0.0.1:{port}"] if allowed is None else allowed(port))
        front, own = await listening(way.serve)
        async with behind, front:
            return await said(own, *request(port))

    return asyncio.run(ask()).decode()


def plain(field: bytes, method: bytes = b"GET") -> Callable[[int], list[bytes]]:
    """Without a tunnel."""
    return lambda port: [b"%s http://127.0.0.1:%d/ HTTP/1.1\r\n%s\r\n\r\n" % (method, port, field)]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_a_plain_request_goes_on_without_what_was_for_the_proxy() -> None:
    origin = Origin()
    more = b"Host: here\r\nProxy-Authorization: Basic own\r\nConnection: keep-alive\r\nX-More: 1\r\n\r\n"
    answer = asked(origin, lambda port: [b"GET http://127.0.0.1:%d/simple/a/?x=1#f HTTP/1.1\r\n" % port + more])
    assert answer.endswith("\r\n\r\nhello")
    (head,) = origin.heads  # it is told which host it is, whatever the build says
    assert re.sub("127.0.0.1:[0-9]+", "PLACE", head) == (
        "GET /simple/a/?x=1 HTTP/1.1\r\nHost: PLACE\r\nX-More: 1\r\nConnection: close\r\n\r\n"
    )


def test_after_a_plain_request_nothing_goes_on() -> None:
    """Nor in one: a second one could be for anybody."""
    origin = Origin()
    second = b"GET http://elsewhere/ HTTP/1.1\r\n\r\n"
    answer = asked(origin, lambda port: [b"GET http://127.0.0.1:%d/ HTTP/1.1\r\n\r\n" % port + second, second])
    assert answer.count("HTTP/1.1") == len(origin.heads) == 1
    for hidden in (b"X: 1\n\nGET / HTTP/1.1", b"X: \x0b", b"X: a\rb", b"X: \x00"):
        assert asked(origin, plain(hidden)).startswith("HTTP/1.1 400 a request has no control characters")
    for more in (b"Content-Length: 5", b"Transfer-Encoding: chunked"):
        assert asked(origin, plain(more)).startswith("HTTP/1.1 405 ")
    assert asked(origin, plain(b"X: 1", b"POST")).startswith("HTTP/1.1 405 ")
    assert len(origin.heads) == 1


def test_there_are_so_many_connections_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way_out, "MAX", 0)
    assert asked(Origin(), lambda port: [b"GET http://127.0.0.1:%d/ HTTP/1.1\r\n\r\n" % port]) == ""


def test_a_tunnel_carries_both_ways() -> None:
    origin = Origin(b"", echoes="GET")
    parts = [b"GET / HTTP/1.1\r\n\r\n", b"more", b"and more"]
    answer = asked(origin, lambda port: [b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % port, *parts])
    assert answer.startswith("HTTP/1.1 200 Connection established\r\n\r\nHTTP/1.1 200 OK")
    assert answer.endswith("moreand more")


@pytest.mark.parametrize("method", ["GET http://127.0.0.1:%d/", "CONNECT 127.0.0.1:%d"])
def test_who_is_not_named_is_not_reached(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    origin = Origin()
    for _ in range(2):
        answer = asked(origin, lambda port: [f"{method % port} HTTP/1.1\r\n\r\n".encode()], lambda port: ["here:443"])
        assert answer.startswith("HTTP/1.1 403 127.0.0.1:")
        assert answer.partition("\r\n")[0].endswith(" is neither the index nor in [environments] hosts")
    assert origin.heads == []
    assert capsys.readouterr().out.count("the build may not reach 127.0.0.1:") == 2  # a way out for each


@pytest.mark.parametrize(
    ("head", "answer"),
    [
        (b"GET /simple/ HTTP/1.1\r\n\r\n", "HTTP/1.1 400 "),
        (b"GET ftp://127.0.0.1/ HTTP/1.1\r\n\r\n", "HTTP/1.1 400 "),
        (b"GET http://user@127.0.0.1/ HTTP/1.1\r\n\r\n", "HTTP/1.1 400 "),
        (b"CONNECT 127.0.0.1:port HTTP/1.1\r\n\r\n", ""),
        (b"CONNECT :443 HTTP/1.1\r\n\r\n", ""),
        (b"nothing\r\n\r\n", ""),
        (b"\xff\xfe\r\n\r\n", ""),
        (b"GET http://127.0.0.1/ HTTP/1.1", ""),
        (b"x" * (way_out.HEAD_NBYTES + 1000), ""),
    ],
    ids=range(9),
)
def test_what_is_no_request_ends_its_connection_alone(head: bytes, answer: str) -> None:
    found = asked(Origin(), lambda port: [head])
    assert found.startswith(answer)
    assert bool(found) is bool(answer)


def test_what_cannot_be_reached_is_said() -> None:
    answer = asked(Origin(), lambda port: [b"GET http://127.0.0.1:1/ HTTP/1.1\r\n\r\n"], lambda port: ["127.0.0.1:1"])
    assert answer.startswith("HTTP/1.1 502 127.0.0.1:1 cannot be reached: [Errno 111]")


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1", "https://127.0.0.1:1", "http://"])
def test_another_kind_of_proxy_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    monkeypatch.setenv("http_proxy", proxy)
    answer = asked(Origin(), lambda port: [b"GET http://127.0.0.1:%d/ HTTP/1.1\r\n\r\n" % port])
    assert answer.startswith("HTTP/1.1 502 the node's http_proxy is not http://HOST:PORT")


@pytest.mark.parametrize("bypassed", [False, True])
def test_the_proxy_of_the_node_is_asked_with_its_password(monkeypatch: pytest.MonkeyPatch, bypassed: bool) -> None:
    """Which the build does not learn."""
    origin, parent = Origin(), Origin(b"", "200 OK", echoes="CONNECT")
    proof = f"Proxy-Authorization: Basic {base64.b64encode(b'u:p@ss').decode()}\r\n"

    async def ask() -> list[bytes]:
        behind, port = await listening(origin)
        above, at = await listening(parent)
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"http://u:p%40ss@127.0.0.1:{at}")
        monkeypatch.setenv("no_proxy", "127.0.0.1" if bypassed else "elsewhere")
        front, own = await listening(WayOut([f"127.0.0.1:{port}", "index.example:443"]).serve)
        async with behind, above, front:
            plain = await said(own, b"GET http://127.0.0.1:%d/a HTTP/1.1\r\n\r\n" % port)
            tunnel = await said(own, b"CONNECT index.example:443 HTTP/1.1\r\n\r\n", b"hello")
            return [plain, tunnel]

    plain, tunnel = asyncio.run(ask())
    assert tunnel == b"HTTP/1.1 200 Connection established\r\n\r\nhello"
    connect = f"CONNECT index.example:443 HTTP/1.1\r\nHost: index.example:443\r\n{proof}\r\n"
    if bypassed:
        assert plain.endswith(b"hello")
        assert parent.heads == [connect]
    else:
        assert origin.heads == []
        assert parent.heads[1] == connect
        assert parent.heads[0].startswith("GET http://127.0.0.1:")
        assert parent.heads[0].endswith(f"Connection: close\r\n{proof}\r\n")


def test_a_proxy_that_refuses_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask() -> bytes:
        above, at = await listening(Origin(b"", "407 Who are you"))
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{at}")
        front, own = await listening(WayOut(["index.example:443"]).serve)
        async with above, front:
            return await said(own, b"CONNECT index.example:443 HTTP/1.1\r\n\r\n")

    assert asyncio.run(ask()).startswith(b"HTTP/1.1 502 the proxy of the node answered 407 for index.example:443")


def test_places_of_addresses_and_hosts() -> None:
    assert places(["https://pypi.org/simple"], []) == ("pypi.org:443", "files.pythonhosted.org:443")
    urls = ["http://Index.example/simple", "file:///srv/wheels", "/srv/wheels", "https://u:p@a.example:8443/x", ""]
    assert places(urls, ["b.example", "b.example:80", "[::1]:8080", "b.example:443"]) == (
        *("index.example:80", "a.example:8443", "b.example:443", "b.example:80", "[::1]:8080"),
    )
    assert place_of(urlsplit("https://[::1]/")) == "[::1]:443"
    for host in ("https://b.example", "b.example/path", "u@b.example", "b.example:port", "", ":443", "b.example:99999"):
        with pytest.raises(ValueError, match=r".+"):
            places([], [host])
    with pytest.raises(ValueError, match=r"^'b\.example/path' is more than a host$"):
        places([], ["b.example/path"])
