"""What a client may take of the router, over real sockets: its header, its body, its time, its connections, its memory.

Each attack is written byte by byte; beside it a healthy client is answered.
"""

import contextlib
import gzip
import http.client
import json
import select
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from odd_requests import LAST, REFUSED, TAKEN
from topology.test_router import WAIT_S, World, spec

from dormouse.schemas import messages as m

BODY_NBYTES = 16 << 20
BUDGET_NBYTES = 64 << 20
CONNECTIONS = 80


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World(
        [spec("echo", "echo"), spec("raise", "raise"), spec("hang", "hang", max_queue=100)],
        body=str(BODY_NBYTES),
        bodies=str(BUDGET_NBYTES),
        connections=CONNECTIONS,
        header_ms=3000,
        body_ms=6000,
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
    """One byte at a time, for ever: what counts is when all of it has come. Who pauses between requests is not slow."""
    patient = world.connect()
    patient.request("GET", "/healthz")
    with patient.getresponse() as response:
        response.read()
    slow = (
        (b"", b"POST /functions/echo/invoke HTTP/1.1\r\nX: " + b"a" * 10_000),
        (invoke(b"Content-Length: 100000\r\n"), b"1" * 100_000),
        (invoke(b"Transfer-Encoding: chunked\r\n"), b"1\r\n1\r\n" * 100_000),
    )
    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(connect(world))
        sending = {stack.enter_context(connect(world)): iter(rest) for _, rest in slow}
        for sock, (start, _) in zip(sending, slow, strict=True):
            sock.sendall(start)
        answers = []
        while sending:
            for sock in select.select(list(sending), [], [], 0.05)[0]:
                answers.append(answer(received(sock)))
                del sending[sock]
            for sock, rest in sending.items():
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    sock.sendall(bytes([next(rest)]))
        assert answers == [(408, "request_timeout")] * 3
        assert received(silent) == b""  # it has asked nothing
    patient.request("POST", "/functions/echo/invoke", b"7")
    with patient.getresponse() as response:
        assert response.read() == b"7"
    patient.close()


def all_said(world: World, request: bytes, at_once: bool) -> list[tuple[int, bytes]]:
    """Status and body of each answer to a request, and to another one behind it, until the connection is closed."""
    data = b""
    with connect(world) as sock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in [request] if at_once else [request[place : place + 1] for place in range(len(request))]:
            sock.sendall(piece)
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        data = received(sock)
    answers = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
        nbytes = int(fields.get(b"content-length", b"0"))
        if not head.startswith(b"HTTP/1.1 100 "):
            answers.append((int(head.split()[1]), data[:nbytes]))
        data = data[nbytes:]
    return answers


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("why", [*TAKEN, *LAST])
def test_what_is_odd_and_can_be_read_in_one_way_only_is_taken(world: World, why: str, at_once: bool) -> None:
    for request in TAKEN.get(why) or LAST[why]:
        answers = all_said(world, request, at_once)
        assert [status for status, _ in answers] == ([200, 200] if why in TAKEN else [200]), request
        assert (answers[0][1] == b"4321") == request.startswith(b"POST"), request


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "byte by byte"])
@pytest.mark.parametrize("why", REFUSED)
def test_d9_what_is_not_http_is_refused_and_closed(world: World, why: str, at_once: bool) -> None:
    """And nothing after it is taken for another request."""
    runs, (status, code, requests) = world.count(m.Run), REFUSED[why]
    for request in requests:
        answers = all_said(world, request, at_once)
        assert [(each, json.loads(body)["error"]["code"]) for each, body in answers] == [(status, code)], request
    assert world.count(m.Run) == runs


