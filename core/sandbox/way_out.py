"""The only way out of a build: a proxy that reaches the package index, and what the node file names beside it.

A build has a network of its own, with nothing in it. It listens there and sends the descriptor of that socket, on which
this process, which has the machine's network, answers as a proxy of HTTP: CONNECT, for https, and plain requests. Who
asks is not trusted. Certificates are checked by pip, which speaks with the index through a tunnel.

    python -m dormouse.core.sandbox.way_out FD HOST:PORT ...

``FD``: a Unix socket by which the descriptor comes. HTTP_PROXY and the like count, as for any other program: the build
need not know them. What is refused is printed, once for each host. Ends with whoever has started it.
"""

import asyncio
import base64
import signal
import socket
import sys
from collections.abc import Collection
from contextlib import closing, suppress
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass_environment  # type: ignore[attr-defined]

from dormouse.core.sandbox import linux
from dormouse.core.sandbox.reach import PORTS, place_of

HEAD_NBYTES: Final = 64 << 10
"""Of a request, at most."""

HEAD_S: Final = 60.0
CONNECT_S: Final = 30.0
CONNECTIONS: Final = 64
"""At once; more wait."""

PIECE_NBYTES: Final = 256 << 10
REFUSED: Final = 100
"""Hosts that are printed, at most."""


class Refused(Exception):
    """With the words of the status line."""


class WayOut:
    """See the module. ``allowed``: places (reach.py)."""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self._refused: set[str] = set()
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._proxies = getproxies_environment()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the build's."""
        with closing(writer):
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
        line, *fields = head.decode("latin-1").split("\r\n")
        method, target, _ = line.split(" ")
        tunnel = method == "CONNECT"
        url = urlsplit(f"https://{target}" if tunnel else target)
        if url.scheme not in PORTS or url.username is not None:
            raise Refused("400 a proxy is asked for an address with a scheme and without a user")
        self._expect_allowed(place := place_of(url))
        parent = self._parent(url)
        there, back = await self._connected(urlsplit(f"//{place}") if parent is None else parent, place)
        with closing(back):
            if tunnel and parent is not None:
                back.write(f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n{_authorization(parent)}\r\n".encode())
                status = (await asyncio.wait_for(there.readuntil(b"\r\n\r\n"), CONNECT_S)).split(b" ", 2)[1]
                if status != b"200":
                    raise Refused(f"502 the proxy of the node answered {status.decode('latin-1')} for {place}")
            if tunnel:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                kept = [each for each in fields if each and not each.lower().startswith(("proxy-", "connection:"))]
                path = url._replace(scheme="", netloc="", fragment="").geturl() or "/"
                asked = f"{method} {path if parent is None else target} HTTP/1.1"
                proof = "" if parent is None else _authorization(parent)
                back.write("\r\n".join([asked, *kept, f"Connection: close\r\n{proof}\r\n"]).encode("latin-1"))
            forth = asyncio.ensure_future(_pump(reader, back))
            try:
                await _pump(there, writer)
            finally:
                forth.cancel()

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
        if not named or proxy_bypass_environment(url.hostname or "", self._proxies):
            return None
        return urlsplit(named if "//" in named else f"http://{named}")

    async def _connected(self, at: SplitResult, place: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        opening = asyncio.open_connection(at.hostname, at.port or 80, limit=PIECE_NBYTES)
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


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """All that comes, until it ends or nobody wants it."""
    with suppress(OSError):
        while data := await reader.read(PIECE_NBYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


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
    asyncio.run(_run(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
