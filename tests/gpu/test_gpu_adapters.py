"""Adapters on a real GPU: Triton's kernels against torch in fp64, and nodes whose answers are PEFT's, unmerged, on the
CPU.

Over the fake driver the kernels run in Triton's interpreter, on fewer and smaller cases; a node has the CPU's.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import triton_here
from gpu_marks import FAKE, NEEDS_GPU

if not triton_here.HERE:
    pytest.skip("needs Triton, which comes with a torch for CUDA", allow_module_level=True)

from adapter_folders import base_model, save_adapter
from attention_world import DEVICE
from language_models import make_folder
from llm_node import ask, connected, deploy, expected, runtimes, same_texts, streaming, talk

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import modelfolder
from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime.backends.low_rank_on_triton import TritonLowRank
from dormouse.gpuserver.runtime.low_rank import AdapterRows, LowRank, Table
from dormouse.gpuserver.runtime.packing import packed

pytestmark = NEEDS_GPU

RANKS = (8, 64, 16, 17, 32)
SHAPES = [(1100, 130)] if FAKE else [(64, 64), (1100, 130), (2048, 8192), (4096, 4096), (14336, 4096)]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "math": {"r": 8, "target_modules": ALL},
    "poem": {"r": 64, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 128, "use_rslora": True},
    "whole": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "model.norm"]},
    "biased": {"target_modules": ["v_proj", "down_proj"], "lora_bias": True},
}
NEW = 24


def owners_of(adapters: int, step: str) -> list[int]:
    """Of each row: of single tokens of all adapters and the base; of long prompts of some; of both."""
    singles = [NO_ADAPTER, *sorted(number % adapters for number in range(32))]
    prompts = [*[0] * 100, *[adapters - 1] * 37, *[NO_ADAPTER] * 20]
    return {"decode": singles, "prompts": prompts, "mixed": [*singles, *prompts]}[step]


class Case:
    """Rows of these owners, and a table of adapters with biases and ranks of several sizes."""

    def __init__(self, adapters: int, inputs: int, outputs: int, dtype: torch.dtype, owners: list[int]) -> None:
        generator = torch.Generator().manual_seed(adapters + inputs)
        self.owners, self.table = owners, Table(32)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

        for number in range(adapters):
            rank = RANKS[number % len(RANKS)]
            bias = random(outputs) if number % 2 else None
            down, up = random(rank, inputs) / inputs**0.5, random(rank, outputs) / rank**0.5
            self.table.put(number, LowRank(down, up, 0.5 + number / 8, bias))
        self.given, self.before = random(len(owners), inputs), random(len(owners), outputs)

    def added(self, rows: slice = slice(None)) -> torch.Tensor:
        """To these rows, as if there were no others."""
        owners = self.owners[rows]
        (numbers,) = packed(DEVICE, owners)
        found = self.before[rows].clone()
        told = AdapterRows(numbers, numbers, (owners, owners), {*owners} - {NO_ADAPTER}, max(RANKS))
        TritonLowRank().add(self.table, self.given[rows].contiguous(), found, told, False)
        return found

    def exact(self) -> torch.Tensor:
        wanted = self.before.double()
        for number, low in self.table.by_number.items():
            own = torch.tensor(self.owners, device=DEVICE) == number
            product = self.given[own].double() @ low.down.double().T @ low.up.double()
            wanted[own] += low.scale * (product + (0 if low.bias is None else low.bias.double()))
        return wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", ["mixed"] if FAKE else ["decode", "prompts", "mixed"])
@pytest.mark.parametrize("adapters", [8] if FAKE else [1, 8, 20])
def test_kernels_add_what_torch_adds(adapters: int, step: str, dtype: torch.dtype) -> None:
    for inputs, outputs in SHAPES:
        case = Case(adapters, inputs, outputs, dtype, owners_of(adapters, step))
        found, wanted = case.added(), case.exact()
        tolerance = 1e-4 if dtype is torch.float32 else 4e-2
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
        base = torch.tensor(case.owners, device=DEVICE) == NO_ADAPTER
        assert found[base].equal(case.before[base])


@pytest.mark.skipif(FAKE, reason="needs a GPU: NumPy, the interpreter's, may add a row of a tile in another order")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_the_same_alone_and_beside_others(dtype: torch.dtype) -> None:
    case = Case(20, 4096, 4096, dtype, owners_of(20, "mixed"))
    together = case.added()
    for row in range(len(case.owners)):
        assert case.added(slice(row, row + 1))[0].equal(together[row]), f"row {row}, of adapter {case.owners[row]}"


# --- nodes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    """By name: the base, and PEFT's own models with adapters, unmerged."""
    found: dict[str, Any] = {"chat": make_folder(folders / "chat")}
    for name, config in CONFIGS.items():
        found[name] = save_adapter(folders / name, base_model(), **config)
    return found


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    gpu = '[gpu]\ndevice = "cuda"\ncount = 1\npoison = true\npool = "pages"\nseat_idle_ms = 2000\n'
    gpu += 'memory = "640MiB"\nactivations = "512MiB"\n'
    with running_node(gpu, node='tenants = "many"\nsharing = "node"') as running:
        yield running


