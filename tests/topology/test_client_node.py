"""The Python client and a real node: calls, arrays, streams, jobs, retries, and nodes that are not there."""

import asyncio
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.nodes.ports import free_port
from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.client import (
    AsyncClient,
    CallCancelled,
    CallTimeout,
    Client,
    FunctionFailed,
    NodeBusy,
    NotAllowed,
    NotThere,
    RequestRefused,
    Unreached,
)
from dormouse.schemas.admin import Wish

ROOT = Path(__file__).parents[2]

FUNCTION = """
import os, time
import torch

def load():
    return torch.ones(4).to("cuda")

def events(request):
    for step in range(request["events"]):
        if step == request.get("fails"):
            raise ValueError("no more")
        yield {"step": step}

def raw(request):
    for size in request["raw"]:
        yield b"x" * size

def handle(weights, request):
    if "events" in request:
        return events(request)
    if "raw" in request:
        return raw(request)
    while "until" in request and not os.path.exists(request["until"]):
        time.sleep(0.01)
    return {"sum": weights.sum().item(), "had": request["x"]}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n') as running:
        running.deployed("f", FUNCTION, timeout="60s", max_queue=1)
        yield running


@pytest.fixture
def client(node: TestNode) -> Iterator[Client]:
    with Client(_url(node)) as made:
        yield made


def _url(node: TestNode) -> str:
    return f"http://127.0.0.1:{node.port}"


def test_arrays_by_name(node: TestNode, client: Client) -> None:
    node.deployed("echo", "def handle(state, request): return request")
    sent = {"x": np.arange(6, dtype=np.float16).reshape(2, 3)[:, ::2], "words": ["a\0", b"\xff"], "one": 3}
    found = client.infer("echo", sent)
    assert (found["x"].dtype, found["x"].tolist()) == (np.float16, [[0, 2], [3, 5]])
    assert (found["words"].tolist(), found["one"].tolist()) == ([b"a\0", b"\xff"], [3])
    found["x"][0] = 1  # it is the caller's own
    halves = torch.tensor([0.5, -2.0], dtype=torch.bfloat16)
    assert torch.equal(client.infer("echo", {"x": halves})["x"], halves)
    assert list(client.infer("echo", sent, outputs=["one"])) == ["one"]
    with pytest.raises(RequestRefused, match="unexpected inference output 'no'") as refused:
        client.infer("echo", sent, outputs=["no"])
    assert (refused.value.code, bool(refused.value.request_id)) == ("bad_body", True)
    with pytest.raises(NotThere):
        client.infer("no/such", sent)
    with pytest.raises(TypeError, match="numbers, text or bytes"):
        client.infer("echo", {"x": np.array([1j])})

    async def asked() -> list[int]:
        async with AsyncClient(_url(node)) as other:
            found: list[int] = (await other.infer("echo", {"x": np.array([7])}))["x"].tolist()
            return found

    assert asyncio.run(asked()) == [7]


def test_a_call(client: Client) -> None:
    assert client.ready()
    assert client.invoke("f", {"x": [1, "two"]}) == {"sum": 4.0, "had": [1, "two"]}
    with pytest.raises(FunctionFailed) as failed:
        client.invoke("f", {})
    assert (failed.value.status, failed.value.code) == (500, "function_raised")
    assert "KeyError" in failed.value.message
    with pytest.raises(NotThere):
        client.invoke("no/such", {})
    with pytest.raises(RequestRefused):
        client.invoke("f", b"not JSON", headers={"Content-Type": "application/json"})


def test_streams(client: Client) -> None:
    assert list(client.stream("f", {"events": 3})) == [{"step": 0}, {"step": 1}, {"step": 2}]
    assert client.invoke("f", {"events": 2}) == [{"step": 0}, {"step": 1}]
    assert sum(map(len, client.stream("f", {"raw": [10, 200_000, 1]}))) == 200_011
    assert list(client.stream("f", {"x": 1})) == [{"sum": 4.0, "had": 1}], "an answer that is whole"
    failing = client.stream("f", {"events": 9, "fails": 2})
    assert list(islice(failing, 2)) == [{"step": 0}, {"step": 1}]
    with pytest.raises(FunctionFailed, match="no more"):
        next(failing)
    with pytest.raises(NotThere):
        next(client.stream("nothing", {}))


def test_jobs(client: Client, node: TestNode) -> None:
    gate = node.shared / "gate"
    job = client.submit("f", {"until": str(gate), "x": 1})
    with pytest.raises(CallTimeout, match="goes on"):
        job.result(timeout_s=1.0)
    gate.touch()
    assert job.result(timeout_s=60.0) == {"sum": 4.0, "had": 1}
    assert client.job(job.id).status()["state"] == "succeeded"
    never = client.submit("f", {"until": str(node.shared / "never"), "x": 1})
    assert never.cancel()["state"] == "cancelled"
    with pytest.raises(CallCancelled):
        never.result()
    with pytest.raises(NotThere):
        client.job("j0").result()


def test_a_call_with_a_key_runs_once(client: Client) -> None:
    first = client.invoke("f", {"x": 2}, idempotency_key="two")
    assert client.invoke("f", {"x": 2}, idempotency_key="two") == first
    with pytest.raises(RequestRefused, match="another body"):
        client.invoke("f", {"x": 3}, idempotency_key="two")


def test_a_full_queue_is_waited_for(client: Client, node: TestNode) -> None:
    gate = node.shared / "gate2"
    holds = [threading.Thread(target=client.invoke, args=("f", {"until": str(gate), "x": n})) for n in range(2)]
    for hold in holds:
        hold.start()
    node.wait(lambda: bool(node.status()["functions"]["f"]["queued"] == 1), 60, "the queue to be full")
    with Client(_url(node), retries=0) as hasty, pytest.raises(NodeBusy):
        hasty.invoke("f", {"x": 4})
    opens = threading.Timer(0.5, gate.touch)
    opens.start()
    assert client.invoke("f", {"x": 4})["had"] == 4
    for thread in (opens, *holds):
        thread.join()


def test_who_may_not() -> None:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n') as node:
        node.deployed("f", FUNCTION)
        key = node.admin.create_key(Wish())["key"]
        with Client(_url(node)) as stranger, pytest.raises(NotAllowed):
            stranger.invoke("f", {"x": 1})
        with Client(_url(node), key) as known:
            assert known.invoke("f", {"x": 1})["had"] == 1


def test_no_node() -> None:
    with Client(f"http://127.0.0.1:{free_port()}", retries=1) as client:
        with pytest.raises(Unreached, match="no node answers"):
            client.invoke("f", {})
        with pytest.raises(Unreached):
            next(client.stream("f", {}))
    with pytest.raises(ValueError, match="no address"):
        Client("127.0.0.1:8700")


def test_the_same_with_asyncio(node: TestNode) -> None:
    async def work() -> None:
        async with AsyncClient(_url(node), retries=9) as client:
            assert await client.ready()
            answers = await asyncio.gather(*(client.invoke("f", {"x": n}, timeout_s=60) for n in range(6)))
            assert [answer["had"] for answer in answers] == list(range(6))
            assert [part async for part in client.stream("f", {"events": 2})] == [{"step": 0}, {"step": 1}]
            job = await client.submit("f", {"x": 7})
            assert (await job.result(60))["had"] == 7
            assert (await client.job(job.id).status())["state"] == "succeeded"
            await job.cancel()
            with pytest.raises(NotThere):
                await job.status()
            with pytest.raises(FunctionFailed):
                await client.invoke("f", {})
        async with AsyncClient(f"http://127.0.0.1:{free_port()}", retries=0) as nowhere:
            with pytest.raises(Unreached):
                await nowhere.invoke("f", {})

    asyncio.run(work())


SAME = """
def load():
    pass

