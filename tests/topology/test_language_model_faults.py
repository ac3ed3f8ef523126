"""Faults of runtimes on a real node: one that stands still is ended, its GPU is not, and every answer is right."""

import os
import signal
import threading
from collections.abc import Iterator

import openai
import pytest
from language_models import make_folder
from llm_node import CONFIG, ORDINARY, ask, connected, deploy, expected, only_runtime, runtimes, streaming
from transformers import PreTrainedModel

from dormouse.core.node.testing import TestNode, running_node

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG + "[limits]\nyield_ms = 1500\n") as running:
        running.deployed("ordinary", ORDINARY)
        yield running


@pytest.fixture(scope="module")
def model(node: TestNode, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("llama")
    found = make_folder(folder)
    deploy(node, "chat", folder)
    return found


@pytest.fixture
def client(node: TestNode) -> Iterator[openai.OpenAI]:
    with connected(node) as found:
        yield found


class Talk:
    """A stream in a thread of its own; each part it hears is counted."""

    def __init__(self, node: TestNode, text: str, new: int) -> None:
        self.text, self.new, self.parts, self.answer = text, new, 0, ""
        self.error: Exception | None = None
        self._heard = threading.Condition()
        self._thread = threading.Thread(target=self._run, args=(node,))
        self._thread.start()

    def _run(self, node: TestNode) -> None:
        try:
            with connected(node) as client:
                for chunk in streaming(client, self.text, self.new):
                    with self._heard:
                        self.parts += 1
                        self.answer += (chunk.choices[0].delta.content or "") if chunk.choices else ""
                        self._heard.notify_all()
        except openai.APIError as error:
            self.error = error
        with self._heard:
            self.parts = 1 << 30
            self._heard.notify_all()

    def heard(self, parts: int) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: self.parts >= parts, 120), f"{self.text} says nothing"

    def check(self, model: PreTrainedModel) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive(), f"{self.text} hangs"
        assert self.error is None
        assert self.answer == expected(model, self.text, self.new)


def test_a_runtime_that_does_not_yield_is_ended_and_the_gpu_is_not(
    node: TestNode, model: PreTrainedModel, client: openai.OpenAI
) -> None:
    executor = node.pids()["gpu0"]
    talk = Talk(node, "stand still", 180)
    talk.heard(3)
    pid = only_runtime(node)
    os.kill(pid, signal.SIGSTOP)
    assert node.result("ordinary", 2) == 999000.0
    assert pid not in runtimes(node)
    talk.check(model)
    assert node.pids()["gpu0"] == executor


def test_a_runtime_that_dies_before_the_first_token(
    node: TestNode, model: PreTrainedModel, client: openai.OpenAI
) -> None:
    ask(client, "wake up", 2)
    pid = only_runtime(node)
    os.kill(pid, signal.SIGSTOP)  # what it is asked for now has no token when it dies
    talk = Talk(node, "nothing said", 60)
    assert node.result("ordinary", 2) == 999000.0  # when it has been ended for its silence
    assert pid not in runtimes(node)
    talk.check(model)
