"""Functions that call functions, on a real node with one GPU, which holds one model at a time."""

from collections.abc import Iterator

import pytest

from dormouse.core.node.testing import TestNode, running_node

CALLER = """
import torch
from dormouse import acall, call
from dormouse.client import ApiError

def load():
    return 2 * torch.ones(1 << 20).to("cuda")

def handle(weights, request):
    mine = weights[:2] * 3
    answer = call(request["call"], request["with"])
    return [mine.tolist(), answer]
"""

CALLED = """
import torch

def load():
    return 3 * torch.ones(1 << 20).to("cuda")

def handle(weights, request):
    return {"got": request, "sum": weights.sum().item()}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "12MiB"\nactivations = "4MiB"\nthreads = 1\n') as running:
        running.deployed("called", CALLED)
        running.deployed("caller", CALLER, call=("called", "later"))
        yield running


def test_a_function_calls_another_on_the_only_gpu(node: TestNode) -> None:
    for number in range(3):
        got = node.result("caller", {"call": "called", "with": {"n": number}})
        assert got == [[6.0, 6.0], {"got": {"n": number}, "sum": 3.0 * (1 << 20)}]
