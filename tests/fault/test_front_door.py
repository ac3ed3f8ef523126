"""What clients of the HTTP face see when the processes behind it die: connections that were not accepted are served by
the next router, and everything else gets an answer that says to come back.
"""

import contextlib
import http.client
import json
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.node.refusals import Unreachable
from dormouse.schemas.admin import Wish

FUNCTION = """
    import os

    import torch

    def load():
        return torch.ones(4, device="cuda")

    def handle(model, request):
        model.sum().item()
        print("got", request, flush=True)
        while isinstance(request, dict) and not os.path.exists(request["until"]):
            model.sum().item()
        print("done", request, flush=True)
        return request
"""


CONFIG = """
[gpu]
count = 1
memory = "64MiB"
[limits]
lease_ms = 200000 # nobody gets a GPU back by waiting for this alone: who waits has given up long before
compute_ms = 600000
[schedule]
turn_ms = 60000 # who computes keeps its turn, however busy the machine is
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG) as running:
        for name, timeout in (("f", "10m"), ("g", "60s")):  # f's own time limit frees nothing before others give up
            running.deployed(name, FUNCTION, timeout=timeout)
        yield running


class Client:
    """One connection with a request on it; the answer is asked for later."""

    def __init__(self, node: TestNode, body: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=120)
        kind = {"Content-Type": "application/json"}
        self._connection.request("POST", "/functions/f/invoke", json.dumps(body).encode(), kind)

    def leave(self) -> None:
        self._connection.close()

    def answer(self) -> tuple[int, Any, str | None]:
        """Status, body and Retry-After. Raises OSError when the connection was reset."""
        with self._connection.getresponse() as response:
            body = json.loads(response.read())
            told = response.status, body, response.getheader("Retry-After")
        self._connection.close()
        return told


def holds(node: TestNode, number: int) -> Client:
    """A request that its function has begun, and ends only with its instance."""
    body = {"until": f"/nowhere/{number}"}
    client = Client(node, body)
    node.wait(lambda: f"got {body}\n" in node.log_of("f"), 60, "the request to run")
    return client


def ready(node: TestNode) -> None:
    node.wait(lambda: node.http("GET", "/readyz").status == 200, 90, "the node to be ready again")


def code(answer: tuple[int, Any, str | None]) -> tuple[int, str, str | None]:
    return answer[0], answer[1]["error"]["code"], answer[2]


def test_d11_connections_that_a_dying_router_has_not_accepted_are_served_by_the_next(node: TestNode) -> None:
    pid = node.kill("router", signal.SIGSTOP)  # from here on it accepts nobody
    clients = [Client(node, number) for number in range(20)]
    node.kill("router")
    assert [client.answer() for client in clients] == [(200, number, None) for number in range(20)]
    node.replaced("router", pid)
    ready(node)


def test_a_command_waits_for_the_next_router(node: TestNode) -> None:
    assert node.process is not None
    pid = node.kill("router")
    with pytest.raises(Unreachable, match=f"pid {node.process.pid}.* but is not ready .* try again in a moment"):
        node.admin.functions()
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "invoke", "f", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "5"), done.stderr
    node.replaced("router", pid)
    ready(node)


def test_d11_a_request_whose_zygote_dies_is_told_to_come_back(node: TestNode) -> None:
    running = holds(node, 1)
    waiting = Client(node, "waits for the instance")
    node.wait(lambda: node.status()["functions"]["f"]["queued"] == 1, 60, "the second to be queued")
    pid = node.kill("zygote")
    assert code(running.answer()) == (503, "starting", "1")
    assert waiting.answer() == (200, "waits for the instance", None)
    node.replaced("zygote", pid)
    ready(node)


def test_d11_a_router_that_loses_the_controller_answers_its_clients_first(node: TestNode) -> None:
    running = holds(node, 2)
    pid = node.kill("controller")
    assert code(running.answer()) == (503, "starting", "1")
    node.replaced("controller", pid)
    ready(node)
    assert Client(node, 3).answer() == (200, 3, None)


def test_d11_a_request_that_is_not_whole_when_the_router_ends_is_told_to_come_back(node: TestNode) -> None:
    head = b"POST /functions/f/invoke HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", node.port), timeout=60) as sock:
        sock.sendall(head + b"Content-Length: 10\r\n\r\n12345")
        assert Client(node, 4).answer() == (200, 4, None), "the router has read the other"
        pid = node.kill("controller")
        with sock.makefile("rb") as file:
            data = file.read()
    assert data.startswith(b"HTTP/1.1 503 "), data
    assert b"retry-after: 1\r\n" in data
    assert b'"code":"starting"' in data
    node.replaced("controller", pid)
    ready(node)


@pytest.mark.parametrize("name", ["f", "g"])
def test_d17_an_abandoned_request_holds_nobody_up(node: TestNode, name: str) -> None:
    """Neither the next one of its function nor another function, which needs the one GPU."""
    holds(node, 10 + ord(name)).leave()
    assert node.result(name, 7) == 7


def test_d17_an_abandoned_request_finishes_if_nobody_waits(node: TestNode) -> None:
    go = node.shared / "go"
    body = {"until": str(go)}
    client = Client(node, body)
    node.wait(lambda: f"got {body}\n" in node.log_of("f"), 60, "the request to run")
    instance = node.status()["functions"]["f"]["instance"]
    client.leave()
    node.wait(lambda: node.status()["node"]["requests_open"] == 0, 60, "its place to be free")
    time.sleep(2.5)  # longer than a request was left alone before
    go.touch()
    node.wait(lambda: f"done {body}\n" in node.log_of("f"), 60, "the request to finish")
    assert node.result("f", 8) == 8
    assert node.status()["functions"]["f"]["instance"] == instance


def test_d16_json_that_nothing_can_hold_is_the_clients_mistake(node: TestNode) -> None:
    instance = node.status()["functions"]["f"]["instance"]

    def status(body: bytes) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=120)
        connection.request("POST", "/functions/f/invoke", body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            data = response.read()
        connection.close()  # a good answer is as deep as the body: this test's decoder could not hold it
        return response.status, "" if response.status == 200 else json.loads(data)["error"]["code"]

    bad = b"[" * 100_000, nested(100_000), b"1" * 10**6, b"1e999", b'"\xff"', b'"\xed\xa0\x80"'
    assert [status(body) for body in bad] == [(400, "bad_json")] * len(bad)
    for levels in (*range(960, 1020, 6), 1500, 5000):  # how many are too many depends on Python
        assert status(nested(levels)) in ((200, ""), (400, "bad_json")), levels
    for body in (nested(900, b"null"), b"0." + b"1" * 10**6, b"[" + b"[]," * 10**5 + b"1]"):
        assert status(body) == (200, ""), body[:20]
    assert node.status()["functions"]["f"]["instance"] == instance


def nested(levels: int, inside: bytes = b"") -> bytes:
    return b"[" * levels + inside + b"]" * levels


def test_d11_half_heads_on_all_connections_shut_nobody_out(node: TestNode) -> None:
    """The last one here: once there is a key, nobody is served without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    key = str(node.admin.create_key(Wish())["key"])
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):  # limits.connections
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", node.port), timeout=60))
            sock.sendall(b"POST /functions/g/invoke HTTP/1.1\r\nX-Slow: ")
        said = []
        for number in range(10):
            client = http.client.HTTPConnection("127.0.0.1", node.port, timeout=120)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            client.request("POST", "/functions/g/invoke", str(number), headers)
            with client.getresponse() as response:
                said.append((response.status, json.loads(response.read())))
            client.close()
    assert said == [(200, number) for number in range(10)]