def test_d9_connections_are_bounded(world: World) -> None:
    with contextlib.ExitStack() as stack:
        idle = world.connect()  # one that has been answered, and may send more
        idle.request("GET", "/healthz")
        with idle.getresponse() as response:
            response.read()
        for _ in range(CONNECTIONS - 1):
            stack.enter_context(connect(world)).sendall(invoke(b"Content-Length: 1\r\n", b"1", b"hang"))
        deadline_s = time.monotonic() + WAIT_S
        while world.row("hang")["queued"] < CONNECTIONS - 2:
            assert time.monotonic() < deadline_s, world.row("hang")
        with connect(world) as newest:  # takes the place of the idle one
            newest.sendall(invoke(b"Content-Length: 1\r\n", b"7"))
            assert newest.recv(65536).startswith(b"HTTP/1.1 200")
            assert idle.sock.recv(1) == b""
            idle.close()
            newest.sendall(invoke(b"Content-Length: 1\r\n", b"1", b"hang"))
            while world.row("hang")["queued"] < CONNECTIONS - 1:
                assert time.monotonic() < deadline_s, world.row("hang")
            with connect(world) as refused:
                data = received(refused)
            assert answer(data) == (503, "too_many_connections")
            assert b"retry-after: 1" in data
    while world.row("hang")["queued"] > 0:  # all have left, and are forgotten
        assert time.monotonic() < deadline_s, world.row("hang")
    assert world.invoke("echo", b"1") == (200, 1)


def test_d9_who_does_not_read_its_answers_is_cut_off(world: World) -> None:
    body = b'"' + b"x" * 60_000 + b'"'
    request = invoke(b"Content-Length: %d\r\n" % len(body), body)

    def send(sock: socket.socket) -> None:
        """Whole requests, one after the other, as long as anybody takes them."""
        left, deadline_s = memoryview(request), time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            if select.select([], [sock], [], 0.1)[1]:
                left = left[sock.send(left) :] or memoryview(request)

    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", world.port))
        sock.setblocking(False)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            send(sock)
    assert world.invoke("echo", b"1") == (200, 1)


@pytest.mark.parametrize(
    ("path", "headers", "mbytes", "told"),
    [
        ("/functions/echo/invoke", {}, 20, (413, "body_too_large")),
        ("/functions/none/invoke", {}, 12, (404, "unknown_function")),
        ("/nowhere", {}, 12, (404, "unknown_route")),
        ("/healthz", {}, 12, (405, "method_not_allowed")),
        ("/functions/echo/invoke", {"Host": "evil.example"}, 12, (421, "unknown_host")),
        ("/functions/echo/invoke", {"Content-Type": "text/plain"}, 12, (415, "content_type")),
        ("/functions/echo/invoke", {"Transfer-Encoding": "gzip, chunked"}, 12, (400, "bad_http")),
        ("/admin/functions?name=f", {}, 12, (401, "unauthorized")),
        ("/v2/models/none/infer", {}, 12, (404, "unknown_function")),
        ("/v1/completions", {}, 20, (413, "body_too_large")),
    ],
)
def test_who_is_refused_while_it_sends_a_body_hears_why(
    world: World, path: str, headers: dict[str, str], mbytes: int, told: tuple[int, str]
) -> None:
    """A client that reads nothing before it has sent all of it."""
    for version in (10, 11):
        connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=WAIT_S)
        connection._http_vsn, connection._http_vsn_str = version, f"HTTP/1.{version - 10}"  # type: ignore[attr-defined]
        connection.request(
            "POST", path, bytes(mbytes << 20), {"Host": "localhost", "Content-Type": "application/json"} | headers
        )
        with connection.getresponse() as response:
            said = json.loads(response.read())["error"]
        said = said if isinstance(said, dict) else {"code": said.split(":")[0]}
        assert (response.status, said["code"]) == told
        connection.close()


def test_who_finds_no_place_hears_why(world: World) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS):
            stack.enter_context(connect(world)).sendall(invoke(b"Content-Length: 1\r\n", b"1", b"hang"))
        deadline_s = time.monotonic() + WAIT_S
        while world.row("hang")["queued"] < CONNECTIONS - 1:
            assert time.monotonic() < deadline_s, world.row("hang")
        for _ in range(5):
            refused = http.client.HTTPConnection("127.0.0.1", world.port, timeout=WAIT_S)
            refused.request("POST", "/functions/echo/invoke", bytes(300_000))
            with refused.getresponse() as response:
                assert (response.status, json.loads(response.read())["error"]["code"]) == (503, "too_many_connections")
            refused.close()
    while world.row("hang")["queued"] > 0:
        assert time.monotonic() < deadline_s, world.row("hang")


