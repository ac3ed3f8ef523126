"""A language model whose tokens come late has a second runtime on another GPU, on a real node with two."""

import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from language_models import make_folder
from llm_node import CONFIG, ask, connected, deploy, expected, runtimes

from dormouse.core.node.testing import TestNode, running_node

CLIENTS = 12


def instances(node: TestNode) -> int:
    return len(node.status()["functions"]["chat"]["instances"])


def talk_until(node: TestNode, client: openai.OpenAI, answers: dict[str, set[str]], stop: threading.Event) -> None:
    """Many clients at once, each with another question after the other."""

    def talk(number: int) -> None:
        text = f"client {number}"
        while text not in answers or not stop.is_set():
            answers.setdefault(text, set()).add(ask(client, text, 60))

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        node.wait(lambda: seats_of_both(node), 120, "both GPUs to have a seat of it")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def seats_of_both(node: TestNode) -> bool:
    gpus: dict[str, Any] = node.status()["gpus"]
    return all(gpu["seats"] for gpu in gpus.values()) and len(runtimes(node)) == 2


@pytest.mark.parametrize("wanted", [{"ttft": "20ms"}, {"ttft": "60s", "tpot": "1ms"}], ids=["first", "further"])
def test_many_streams_open_a_second_runtime_on_the_other_gpu_and_it_ends(
    tmp_path: Path, wanted: dict[str, str]
) -> None:
    model = make_folder(tmp_path)
    config = CONFIG.replace("count = 1", "count = 2") + "[limits]\nextra_idle_ms = 3000\n"
    with running_node(config) as node, connected(node) as client:
        deploy(node, "chat", tmp_path, **wanted, max_instances=2)
        assert ask(client, "alone", 20) == expected(model, "alone", 20)
        assert instances(node) == 1
        answers: dict[str, set[str]] = {}
        talk_until(node, client, answers, threading.Event())
        assert {text: {expected(model, text, 60)} for text in answers} == answers
        assert len(answers) == CLIENTS
        node.wait(lambda: len(runtimes(node)) == 1, 60, "the second runtime to end")
        assert instances(node) == 1
        assert ask(client, "alone", 20) == expected(model, "alone", 20)
