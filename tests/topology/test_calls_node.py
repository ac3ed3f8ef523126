"""Functions that call functions, on a real node whose only GPU has no room for two models and the work of one."""

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from click.testing import CliRunner
from guides import blocks

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.cli import main as cli

CALLER = """
import asyncio, os, threading, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
import torch
from dormouse import acall, call
from dormouse.client import CallError

later = threading.Event()

def load():
    try:
        call("called", 1)
    except CallError as error:
        print("load():", type(error).__name__, error)
    return (2 * torch.ones(1 << 20)).to("cuda")

def handle(weights, request):
    return globals()[request.pop("do")](weights, **request)

def fills(weights, n):
    "What it keeps on the GPU while it calls leaves no room for another model."
    kept = [weights[:900_000] + n, weights[:900_000] - n]
    answer = call("called", {"n": n})
    return [kept[0].sum().item(), kept[1].sum().item(), answer]

def tries(weights, to, body):
    try:
        return call(to, body)
    except CallError as error:
        return [type(error).__name__, error.status, error.code, error.message]

def types(weights):
    array = call("called", np.arange(6, dtype=np.int16).reshape(2, 3))
    return [array.dtype.name, array.tolist(), call("called", b"abc").decode(), call("called", {"parts": 3})]

def together(weights, count):
    "In threads, then in coroutines."
    def one(n):
        return call("called", {"n": n})["got"]["n"]
    with ThreadPoolExecutor(60) as pool:
        answers = list(pool.map(one, range(count)))
    async def every():
        return await asyncio.gather(*(acall("called", {"n": n}) for n in range(count)))
    return answers + [each["got"]["n"] for each in asyncio.run(every())]

def gives_up(weights):
    async def both():
        waits = asyncio.create_task(acall("called", {"waits": True}))
        await asyncio.sleep(0.05)
        waits.cancel()
        return await acall("called", {"n": 5})
    return asyncio.run(both())["got"]

def calls_later(weights, gate):
    while not os.path.exists(gate):
        time.sleep(0.02)
    return call("called", {"n": 8})["got"]

def outlives(weights):
    def goes_on():
        later.wait()
        print("later:", tries(weights, "called", 1), flush=True)
    threading.Thread(target=goes_on).start()

def goes_on(weights):
    later.set()
"""

MANY = """
import asyncio
from dormouse import acall, call

async def handle(state, request):
    answers = await asyncio.gather(*(acall("called", {"n": request + n}) for n in range(3)))
    other = await asyncio.to_thread(call, "called", {"n": request})
    return [each["got"]["n"] for each in (*answers, other)]
"""

CALLED = """
import os, time
import numpy as np
import torch
from dormouse import PublicError, Response

def load():
    return (3 * torch.ones(1 << 20)).to("cuda")

def handle(weights, request):
    if isinstance(request, np.ndarray):
        return request * 2
    if not isinstance(request, dict):
        return bytes(reversed(request.data)) if hasattr(request, "data") else request
    if "parts" in request:
        return ({"part": number} for number in range(request["parts"]))
    if "refuses" in request:
        raise PublicError(418, "no tea", code="teapot")
    if "raises" in request:
        raise ValueError("the called one's")
    if "dies" in request:
        os._exit(3)
    if "large" in request:
        return "x" * request["large"]
    while "waits" in request and not os.path.exists(str(request["waits"])):
        time.sleep(0.02)
    return {"got": request, "sum": weights.sum().item()}
"""

HOSTILE = """
from itertools import count
from dormouse.client_shim.instance import context
from dormouse.client_shim.torch_face.remote_tensor import world
from dormouse.schemas import messages as m

numbers = count(1000)

def load():
    pass

def handle(state, request):
    router, own = world.stream.backend.router, context.number()
    def ask(to="called", body=b"1", **made_up):
        number = made_up.pop("number", None) or next(numbers)
        router.call(m.CallFunction(number=number, body=body, **{"request": own, "function": to, **made_up}), 10**9)
        return number
    def said(number):
        answer = router.call_answer(number)
        return [answer.status, answer.body.decode()]
    return eval(request, globals() | locals())
"""