def test_another_name_in_the_target_counts_and_not_the_host(world: World) -> None:
    for target, status in ((b"http://evil.example", b"421"), (b"http://localhost:%d" % world.port, b"200")):
        with connect(world) as sock:
            request = b"POST %s/functions/echo/invoke HTTP/1.1\r\nHost: localhost\r\n" % target
            sock.sendall(request + b"Content-Type: application/json\r\nContent-Length: 1\r\nConnection: close\r\n\r\n7")
            assert received(sock).startswith(b"HTTP/1.1 %s " % status)


def test_head_is_get_without_a_body(world: World) -> None:
    paths = (
        "/healthz",
        "/readyz",
        "/v2",
        "/v2/health/ready",
        "/v2/health/live",
        "/v1/models",
        "/v1/models/none",
        "/docs",
    )
    for path in (
        *paths,
        "/openapi.json",
        "/metrics",
        "/",
        "/jobs/none",
        "/nowhere",
        "/admin/status",
        "/v2/models/none",
    ):
        connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=WAIT_S)
        said = []
        for method in ("GET", "HEAD"):
            connection.request(method, path, headers={"X-Request-Id": "1"})
            with connection.getresponse() as response:
                body = response.read()
            changing = ("/metrics", "/openapi.json")
            names = {name for name, _ in response.getheaders() if path not in changing or name != "content-length"}
            said.append((response.status, names, {response.getheader("content-type")}))
            assert (body == b"") == (method == "HEAD"), path
        assert said[0] == said[1], path
        connection.close()


def sent(world: World, path: str, body: bytes | Iterator[bytes], **headers: str) -> tuple[int, Any]:
    """Status, and the value or the error's code."""
    connection = http.client.HTTPConnection("127.0.0.1", world.port, timeout=WAIT_S)
    said = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("POST", path, body, said)
    with connection.getresponse() as response:
        value = json.loads(response.read())
    connection.close()
    if response.status == 415:
        assert response.getheader("Accept-Encoding") == "gzip, deflate"
    error = value.get("error") if isinstance(value, dict) else None
    return response.status, value if error is None else error["code"] if isinstance(error, dict) else error


INVOKE, COMPLETE, INDEX = "/functions/echo/invoke", "/v1/completions", "/v2/repository/index"


@pytest.mark.parametrize(
    ("coding", "pack"), [("gzip", gzip.compress), ("X-GZIP", gzip.compress), ("deflate", zlib.compress)]
)
def test_a_packed_body_is_unpacked_on_every_route(world: World, coding: str, pack: Callable[[bytes], bytes]) -> None:
    assert sent(world, INVOKE, pack(b'{"a": 1}'), content_encoding=coding) == (200, {"a": 1})
    assert sent(world, INVOKE, iter((pack(b'{"a": 1}'),)), content_encoding=f"identity, {coding}") == (200, {"a": 1})
    assert sent(world, INVOKE, pack(b" " * 300_000 + b"1"), content_encoding=coding) == (200, 300_001)
    assert sent(world, COMPLETE, pack(b'{"model": "none"}'), content_encoding=coding) == (404, "model_not_found")
    assert sent(world, INDEX, pack(b'{"ready": true}'), content_encoding=coding)[0] == 200
    assert sent(world, INVOKE, pack(b'{"a": 1}')[:-1], content_encoding=coding) == (400, "bad_body")
    assert sent(world, INVOKE, b'{"a": 1}', content_encoding=coding) == (400, "bad_body")


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_that_is_too_large_unpacked_is_refused(world: World, coding: str) -> None:
    bomb = gzip.compress(bytes(40 << 20)) if coding == "gzip" else zlib.compress(bytes(40 << 20))
    for path in (INVOKE, COMPLETE):
        assert sent(world, path, bomb, content_encoding=coding) == (413, "body_too_large")
        assert sent(world, path, iter((bomb,)), content_encoding=coding) == (413, "body_too_large")


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "deflate, gzip"])
def test_another_coding_is_refused_by_name(world: World, coding: str) -> None:
    for path in (INVOKE, COMPLETE):
        assert sent(world, path, b"\x1b\x07\x00", content_encoding=coding) == (415, "content_encoding")
    assert sent(world, INDEX, b"\x1b\x07\x00", content_encoding=coding)[0] == 400  # the protocol's one status


