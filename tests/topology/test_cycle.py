"""Requests and answers on real connections, with applications of a few lines: pieces, pipelines, leaving, idling."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from dormouse.router.front.bodies import SMALL_NBYTES, Bodies
from dormouse.router.front.connection import LINGER_NBYTES, LINGER_S, QUIET_S, Bounds, HttpConnection, Onward
from dormouse.router.front.cycle import UNREAD_NBYTES, ClientLeft, Cycle
from dormouse.router.front.exchange import Exchange, raw_error
from dormouse.router.front.places import ConnectionPlaces
from dormouse.router.front.receiver import BodyReceiver

WAIT_S = 90.0
KEEP_ALIVE_S = 30.0


def bounds(most: int = 10) -> Bounds:
    times = {"header_s": 10.0, "body_s": 10.0, "keep_alive_s": KEEP_ALIVE_S}
    return Bounds(places=ConnectionPlaces(most), **times, onward=Onward(), render=raw_error)


POST = b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"


def post(name: bytes, body: bytes = b"") -> bytes:
    return POST % (name, len(body), body)


class Watched(HttpConnection):
    """Tells when it is lost, and when some of a large body has come."""

    on_lost: Callable[[], None] | None = None
    on_received: Callable[[], None] | None = None

    def received(self, nbytes: int) -> None:
        super().received(nbytes)
        if self.on_received is not None:
            self.on_received()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()


class Server:
    """``connections``: those that are open; ``connect`` opens one more."""

    def __init__(self, path: Path) -> None:
        self.state = ServerState()
        self._path = path

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(str(self._path))

    @property
    def only(self) -> Watched:
        (connection,) = self.state.connections
        assert isinstance(connection, Watched)
        return connection


@asynccontextmanager
async def served(app: Callable[[Cycle], Awaitable[None]], directory: Path) -> AsyncIterator[Server]:
    kind: Any = Watched
    given: Any = app
    config = uvicorn.Config(given, http=kind, ws="none", interface="asgi3", log_config=None, proxy_headers=False)
    path = directory / "http"
    server, bound = Server(path), bounds()
    listener = await asyncio.get_running_loop().create_unix_server(
        lambda: Watched(bound, config=config, server_state=server.state, app_state={}), str(path)
    )
    try:
        yield server
    finally:
        for connection in list(server.state.connections):
            connection.transport.close()
        listener.close()
        await listener.wait_closed()


async def whole(cycle: Cycle) -> bytes:
    body = b""
    while pieces := await cycle.read():
        body += b"".join(pieces)
    return body


async def echo(cycle: Cycle) -> None:
    await cycle.answer(200, (), await whole(cycle))


async def answered(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
    return head, await reader.readexactly(int(lines[b"content-length"]))


def run(work: Callable[[], Any], runner: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await work()

    runner(bounded())


@pytest.mark.parametrize("nbytes", [0, 1, UNREAD_NBYTES, 3 * UNREAD_NBYTES, 1 << 20])
def test_bodies_of_all_sizes_there_and_back(tmp_path: Path, nbytes: int) -> None:
    async def work() -> None:
        async with served(echo, tmp_path) as server:
            reader, writer = await server.connect()
            for _ in range(2):  # on one connection
                writer.write(post(b"a", b"x" * nbytes))
                assert (await answered(reader))[1] == b"x" * nbytes
            writer.close()

    run(work)


def test_pipelined_requests_are_answered_in_their_order(tmp_path: Path) -> None:
    async def work() -> None:
        async with served(echo, tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(b"".join(post(b"a", b"%d" % number) for number in range(20)))
            assert [(await answered(reader))[1] for _ in range(20)] == [b"%d" % number for number in range(20)]
            writer.close()

    run(work)


@pytest.mark.parametrize("body", [b"", b"x" * 2 * UNREAD_NBYTES], ids=["small", "of which reading was paused"])
def test_who_answers_hears_that_the_client_leaves(tmp_path: Path, body: bytes) -> None:
    async def work() -> None:
        begun, left = asyncio.Event(), asyncio.Event()

        async def waits(cycle: Cycle) -> None:
            await whole(cycle)
            cycle.when_left(left.set)
            begun.set()
            await left.wait()
            await cycle.answer(200, (), b"nobody hears this")

        async with served(waits, tmp_path) as server:
            _, writer = await server.connect()
            writer.write(post(b"a", body))
            await begun.wait()
            writer.transport.abort()
            await left.wait()
            await asyncio.gather(*server.state.tasks)

    run(work)


def test_a_client_that_has_left_before_anyone_asks(tmp_path: Path) -> None:
    async def work() -> None:
        left, called = asyncio.Event(), asyncio.Event()

        async def slow(cycle: Cycle) -> None:
            await whole(cycle)
            server.only.on_lost = left.set
            writer.transport.abort()
            await left.wait()
            cycle.when_left(called.set)

        async with served(slow, tmp_path) as server:
            _, writer = await server.connect()
            writer.write(post(b"a"))
            await called.wait()

    run(work)


def test_nobody_is_told_of_a_client_that_leaves_with_its_answer(tmp_path: Path) -> None:
    async def work() -> None:
        calls: list[str] = []

        async def quick(cycle: Cycle) -> None:
            cycle.when_left(lambda: calls.append("left"))
            await cycle.answer(200, (), b"1")

        async with served(quick, tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(post(b"a"))
            await answered(reader)
            left = asyncio.Event()
            server.only.on_lost = left.set
            writer.close()
            await left.wait()
            assert calls == []

    run(work)


def test_an_idle_connection_is_closed_and_one_in_use_is_not(tmp_path: Path) -> None:
    async def work() -> None:
        async with served(echo, tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(post(b"a"))
            await answered(reader)
            now_s = asyncio.get_running_loop().time()
            server.only.sweep(now_s + KEEP_ALIVE_S / 2)
            writer.write(post(b"a"))
            await answered(reader)
            server.only.sweep(now_s + KEEP_ALIVE_S + 1.0)
            assert await reader.read() == b""
            writer.close()

    run(work)


def test_answers_of_every_form(tmp_path: Path) -> None:
    async def forms(cycle: Cycle) -> None:
        await whole(cycle)
        match cycle.scope["path"]:
            case "/empty":
                cycle.answer_empty(204, [(b"x-a", b"b")])
            case "/pieces":
                cycle.begin(200, ())
                for piece in (b"one", b"", b"two"):
                    await cycle.chunk(piece)
                cycle.end()
            case "/given-up":
                cycle.begin(200, ())
                await cycle.chunk(b"half")
            case _:
                await cycle.answer(200, (), b"body")

    async def work() -> None:
        async with served(forms, tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(post(b"empty"))
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 204 No Content\r\nx-a: b\r\n\r\n"
            writer.write(post(b"pieces"))
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
            writer.write(b"HEAD /x HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"content-length: 4\r\n" in await reader.readuntil(b"\r\n\r\n")
            writer.write(b"GET /x HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"1")
            assert (await answered(reader))[1] == b"body"
            writer.write(b"GET /given-up HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await reader.read()).endswith(b"4\r\nhalf\r\n")  # and the connection's end: it was not all
            writer.close()

    run(work)


def test_a_client_of_http_1_0_is_sent_no_chunks(tmp_path: Path) -> None:
    """It knows the end by the connection's, and that there is more to come by a reset."""

    async def parts(cycle: Cycle) -> None:
        await whole(cycle)
        cycle.begin(200, [(b"x-a", b"b")])
        await cycle.chunk(b"one")
        assert cycle.chunk_now(b"two")
        if cycle.scope["path"] == "/cut":
            await cut.wait()  # what is not read yet would go with the connection
            cycle.cut()
        else:
            cycle.end()

    cut = asyncio.Event()

    async def work() -> None:
        async with served(parts, tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(b"GET /x HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            assert await reader.read() == b"HTTP/1.1 200 OK\r\nx-a: b\r\nconnection: close\r\n\r\nonetwo"
            writer.close()
            reader, writer = await server.connect()
            writer.write(b"GET /cut HTTP/1.0\r\n\r\n")
            await reader.readuntil(b"onetwo")
            server.only.on_lost = lost.set
            cut.set()
            await lost.wait()
            writer.close()

    lost = asyncio.Event()
    run(work)


LOOPS = pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
LARGE_NBYTES = 40 * SMALL_NBYTES + 1


class Received:
    """An application that answers with the body that it has received, and how it was."""

    def __init__(self) -> None:
        self.bodies = Bodies(4 * LARGE_NBYTES)
        self.straight = 0  # bodies whose rest went past the parser
        self.began = asyncio.Event()
        self.left = asyncio.Event()

    async def __call__(self, cycle: Cycle) -> None:
        fill = cycle.fill

        async def filled(room: memoryview) -> bool:
            filling = asyncio.ensure_future(fill(room))
            await asyncio.sleep(0)
            self.began.set()
            done = await filling
            self.straight += done
            return done

        cycle.fill = filled  # type: ignore[method-assign]
        try:
            body = await Exchange(cycle, b"1").receive_body(LARGE_NBYTES, self.bodies)
        except ClientLeft:
            self.left.set()
            return
        data = bytes(body.data)
        body.close()
        await cycle.answer(200, (), data)


def numbered(nbytes: int) -> bytes:
    return b"".join(b"%08d" % number for number in range(nbytes // 8 + 1))[:nbytes]


@LOOPS
def test_the_rest_of_a_large_body_is_received_where_it_is_to_lie(
    tmp_path: Path, runner: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    """And the next request, whose first bytes come with its last ones, is one."""

    async def work() -> None:
        app = Received()
        async with served(app, tmp_path) as server:
            reader, writer = await server.connect()
            large = numbered(LARGE_NBYTES)
            for number in range(3):
                writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n")
                writer.write(b"content-length: %d\r\n\r\n" % LARGE_NBYTES)
                assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
                writer.write(large + post(b"a", b"after") + post(b"a", b"last"))
                assert (await answered(reader))[1] == large
                assert [(await answered(reader))[1] for _ in range(2)] == [b"after", b"last"]
                assert app.straight == number + 1
            assert app.bodies.taken_nbytes == 0
            writer.close()

    run(work, runner)


@LOOPS
@pytest.mark.parametrize("how", ["leaves", "half-closes", "is too slow"])
def test_a_large_body_that_does_not_come_whole(
    tmp_path: Path, runner: Callable[[Coroutine[Any, Any, None]], None], how: str
) -> None:
    async def work() -> None:
        app = Received()
        async with served(app, tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % LARGE_NBYTES)
            writer.write(numbered(10 * SMALL_NBYTES))
            await app.began.wait()
            receiver = server.only.transport.get_protocol()
            assert isinstance(receiver, BodyReceiver)
            came, missing_nbytes = asyncio.Event(), LARGE_NBYTES - 10 * SMALL_NBYTES

            def look() -> None:
                if receiver.expected_nbytes <= missing_nbytes:
                    came.set()

            server.only.on_received = look
            look()
            await came.wait()  # what is not read makes its end a reset
            match how:
                case "leaves":
                    writer.transport.abort()
                case "half-closes":
                    writer.write_eof()
                case _:
                    server.only.sweep(asyncio.get_running_loop().time() + 1000.0)
            await app.left.wait()
            assert app.bodies.taken_nbytes == 0
            if how == "is too slow":
                assert (await reader.read()).startswith(b"HTTP/1.1 408")
            writer.close()

    run(work, runner)


@LOOPS
def test_who_gives_up_on_a_large_body_can_still_answer(
    tmp_path: Path, runner: Callable[[Coroutine[Any, Any, None]], None]
) -> None:
    async def work() -> None:
        async def impatient(cycle: Cycle) -> None:
            await cycle.read()
            filling = asyncio.ensure_future(cycle.fill(memoryview(bytearray(LARGE_NBYTES))))
            await asyncio.sleep(0)
            filling.cancel()
            await asyncio.wait([filling])
            assert server.only.transport.get_protocol() is server.only  # nothing more is written into the room
            cycle.keep_alive = False
            await cycle.answer(503, (), b"later")

        async with served(impatient, tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n1" % (LARGE_NBYTES + 1))
            head, body = await answered(reader)
            assert (head.split()[1], body) == (b"503", b"later")
            writer.close()

    run(work, runner)


UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
ASKING = (
    b"POST /a HTTP/1.1\r\nhost: x\r\n%bcontent-length: 4\r\n\r\nbody" % UPGRADE,
    b"POST /a HTTP/1.1\r\nhost: x\r\n%btransfer-encoding: chunked\r\n\r\n1\r\nb\r\n3\r\nody\r\n0\r\n\r\n" % UPGRADE,
    b"POST /a HTTP/1.1\r\nhost: x\r\nupgrade: a\r\nupgrade: b\r\nconnection: close, upgrade\r\n"
    b"content-length: 4\r\n\r\nbody",
)


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_another_protocol_that_is_asked_for_is_not_taken_and_nothing_is_lost(
    tmp_path: Path, asking: bytes, step: int
) -> None:
    """The request is answered, and what comes after it is the next request: never what was its body."""

    async def work() -> None:
        async with served(echo, tmp_path) as server:
            reader, writer = await server.connect()
            closes = b"close, upgrade" in asking
            sent = asking + (b"" if closes else asking + post(b"a", b"GET /b HTTP/1.1\r\n\r\n"))
            for start in range(0, len(sent), step):
                writer.write(sent[start : start + step])
                if step < 10_000:
                    await writer.drain()
                    await asyncio.sleep(0)
            assert (await answered(reader))[1] == b"body"
            if not closes:
                assert (await answered(reader))[1] == b"body"
                assert (await answered(reader))[1] == b"GET /b HTTP/1.1\r\n\r\n"
                writer.write_eof()
            assert await reader.read() == b""
            writer.close()

    run(work)


@pytest.mark.parametrize("junk", [b"x", b"GARBAGE\r\n\r\n", b"GET /a HTTP/1.1\r\nno colon\r\n\r\n"])
def test_what_is_no_request_takes_no_answer_from_those_before_it(tmp_path: Path, junk: bytes) -> None:
    async def work() -> None:
        async with served(echo, tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(post(b"a", b"one") + post(b"a", b"two") + junk + post(b"a", b"smuggled") * 100)
            assert [(await answered(reader))[1] for _ in range(2)] == [b"one", b"two"]
            last = await reader.read()
            assert last.startswith(b"HTTP/1.1 400 ")
            assert b"smuggled" not in last
            writer.close()

    run(work)


async def refuses(cycle: Cycle) -> None:
    """Before it has read any of the body."""
    cycle.keep_alive = False
    await cycle.answer(413, (), b"too large")


@LOOPS
@pytest.mark.parametrize(
    "head",
    [b"1.0\r\ncontent-length: 16777216", b"1.1\r\ncontent-length: 16777216", b"1.1\r\ntransfer-encoding: chunked"],
)
def test_who_is_refused_while_it_sends_hears_the_answer(
    tmp_path: Path, runner: Callable[[Coroutine[Any, Any, None]], None], head: bytes
) -> None:
    """A close at once would be a reset, which takes the answer with it."""

    async def work() -> None:
        async with served(refuses, tmp_path) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /a HTTP/%b\r\nhost: x\r\n\r\n" % head)
            for _ in range(16):
                writer.write(b"%x\r\n" % (1 << 20) + b"x" * ((1 << 20) - 9) + b"\r\n")
                await writer.drain()
            assert (await answered(reader))[1] == b"too large"
            assert await reader.read() == b""
            lost = asyncio.Event()
            for connection in server.state.connections:
                assert isinstance(connection, Watched)
                connection.on_lost = lost.set
            writer.close()
            if server.state.connections:
                await lost.wait()

    run(work, runner)


def test_who_is_refused_is_listened_to_for_a_while_only(tmp_path: Path) -> None:
    async def work() -> None:
        async with served(refuses, tmp_path) as server:
            for how in ("silent", "slow", "much"):
                reader, writer = await server.connect()
                writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n")
                await answered(reader)
                lost, connection = asyncio.Event(), server.only
                connection.on_lost = lost.set
                now_s = asyncio.get_running_loop().time()
                connection.sweep(now_s + QUIET_S / 2)
                assert not connection.transport.is_closing()
                match how:
                    case "silent":
                        connection.sweep(now_s + QUIET_S + 1.0)
                    case "slow":
                        for number in range(int(LINGER_S) + 2):
                            connection.loop.time = lambda at_s=now_s + number: at_s  # type: ignore[method-assign,misc]
                            if not connection.transport.is_closing():
                                connection.data_received(b"x")
                            connection.sweep(now_s + number)
                        del connection.loop.time
                    case _:
                        for _ in range(LINGER_NBYTES // (64 << 20) + 1):
                            connection.data_received(bytes(64 << 20))
                await lost.wait()
                writer.close()

    run(work)


@pytest.mark.parametrize("nbytes", [100 << 10, 1 << 20])
def test_what_lies_between_chunks_is_bounded_however_it_comes(tmp_path: Path, nbytes: int) -> None:
    """With the head before it and the body behind it in one piece."""

    async def work() -> None:
        async with served(echo, tmp_path) as server:
            reader, writer = await server.connect()
            head = b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            writer.write(head + b"4;a=" + b"x" * nbytes + b"\r\nbody\r\n0\r\n\r\n")
            assert (await answered(reader))[0].startswith(b"HTTP/1.1 431 ")
            writer.close()
            reader, writer = await server.connect()
            chunks = b"4;signature=" + b"f" * 64 + b"\r\nbody\r\n"
            writer.write(head + chunks * 5000 + b"0\r\n\r\n")
            assert (await answered(reader))[1] == b"body" * 5000
            writer.close()

    run(work)


def test_half_heads_give_way_to_one_more(tmp_path: Path) -> None:
    async def work() -> None:
        async with served(echo, tmp_path) as server:
            slow = [await server.connect() for _ in range(10)]
            for _, writer in slow:
                writer.write(b"POST /a HTTP/1.1\r\nx: ")
            for number in range(10):
                reader, writer = await server.connect()
                writer.write(post(b"a", b"%d" % number))
                assert (await answered(reader))[1] == b"%d" % number
                slow.append((reader, writer))
            for _, writer in slow:
                writer.close()

    run(work)