@pytest.fixture
def client(node: TestNode) -> Iterator[openai.OpenAI]:
    with connected(node) as found:
        yield found
    for name in sorted({row["name"] for row in node.admin.functions()}, key="chat".__eq__):  # a base stays until last
        node.remove(name)
    node.wait(lambda: runtimes(node) == [], 60, "the runtimes to end with the last of their instances")


def adapt(node: TestNode, name: str, folders: Path, **settings: Any) -> None:
    node.admin.deploy(name, modelfolder.find_adapter(str(folders / name)), {"base": "chat", **settings})


def check(models: dict[str, Any], answers: dict[tuple[str, str], str]) -> None:
    assert {key: expected(models[key[0]], key[1], NEW) for key in answers} == answers


def free_nbytes(node: TestNode) -> int:
    """When nobody has a seat: idle weights stay."""
    node.wait(lambda: node.status()["gpus"]["0"]["seats"] == [], 60, "all leases to end")
    return int(node.status()["gpus"]["0"]["free_nbytes"])


def weights_nbytes(node: TestNode) -> int:
    node.wait(lambda: node.status()["gpus"]["0"]["seats"] == [], 60, "all leases to end")
    return int(node.status()["gpus"]["0"]["weights_nbytes"])


def own_nbytes(node: TestNode) -> int:
    """The base once, and what each adapter has beside it."""
    functions = node.status()["functions"]
    base = int(functions["chat"]["nbytes"])
    return base + sum(int(row["nbytes"]) - base for name, row in functions.items() if name != "chat")


def test_adapters_in_one_batch_answer_as_peft_does_and_a_wake_copies_only_its_own(
    node: TestNode, folders: Path, models: dict[str, Any], client: openai.OpenAI
) -> None:
    deploy(node, "chat", folders / "chat")
    check(models, {("chat", "first"): ask(client, "first", NEW)})
    base = node.status()["functions"]["chat"]["nbytes"]
    for name in CONFIGS:
        adapt(node, name, folders)
        check(models, {(name, "first"): ask(client, "first", NEW, name)})
        node.wait(lambda: node.status()["functions"][name]["leases"] == 1, 60, "its lease to end")  # noqa: B023
        told = node.status()["functions"][name]
        assert (told["last_wake"]["copied_nbytes"], told["shared_nbytes"]) == (told["nbytes"] - base, base)
    answers = talk(client, same_texts(models, 1 if FAKE else 3), NEW)
    check(models, answers)
    assert len(runtimes(node)) == 1
    firsts = {answers[name, "say 0"] for name in models}
    assert len(firsts) == len(models), "each adapter has an effect"
    assert 0 <= weights_nbytes(node) - own_nbytes(node) < 512 * len(models), "what aligns them"


def test_two_tenants_and_functions_in_isolation_have_the_backbone_once(
    node: TestNode, folders: Path, models: dict[str, Any], client: openai.OpenAI
) -> None:
    deploy(node, "chat", folders / "chat", isolation="function")
    adapt(node, "math", folders, isolation="function")
    adapt(node, "poem", folders, tenant="other")
    names = ["chat", "math", "poem"]
    check(models, talk(client, same_texts(names, 1 if FAKE else 3), NEW))
    functions = node.status()["functions"]
    pids = [each["pid"] for name in names for each in functions[name]["runtimes"]]
    assert len(set(pids)) == 3
    assert sorted(pids) == sorted(runtimes(node))
    assert 0 <= weights_nbytes(node) - own_nbytes(node) < 512 * 3, "what aligns them"


def test_a_runtime_that_is_killed_under_load_gives_all_of_its_memory_back(
    node: TestNode, folders: Path, models: dict[str, Any], client: openai.OpenAI
) -> None:
    deploy(node, "chat", folders / "chat", isolation="function")
    adapt(node, "math", folders, isolation="function")
    check(models, talk(client, same_texts(["chat", "math"], 1), NEW))
    before, executor = free_nbytes(node), node.pids()["gpu0"]
    for turn in range(2 if FAKE else 4):
        beside = list[str]()
        other = threading.Thread(target=lambda beside=beside: beside.append(ask(client, "beside", NEW, "math")))
        stream = streaming(client, f"turn {turn}", NEW)
        begun = next(iter(stream)).choices[0].delta.content or ""
        other.start()
        os.kill(node.status()["functions"]["chat"]["runtimes"][0]["pid"], signal.SIGKILL)
        rest = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        other.join()
        assert begun + rest == expected(models["chat"], f"turn {turn}", NEW)
        assert beside == [expected(models["math"], "beside", NEW)]
    assert free_nbytes(node) == before
    assert node.pids()["gpu0"] == executor