def taken_nbytes(pid: int) -> int:
    """Anonymous and shared pages of a process: what a body can lie in."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def test_d9_bodies_have_one_budget(world: World) -> None:
    """Sixty of 16 MB at once: what fits the budget is taken, the rest waits unread, and is told to come back."""
    body = b'"' + b"x" * (BODY_NBYTES - 2) + b'"'
    start = invoke(b"Content-Length: %d\r\n" % len(body), b"", b"hang")
    before_nbytes = taken_nbytes(world.process.pid)
    most_nbytes = 0
    sending: dict[socket.socket, memoryview] = {}
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            sock = stack.enter_context(connect(world))
            sock.sendall(start)
            sock.setblocking(False)
            sending[sock] = memoryview(body)
        answers: list[tuple[int, str]] = []
        deadline_s = time.monotonic() + WAIT_S
        whole: list[socket.socket] = []
        while sending:
            assert time.monotonic() < deadline_s, (len(whole), answers)
            readable, writable, _ = select.select(list(sending), list(sending), [], 0.2)
            for sock in writable:
                with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                    sending[sock] = sending[sock][sock.send(sending[sock][: 1 << 20]) :]
                if not sending[sock]:
                    whole.append(sock)
                    del sending[sock]
            for sock in set(readable) & set(sending):
                sock.setblocking(True)
                answers.append(answer(received(sock)))
                del sending[sock]
            most_nbytes = max(most_nbytes, taken_nbytes(world.process.pid) - before_nbytes)
        assert len(whole) == BUDGET_NBYTES // BODY_NBYTES
        assert answers == [(503, "bodies_full")] * (60 - len(whole))
        assert most_nbytes > BUDGET_NBYTES // 2  # it was seen
        assert most_nbytes < BUDGET_NBYTES + (100 << 20)
        assert world.invoke("echo", b"1") == (200, 1)  # a small one needs no room
    deadline_s = time.monotonic() + WAIT_S  # their clients leave one by one, and with each some of the room comes back
    while (told := world.invoke("echo", body))[0] == 503:
        assert time.monotonic() < deadline_s, told
        time.sleep(0.05)
    assert told == (200, len(body))
    left_nbytes = taken_nbytes(world.process.pid) - before_nbytes
    assert left_nbytes < BUDGET_NBYTES // 2  # and given back to the system


def test_d9_the_router_makes_no_values_of_json(world: World) -> None:
    """Sixteen megabytes that would be half a gigabyte of Python lists."""
    status = Path(f"/proc/{world.process.pid}/status")
    before_nbytes = taken_nbytes(world.process.pid)
    body = b"[" + b"[]," * (BODY_NBYTES // 3 - 2) + b"1]"
    assert world.invoke("echo", body) == (200, len(body))
    peak_nbytes = next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if "VmHWM" in line)
    assert peak_nbytes < before_nbytes + BUDGET_NBYTES + (200 << 20)


def test_d9_a_request_that_failed_leaves_no_pages_behind(world: World) -> None:
    assert world.invoke("raise", b"1")[0] == 500
    before_nbytes = taken_nbytes(world.process.pid)
    assert world.invoke("raise", b'"' + b"x" * (BODY_NBYTES - 2) + b'"')[0] == 500
    end_s = time.monotonic() + 60
    while taken_nbytes(world.process.pid) >= before_nbytes + BODY_NBYTES // 2:  # they are kept for a second
        assert time.monotonic() < end_s
        time.sleep(0.05)
