"""Mutated HTTP against a node's port, beside a healthy client whose answers are checked.

``python -m benchmarks.fuzz_http --requests 100000``

A request is made of tokens (method, path, version, fields, chunks, JSON), some of which are replaced, doubled, moved or
cut; its bytes come in pieces. Every answer must be well-formed HTTP with a status below 500, or 503; the neighbour's
answers must be right and the same process must give them. Owns no node: :func:`fuzz` is told a port.
"""

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

CONNECTIONS: Final = 16
QUIET_S: Final = 0.25
"""Who has had no answer for so long has sent half a request: it says that no more comes."""

END_S: Final = 60.0

_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) [ -~]*")

METHODS: Final = (b"POST", b"GET", b"HEAD", b"PUT", b"OPTIONS", b"post", b"CONNECT", b"PRI", b"\x00", b"A" * 300)
VERSIONS: Final = (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 ", b"", b"HTTP/1.1\x00")
PATHS: Final = (
    b"/functions/%s/invoke",
    b"/functions/%s/invoke?x=%%ff",
    b"/functions/%%6eobody/invoke",
    b"/functions/../%s/invoke",
    b"/functions/nobody/invoke",
    b"/functions/%s%%00/invoke",
    b"http://x/functions/%s/invoke",
    b"/healthz",
    b"/readyz",
    b"/admin/status",
    b"*",
    b"",
    b"/" + b"a" * 70_000,
    b"/\xff\xfe",
    b"//[",
)
FIELDS: Final = (
    b"Content-Length: %d",
    b"Content-Length: 0",
    b"Content-Length: 99999999",
    b"Content-Length: 99999999999999999999999",
    b"Content-Length: -1",
    b"Content-Length: 1, 1",
    b"Content-Length:",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding : chunked",
    b"Connection: close",
    b"Connection: keep-alive, upgrade",
    b"Upgrade: websocket",
    b"Upgrade: h2c",
    b"Expect: 100-continue",
    b"Expect: nothing",
    b"X-Request-Id: \xff",
    b"X-Request-Id: " + b"a" * 500,
    b"X: " + b"a" * 70_000,
    b" folded: 1",
    b"No colon",
    b": no name",
    b"Content-Encoding: gzip",
    b"Cookie: a=b",
    b"Host: evil.example",
    b"Origin: http://evil.example",
    b"Authorization: Bearer nothing",
    b"Content-Type: text/plain",
)
BODIES: Final = (
    b"1",
    b'{"text": "hello", "n": [1, 2.5, null, true]}',
    b'"' + "\u00e9\u4e2d\U0001f600".encode() + b'"',
    b"[" * 2_000 + b"]" * 2_000,
    b"[" * 900 + b"]" * 900,
    b'{"a":' * 5_000,
    b"1" * 100_000,
    b"9" * 400,
    b"1e999",
    b"-0",
    b"NaN",
    b'"\xff"',
    b'"\xed\xa0\x80"',
    b'"\\ud800"',
    b"",
    b"\x00" * 100,
    b'"' + b"x" * 200_000 + b'"',
    b"\xef\xbb\xbf1",
)
ENDS: Final = (b"\r\n", b"\n", b"\r", b"\r\n\r\n", b"\x00\r\n")


@dataclass
class Tally:
    """What came of it."""

    answers: Counter[str] = field(default_factory=Counter)  # by status and code
    silent: int = 0  # closed without an answer
    neighbour: int = 0  # answers that were right
    wrong: list[str] = field(default_factory=list)

    @property
    def past_the_parser(self) -> float:
        """Share of the answers that somebody gave who had understood the request."""
        all_ = self.answers.total()
        return (all_ - self.answers["400 bad_http"]) / all_ if all_ else 0.0


class Grammar:
    """Requests for ``function``, by a seed."""

    def __init__(self, function: str, seed: int) -> None:
        self._random = random.Random(seed)
        self._function = function.encode()

    def _odd(self, chance: float) -> bool:
        return self._random.random() < chance

    def _named(self, template: bytes) -> bytes:
        return template % self._function if b"%s" in template else template.replace(b"%%", b"%")

    def _body(self) -> bytes:
        body = self._random.choice(BODIES)
        if body and self._odd(0.2):
            at = self._random.randrange(len(body))
            body = body[:at] + self._random.randbytes(self._random.randrange(3)) + body[at + 1 :]
        return body

    def _chunks(self, body: bytes) -> bytes:
        pick = self._random
        out = b""
        while body:
            size = pick.randint(1, max(1, len(body)))
            told = b"%x" % size
            if self._odd(0.05):
                told = pick.choice(
                    (b"zz", b"-1", b"f" * 17, b"0", told + b";a=b", told + b" ", b"0x1", b"", told.upper())
                )
            out += told + b"\r\n" + body[:size] + (pick.choice(ENDS) if self._odd(0.03) else b"\r\n")
            body = body[size:]
        trailer = (
            pick.choice((b"X: 1\r\n", b"Content-Length: 5\r\n", b"Y: " + b"a" * 70_000)) if self._odd(0.1) else b""
        )
        return out + b"0\r\n" + trailer + b"\r\n"

    def request(self) -> bytes:
        """One request, more or less."""
        pick = self._random
        body = self._body()
        path = self._named(pick.choice(PATHS) if self._odd(0.15) else PATHS[0])
        method = pick.choice(METHODS) if self._odd(0.1) else b"POST"
        version = pick.choice(VERSIONS) if self._odd(0.05) else b"HTTP/1.1"
        chunked = self._odd(0.3)
        fields = [b"Host: 127.0.0.1", b"Content-Type: application/json"]
        length = 99_999_999 if self._odd(0.03) else len(body)
        fields.append(b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % length)
        for _ in range(pick.choice((0, 0, 0, 1, 1, 2))):
            template = pick.choice(FIELDS)
            fields.insert(pick.randint(0, len(fields)), template % len(body) if b"%d" in template else template)
        if self._odd(0.03):
            fields += [b"X-%d: 1" % number for number in range(pick.choice((50, 1000)))]
        if self._odd(0.03):
            del fields[pick.randrange(len(fields))]
        end = pick.choice(ENDS) if self._odd(0.03) else b"\r\n"
        data = method + b" " + path + b" " + version + b"\r\n" + end.join(fields) + b"\r\n\r\n"
        data += self._chunks(body) if chunked else body
        return data[: pick.randrange(len(data))] if self._odd(0.05) else data

    def pieces(self) -> tuple[int, list[bytes]]:
        """How many requests one connection sends, in the pieces in which they come."""
        number = self._random.choice((1, 1, 1, 1, 2, 3))
        data = b"".join(self.request() for _ in range(number))
        cuts = sorted(self._random.randrange(len(data) + 1) for _ in range(self._random.choice((0, 0, 1, 4))))
        return number, [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]


async def _exchange(port: int, number: int, pieces: list[bytes], tally: Tally) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data, answers = b"", []
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        wait_s = QUIET_S
        while True:
            try:
                part = await asyncio.wait_for(reader.read(1 << 20), wait_s)
            except TimeoutError:
                if wait_s == END_S:
                    raise ValueError("it is neither answered nor closed") from None
                part, wait_s = None, END_S
            if part == b"":
                break
            data += part or b""
            answers = parse(data, whole=False)
            if part is None or len(answers) >= number:
                writer.write_eof()
                number, wait_s = 1 << 30, END_S
        answers = parse(data, whole=True)
    except OSError:
        pass  # it was closed before all was sent
    except ValueError as error:
        tally.wrong.append(f"{error} after {b''.join(pieces)!r:.300}")
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    tally.answers.update(answers)
    tally.silent += not answers


def parse(data: bytes, whole: bool) -> list[str]:
    """Status and code of each answer. Raises ValueError if one is none, or its status is that of a broken server."""
    answers: list[str] = []
    while data:
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            break
        lines = head.split(b"\r\n")
        match = _STATUS.fullmatch(lines[0])
        if match is None:
            raise ValueError(f"not an answer: {lines[0]!r}")
        fields = dict(line.lower().split(b": ", 1) for line in lines[1:])
        nbytes = int(fields.get(b"content-length", 0))
        if rest.startswith(b"HTTP/1.1 ") or (whole and not rest):
            nbytes = 0  # to HEAD, or to Expect
        if len(rest) < nbytes:
            break
        body, data = rest[:nbytes], rest[nbytes:]
        status, code = int(match[1]), ""
        if status >= 400 and body.startswith(b"{"):
            code = json.loads(body).get("error", {}).get("code", "")
        if status >= 500 and status != 503:
            raise ValueError(f"{status} {code}: {body!r:.200}")
        if status != 100:
            answers.append(f"{status} {code}".strip())
    if whole and data:
        raise ValueError(f"half an answer: {data!r:.200}")
    return answers


async def _neighbour(port: int, function: str, tally: Tally, ended: asyncio.Event) -> None:
    """A client with one connection and one request at a time, all of them answered rightly."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while not ended.is_set() or tally.neighbour == 0:
        body = b'{"n": %d}' % tally.neighbour
        head = f"POST /functions/{function}/invoke HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        nbytes = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        data = await reader.readexactly(nbytes)
        if not answer.startswith(b"HTTP/1.1 200") or json.loads(data) != {"n": tally.neighbour}:
            tally.wrong.append(f"the neighbour got {answer!r:.200} {data!r:.200}")
            break
        tally.neighbour += 1
        await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()


async def fuzz(port: int, function: str, neighbour: str, requests: int, seed: int = 1) -> Tally:
    """Send as many; the neighbour's function returns what it is given."""
    tally, grammar, ended = Tally(), Grammar(function, seed), asyncio.Event()
    beside = asyncio.ensure_future(_neighbour(port, neighbour, tally, ended))
    left = requests

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await _exchange(port, *grammar.pieces(), tally)

    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
    ended.set()
    await beside
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    from benchmarks.nodes.testnode import running_node

    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n') as node:
        # Not what was sent: an integer of more than 64 bits can come in and cannot go out.
        node.deployed("target", "def load(): pass\ndef handle(state, request): return type(request).__name__\n")
        node.deployed("neighbour", "def load(): pass\ndef handle(state, request): return request\n")
        before = node.pids()
        tally = asyncio.run(fuzz(node.port, "target", "neighbour", arguments.requests, arguments.seed))
        assert node.pids() == before, "a process of the node was replaced"
    for what, count in sorted(tally.answers.items()):
        print(f"{count:8} {what}")
    print(f"{tally.silent:8} closed without an answer")
    print(f"{tally.neighbour:8} right answers to the neighbour")
    print(f"{tally.past_the_parser:8.0%} of answers were given past the parser")
    for line in tally.wrong[:20]:
        print("WRONG", line)
    raise SystemExit(bool(tally.wrong))


if __name__ == "__main__":
    main()