LINK = """
import torch
from dormouse import call

def load():
    return (NUMBER * torch.ones(1 << 20)).to("cuda")

def handle(weights, n):
    kept = [weights[:900_000] + n, weights[:900_000] - n]
    below = call(BELOW, n) if BELOW else []
    return [kept[0].sum().item(), kept[1].sum().item(), *below]
"""

MAX = 768 << 10


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "12MiB"\nactivations = "8MiB"\nthreads = 1\n') as running:
        running.deployed("called", CALLED)
        running.deployed("caller", CALLER, call=("called", "later"), timeout="20s")
        yield running


def asks(node: TestNode, do: str, **said: Any) -> Any:
    return node.result("caller", {"do": do, **said})


def outcomes(node: TestNode, name: str) -> dict[str, str]:
    """Of its last requests, by whose calls they are."""
    return {row["by"]: row["outcome"] for row in node.admin.requests(name, "", 64)}


def test_one_gpu_serves_both_though_it_has_room_for_one(node: TestNode) -> None:
    for n in range(3):
        own = [900_000.0 * (2 + n), 900_000.0 * (2 - n)]
        assert asks(node, "fills", n=n) == [*own, {"got": {"n": n}, "sum": 3.0 * (1 << 20)}]


def test_chains_that_fill_the_gpu_at_each_step_end_with_their_own_values(node: TestNode) -> None:
    """Many at once, begun at each of the links: each holds an instance, and as much of the GPU as there is."""
    for number in (3, 2, 1):
        below = f"link{number + 1}" if number < 3 else ""
        source = LINK.replace("NUMBER", str(number)).replace("BELOW", repr(below))
        node.deployed(f"link{number}", source, call=(below,) if below else ())

    def right(n: int) -> bool:
        first = n % 3 + 1
        wanted = [900_000.0 * (link + sign * n) for link in range(first, 4) for sign in (1, -1)]
        return bool(node.result(f"link{first}", n) == wanted)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(right, range(18)))


def test_answers_are_what_a_client_gets(node: TestNode) -> None:
    parts = [{"part": 0}, {"part": 1}, {"part": 2}]
    assert asks(node, "types") == ["int16", [[0, 2, 4], [6, 8, 10]], "cba", parts]
    assert asks(node, "tries", to="called", body={"large": MAX - 2}) == "x" * (MAX - 2), "with quotes, all there is"


def test_many_at_once_get_their_own_answers(node: TestNode) -> None:
    assert asks(node, "together", count=200) == [*range(200), *range(200)], "more than may be open"
    node.deployed("many", MANY, call=("called",), concurrency=4)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda n: node.result("many", 10 * n), range(8))) == [
            [10 * n, 10 * n + 1, 10 * n + 2, 10 * n] for n in range(8)
        ]


@pytest.mark.parametrize(
    ("to", "body", "kind", "status", "code", "words"),
    [
        ("called", {"refuses": 1}, "FunctionRefused", 418, "teapot", "no tea"),
        ("called", {"raises": 1}, "FunctionFailed", 500, "function_raised", "ValueError: the called one's"),
        ("called", {"dies": 1}, "FunctionFailed", 502, "sandbox_died", "in the middle of the request"),
        ("called", {"large": MAX - 1}, "RequestRefused", 413, "answer_too_large", "768 KiB"),
        ("called", "x" * MAX, "RequestRefused", 413, "body_too_large", "768 KiB"),
        ("later", 1, "NotThere", 404, "unknown_function", "'later'"),
        ("no name", 1, "NotThere", 404, "unknown_function", "'no name'"),
        ("other", 1, "NotAllowed", 403, "call_refused", "may call only called, later"),
        ("caller", 1, "RequestRefused", 409, "call_circle", "'caller' calls 'caller'"),
    ],
)
def test_errors_say_whose_they_are(
    node: TestNode, to: str, body: Any, kind: str, status: int, code: str, words: str
) -> None:
    found = asks(node, "tries", to=to, body=body)
    assert found[:3] == [kind, status, code]
    assert words in found[3]


