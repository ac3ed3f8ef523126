"""Answers in parts on a real node: every kind of handler, clients that leave, do not read, or see processes die."""

import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.schemas import messages as m

FUNCTION: Final = """
import asyncio, time
from pathlib import Path
import torch

ended = []

def load():
    return torch.arange(8.0).to("cuda")

def numbers(weights, request):
    x = weights
    for step in range(request["steps"]):
        x = x * 2
        yield {"step": step, "sum": x.sum().item()}

def texts(weights, request):
    yield from request["texts"]

def raw(weights, request):
    for size in request["sizes"]:
        yield bytes([size % 251]) * size

async def whole(weights, request):
    await asyncio.sleep(0.001)
    left = asyncio.create_task(asyncio.sleep(3600))  # nobody waits for it
    return {"sum": (await asyncio.to_thread(lambda: 3)) + weights.sum().item(), "left": left.done()}

async def apart(weights, request):
    try:
        for step in range(request["steps"]):
            await asyncio.sleep(0.001)
            yield weights.sum().item() + step
    finally:
        ended.append("async")

def breaks(weights, request):
    for step in range(request["good"]):
        yield step
    raise ValueError("no more than that")

def mixed(weights, request):
    yield "text"
    yield b"bytes"

def nothing(weights, request):
    return iter(())

def endless(weights, request):
    step = 0
    try:
        while True:
            step += 1
            print("step", step)
            yield {"step": step, "fill": "x" * request.get("fill", 0)}
            time.sleep(request.get("pause_s", 0.0))
    finally:
        ended.append("endless")

def computes(weights, until):  # without a pause
    x = weights
    while not Path(until).exists():
        for _ in range(20):
            x = x * 2
            x = x / 2
            same = bool((x == weights).all())
        yield same

def waits_for(weights, until):
    return [same for same in computes(weights, until)][-1]

def how_many_ended(weights, request):
    return ended.count(request["who"])

def handle(weights, request):
    if "until" in request:
        return globals()[request["do"]](weights, request["until"])
    return globals()[request["do"]](weights, request)
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    gpu = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\npoison = true\n'
    with running_node(f"{gpu}[limits]\ncompute_ms = 500\n") as running:
        running.deployed("parts", FUNCTION, timeout="20s")
        running.deployed("plain", "def load():\n    pass\ndef handle(state, request):\n    return request\n")
        yield running


OPEN: Final[list["Streamed"]] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().leave()


class Streamed:
    """An answer that is read as it comes."""

    def __init__(self, node: TestNode, request: Any, function: str = "parts") -> None:
        OPEN.append(self)
        self.connection = node.connect(60)
        body = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        self.connection.request("POST", f"/functions/{function}/invoke", body, headers)
        self.response = self.connection.getresponse()
        self.kind = self.response.getheader("Content-Type")

    def events(self) -> Iterator[tuple[str, str]]:
        """``(event, data)``. Comments, which tell a client that it waits, are none."""
        kind, data = "", list[str]()
        for line in self.response:
            text = line.decode().removesuffix("\n")
            if text.startswith("data: "):
                data.append(text.removeprefix("data: "))
            elif text.startswith("event: "):
                kind = text.removeprefix("event: ")
            elif not text.startswith(":"):
                assert text == ""
                if data:
                    yield kind, "\n".join(data)
                kind, data = "", []

    def leave(self) -> None:
        self.response.close()
        self.connection.close()


def test_objects_come_as_events_each_when_it_is_there(node: TestNode) -> None:
    answer = Streamed(node, {"do": "numbers", "steps": 20})
    assert (answer.response.status, answer.kind) == (200, m.SSE)
    x, expected = torch.arange(8.0), []
    for step in range(20):
        x = x * 2
        expected.append({"step": step, "sum": x.sum().item()})
    assert [json.loads(data) for _, data in answer.events()] == expected
    assert answer.response.getheader("Server-Timing", "").startswith("queue;dur=")


def test_the_first_part_is_there_before_the_last_is_made(node: TestNode) -> None:
    answer = Streamed(node, {"do": "endless", "pause_s": 0.01})
    events = answer.events()
    seen = [json.loads(next(events)[1])["step"] for _ in range(5)]
    assert seen == [1, 2, 3, 4, 5]
    answer.leave()


TEXTS: Final = ["Once", " upon", "\n\n", "a: b", "", "é\N{SLEEPING SYMBOL}", " data: x"]


def test_text_comes_as_it_is(node: TestNode) -> None:
    answer = Streamed(node, {"do": "texts", "texts": TEXTS})
    assert [data for _, data in answer.events()] == TEXTS


def test_bytes_come_raw_whatever_their_size(node: TestNode) -> None:
    sizes = [1, m.CHUNK_NBYTES, m.CHUNK_NBYTES + 1, 5 * m.STREAM_WINDOW_NBYTES + 7]
    answer = Streamed(node, {"do": "raw", "sizes": sizes})
    assert answer.kind == m.RAW
    assert answer.response.read() == b"".join(bytes([size % 251]) * size for size in sizes)


def test_coroutines_answer_and_what_they_leave_is_ended(node: TestNode) -> None:
    for _ in range(2):
        assert node.result("parts", {"do": "whole"}) == {"sum": 31.0, "left": False}


def test_async_generators_answer_in_parts(node: TestNode) -> None:
    answer = Streamed(node, {"do": "apart", "steps": 3})
    assert [json.loads(data) for _, data in answer.events()] == [28.0, 29.0, 30.0]


def test_an_answer_without_parts_is_one(node: TestNode) -> None:
    answer = Streamed(node, {"do": "nothing"})
    assert (answer.response.status, answer.response.read()) == (200, b"")


def test_what_fails_before_the_first_part_has_a_status(node: TestNode) -> None:
    answer = node.invoke("parts", {"do": "breaks", "good": 0})
    assert (answer.status, answer.code) == (500, "function_raised")
    assert "no more than that" in answer.body["error"]["message"]


def test_what_fails_later_ends_with_an_error_event(node: TestNode) -> None:
    *good, last = Streamed(node, {"do": "breaks", "good": 3}).events()
    assert good == [("", "0"), ("", "1"), ("", "2")]
    error = json.loads(last[1])["error"]
    assert (last[0], error["code"]) == ("error", "function_raised")
    assert "no more than that" in error["message"]


def test_bytes_and_text_in_one_answer_are_refused(node: TestNode) -> None:
    *_, last = Streamed(node, {"do": "mixed"}).events()
    assert json.loads(last[1])["error"]["code"] == "bad_response"


def ended(node: TestNode, who: str) -> int:
    """How many generators of this name have; an instance that is busy with one answers only when that has."""
    count: int = node.result("parts", {"do": "how_many_ended", "who": who})
    return count


@pytest.mark.parametrize(("do", "who"), [("endless", "endless"), ("apart", "async")])
def test_a_client_that_leaves_ends_it(node: TestNode, do: str, who: str) -> None:
    before = ended(node, who)
    answer = Streamed(node, {"do": do, "steps": 10**9})
    next(answer.events())
    answer.leave()
    assert ended(node, who) == before + 1  # by the same instance: another would count from none


def test_clients_that_leave_do_not_cost_the_instance(node: TestNode) -> None:
    """Wherever in the event loop each of them meets it."""
    before, leave = ended(node, "async"), 100
    for _ in range(leave):
        answer = Streamed(node, {"do": "apart", "steps": 10**9})
        next(answer.events())
        answer.leave()
    assert ended(node, "async") == before + leave


def test_a_client_that_does_not_read_costs_bounded_memory_and_harms_nobody(node: TestNode) -> None:
    body = json.dumps({"do": "endless", "fill": 8000}).encode()
    before = ended(node, "endless")
    with socket.create_connection(("127.0.0.1", node.port)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = b"POST /functions/parts/invoke HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        last = _last_step(node)
        # what lies between: the window, the router's buffer, the kernel's two
        assert 8000 * last < m.STREAM_WINDOW_NBYTES + (8 << 20)
        assert node.result("plain", {"x": 1}) == {"x": 1}
        assert _last_step(node) == last, "it went on"
    assert ended(node, "endless") == before + 1


def _last_step(node: TestNode) -> int:
    """The step at which it stays."""
    seen = [-1]

    def stays() -> bool:
        steps = [int(line.split()[1]) for line in node.log_of("parts").splitlines() if line.startswith("step ")]
        seen.append(steps[-1] if steps else 0)
        return len(seen) > 4 and min(seen[-4:]) == seen[-1] > 10

    while not stays():
        time.sleep(0.5)
    return seen[-1]


def test_the_turn_is_free_between_parts(node: TestNode) -> None:
    """One GPU, and a stream that pauses: another function's requests do not wait for its end."""
    node.deployed("other", "def load():\n    import torch\n    return torch.ones(4).to('cuda')\n"
                  "def handle(w, request):\n    return (w * request).sum().item()\n")  # fmt: skip
    answer = Streamed(node, {"do": "endless", "pause_s": 0.3})
    events = answer.events()
    next(events)
    for number in range(10):
        assert node.result("other", number) == 4.0 * number
    assert json.loads(next(events)[1])["step"] == 2  # while the stream was under way
    answer.leave()
    node.remove("other")


