"""Faults under language models on a real node: whatever dies, stands still or is too small, every answer is right, and
all memory comes back.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import needs
import openai
import pytest
from language_models import make_folder
from llm_node import (
    CONFIG,
    ORDINARY,
    ask,
    client,
    connected,
    deploy,
    expected,
    model,
    only_runtime,
    rest,
    runtimes,
    streaming,
)
from transformers import PreTrainedModel

from benchmarks.nodes.testnode import TestNode, running_node

__all__ = ["client", "model"]

pytestmark = pytest.mark.timeout(400)

KILLS: Final = 20
SEED: Final = 14


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG + "[limits]\nyield_ms = 1500\n") as running:
        running.deployed("ordinary", ORDINARY)
        yield running


def gpu(node: TestNode) -> dict[str, Any]:
    found: dict[str, Any] = node.status()["gpus"]["0"]
    return found


def free_nbytes(node: TestNode) -> int:
    """When nobody has a seat: idle weights stay."""
    node.wait(lambda: gpu(node)["seats"] == [] and not runtimes_with_memory(node), 60, "all seats to be left")
    return int(gpu(node)["free_nbytes"])


def runtimes_with_memory(node: TestNode) -> list[int]:
    """Those that have something of the pool mapped."""
    found = []
    for pid in runtimes(node):
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "memfd:dormouse-granule" in maps:
            found.append(pid)
    return found


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
    talk = Talk(node, "stand still", 600)  # it is not to be over before its runtime stands still
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
    node.wait(lambda: node.status()["functions"]["chat"]["running"] == 1, 60, "its instance to have it")
    assert node.result("ordinary", 2) == 999000.0  # when it has been ended for its silence
    assert pid not in runtimes(node)
    talk.check(model)


def test_eight_streams_go_on_when_their_executor_dies(node: TestNode, model: PreTrainedModel) -> None:
    talks = [Talk(node, f"go on {number}", 150) for number in range(8)]
    for talk in talks:
        talk.heard(2)
    pid = node.kill("gpu0")
    for talk in talks:
        talk.check(model)
    node.replaced("gpu0", pid)


def all_heard(talks: list[Talk], parts: int) -> None:
    for talk in talks:
        talk.heard(parts)


POINTS: Final[dict[str, Callable[[list[Talk]], None]]] = {
    "at once": lambda talks: None,
    "the first has a token": lambda talks: talks[0].heard(2),
    "all have some": lambda talks: all_heard(talks, 3),
    "the first is over": lambda talks: talks[0].heard(1 << 30),
}


@needs.ROOT
def test_a_runtime_that_is_killed_at_any_moment_gives_all_memory_back(
    node: TestNode, model: PreTrainedModel, client: openai.OpenAI
) -> None:
    """Under load, with an ordinary function beside it."""
    ask(client, "before", 2)
    node.result("ordinary", 1)
    before_nbytes, executor = free_nbytes(node), node.pids()["gpu0"]
    chosen, killed = random.Random(SEED), 0
    for number in range(KILLS):
        talks = [Talk(node, f"kill {number} {which}", chosen.choice([10, 60, 120])) for which in range(3)]
        POINTS[chosen.choice(list(POINTS))](talks)
        time.sleep(chosen.random() / 20)  # any moment near it; no answer depends on which
        for pid in runtimes(node):
            with suppress(ProcessLookupError):  # one of before is gone by now
                os.kill(pid, signal.SIGKILL)
                killed += 1
        assert node.result("ordinary", 2) == 999000.0
        for talk in talks:
            talk.check(model)
    assert killed >= KILLS // 2
    assert free_nbytes(node) == before_nbytes
    assert node.pids()["gpu0"] == executor


def preempted(node: TestNode) -> int:
    runtimes: list[dict[str, Any]] = node.status()["functions"]["chat"]["runtimes"]
    return sum(each["preempted"] for each in runtimes)


def test_memory_that_all_sequences_together_exhaust(tmp_path: Path) -> None:
    """KV for eleven sequences of this length at most; all are answered, and the youngest have begun anew."""
    found = make_folder(tmp_path)
    together = '[schedule]\nbatching = "fixed"\nbatch_size = 20\nbatch_delay_ms = 5000\n'  # all begin together
    with running_node(CONFIG.replace("64MiB", "4MiB") + together) as small:
        deploy(small, "chat", tmp_path)
        talks = [Talk(small, f"much {number}", 200) for number in range(20)]
        for talk in talks:
            talk.check(found)
        small.wait(lambda: preempted(small) > 0, 60, "the status to say that some were preempted")
        with connected(small) as client:
            assert rest(streaming(client, "after", 20)) == expected(found, "after", 20)