def test_calls_are_told_with_whose_they_are(node: TestNode) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-request-id": "mine", "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    body = {"do": "fills", "n": 1}
    assert node.http("POST", "/functions/caller/invoke", body, headers=headers).status == 200
    called = next(row for row in node.admin.requests("called", "", 64) if row["by"] == "caller mine")
    assert (called["outcome"], called["trace"]) == ("ok", trace)


def test_only_the_code_of_a_request_calls(node: TestNode) -> None:
    assert "load(): OutsideRequest" in node.log_of("caller")
    asks(node, "outlives")
    asks(node, "goes_on")
    node.wait(lambda: "later: ['CallCancelled', 503, 'cancelled'" in node.log_of("caller"), 60, "the thread to be told")


def test_what_is_given_up_ends(node: TestNode) -> None:
    assert asks(node, "gives_up") == {"n": 5}
    assert node.status()["functions"]["called"]["queued"] == 0


def test_a_client_that_leaves_leaves_the_call(node: TestNode) -> None:
    body, headers = json.dumps({"do": "tries", "to": "called", "body": {"waits": 1}}), {"X-Request-Id": "leaves"}
    connection = http.client.HTTPConnection("127.0.0.1", node.port, timeout=30)
    connection.request("POST", "/functions/caller/invoke", body, {"Content-Type": "application/json", **headers})
    node.wait(lambda: node.status()["functions"]["called"]["running"] == 1, 60, "the call to run")
    connection.close()
    node.wait(lambda: outcomes(node, "called").get("caller leaves") == "cancelled", 60, "the call to end")
    assert asks(node, "tries", to="called", body={"n": 1})["got"] == {"n": 1}


def test_a_time_limit_is_the_calls_too(node: TestNode) -> None:
    node.deployed("short", CALLER, call=("called",), timeout="1s")
    body, headers = {"do": "tries", "to": "called", "body": {"waits": 1}}, {"X-Request-Id": "late"}
    answer = node.http("POST", "/functions/short/invoke", body, headers=headers)
    assert (answer.status, answer.code) == (504, "timed_out")
    node.wait(lambda: outcomes(node, "called").get("short late") == "cancelled", 60, "the call to end")
    assert node.result("short", {"do": "tries", "to": "called", "body": {"n": 1}})["got"] == {"n": 1}


def test_what_code_makes_up_calls_nobody(node: TestNode) -> None:
    """Not even by a request of another function's, which may call that."""
    node.deployed("hostile", HOSTILE, call=("later",))
    gate = node.shared / "gate"
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(asks, node, "tries", to="called", body={"waits": str(gate)})
        node.wait(lambda: node.status()["functions"]["called"]["running"] == 1, 60, "a request that may call")
        found = node.result("hostile", "[said(ask(request=each)) for each in range(-3, 300) if each != own]")
        assert {(status, json.loads(text)["error"]["code"]) for status, text in found} == {(503, "cancelled")}
        assert node.result("hostile", "said(ask())")[0] == 403
        assert node.result("hostile", "said(ask('later'))")[0] == 404
        gate.touch()
        assert others.result()["got"] == {"waits": str(gate)}
    assert not [row for row in node.admin.requests("called", "", 64) if "hostile" in (row["by"] or "")]


@pytest.mark.parametrize(
    "attack",
    [
        """[ask(number=7, body=b'{"waits": 1}') for _ in range(2)], said(7)""",  # a number twice
        "said(ask(body=b'x' * (900 << 10)))",
        "said(ask(function=7))",
        "said(ask(function='x' * (1 << 20)))",
        "said(ask(request='x'))",
    ],
)
def test_what_no_shim_says_ends_its_instance(node: TestNode, attack: str) -> None:
    node.deployed("hostile", HOSTILE, call=("called",))
    answer = node.invoke("hostile", attack)
    assert (answer.status, answer.code) == (502, "sandbox_died")
    assert "broke the protocol" in answer.message
    assert node.invoke("hostile", "said(ask('other'))").body[0] == 403