@pytest.mark.parametrize("do", ["computes", "waits_for"])
def test_who_computes_without_a_pause_keeps_nobody_from_the_gpu(node: TestNode, do: str) -> None:
    """Neither the parts of an answer nor a time limit make its turn longer; and it goes on where it was."""
    node.deployed("beside", "def load():\n    import torch\n    return torch.ones(4).to('cuda')\n"
                  "def handle(w, request):\n    return (w * request).sum().item()\n")  # fmt: skip
    go = node.shared / f"go-{do}"
    with ThreadPoolExecutor(1) as pool:
        try:
            answer = pool.submit(lambda: Streamed(node, {"do": do, "until": str(go)}).response.read())
            node.wait(lambda: node.status()["gpus"]["0"]["busy_with"] == "parts", 60.0, "a GPU that is used")
            for number in range(3):
                assert node.result("beside", number) == 4.0 * number
            assert not answer.done()
        finally:
            go.touch()
        lines = {line for line in answer.result().decode().splitlines() if line and not line.startswith(":")}
    assert lines == {"data: true" if do == "computes" else "true"}
    node.remove("beside")


def test_streams_of_an_instance_that_dies_end_with_an_error(node: TestNode) -> None:
    others = node.descendants()
    node.deployed("victim", FUNCTION)
    answer = Streamed(node, {"do": "endless", "pause_s": 0.05}, "victim")
    events = answer.events()
    next(events)
    for pid in set(node.descendants()).difference(others):
        os.kill(pid, signal.SIGKILL)
    *_, last = events
    assert last[0] == "error"
    assert json.loads(last[1])["error"]["code"] == "sandbox_died"
    node.remove("victim")


