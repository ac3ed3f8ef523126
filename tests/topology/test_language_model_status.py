"""What is seen of language models on a real node: `Server-Timing`, the status, and the commands for people."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from language_models import make_folder
from llm_node import CONFIG, GREEDY, MESSAGES, connected, deploy, generated, prompt_tokens, runtimes
from transformers import PreTrainedModel

from dormouse.core.node.testing import TestNode, running_node
from dormouse.core.output import harmless


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG) as running:
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
    config = CONFIG.replace('pool = "pages"\n', 'pool = "pages"\nlink = "60KB"\n').replace("2000", "600000")
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


def test_the_status_follows_what_runtimes_do(node: TestNode, model: PreTrainedModel, client: openai.OpenAI) -> None:
    before = {each["reused_nbytes"] for each in _told(node)["runtimes"]}
    stream = client.chat.completions.create(model="chat", messages=say(5), max_tokens=1900, stream=True, n=3, **GREEDY)
    next(stream)

    def busy() -> bool:
        (runtime,) = _told(node)["runtimes"]
        more_nbytes = node.status()["gpus"]["0"]["weights_nbytes"] - _told(node)["nbytes"]
        assert 0 <= more_nbytes < 1024, "no KV; what is packed is aligned"
        assert runtime["pid"] in runtimes(node)
        pool_nbytes = node.status()["gpus"]["0"]["capacity_nbytes"]
        assert runtime["kv_share"] == pytest.approx(runtime["kv_nbytes"] / pool_nbytes, abs=1e-3)
        return bool(runtime["running"] == 3 and 3 <= runtime["kv_blocks_used"] <= runtime["kv_blocks"])

    node.wait(busy, 60, "three sequences to run")
    assert _told(node)["running"] == 1
    stream.close()

    def idle() -> bool:
        (runtime,) = _told(node)["runtimes"]
        return not (runtime["running"] or runtime["waiting"] or runtime["kv_blocks_used"])

    node.wait(idle, 60, "them to be over, and their KV to be free")
    assert before != {each["reused_nbytes"] for each in _told(node)["runtimes"]}, "the choices share their prompt"
    assert [each["gathered"] for each in _told(node)["runtimes"]] == [{}], "nobody has waited for others"


def dormouse(node: TestNode, *words: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-P", "-m", "dormouse.core.node.cli", "--run", str(node.run), *words]
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