def test_a_flood_of_calls_ends_its_instance(node: TestNode) -> None:
    node.deployed("hostile", HOSTILE, call=("called",))
    gate = node.shared / "flood"  # until then none of them is answered
    waits = json.dumps({"waits": str(gate)}).encode()
    reads = (
        "[[said(each) for each in asked[32:]], print('refused', flush=True), [said(each)[0] for each in asked[:32]]]"
    )
    with ThreadPoolExecutor(1) as pool:
        attack = f"(lambda asked: {reads})([ask(body={waits!r}) for _ in range(40)])"
        found = pool.submit(node.result, "hostile", attack)
        try:
            node.wait(lambda: "refused" in node.log_of("hostile"), 60, "those that are too many to be refused")
        finally:
            gate.touch()
        refused, _, answered = found.result()
    assert [(status, json.loads(text)["error"]["code"]) for status, text in refused] == [(429, "too_many_calls")] * 8
    assert answered == [200] * 32
    answer = node.invoke("hostile", "[ask() for _ in range(3000)]")
    assert (answer.status, answer.code) == (502, "sandbox_died")
    assert "does not read" in answer.message
    assert asks(node, "tries", to="called", body={"n": 1})["got"] == {"n": 1}


def test_the_guide_shows_what_runs(node: TestNode) -> None:
    search, tries = [text for text in blocks("docs/moving.md", "python") if "import call" in text]
    node.deployed("embed", "def handle(state, request):\n    return [len(request['text'])]\n")
    node.deployed("index", "def handle(state, request):\n    return request\n")
    node.deployed("search", search, call=("embed", "index"))
    assert node.result("search", {"text": "abc"}) == {"found": {"vector": [3], "most": 5}}
    node.deployed("search", tries, call=("embed",))
    assert node.result("search", {"text": "abc"}) == [3]
    assert node.result("search", {}) == [500, "function_raised"]
    assert node.remove("embed").status == 200
    assert node.result("search", {"text": "abc"}) is None


def test_whom_it_may_call_is_kept_changed_and_told(node: TestNode) -> None:
    folder = node.folder("kept")
    (folder / "kept.py").write_text(MANY)
    (folder / "dormouse.toml").write_text('call = ["called"]\nconcurrency = 2\n')

    def dormouse(*words: str) -> str:
        found = CliRunner().invoke(cli.cli, ["--run", str(node.run), *words])
        assert found.exit_code == 0, found.output
        return found.output

    dormouse("deploy", "kept", str(folder), "--call", "later")
    assert "may call called, later\n" in dormouse("status", "kept")
    assert "call.later" in dormouse("deploy", "kept", str(folder)), "it says what it keeps"
    assert "call.later: is not there any more" in dormouse("deploy", "kept", str(folder), "--reset", "call.later")
    assert "may call called\n" in dormouse("status", "kept")
    assert node.result("kept", 1) == [1, 2, 3, 1]
    assert "kept " in dormouse("requests", "called", "-n", "4"), "who has called"
    refused = node.deploy("called", CALLED, call=("kept",))
    assert (refused.status, refused.code) == (409, "call_circle")


def test_a_node_that_drains_lets_its_requests_call(node: TestNode) -> None:
    gate = node.shared / "drains"
    with ThreadPoolExecutor(2) as pool:
        calls = pool.submit(asks, node, "calls_later", gate=str(gate))
        node.wait(lambda: node.status()["functions"]["caller"]["running"] == 1, 60, "it to run")
        drained = pool.submit(node.admin.drain)
        try:
            node.wait(lambda: node.status()["node"]["draining"], 60, "the drain")
            assert node.invoke("called", {"n": 1}).code == "draining"
            gate.touch()
            assert calls.result() == {"n": 8}
            assert drained.result() is True
        finally:
            gate.touch()
            node.admin.drain(undo=True)


def test_a_job_calls_and_a_version_is_called(node: TestNode) -> None:
    begun = node.http("POST", "/functions/caller/invoke", {"do": "types"}, headers={"prefer": "respond-async"})
    assert begun.status == 202
    result = begun.body["result"]
    done = node.http("GET", result, headers={"prefer": "wait=30"})
    assert (done.status, done.body[2]) == (200, "cba")
    version = node.status()["functions"]["called"]["version"]
    assert asks(node, "tries", to=f"called@{version}", body={"n": 2})["got"] == {"n": 2}
    assert asks(node, "tries", to="called@77", body=1)[2] == "unknown_function"
