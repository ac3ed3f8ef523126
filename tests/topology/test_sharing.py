"""Functions with equal tensors on a real node: kept once, written apart, answered as native PyTorch does; and broken
checkpoints, of which nothing stays."""

import json
import struct
from collections.abc import Iterator
from typing import Any, Final

import pytest
import safetensors.torch
import torch

from benchmarks.nodes.testnode import TestNode, running_node

pytestmark = [pytest.mark.filterwarnings("ignore")]

LAYERS: Final = 6
WIDTH: Final = 512  # a layer has 1 MiB
LAYER_NBYTES: Final = WIDTH * WIDTH * 4
MODEL_NBYTES: Final = LAYERS * LAYER_NBYTES + WIDTH * 4
OWN: Final = "2"  # the layer that a fine-tune has of its own

FUNCTION: Final = """
from pathlib import Path
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent

def load():
    state = load_file(HERE / "base.safetensors", device="cuda")
    if OWN_SEED:
        generator = torch.Generator().manual_seed(OWN_SEED)
        state["2"] = (torch.randn(512, 512, generator=generator) / 512**0.5).to("cuda")
    return state

def handle(state, request):
    for name in request.get("add", ()):
        state[name] += OWN_SEED + 1
    x = torch.ones(512, device="cuda")
    for number in range(len(state) - 1):
        x = torch.tanh(state[str(number)] @ x + state["bias"])
    return {"x": x.tolist(), "sums": [value.sum().item() for value in state.values()]}
"""


def base() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    state = {str(number): torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for number in range(LAYERS)}
    return state | {"bias": torch.randn(WIDTH, generator=generator)}


class Native:
    """The same function in this process."""

    def __init__(self, own_seed: int) -> None:
        self.own_seed = own_seed
        self.state = base()
        if own_seed:
            generator = torch.Generator().manual_seed(own_seed)
            self.state[OWN] = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5

    def handle(self, request: dict[str, list[str]]) -> dict[str, list[float]]:
        for name in request.get("add", ()):
            self.state[name] += self.own_seed + 1
        x = torch.ones(WIDTH)
        for number in range(LAYERS):
            x = torch.tanh(self.state[str(number)] @ x + self.state["bias"])
        # safetensors hands tensors out in the order of their names
        return {
            "x": x.tolist(),
            "sums": [self.state[key].sum().item() for key in sorted(self.state)],
        }


class Pair:
    """Functions on a node, each with its native twin."""

    def __init__(self, node: TestNode) -> None:
        self.node = node
        self.twins: dict[str, Native] = {}
        self.path = node.directory / "base.safetensors"
        safetensors.torch.save_file(base(), self.path)

    def deploy(self, name: str, own_seed: int) -> None:
        self.node.deployed(name, FUNCTION.replace("OWN_SEED", str(own_seed)), {self.path.name: self.path})
        self.twins[name] = Native(own_seed)

    def ask(self, name: str, *add: str) -> None:
        """One request to both, and equal answers."""
        request = {"add": list(add)}
        answer, expected = self.node.result(name, request), self.twins[name].handle(request)
        assert answer["x"] == pytest.approx(expected["x"], abs=1e-4)
        assert answer["sums"] == pytest.approx(expected["sums"], rel=1e-4, abs=0.5)

    def close(self) -> None:
        for name in self.twins:
            assert self.node.remove(name).status == 200


@pytest.fixture(scope="module", params=["64MiB", "8MiB"])
def node(request: pytest.FixtureRequest) -> Iterator[TestNode]:
    """One GPU with room for all models, and one that must evict one function's own layers for the other's."""
    with running_node(f'[gpu]\ncount = 1\nmemory = "{request.param}"\npoison = true\n') as running:
        yield running


@pytest.fixture
def pair(node: TestNode) -> Iterator[Pair]:
    found = Pair(node)
    yield found
    found.close()


