"""Mutated heads against the front door's connections and uvicorn's with h11: where the answers differ, and why.

``python -m benchmarks.compare_heads [--requests 1000] [--seed 1]``; both answer from this process, by one application.
Each request is followed by a second one on its connection: what is taken for its body, and what not, is seen in that.
"""

import argparse
import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from benchmarks.mutated_heads import BASES, MUTATIONS, WHY
from dormouse.router.access.access import Refusal
from dormouse.router.access.doorkeeper import Headers
from dormouse.router.front.connection import Bounds, HttpConnection, Onward
from dormouse.router.front.cycle import ClientLeft, Cycle
from dormouse.router.front.exchange import raw_error
from dormouse.router.front.places import ConnectionPlaces

QUIET_S: Final = 0.5
SURE_S: Final = 30.0  # of what is odd: a busy machine is silent for half a second, too
SECOND: Final = b"GET /second HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def ours(cycle: Cycle) -> None:
    body, refusal = b"", Headers.of(cycle.scope["headers"])
    with suppress(ClientLeft):
        while pieces := await cycle.read():
            body += b"".join(pieces)
    await cycle.answer(refusal.status if isinstance(refusal, Refusal) else 200, (), b"%d" % len(body))


async def theirs(scope: Any, receive: Any, send: Any) -> None:
    nbytes, more = 0, True
    while more:
        message = await receive()
        nbytes, more = nbytes + len(message.get("body", b"")), message.get("more_body", False)
    body = b"%d" % nbytes
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


async def said(port: int, request: bytes, quiet_s: float = QUIET_S) -> str:
    """Statuses in order, of good answers with how long the body was; and whether the connection is still open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data, end = b"", "waits"
    try:
        writer.write(request + SECOND)
        while True:
            async with asyncio.timeout(quiet_s):
                piece = await reader.read(65536)
            if not piece:
                end = ""
                break
            data += piece
    except TimeoutError:
        pass
    except ConnectionError:
        end = ""
    writer.close()
    answers = re.findall(r"HTTP/1.1 (\d+) [^\r]*\r\n(?:[^\r]+\r\n)*\r\n(\d*)", data.decode("latin-1"))
    told = [f"200:{nbytes}" if status == "200" else status for status, nbytes in answers]
    refused = next((place for place, each in enumerate(told) if each[0] == "4"), len(told))
    return " ".join([*told[: refused + 1], end]).strip() or "closed"  # what comes behind a refusal is no matter


async def compare(requests: int, seed: int) -> Counter[tuple[str, str, str, str]]:
    """How often, by the mutations, what each said, and why."""
    chance = random.Random(seed)
    servers, loop = [], asyncio.get_running_loop()
    times = {"header_s": 60.0, "body_s": 60.0, "keep_alive_s": 60.0}
    bounds = Bounds(places=ConnectionPlaces(1000), onward=Onward(), render=raw_error, **times)
    apps: tuple[tuple[Any, Callable[..., asyncio.Protocol]], ...] = (
        (ours, partial(HttpConnection, bounds)),
        (theirs, H11Protocol),
    )
    for app, protocol in apps:
        config = uvicorn.Config(app, interface="asgi3", log_config=None, log_level=100, ws="none", proxy_headers=False)
        make = partial(protocol, config=config, server_state=ServerState(), app_state={})
        servers.append(await loop.create_server(make, "127.0.0.1", 0))
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    turn, found = asyncio.Semaphore(32), Counter[tuple[str, str, str, str]]()

    async def ask() -> None:
        request, names = chance.choice(BASES), []
        for name in chance.choices(list(MUTATIONS), k=chance.choice((1, 1, 2))):
            changed = re.sub(*MUTATIONS[name], request, count=1)
            names += [name] if changed != request else []
            request = changed
        async with turn:
            own, other = await asyncio.gather(*(said(port, request) for port in ports))
            why = next((WHY[name] for name in names if name in WHY), "")
            if own != other and (not why or own == "waits"):
                own, other = await asyncio.gather(*(said(port, request, SURE_S) for port in ports))
        if own != other:
            found[" + ".join(names), own, other, why] += 1

    await asyncio.gather(*(ask() for _ in range(requests)))
    for server in servers:
        server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = asyncio.run(compare(options.requests, options.seed))
    for (names, own, other, why), count in sorted(found.items()):
        print(f"{count:4} {names}: {own} / {other}: {why or 'NOT EXPLAINED'}")
    unexplained = sum(count for (*_, why), count in found.items() if not why)
    print(f"{options.requests} requests: {found.total()} differ, {unexplained} of them without an explanation")


if __name__ == "__main__":
    main()
