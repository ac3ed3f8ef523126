"""Bursts on a real node with two emulated GPUs: requests to a stateless function run on both at once, those to another
function never; what is added costs no bytes and ends by itself."""

import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from benchmarks.nodes.testnode import TestNode, running_node

WIDTH: Final = 512
LAYERS: Final = 4
MODEL_NBYTES: Final = LAYERS * WIDTH * WIDTH * 4
REQUESTS: Final = 16
BURSTS: Final = 10

FUNCTION: Final = f"""
import os, time
import torch

def load():
    generator = torch.Generator().manual_seed(5)
    layers = [(torch.randn({WIDTH}, {WIDTH}, generator=generator) / {WIDTH}**0.5).to("cuda") for _ in range({LAYERS})]
    return os.urandom(8).hex(), layers

def handle(state, request):
    name, layers = state
    began_s = time.monotonic()
    x = torch.full(({WIDTH},), request["x"], device="cuda")
    for _ in range(60):
        for layer in layers:
            x = torch.tanh(layer @ x)
    x = x.tolist()
    if request.get("write"):
        layers[0] += 1
    return {{"x": x, "instance": name, "ran": [began_s, time.monotonic()]}}
"""


@functools.cache
def native(value: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    layers = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)]
    x = torch.full((WIDTH,), value)
    for _ in range(60):
        for layer in layers:
            x = torch.tanh(layer @ x)
    return x


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(
        '[gpu]\ncount = 2\nmemory = "64MiB"\nthreads = 1\npoison = true\n[limits]\nextra_idle_ms = 6000\n'
    ) as running:
        yield running


def burst(node: TestNode, name: str) -> list[dict[str, Any]]:
    """Many requests at once, after one that shows how long they take; every answer is as native PyTorch's."""
    expected = [native(number / REQUESTS) for number in range(REQUESTS)]  # later, what was added may have ended
    node.result(name, {"x": 0.5})
    answers: dict[int, dict[str, Any]] = {}

    def ask(number: int) -> None:
        answers[number] = node.result(name, {"x": number / REQUESTS})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(REQUESTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(REQUESTS):
        torch.testing.assert_close(torch.tensor(answers[number]["x"]), expected[number], rtol=1e-3, atol=1e-4)
    return list(answers.values())


def overlaps(answers: list[dict[str, Any]]) -> int:
    """How many requests began while the one that began before them was running."""
    ran = sorted(answer["ran"] for answer in answers)
    return sum(later[0] < earlier[1] for earlier, later in itertools.pairwise(ran))


def row(node: TestNode, name: str) -> dict[str, Any]:
    found: dict[str, Any] = node.status()["functions"][name]
    return found


def test_a_burst_to_a_stateless_function_runs_on_both_gpus(node: TestNode) -> None:
    node.deployed("wide", FUNCTION, stateless=True, deadline="1ms")
    for _ in range(BURSTS):  # the first may be over before another instance has loaded, or as soon as it has
        answers = burst(node, "wide")
        if len({answer["instance"] for answer in answers}) > 1 and overlaps(answers):
            break
    assert len({answer["instance"] for answer in answers}) == 2
    assert overlaps(answers) > 0
    # The controller may hear of a lease's end after the client has its answer.
    both = {"0": MODEL_NBYTES, "1": MODEL_NBYTES}
    node.wait(lambda: row(node, "wide")["gpu_nbytes"] == both, 60, "the ends of the last leases")
    status = node.status()
    told = status["functions"]["wide"]
    assert (told["stateless"], told["max_instances"], told["writes"]) == (True, 2, 0)
    assert min(told["gpus"].get(gpu, 0) for gpu in ("0", "1")) > 0
    # Both instances have been on a GPU that had the other's bytes: they are the same, on each GPU and in the store.
    assert told["copied_nbytes"] == 2 * MODEL_NBYTES
    assert [gpu["weights_nbytes"] for gpu in status["gpus"].values()] == [MODEL_NBYTES, MODEL_NBYTES]
    assert (status["store"]["host_nbytes"], status["store"]["segments"]) == (MODEL_NBYTES, LAYERS)
    assert told["nbytes"] == told["host_nbytes"] == MODEL_NBYTES
    node.wait(lambda: len(row(node, "wide")["instances"]) == 1, 60, "the extra instance to end")
    node.wait(lambda: node.status()["node"]["instances"] == 1, 60, "its process to be gone")
    assert node.result("wide", {"x": 0.25})["instance"] in {answer["instance"] for answer in answers}
    assert node.remove("wide").status == 200


def test_a_burst_to_another_function_runs_one_by_one(node: TestNode) -> None:
    node.deployed("narrow", FUNCTION, deadline="1ms")
    answers = burst(node, "narrow")
    assert len({answer["instance"] for answer in answers}) == 1
    assert overlaps(answers) == 0
    assert row(node, "narrow")["max_instances"] == 1
    assert node.remove("narrow").status == 200


def test_a_stateless_function_that_writes_its_model_is_found_out(node: TestNode) -> None:
    node.deployed("liar", FUNCTION, stateless=True, deadline="1ms")
    node.result("liar", {"x": 0.5, "write": True})
    node.wait(lambda: row(node, "liar")["writes"] == 1, 60, "the write to be noticed")
    assert row(node, "liar")["max_instances"] == 1
    log = node.log_of("liar")
    assert "was deployed as stateless" in log
    assert node.remove("liar").status == 200


def test_more_instances_than_one_are_for_stateless_functions(node: TestNode) -> None:
    refused = node.deploy("narrow", FUNCTION, max_instances=2)
    assert (refused.status, refused.code) == (400, "bad_request")
    assert "--stateless" in refused.message
