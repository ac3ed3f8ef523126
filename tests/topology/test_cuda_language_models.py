"""A language model on a node whose executor drives CudaDevice, over the fake driver: its runtime is another process
with a context of its own, which maps what the executor exports.

Kernels are the CPU's, in the fake's device memory, which does not hold a copy before somebody has waited for it.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from fake_cuda.build import NoCompiler, build
from language_models import make_folder
from llm_node import (
    ORDINARY,
    ask,
    connected,
    deploy,
    expected,
    generated,
    model,
    only_runtime,
    prompt_tokens,
    rest,
    runtimes,
    streaming,
)
from transformers import PreTrainedModel

from benchmarks.nodes.testnode import TestNode, running_node

__all__ = ["model"]

POOL = '[gpu]\ndevice = "cuda"\ncount = 1\nmemory = "48MiB"\nactivations = "16MiB"\npoison = true\n'
LARGE_NUMEL = 7 << 20
LARGE = f"""
import torch

def load():
    return torch.ones({LARGE_NUMEL}).to("cuda")
def handle(weights, request):
    return (weights.sum() * request).item()
"""


@pytest.fixture(scope="module")
def fake() -> Iterator[None]:
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda.bindings.driver: make setup")
    try:
        library = build(Path(tempfile.gettempdir()) / f"dormouse-fake-cuda-{os.getuid()}")
    except NoCompiler as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(library.parent))
        yield


@pytest.fixture(scope="module")
def node(fake: None) -> Iterator[TestNode]:
    with running_node(POOL + 'pool = "pages"\n') as running:
        running.deployed("ordinary", ORDINARY)
        yield running


def test_answers_are_those_of_transformers(node: TestNode, model: PreTrainedModel) -> None:
    assert node.status()["gpus"]["0"]["name"] == "Fake GPU 0"
    with connected(node) as client:
        assert ask(client) == generated(model, prompt_tokens(), 40)


def mapped(pid: int) -> list[str]:
    """The rights of each of the device's granules that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if "memfd:fake-cuda-physical" in line]


def loads_cuda(pid: int) -> bool:
    return "libcuda.so" in Path(f"/proc/{pid}/maps").read_text()


def zygote_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_weights_can_only_be_read_and_the_process_that_forks_has_no_device(
    node: TestNode, model: PreTrainedModel
) -> None:
    with connected(node) as client:
        stream = streaming(client, "four five", 100)
        begun = next(iter(stream)).choices[0].delta.content or ""
        runtime = only_runtime(node)
        rights = mapped(runtime)
        assert begun + rest(stream) == expected(model, "four five", 100)
    assert set(rights) == {"r--s", "rw-s"}, "weights, and KV"
    assert rights.count("r--s") == 1  # 300 KiB of weights lie in one granule
    zygote = zygote_of(runtime)
    assert (loads_cuda(runtime), loads_cuda(zygote), mapped(zygote)) == (True, False, [])


def contexts(node: TestNode) -> int:
    return int(node.status()["gpus"]["0"]["contexts_nbytes"])


def test_where_contexts_have_room_for_two_a_runtime_that_rests_ends_for_a_third(
    fake: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the pool, the activations and what the executor has for copies there are 236 MiB."""
    machine = tmp_path / "machine"
    machine.write_text(f"0 context {100 << 20}\n")
    monkeypatch.setenv("FAKE_CUDA_MACHINE", str(machine))
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(400 << 20))
    found = make_folder(tmp_path / "llama")
    with running_node(POOL + 'pool = "pages"\nseat_idle_ms = 500\n') as node, connected(node) as client:
        for name in "abc":
            deploy(node, name, tmp_path / "llama", isolation="function")
        pids: list[int] = []
        for name in "abca":
            assert ask(client, "one two", 12, name) == expected(found, "one two", 12)
            node.wait(lambda: node.status()["gpus"]["0"]["seats"] == [], 120, "the lease to end")
            (runtime,) = node.status()["functions"][name]["runtimes"]
            pids.append(runtime["pid"])
            node.wait(lambda: set(runtimes(node)) == set(pids[-2:]), 120, "the one that rests for longest to end")
            node.wait(lambda: contexts(node) == min(len(pids), 2) * (100 << 20), 120, "the node to know of it")
        assert len(set(pids)) == 4
        gpu = node.status()["gpus"]["0"]
        assert (gpu["context_nbytes"], gpu["beside_nbytes"]) == (100 << 20, 236 << 20)


def test_an_ordinary_function_and_a_model_that_both_need_the_room(node: TestNode, model: PreTrainedModel) -> None:
    """The function fills the pool but for a granule: one of them leaves for the other, in turns."""
    node.deployed("large", LARGE)
    with connected(node) as client:
        for turn in range(3):
            assert node.result("large", turn + 1) == (turn + 1) * LARGE_NUMEL
            assert ask(client, f"turn {turn}") == expected(model, f"turn {turn}", 40)
            assert node.result("ordinary", turn) == turn * 499_500
    assert node.status()["functions"]["large"]["evictions"] > 0
    node.remove("large")


def test_a_runtime_that_is_killed_is_replaced_and_its_memory_is_back(node: TestNode, model: PreTrainedModel) -> None:
    with connected(node) as client:
        stream = streaming(client, "six seven", 120)
        begun = next(iter(stream)).choices[0].delta.content or ""
        os.kill(only_runtime(node), signal.SIGKILL)
        assert begun + rest(stream) == expected(model, "six seven", 120)
        assert ask(client, "eight") == expected(model, "eight", 40)
        node.remove("chat")
    node.wait(lambda: not runtimes(node), 60, "the runtime to be gone")
    node.deployed("filling", LARGE)  # all of it is there again
    assert node.result("filling", 1) == LARGE_NUMEL


def test_another_kind_of_pool_is_refused_by_name(fake: None, tmp_path: Path) -> None:
    make_folder(tmp_path)
    with running_node(POOL + 'pool = "regions"\n') as other, connected(other) as client:
        deploy(other, "chat", tmp_path)
        with pytest.raises(openai.APIStatusError, match="needs \\[gpu\\] pool = 'pages' on CUDA devices") as raised:
            ask(client)
        assert raised.value.status_code >= 500
