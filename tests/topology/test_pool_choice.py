"""``[gpu] pool = "auto"`` on a real node: another pool from the first language model on, and nobody loses a request."""

import threading
from pathlib import Path

from language_models import make_folder
from llm_node import CONFIG, ORDINARY, ask, connected, deploy, expected

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node

SLOW = """
import time, torch
def load():
    return torch.arange(1000.0).to("cuda")
def handle(weights, request):
    total = (weights * request).sum()
    time.sleep(2.0)
    return total.item()
"""
TOTAL = 1000 * 999 / 2


def pool(node: TestNode) -> set[str]:
    return {gpu["pool"] for gpu in node.status()["gpus"].values()}


def epochs(node: TestNode) -> set[int]:
    return {gpu["epoch"] for gpu in node.status()["gpus"].values()}


def invoke(node: TestNode, name: str, request: int, answers: list[tuple[int, HttpAnswer]]) -> None:
    answers.append((request, node.invoke(name, request)))


def test_the_first_language_model_exchanges_the_pool_and_no_request_is_lost(tmp_path: Path) -> None:
    model = make_folder(tmp_path)
    config = CONFIG.replace('pool = "pages"\n', "")
    with running_node(config) as node, connected(node) as client:
        node.deployed("ordinary", ORDINARY, deadline="60s")
        node.deployed("slow", SLOW, deadline="60s")
        assert pool(node) == {"regions"}
        assert node.invoke("ordinary", 2).body == 2 * TOTAL
        executor = node.pids()["gpu0"]
        answers: list[tuple[int, HttpAnswer]] = []
        stop = threading.Event()

        def ask_on() -> None:
            number = 0
            while not stop.is_set():
                number = number % 30 + 1  # their totals are exact in float32
                invoke(node, "ordinary", number, answers)

        threads = [threading.Thread(target=ask_on), threading.Thread(target=invoke, args=(node, "slow", 3, answers))]
        for thread in threads:
            thread.start()
        deploy(node, "chat", tmp_path)
        try:
            node.wait(lambda: node.pids()["gpu0"] != executor and pool(node) == {"pages"}, 60, "another pool")
            assert ask(client) == expected(model, "one two three", 40)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        told = node.status()["node"]
        assert (told["ended"], {role: left["times"] for role, left in told["left"].items()}) == ({}, {"gpu0": 1})
        assert [(each.status, each.body) for number, each in answers if each.body != number * TOTAL] == []
        node.stop()
        node.start()
        assert (pool(node), epochs(node)) == ({"pages"}, {1})  # from the start on
        assert ask(client) == expected(model, "one two three", 40)
        node.remove("chat")
        assert pool(node) == {"pages"}
        node.stop()
        node.start()
        assert (pool(node), epochs(node)) == ({"regions"}, {1})
        assert node.invoke("ordinary", 2).body == 2 * TOTAL
