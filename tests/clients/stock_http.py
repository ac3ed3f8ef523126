"""requests, httpx or aiohttp, by the Python of build/stock/http: CLIENT ADDRESS KEY FILE; what a node answers, as JSON.

The files beside this one ask the same; tests/topology/test_stock_clients.py has the answers. FILE is made after the
first part of a stream, which waits for it.
"""

import asyncio
import gzip
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

CLIENT, ADDRESS, KEY, FILE = sys.argv[1:]
HOME, ECHO, STREAM = f"http://{ADDRESS}", "/functions/f/invoke", "/functions/s/invoke"
BEARER = {"Authorization": f"Bearer {KEY}"}
VALUE = {"a": [1, "é"]}
LARGE = b"a" * (20 << 20)


def pieces() -> Iterator[bytes]:
    for start in range(0, len(LARGE), 1 << 16):
        yield LARGE[start : start + (1 << 16)]


async def pieces_async() -> AsyncIterator[bytes]:
    for piece in pieces():
        yield piece


BYTES = {"Content-Type": "application/octet-stream"}
ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "json": ("POST", ECHO, {"json": VALUE}),
    "upload": ("POST", ECHO, {"data": LARGE, "headers": BYTES}),
    "chunked": ("POST", ECHO, {"data": pieces, "headers": BYTES}),
    "form": ("POST", ECHO, {"files": LARGE}),
    "413": ("POST", ECHO, {"data": LARGE * 2, "headers": BYTES}),
    "404": ("POST", "/functions/none/invoke", {"data": LARGE, "headers": BYTES}),
    "401": ("POST", ECHO, {"data": LARGE, "headers": BYTES | {"Authorization": "Bearer dm_0_0"}}),
    "415": ("POST", ECHO, {"data": LARGE, "headers": BYTES | {"Content-Encoding": "br"}}),
    "gzip": (
        "POST",
        ECHO,
        {
            "data": gzip.compress(json.dumps(VALUE).encode()),
            "headers": {"Content-Encoding": "gzip", "Content-Type": "application/json"},
        },
    ),
    "head": ("HEAD", "/healthz", {}),
    "slash": ("POST", ECHO + "/", {"json": VALUE}),
    "empty": ("POST", ECHO, {"json": "nothing"}),
}


def of_requests(session: Any, method: str, path: str, asked: dict[str, Any]) -> tuple[int, str]:
    if callable(asked.get("data")):
        asked = asked | {"data": asked["data"]()}
    if "files" in asked:
        asked = {"files": {"file": ("a.bin", asked["files"])}}
    answer = session.request(method, HOME + path, timeout=120, **asked)
    return answer.status_code, answer.text


def of_httpx(session: Any, method: str, path: str, asked: dict[str, Any]) -> tuple[int, str]:
    if "data" in asked:
        asked = {"content" if name == "data" else name: value for name, value in asked.items()}
    if callable(asked.get("content")):
        asked = asked | {"content": asked["content"]()}
    if "files" in asked:
        asked = {"files": {"file": ("a.bin", asked["files"])}}
    answer = session.request(method, HOME + path, timeout=120, **asked)
    return answer.status_code, answer.text


def told(case: str, status: int, text: str) -> None:
    print(json.dumps({case: [status, text]}), flush=True)


def at_once(session: Any, ask: Callable[..., tuple[int, str]], parts: Callable[[], Iterator[str]]) -> None:
    for case, (method, path, asked) in ASKED.items():
        told(case, *ask(session, method, path, asked))
        told(f"after {case}", *ask(session, *ASKED["json"]))
    stream = parts()
    told("first part", 200, next(stream))
    Path(FILE).touch()
    told("rest", 200, "".join(stream))


def with_requests() -> None:
    import requests

    with requests.Session() as session:
        session.headers.update(BEARER)

        def parts() -> Iterator[str]:
            with session.post(HOME + STREAM, json=FILE, stream=True, timeout=120) as answer:
                for each in answer.iter_content(None):
                    yield each.decode()

        at_once(session, of_requests, parts)


def with_httpx() -> None:
    import httpx

    with httpx.Client(headers=BEARER) as session:

        def parts() -> Iterator[str]:
            with session.stream("POST", HOME + STREAM, json=FILE, timeout=120) as answer:
                yield from answer.iter_text()

        at_once(session, of_httpx, parts)


async def with_aiohttp() -> None:
    import aiohttp

    async def ask(method: str, path: str, asked: dict[str, Any]) -> tuple[int, str]:
        if callable(asked.get("data")):
            asked = asked | {"data": pieces_async()}
        if "files" in asked:
            form = aiohttp.FormData()
            form.add_field("file", asked["files"], filename="a.bin")
            asked = {"data": form}
        async with session.request(method, HOME + path, **asked) as answer:
            return answer.status, await answer.text()

    async with aiohttp.ClientSession(headers=BEARER) as session:
        for case, (method, path, asked) in ASKED.items():
            told(case, *await ask(method, path, asked))
            told(f"after {case}", *await ask(*ASKED["json"]))
        async with session.post(HOME + STREAM, json=FILE) as answer:
            stream = answer.content.iter_any()
            told("first part", answer.status, (await anext(stream)).decode())
            Path(FILE).touch()  # noqa: ASYNC240
            told("rest", answer.status, b"".join([each async for each in stream]).decode())


if CLIENT == "aiohttp":
    asyncio.run(with_aiohttp())
else:
    {"requests": with_requests, "httpx": with_httpx}[CLIENT]()
