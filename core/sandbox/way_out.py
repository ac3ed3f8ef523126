"""The only way out of a build: a proxy that reaches the package index, and the places that the node file names beside
it.

A build has a network of its own, with nothing in it. It listens there and sends the descriptor of that socket, on which
this process, which has the machine's network, answers as a proxy of HTTP: CONNECT, for https, and plain requests. The
client is not trusted. Certificates are checked by pip, which speaks with the index through a tunnel.

    python -m dormouse.core.sandbox.way_out FD HOST:PORT ...

``FD``: a Unix socket by which the descriptor comes. HTTP_PROXY and the like count, as for any other program: the build
need not know them. Refusals are printed, once for each host. Ends with the process that has started it.
"""

import asyncio
import base64
import re
import resource
import signal
import socket
import sys
from collections.abc import Collection
from contextlib import closing, suppress
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

from dormouse.core.sandbox import linux
from dormouse.core.sandbox.reach import PORTS, place_of

HEAD_NBYTES: Final = 64 << 10
"""Of a request, at most."""

HEAD_S: Final = 60.0
CONNECT_S: Final = 30.0
CONNECTIONS: Final = 64
"""At once; more wait, and beyond so many they are closed."""

MAX: Final = 256

PIECE_NBYTES: Final = 256 << 10
REFUSED: Final = 100
"""Hosts that are printed, at most."""

_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that could end a line for somebody else; a tab does not."""


class Refused(Exception):
    """With the words of the status line."""


class WayOut:
    """See the module. ``allowed``: places (reach.py)."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self._refused: set[str] = set()
        self._room, self._open = asyncio.Semaphore(CONNECTIONS), 0
        self._proxies = getproxies_environment()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the build's."""
        self._open += 1
        with closing(writer):
            try:
                if self._open <= MAX:
                    await self._serve(reader, writer)
            finally:
                self._open -= 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._room:
            try:
                head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
                await self._answer(head, reader, writer)
            except Refused as error:
                writer.write(f"HTTP/1.1 {error}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
            except (OSError, ValueError, TimeoutError, EOFError, asyncio.LimitOverrunError):
                pass  # it has left, or what it says is no request
            with suppress(OSError):
                await writer.drain()

    async def _answer(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises Refused, and what `serve` knows."""
        line, *fields = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        if _CONTROL.search("".join((line, *fields))):
            raise Refused("400 a request has no control characters")
        method, target, _ = line.split(" ")
        tunnel = method == "CONNECT"
        url = urlsplit(f"https://{target}" if tunnel else target)
        if url.scheme not in PORTS or url.username is not None:
            raise Refused("400 a proxy is asked for an address with a scheme and without a user")
        self._expect_allowed(place := place_of(url))
        parent = self._parent(url)
        there, back = await self._connected(urlsplit(f"//{place}") if parent is None else parent, place)
        with closing(back):
            if tunnel:
                if parent is not None:
                    await _pass_through(parent, place, there, back)
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                await _pump_both((reader, writer), (there, back))
            else:
                back.write(_plain_request(method, url, place, fields, parent).encode("latin-1"))
                await _pump(there, writer)

    def _expect_allowed(self, place: str) -> None:
        if place in self._allowed:
            return
        if place not in self._refused and len(self._refused) < REFUSED:
            self._refused.add(place)
            print(f"the build may not reach {place}: [environments] hosts of the node file can allow it", flush=True)
        raise Refused(f"403 {place} is neither the index nor in [environments] hosts")

    def _parent(self, url: SplitResult) -> SplitResult | None:
        """The node's own proxy for it, if it has one."""
        named = self._proxies.get(url.scheme)
        if not named or proxy_bypass(url.hostname or "", self._proxies):
            return None
        found = urlsplit(named if "//" in named else f"http://{named}")
        if found.scheme != "http" or not found.hostname:
            raise Refused(f"502 the node's {url.scheme}_proxy is not http://HOST:PORT, and no other kind is known here")
        return found

    async def _connected(self, at: SplitResult, place: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        opening = asyncio.open_connection(at.hostname, at.port or 80, limit=PIECE_NBYTES, happy_eyeballs_delay=0.25)
        try:
            return await asyncio.wait_for(opening, CONNECT_S)
        except (OSError, TimeoutError) as error:
            raise Refused(f"502 {place} cannot be reached: {_in_one_line(error)}") from None


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _authorization(parent: SplitResult) -> str:
    """The line of a proxy that wants a user, or nothing."""
    if parent.username is None:
        return ""
    user = f"{unquote(parent.username)}:{unquote(parent.password or '')}"
    return f"Proxy-Authorization: Basic {base64.b64encode(user.encode()).decode()}\r\n"


def _plain_request(method: str, url: SplitResult, place: str, fields: list[str], parent: SplitResult | None) -> str:
    """As the host is asked, or the node's proxy: for this place, with nothing after it. Raises Refused."""
    names = {each.partition(":")[0].lower() for each in fields}
    if method not in ("GET", "HEAD") or not names.isdisjoint(("content-length", "transfer-encoding")):
        raise Refused("405 what goes through without a tunnel is read only")
    own = ("host", "connection", "proxy-connection", "proxy-authorization", "keep-alive", "upgrade", "te")
    kept = [each for each in fields if each.partition(":")[0].strip().lower() not in own]
    path = url._replace(scheme="", netloc="", fragment="").geturl() or "/"
    asked = f"{method} {path if parent is None else f'http://{place}{path}'} HTTP/1.1"
    proof = "" if parent is None else _authorization(parent)
    return "\r\n".join([asked, f"Host: {place.removesuffix(':80')}", *kept, f"Connection: close\r\n{proof}\r\n"])


async def _pass_through(
    parent: SplitResult, place: str, there: asyncio.StreamReader, back: asyncio.StreamWriter
) -> None:
    """The node's proxy makes a tunnel. Raises Refused."""
    back.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n{_authorization(parent)}\r\n".encode())
    answer = await asyncio.wait_for(there.readuntil(b"\r\n\r\n"), CONNECT_S)
    if (found := re.match(rb"HTTP/1\.[01] ([0-9]{3})[ \r]", answer)) is None or found[1] != b"200":
        status = "what is no answer" if found is None else found[1].decode()
        raise Refused(f"502 the proxy of the node answered {status} for {place}")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, until it ends. Raises OSError where nobody wants it."""
    while data := await reader.read(PIECE_NBYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _pump_both(*ends: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    """Either way, until both have ended or one is broken."""
    (reader, writer), (there, back) = ends
    both = [asyncio.ensure_future(_pump(reader, back)), asyncio.ensure_future(_pump(there, writer))]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for each in both:
            each.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _run(channel: socket.socket, allowed: Collection[str]) -> None:
    loop = asyncio.get_running_loop()
    channel.setblocking(False)
    came = asyncio.Event()
    loop.add_reader(channel, came.set)
    await came.wait()
    loop.remove_reader(channel)
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    if fds:  # else the build has ended before it began
        way = WayOut(allowed)
        server = await asyncio.start_server(way.serve, sock=socket.socket(fileno=fds[0]), limit=HEAD_NBYTES)
        await server.serve_forever()


if __name__ == "__main__":
    linux.die_with_parent_signal(signal.SIGKILL)
    linux.set_name("dormouse way_out")
    linux.set_dumpable(False)  # the node's proxies may have passwords
    files = min(2 * MAX + 64, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    asyncio.run(_run(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
