"""Requests that run for as long as a test likes."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from benchmarks.nodes.testnode import HttpAnswer, TestNode

FUNCTION = """
import os, time
import torch

def load():
    return torch.ones(4).to("cuda")

def handle(weights, request):
    while "until" in request and not os.path.exists(request["until"]):
        time.sleep(0.01)
    return {"sum": weights.sum().item(), "had": request["x"]}
"""
"""Deployed as `f`."""


class Held:
    """A request that runs until :meth:`go`."""

    def __init__(self, node: TestNode, pool: ThreadPoolExecutor, x: int) -> None:
        self._file = node.shared / "go"
        self._answer = pool.submit(node.invoke, "f", {"until": str(self._file), "x": x})
        node.wait(lambda: node.status()["functions"]["f"]["running"] == 1, 60, "the request to run")

    def go(self) -> None:
        self._file.touch()

    def answer(self) -> HttpAnswer:
        return self._answer.result()


@contextmanager
def held(node: TestNode, x: int = 7) -> Iterator[Held]:
    with ThreadPoolExecutor(1) as pool:
        found = Held(node, pool, x)
        try:
            yield found
        finally:
            found.go()
