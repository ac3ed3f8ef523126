"""Many requests in one instance, on a real node: they overlap, share leases, and keep their own errors and ends."""

import http.client
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core.logrecords import having, lines_of

FUNCTION = """
import asyncio, logging, os, sys, threading, time
import torch
from dormouse.client_shim.instance.context import current

here, most, ended = 0, 0, []
instance = os.urandom(8).hex()
gates = {}

def load():
    return torch.arange(8.0).to("cuda")

async def handle(weights, request):
    global here, most
    here += 1
    most = max(most, here)
    try:
        return await globals()[request["do"]](weights, request)
    finally:
        here -= 1

async def all_here(request):
    gate = gates.setdefault(request["at"], asyncio.Event())
    if here >= request["at"]:
        gate.set()
    await gate.wait()

async def meet(weights, request):
    "Computes between the others."
    await all_here(request)
    value = weights * request["n"]
    await asyncio.sleep(0.01)
    return {"sum": value.sum().item(), "id": current().id, "pid": os.getpid(), "instance": instance}

async def bad(weights, request):
    "Its command fails on the GPU, where nobody has waited for it before others compute."
    await all_here(request)
    index = torch.tensor([0, 100]).to("cuda")
    picked = weights[index]
    await asyncio.sleep(0.2)  # others ask first
    return picked.sum().item()

async def speaks(weights, request):
    "At the same time as others, in each way that there is."
    number = request["n"]
    for way in range(3):
        print("print", number)
        print("error", number, file=sys.stderr)
        logging.warning("logged %d", number)
        thread = threading.Thread(target=print, args=("thread", number))
        thread.start()
        thread.join()
        await all_here(request)
        await asyncio.get_running_loop().run_in_executor(None, print, "pool", number)
    (weights * number).sum().item()

async def raises(weights, request):
    raise ValueError(request["text"])

async def waits(weights, request):
    left = asyncio.create_task(asyncio.sleep(3600))
    try:
        print("waits", flush=True)
        await asyncio.sleep(3600)
    finally:
        ended.append(request["name"])

async def hangs(weights, request):
    time.sleep(3600)

async def seen(weights, request):
    tasks = len(asyncio.all_tasks())
    return {"most": most, "ended": ended, "here": here, "tasks": tasks}

async def computes(weights, request):
    value = weights
    for _ in range(request["steps"]):
        value = value + 1
        if request.get("awaits"):
            await asyncio.sleep(0)
    return value.sum().item()

async def dies(weights, request):
    os._exit(7)

async def held(weights, request):
    "Without a GPU."
    print("held", flush=True)
    while not os.path.exists(request["gate"]):
        await asyncio.sleep(0.01)
    return instance

async def parts(weights, request):
    def each():
        yield 1
    return each()
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n') as node:
        node.deployed("many", FUNCTION, concurrency=8, timeout="8s")
        yield node


def together(*calls: Callable[[], HttpAnswer]) -> list[HttpAnswer]:
    """All at once; their answers in the same order."""
    found: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        found[number] = calls[number]()

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def ask(node: TestNode, do: str, **more: Any) -> Callable[[], HttpAnswer]:
    return lambda: node.invoke("many", {"do": do, **more})


def test_so_many_are_in_one_instance_and_no_more(node: TestNode) -> None:
    answers = together(*(ask(node, "meet", at=8, n=n) for n in range(8)))
    assert [answer.body["sum"] for answer in answers] == [28.0 * n for n in range(8)]
    assert len({answer.body["pid"] for answer in answers}) == 1
    assert [answer.body["id"] for answer in answers] == [answer.headers["x-request-id"] for answer in answers]
    together(*(ask(node, "computes", steps=3, awaits=True) for _ in range(20)))
    assert node.result("many", {"do": "seen"})["most"] == 8


def test_each_line_of_the_log_is_its_requests(node: TestNode) -> None:
    answers = together(*(ask(node, "speaks", at=4, n=n) for n in range(4)))
    assert [answer.status for answer in answers] == [200] * 4
    lines = list(lines_of((node.marked_log("many"),)))
    for number, answer in enumerate(answers):
        said = [line.text.decode().strip() for line in lines if line.origin.request == answer.headers["x-request-id"]]
        ways = {f"{way} {number}" for way in ("print", "error", "thread", "pool")} | {f"WARNING:root:logged {number}"}
        assert Counter(said) == dict.fromkeys(ways, 3)
        found = b"".join(
            line.text for record in having(node.marked_log("many"), answer.headers["x-request-id"]) for line in record
        )
        assert found.decode().split("\n")[:-1] == said


def test_an_error_of_the_gpu_is_that_requests_and_no_others(node: TestNode) -> None:
    good = [ask(node, "meet", at=6, n=n) for n in range(4)]
    answers = together(ask(node, "bad", at=6), *good, ask(node, "bad", at=6))
    for answer in (answers[0], answers[-1]):
        assert (answer.status, answer.code) == (500, "function_raised")
        assert "IndexError" in answer.message
        assert "aten::index" in answer.message
    assert [(answer.status, answer.body["sum"]) for answer in answers[1:5]] == [(200, 28.0 * n) for n in range(4)]
    assert node.result("many", {"do": "computes", "steps": 1}) == 36.0
    assert node.log_of("many").count(" starts, ") == 1, "nothing is left that would spoil the instance"


def test_what_a_handler_raises_is_its_requests(node: TestNode) -> None:
    counted = node.status()["functions"]["many"]["service"]["counted"]
    answers = together(*(ask(node, "raises", text=f"number {n}") for n in range(4)), ask(node, "computes", steps=2))
    for n, answer in enumerate(answers[:4]):
        assert (answer.status, answer.code) == (500, "function_raised")
        assert f"ValueError: number {n}" in answer.message
    assert answers[4].body == 44.0
    service = node.status()["functions"]["many"]["service"]
    assert service["counted"] == counted + 5, "each by itself"
    assert service["in_time"] < 1.0


def test_a_client_that_leaves_ends_its_own_coroutine(node: TestNode) -> None:
    before = node.result("many", {"do": "seen"})["tasks"]
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
    body = json.dumps({"do": "waits", "name": "gone"})
    connection.request("POST", "/functions/many/invoke", body, {"Content-Type": "application/json"})
    node.wait(lambda: bool(node.result("many", {"do": "seen"})["here"] == 2), 60, "it to run")
    connection.close()
    node.wait(lambda: "gone" in node.result("many", {"do": "seen"})["ended"], 60, "it to end")
    assert node.result("many", {"do": "seen"})["tasks"] == before
    assert node.log_of("many").count("starts, ") == 1


def test_the_time_limit_ends_one_coroutine(node: TestNode) -> None:
    pid = node.result("many", {"do": "meet", "at": 1, "n": 1})["pid"]
    answer = node.invoke("many", {"do": "waits", "name": "late"})
    assert (answer.status, answer.code) == (504, "timed_out")
    assert "given up" in answer.message
    node.wait(lambda: "late" in node.result("many", {"do": "seen"})["ended"], 60, "it to end")
    assert node.result("many", {"do": "meet", "at": 1, "n": 1})["pid"] == pid


def test_others_have_the_gpu_between_requests_that_never_end(node: TestNode) -> None:
    """Requests of one function overlap all the time; another function's is answered all the same."""
    source = "import torch\ndef load(): return torch.ones(2).to('cuda')\ndef handle(w, r): return w.sum().item()\n"
    node.deployed("other", source)
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            node.result("many", {"do": "computes", "steps": 50, "awaits": True})

    threads = [threading.Thread(target=go_on) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert node.result("other", 0) == 2.0
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_answers_in_parts_and_large_bodies_are_refused_with_what_to_do(node: TestNode) -> None:
    answer = node.invoke("many", {"do": "parts"})
    assert (answer.status, answer.code) == (500, "bad_response")
    assert "--concurrency" in answer.message
    answer = node.invoke("many", {"do": "seen", "fill": "x" * (800 << 10)})
    assert (answer.status, answer.code) == (413, "body_too_large")


def test_one_that_never_awaits_is_ended_with_its_instance(node: TestNode) -> None:
    answers = together(ask(node, "hangs"), ask(node, "waits", name="beside"))
    assert sorted(answer.status for answer in answers) == [502, 504] or [a.status for a in answers] == [504, 504]
    node.wait(lambda: node.invoke("many", {"do": "computes", "steps": 1}).status == 200, 60, "a new instance")


def test_a_death_fails_all_that_were_there(node: TestNode) -> None:
    def dies() -> HttpAnswer:
        node.wait(lambda: bool(node.result("many", {"do": "seen"})["here"] == 2), 60, "the other one to be there")
        return node.invoke("many", {"do": "dies"})

    answers = together(ask(node, "waits", name="beside"), dies)
    assert [(answer.status, answer.code) for answer in answers] == [(502, "sandbox_died")] * 2
    assert node.result("many", {"do": "computes", "steps": 1}) == 36.0


def test_a_stateless_function_has_many_in_each_of_several_instances() -> None:
    """Two that hold the first instance full are answered after all others, which the second one has."""
    with running_node('[gpu]\ncount = 2\nmemory = "64MiB"\n') as node:
        node.deployed("many", FUNCTION, concurrency=2, stateless=True, deadline="1ms")
        first = node.result("many", {"do": "meet", "at": 1, "n": 1})["instance"]
        gate = str(node.shared / "gate")
        with ThreadPoolExecutor(12) as pool:
            held = [pool.submit(ask(node, "held", gate=gate)) for _ in range(2)]
            node.wait(lambda: node.log_of("many").count("held") == 2, 60, "the first instance to be full")
            others = [pool.submit(ask(node, "meet", at=2, n=n)) for n in range(8)]
            answers = [each.result() for each in others]
            assert [answer.body["sum"] for answer in answers] == [28.0 * n for n in range(8)]
            assert not any(each.done() for each in held)
            Path(gate).touch()
            assert {each.result().body for each in held} == {first}
        assert first not in {answer.body["instance"] for answer in answers}


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"concurrency": 0}, 400, "from 1 to 256"),
        ({"concurrency": 1000}, 400, "from 1 to 256"),
        ({"concurrency": 2}, 422, "async def handle(state, request)"),
    ],
)
def test_what_cannot_be_is_refused_at_deploy(node: TestNode, settings: Any, status: int, words: str) -> None:
    answer = node.deploy("plain", "def handle(state, request): return 1\n", **settings)
    assert answer.status == status
    assert words in answer.message