def test_a_base_and_its_fine_tune_are_kept_once(pair: Pair) -> None:
    node = pair.node
    node.wait(lambda: node.status()["store"]["segments"] == 0, 60, "those of earlier tests to be forgotten")
    pair.deploy("plain", 0)
    pair.deploy("tuned", 7)
    for _ in range(2):
        for name in pair.twins:
            pair.ask(name)
    # The store's own numbers come a moment later.
    node.wait(lambda: node.status()["store"]["host_nbytes"] == MODEL_NBYTES + LAYER_NBYTES, 60, "the store's bytes")
    status = node.status()
    for name, other in (("plain", "tuned"), ("tuned", "plain")):
        row = status["functions"][name]
        assert row["nbytes"] == row["host_nbytes"] == MODEL_NBYTES
        assert row["shared_nbytes"] == MODEL_NBYTES - LAYER_NBYTES
        assert row["shared_with"] == [other]
    assert status["store"]["segments"] == LAYERS + 2
    gpu = status["gpus"]["0"]
    assert gpu["weights_nbytes"] <= MODEL_NBYTES + LAYER_NBYTES
    # The second wake copied no more than what is its own.
    pair.ask("plain")
    pair.ask("tuned")
    row = node.status()["functions"]["tuned"]
    assert row["copied_nbytes"] <= row["wakes"] * LAYER_NBYTES + MODEL_NBYTES
    # One of them goes: what is left is the other's alone.
    assert node.remove("plain").status == 200
    del pair.twins["plain"]
    node.wait(lambda: node.status()["functions"]["tuned"]["shared_nbytes"] == 0, 60, "nobody to share with")
    pair.ask("tuned")


def test_one_writes_what_another_reads(pair: Pair) -> None:
    pair.deploy("writer", 0)
    pair.deploy("reader", 7)
    pair.ask("reader")
    for turn in range(4):
        pair.ask("writer", "1", "bias")
        pair.ask("reader")
        if turn % 2:
            pair.ask("writer")

    def reader() -> Any:
        return pair.node.status()["functions"]["reader"]

    left_nbytes = MODEL_NBYTES - 2 * LAYER_NBYTES - WIDTH * 4
    pair.node.wait(lambda: bool(reader()["shared_nbytes"] == left_nbytes), 60, "the store to tell what is shared")
    # Who comes new gets what is in the file, and shares it with who has not written it.
    pair.deploy("late", 0)
    pair.ask("late")
    pair.ask("writer")
    pair.node.wait(lambda: set(reader()["shared_with"]) == {"late", "writer"}, 60, "the store to tell with whom")


def test_two_write_the_same_shared_tensor(pair: Pair) -> None:
    for name, seed in (("left", 3), ("right", 9), ("reader", 0)):
        pair.deploy(name, seed)
    for turn in range(3):
        for name in ("left", "right"):
            pair.ask(name, "0", *(["5"] if turn else []))
            pair.ask("reader")
    # The same change to the same bytes: equal again, and yet nobody's writes are another's.
    pair.deploy("twin", 0)
    pair.ask("reader", "4")
    pair.ask("twin", "4")
    pair.ask("reader", "4")
    for name in pair.twins:
        pair.ask(name)


@pytest.mark.parametrize("sharing", ["none", "node"])
def test_the_scope_of_sharing_is_configured(sharing: str) -> None:
    settings = f'sharing = "{sharing}"\n[sandbox]\nwarm = []\n[gpu]\ncount = 1\nmemory = "64MiB"\npoison = true\n'
    with running_node(settings) as node:  # the node section comes first, and goes on with this
        pair = Pair(node)
        for name in ("one", "two"):
            pair.deploy(name, 0)
            pair.ask(name)
        copies = 2 if sharing == "none" else 1
        # The store's own numbers come a moment later, and the GPU's with the end of a lease that has been answered.
        node.wait(lambda: node.status()["store"]["host_nbytes"] == copies * MODEL_NBYTES, 60, "the store's bytes")
        node.wait(lambda: node.status()["gpus"]["0"]["weights_nbytes"] == copies * MODEL_NBYTES, 60, "the GPU's")
        status = node.status()
        for name, other in (("one", "two"), ("two", "one")):
            row = status["functions"][name]
            assert row["shared_with"] == ([] if sharing == "none" else [other])
            assert row["shared_nbytes"] == (0 if sharing == "none" else MODEL_NBYTES)
        pair.ask("one", "1")
        for name in pair.twins:
            pair.ask(name)


# --- broken checkpoints

BIG: Final = 1 << 20  # elements; a tensor that would go to the store by file identity


def header(
    tensors: dict[str, tuple[int, int]], data_nbytes: int, *, padding: int = 0, claimed: int | None = None
) -> bytes:
    """A safetensors file of float32 tensors at these offsets, with ``data_nbytes`` of data."""
    described = {
        name: {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end]}
        for name, (start, end) in tensors.items()
    }
    text = json.dumps(described).encode() + b" " * padding
    return struct.pack("<Q", len(text) if claimed is None else claimed) + text + bytes(data_nbytes)