def test_raw_answers_that_break_do_not_look_whole(node: TestNode) -> None:
    source = "def load():\n    pass\ndef handle(state, request):\n    yield b'half'\n    raise ValueError('broken')\n"
    node.deployed("half", source)
    answer = Streamed(node, None, "half")
    with pytest.raises(http.client.IncompleteRead) as raised:
        answer.response.read()
    assert raised.value.partial == b"half"
    node.remove("half")


def test_silence_is_limited_and_length_is_not(node: TestNode) -> None:
    source = """
    import time
    def load():
        pass
    def handle(state, pauses):
        for pause in pauses:
            time.sleep(pause)
            yield pause
    """
    node.deployed("pauses", source, timeout="12s")  # 10 s more than a pause: on a busy machine too
    assert [data for _, data in Streamed(node, [2.0] * 7, "pauses").events()] == ["2.0"] * 7
    *good, last = Streamed(node, [0.1, 60.0], "pauses").events()
    assert good == [("", "0.1")]
    assert json.loads(last[1])["error"]["code"] == "timed_out"
    node.remove("pauses")


def test_the_command_line_prints_parts_as_they_come(node: TestNode) -> None:
    pieces = node.admin.stream("parts", json.dumps({"do": "texts", "texts": ["a", "b"]}).encode())
    assert list(pieces) == [(m.SSE, b"data: a\n\n"), (m.SSE, b"data: b\n\n")]


def test_many_streams_at_once_do_not_mix(node: TestNode) -> None:
    answers: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        texts = [f"{number}-{part}" for part in range(50)]
        answers[number] = [data for _, data in Streamed(node, {"do": "texts", "texts": texts}).events()]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [f"{number}-{part}" for part in range(50)] for number in range(12)}
