"""Models that are asked to leave a GPU, or to come to one, over the repository's routes."""

import json
import threading
from collections.abc import Iterator

import pytest
from inference_wire import Reply, Sender

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.schemas.admin import Wish

pytestmark = pytest.mark.timeout(300)

FUNCTION = """
import os, time
import torch
def load():
    return torch.full((1 << 20,), 2.0).to("cuda")
def handle(weights, request):
    total = weights.sum().item()
    while request and not os.path.exists(request):
        time.sleep(0.01)
    return total
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 2\nmemory = "32MiB"\nthreads = 1\n', node="open_loopback = true") as node:
        node.deployed("w", FUNCTION, timeout="120s")
        yield node


@pytest.fixture(scope="module")
def send(node: TestNode) -> Iterator[Sender]:
    key = node.admin.create_key(Wish(scopes=("deploy",)))["key"]
    sender = Sender(node.port, {"Authorization": f"Bearer {key}"})
    yield sender
    sender.close()


def place(node: TestNode) -> str:
    """Where its model was."""
    answer = node.invoke("w", "")
    assert (answer.status, answer.body) == (200, 2.0 * (1 << 20)), answer
    return str(answer.headers["server-timing"].rpartition("model;desc=")[2])


def move(send: Sender, what: str, **parameters: str) -> Reply:
    return send("POST", f"/v2/repository/models/w/{what}", json.dumps({"parameters": parameters}).encode())


def moved(node: TestNode, send: Sender, what: str, **parameters: str) -> None:
    """As soon as nobody uses it."""

    def done() -> bool:
        reply = move(send, what, **parameters)
        assert reply.status in (200, 409, 503), reply
        return reply.status == 200

    node.wait(done, 90, f"{what} {parameters}")


def test_a_model_leaves_its_gpu_and_comes_back(node: TestNode, send: Sender) -> None:
    place(node)
    moved(node, send, "unload")
    assert place(node) == "host"
    moved(node, send, "unload")
    moved(node, send, "load")
    assert place(node) == "gpu"
    assert send("POST", "/v2/repository/models/w/load").status == 200  # it is there; no body is one, too
    moved(node, send, "unload", tier="disk")
    assert node.status()["functions"]["w"]["host_nbytes"] == 0
    place(node)  # an answer may be there before the news of where all came from
    node.wait(lambda: node.status()["functions"]["w"]["copied_file_nbytes"] >= 4 << 20, 90, "what was read from a file")
    moved(node, send, "unload", tier="disk")
    moved(node, send, "load")
    assert place(node) == "gpu"


def test_what_is_used_stays(node: TestNode, send: Sender) -> None:
    gate = node.shared / "gate"
    running = threading.Thread(target=node.invoke, args=("w", str(gate)))
    running.start()
    node.wait(lambda: bool(node.status()["gpus"]["0"]["seats"] or node.status()["gpus"]["1"]["seats"]), 90, "a seat")
    reply = move(send, "unload")
    assert (reply.status, reply.error.split(":")[0]) == (409, "in_use")
    gate.touch()
    running.join()
    moved(node, send, "unload")


def test_what_is_wrong_is_said(node: TestNode, send: Sender) -> None:
    assert Sender(node.port)("POST", "/v2/repository/models/w/load").status == 401
    assert send("POST", "/v2/repository/models/org/a/load").status == 404
    assert [move(send, "load", tier=tier).status for tier in ("host", "disk", "tape")] == [400] * 3
    assert move(send, "unload", tier="gpu").status == 400
    assert move(send, "load", config="{}").status == 400
    assert send("POST", "/v2/repository/models/w/load", b"[]").status == 400
    assert send("POST", "/v2/repository/models/w/load", bytes(70 << 10)).status == 413
    for deep in (b'{"parameters": {"tier": ' + b"[" * 30_000, b'{"other": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"):
        for what in ("load", "unload"):
            reply = send("POST", f"/v2/repository/models/w/{what}", deep)
            assert (reply.status, reply.error.split(":")[0]) == (400, "bad_body"), reply.data
