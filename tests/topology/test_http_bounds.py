"""What a client may take of the router, over real sockets: its header, its body, its time, its connections, its memory.

Each attack is written byte by byte; beside it a healthy client is answered.
"""

import json
import select
import socket
import time
from collections.abc import Iterator

import pytest
from topology.test_router import WAIT_S, World, spec

BODY_NBYTES = 16 << 20
BUDGET_NBYTES = 64 << 20
CONNECTIONS = 80

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(
        [spec("echo", "echo"), spec("hang", "hang", max_queue=100)],
        body=str(BODY_NBYTES),
        bodies=str(BUDGET_NBYTES),
        connections=CONNECTIONS,
        header_ms=700,
        body_ms=700,
    )
    try:
        yield world.ready()
    finally:
        world.close()


def connect(world: World) -> socket.socket:
    return socket.create_connection(("127.0.0.1", world.port), timeout=WAIT_S)


def received(sock: socket.socket) -> bytes:
    """All that comes until the server closes."""
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionResetError:  # it closed before it had read all that was sent
        pass
    return data


def answer(data: bytes) -> tuple[int, str]:
    """Status and code of the one answer in ``data``, which closes its connection."""
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower(), data
    return int(head.split()[1]), json.loads(body)["error"]["code"]


def said(world: World, *parts: bytes) -> tuple[int, str]:
    """What the server answers to these bytes."""
    with connect(world) as sock:
        try:
            for part in parts:
                sock.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return answer(received(sock))


def invoke(headers: bytes, body: bytes = b"", name: bytes = b"echo") -> bytes:
    known = b"Host: localhost\r\nContent-Type: application/json\r\n"
    return b"POST /functions/%s/invoke HTTP/1.1\r\n%s%s\r\n%s" % (name, known, headers, body)


def test_d9_a_header_is_bounded(world: World) -> None:
    large = b"X-Large: " + b"a" * (1 << 20)
    assert said(world, invoke(large + b"\r\n")) == (431, "header_too_large")
    many = b"".join(b"X-%d: 1\r\n" % number for number in range(200))
    assert said(world, invoke(many)) == (431, "header_too_large")
    assert said(world, b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n") == (431, "header_too_large")
    assert world.invoke("echo", b"1") == (200, 1)


def test_d9_a_header_of_200_mb_is_not_read(world: World) -> None:
    """It is sent in pieces, as long as anybody takes them."""
    with connect(world) as sock:
        sock.sendall(b"POST /functions/echo/invoke HTTP/1.1\r\nX-Large: ")
        sent = 0
        piece = b"a" * 65536
        try:
            while sent < 200 << 20:
                sent += sock.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert sent < 20 << 20  # what fits into the kernel's buffers of both ends
        assert answer(received(sock)) == (431, "header_too_large")


def test_d9_trailers_and_chunk_extensions_are_bounded(world: World) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n"
    piece = b"a" * (1 << 20)
    for start in (b"1\r\n1\r\n0\r\nX-Trailer: ", b"1\r\n1\r\n0\r\n" + b"X: 1\r\n" * 50_000, b"1;"):
        assert said(world, invoke(chunked, start), piece) == (431, "header_too_large"), start[:20]
    # a trailer is no header of the request
    with connect(world) as sock:
        sock.sendall(invoke(chunked + b"Connection: close\r\n", b"1\r\n1\r\n0\r\nX-Request-Id: smuggled\r\n\r\n"))
        data = received(sock)
    assert data.startswith(b"HTTP/1.1 200")
    assert b"smuggled" not in data


def test_d9_who_sends_too_slowly_is_told_and_closed(world: World) -> None:
    """One byte at a time, for ever: what counts is when all of it has come."""
    slow = {
        b"": invoke(b"Content-Length: 100\r\n"),
        invoke(b"Content-Length: 100000\r\n"): b"1" * 100_000,
        invoke(b"Transfer-Encoding: chunked\r\n"): b"1\r\n1\r\n" * 100_000,
    }
    for start, rest in slow.items():
        with connect(world) as sock:
            sock.sendall(start)
            for position in range(len(rest)):
                if select.select([sock], [], [], 0.05)[0]:
                    break  # something has come, or it is closed
                sock.sendall(rest[position : position + 1])
            assert answer(received(sock)) == (408, "request_timeout"), start
    with connect(world) as sock:  # says nothing at all
        assert received(sock) == b""


def test_d9_who_pauses_between_requests_is_not_slow(world: World) -> None:
    connection = world.connect()
    for number in range(2):
        connection.request("POST", "/functions/echo/invoke", str(number).encode())
        with connection.getresponse() as response:
            assert response.read() == str(number).encode()
        time.sleep(1.5)  # longer than a header and a sweep may take
    connection.close()