def handle(state, request):
    return request.data if hasattr(request, "content_type") else request  # bytes know what they are
"""


def test_arrays_and_bytes_go_and_come_as_they_are(client: Client, node: TestNode) -> None:
    node.deployed("same", SAME)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    for back in (
        client.invoke("same", array),
        client.submit("same", array).result(60),
        client.invoke("same", array, idempotency_key="array"),
    ):
        assert (back.dtype, back.tolist()) == (array.dtype, array.tolist())
    assert client.invoke("same", b"\x00\xff") == b"\x00\xff"
    assert client.submit("same", b"\x00\xff").result(60) == b"\x00\xff"


def test_the_distribution_without_a_node(tmp_path: Path) -> None:
    folder = tmp_path / "client"
    shutil.copytree(ROOT / "core" / "namespace" / "client", folder)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(tmp_path), str(folder)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    node = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert wheel.name == f"dormouse_client-{node['version']}-py3-none-any.whl"
    own = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert own["dependencies"] == node["optional-dependencies"]["client"]
    there = tmp_path / "there"
    zipfile.ZipFile(wheel).extractall(there)
    code = "import sys, dormouse.client as c; print(c.__file__, c.Unreached.__base__.__name__, 'torch' in sys.modules)"
    said = subprocess.check_output([sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(there)}, text=True)
    assert said.split() == [f"{there}/dormouse/client/__init__.py", "CallError", "False"]
