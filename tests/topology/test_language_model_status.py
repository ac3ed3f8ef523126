"""What is seen of language models on a real node: `Server-Timing`, the status, and the commands for people."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from language_models import make_folder
from llm_node import CONFIG, GREEDY, MESSAGES, client, connected, deploy, generated, model, prompt_tokens, runtimes
from transformers import PreTrainedModel

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.terminal import harmless

__all__ = ["client", "model"]

STAYS: Final = CONFIG.replace("seat_idle_ms = 2000", "seat_idle_ms = 600000")
"""A runtime stays until the end: on a busy machine it could be gone before somebody looks at it."""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(STAYS) as running:
        yield running


def say(number: int) -> Any:
    return [{"role": "user", "content": f"number {number}"}]


def _timing(header: str) -> dict[str, float]:
    parts = (part.split(";dur=") for part in header.split(", ") if ";dur=" in part)
    return {name: float(ms) for name, ms in parts}


def _told(node: TestNode, name: str = "chat") -> Any:
    return node.status()["functions"][name]


def test_what_a_first_token_took_is_told(tmp_path: Path) -> None:
    """The first request finds no runtime, and weights that come over a slow link; the next one finds everything.

    No comment comes before them: with it the headers would leave, before there is anything to tell.
    """
    config = STAYS.replace('pool = "pages"\n', 'pool = "pages"\nlink = "60KB"\n')
    config += "[limits]\nheartbeat_ms = 60000\n"
    make_folder(tmp_path)
    with running_node(config) as slow, connected(slow) as client:
        deploy(slow, "chat", tmp_path, ttft="60s", tpot="10s", percentile=50.0, timeout="100s")
        sent: Any = {"model": "chat", "messages": say(1), "max_tokens": 9, **GREEDY}
        timings, places = [], list[str]()
        for stream in (True, True, False):
            began_s = time.monotonic()
            answer = client.chat.completions.with_raw_response.create(stream=stream, **sent)
            took_ms = (time.monotonic() - began_s) * 1000
            timing = _timing(answer.headers["server-timing"])
            places.append(answer.headers["server-timing"].rpartition("model;desc=")[2])
            assert list(timing) == ["queue", "runtime", "wake", "prefill", "rest"]
            assert sum(timing.values()) <= took_ms
            timings.append(timing)
            list(answer.parse()) if stream else None
        first, warm, whole = timings
        assert places == ["host", "gpu", "gpu"]
        assert first["runtime"] > 5
        assert first["runtime"] + first["wake"] > 3000, "half a megabyte at 60 kB a second, beside the runtime's start"
        for timing in (warm, whole):
            assert (timing["runtime"], timing["wake"]) == (0, 0)
            assert timing["prefill"] > 0
        assert whole["rest"] > 0, "eight more tokens"
        slow.wait(lambda: bool(_told(slow)["llm"]["counted"] == 3), 60, "the last of them to be counted")
        llm = _told(slow)["llm"]
        prompt = len(prompt_tokens(say(1)))
        assert (llm["prompt_tokens"], llm["made_tokens"]) == (3 * prompt, 27)
        assert llm["reused_tokens"] == 2 * ((prompt - 1) // 16 * 16)
        assert (llm["counted"], llm["in_time"], llm["complies"]) == (3, 1.0, True)
        assert llm["ttft_ms"]["p99"] >= first["runtime"] + first["wake"]
        assert llm["tpot_ms"]["p50"] > 0


LONG: Final[Any] = [{"role": "user", "content": "more than a block of tokens"}]


def runtime_of(status: Any, name: str = "chat") -> Any:
    """The only one that computes for it."""
    (runtime,) = status["functions"][name]["runtimes"] or [{}]
    return runtime


@contextlib.contextmanager
def three_choices_at_a_time(client: openai.OpenAI) -> Iterator[None]:
    """One request after the other, until somebody has looked: on a busy machine each may be over before."""
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            asked: Any = {"messages": LONG, "max_tokens": 1800, "n": 3, **GREEDY}
            with client.chat.completions.create(model="chat", stream=True, **asked) as stream:
                for _ in stream:
                    if over.is_set():
                        break

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(go_on)
        try:
            yield
        finally:
            over.set()
            going.result()


def test_the_status_follows_what_runtimes_do(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    client.chat.completions.create(model="chat", messages=LONG, max_tokens=1, **GREEDY)
    before = runtime_of(node.status()).get("reused_nbytes", 0)

    def busy() -> bool:
        runtime = runtime_of(node.status())
        return bool(runtime["running"] == 3 and 3 <= runtime["kv_blocks_used"] <= runtime["kv_blocks"])

    def weighed() -> bool:
        status = node.status()
        more_nbytes = status["gpus"]["0"]["weights_nbytes"] - status["functions"]["chat"]["nbytes"]
        return bool(runtime_of(status)["running"] and 0 <= more_nbytes < 1024)

    with three_choices_at_a_time(client):
        node.wait(busy, 60, "three sequences to run")
        node.wait(lambda: bool(_told(node)["running"] == 1), 60, "their request to run")
        node.wait(weighed, 60, "its weights to be there and no KV among them; what is packed is aligned")
        status = node.status()
    runtime, pool_nbytes = runtime_of(status), status["gpus"]["0"]["capacity_nbytes"]
    assert runtimes(node) == [runtime["pid"]]
    assert runtime["kv_share"] == pytest.approx(runtime["kv_nbytes"] / pool_nbytes, abs=1e-3)

    def idle() -> bool:
        runtime = runtime_of(node.status())
        return not (runtime["running"] or runtime["waiting"] or runtime["kv_blocks_used"])

    node.wait(idle, 60, "them to be over, and their KV to be free")
    runtime = runtime_of(node.status())
    assert runtime["reused_nbytes"] > before, "the choices find most of their prompt there"
    assert runtime["gathered"] == {}, "nobody has waited for others"


def dormouse(node: TestNode, *words: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_an_operator_sees(node: TestNode, model: PreTrainedModel) -> None:
    wanted = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "ignore_eos": True, "stream": True}
    assert (
        dormouse(node, "invoke", "chat", json.dumps(wanted)) == harmless(generated(model, prompt_tokens(), 40)) + "\n"
    )
    said = dormouse(node, "invoke", "chat", "one two three")
    assert said.endswith("\n"), "text, which at a temperature of 1 can be none at all"
    assert "choices" not in said
    assert "500 + 60/token" in dormouse(node, "ls")
    status = dormouse(node, "status", "chat")
    assert f"pid {runtimes(node)[0]}" in status
    assert "98% in 500 ms, then 60 ms" in status