def broken(what: str) -> bytes:
    whole = {"a": (0, 4 * BIG), "b": (4 * BIG, 8 * BIG)}
    match what:
        case "truncated":
            return header(whole, 8 * BIG)[: -2 * BIG]
        case "a header beyond the file":
            return header(whole, 0, claimed=1 << 20)
        case "a length without bounds":
            return header(whole, 8 * BIG, claimed=(1 << 64) - 1)
        case "overlapping":
            return header({"a": (0, 4 * BIG), "b": (2 * BIG, 6 * BIG)}, 6 * BIG)
        case "beyond the file":
            return header({"a": (0, 4 * BIG), "b": (4 * BIG, 1 << 40)}, 8 * BIG)
        case "backwards":
            return header({"a": (4 * BIG, 0)}, 4 * BIG)
        case "a huge header":
            return header(whole, 8 * BIG, padding=100_000_000)
        case "no JSON":
            return struct.pack("<Q", 16) + b"\xff" * 16
        case "empty":
            return b""
    raise AssertionError(what)


LOAD_BROKEN: Final = """
from pathlib import Path
from safetensors.torch import load_file

def load():
    return load_file(Path(__file__).parent / "broken.safetensors", device="cuda")

def handle(state, request):
    return [value.sum().item() for value in state.values()]
"""


GOOD: Final = """
import torch
def load(): return torch.ones(1 << 20).to("cuda")
def handle(state, request): return state.sum().item()
"""


@pytest.fixture(scope="module")
def quiet() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n') as running:
        running.deployed("good", GOOD)
        running.wait(lambda: running.status()["store"]["file_nbytes"] == 4 << 20, 60, "its file")
        yield running


@pytest.fixture
def node_with_good(quiet: TestNode) -> Iterator[TestNode]:
    """Whatever a test deploys there fails, and leaves all as it was."""
    before = quiet.status()["store"]
    yield quiet
    assert quiet.result("good", {}) == 1 << 20
    quiet.wait(lambda: quiet.status()["store"] == before, 60, f"the store to be as it was: {before}")
    assert set(quiet.status()["functions"]) == {"good"}


@pytest.mark.parametrize(
    "what",
    [
        "truncated",
        "a header beyond the file",
        "a length without bounds",
        "overlapping",
        "beyond the file",
        "backwards",
        "a huge header",
        "no JSON",
        "empty",
    ],
)
def test_a_broken_checkpoint_fails_its_own_load(node_with_good: TestNode, what: str) -> None:
    node = node_with_good
    path = node.directory / "broken.safetensors"
    path.write_bytes(broken(what))
    answer = node.deploy("broken", LOAD_BROKEN, {path.name: path})
    assert (answer.status, answer.code) == (422, "load_failed"), answer
    assert "afetensor" in answer.message, answer.message
    assert len(answer.message) < 5000
    assert node.invoke("broken", {}).status == 404


CHANGES: Final = """
import os, shutil
from pathlib import Path
import torch
from safetensors import safe_open

def load():
    path = Path(os.environ["HOME"]) / "copy.safetensors"
    shutil.copyfile(Path(__file__).parent / "whole.safetensors", path)
    with safe_open(path, "pt", device="cuda") as file:
        first = file.get_tensor("a")
        os.truncate(path, 5 << 20)
        return first, file.get_tensor("b")

def handle(state, request): return state[1].sum().item()
"""


def test_a_checkpoint_truncated_while_it_is_loaded(node_with_good: TestNode) -> None:
    node = node_with_good
    path = node.directory / "whole.safetensors"
    path.write_bytes(header({"a": (0, 4 * BIG), "b": (4 * BIG, 8 * BIG)}, 8 * BIG))
    answer = node.deploy("changes", CHANGES, {path.name: path})
    assert (answer.status, answer.code) == (422, "load_failed"), answer
    assert "SIGBUS" in answer.message or "truncated" in answer.message, answer


def test_more_tensors_than_a_model_may_have(node_with_good: TestNode) -> None:
    many = """
        import torch
        def load(): return [torch.ones(1, device="cuda") for _ in range(70_000)]
        def handle(state, request): return len(state)
    """
    answer = node_with_good.deploy("crumbs", many)
    assert (answer.status, answer.code) == (422, "load_failed"), answer
    assert "65,536" in answer.message, answer.message
