"""Weights that reach the store by file identity, on a real node: the sandbox passes a descriptor, and a file that the
store knows is not read again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from benchmarks.nodes.testnode import TestNode, running_node

pytestmark = [pytest.mark.filterwarnings("ignore")]

LAYERS = 12
WIDTH = 2048  # a layer has 16 MiB, the file about 200 MB
FILE_NBYTES = LAYERS * WIDTH * WIDTH * 4

SMALL_NBYTES = 1 << 20
"""What of a model may pass through the arena or be read again: small tensors, headers, what a process reads anyway."""

FUNCTION = """
from pathlib import Path
import torch
from safetensors.torch import load_file
from dormouse.client_shim.torch_face.remote_tensor import world

HERE = Path(__file__).parent

def load():
    state = load_file(HERE / "weights.safetensors", device="cuda")
    return state, (world.stream.bulk.file_nbytes, world.stream.bulk.uploaded_nbytes)

def handle(loaded, request):
    state, (from_file, through_arena) = loaded
    if request.get("write"):
        state["0"].zero_()
    x = torch.ones(len(state["bias"]), device="cuda")
    for number in range(len(state) - 1):
        x = torch.tanh(state[str(number)] @ x + state["bias"])
    return {"x": x[:8].tolist(), "file": from_file, "arena": through_arena}
"""

PRETRAINED = """
from pathlib import Path
import torch
from transformers import BertModel
from dormouse.client_shim.torch_face.remote_tensor import world

def load():
    model = BertModel.from_pretrained(Path(__file__).parent / "bert").eval().to("cuda")
    return model, (world.stream.bulk.file_nbytes, world.stream.bulk.uploaded_nbytes)

def handle(loaded, request):
    model, (from_file, through_arena) = loaded
    hidden = model(torch.tensor([request["ids"]], device="cuda")).last_hidden_state
    return {"hidden": hidden[0, 0].tolist(), "file": from_file, "arena": through_arena}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "700MiB"\npoison = true\n[limits]\nhost = "1GiB"\n') as running:
        yield running


@pytest.fixture(scope="module")
def expected(node: TestNode) -> list[float]:
    """The answer, and the file that gives it: of mode 0600 in a folder that nobody else may enter."""
    torch.manual_seed(0)
    state = {str(number): torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for number in range(LAYERS)}
    state["bias"] = torch.randn(WIDTH)
    path = weights(node)
    path.parent.mkdir(mode=0o700)
    safetensors.torch.save_file(state, path)
    path.chmod(0o600)
    x = torch.ones(WIDTH)
    for number in range(LAYERS):
        x = torch.tanh(state[str(number)] @ x + state["bias"])
    found: list[float] = x[:8].tolist()
    return found


def weights(node: TestNode) -> Path:
    return node.directory / "home" / "weights.safetensors"


def read_nbytes(node: TestNode) -> int:
    """What the store has read from files, whether they were in the page cache or not."""
    lines = Path(f"/proc/{node.pids()['store']}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def test_a_file_is_read_once_and_not_by_the_sandbox(node: TestNode, expected: list[float]) -> None:
    beside = {"weights.safetensors": weights(node)}
    node.deployed("first", FUNCTION, beside)
    answer = node.result("first", {})
    assert answer["x"] == pytest.approx(expected, abs=1e-4)
    assert answer["file"] == FILE_NBYTES
    assert answer["arena"] < SMALL_NBYTES

    before = read_nbytes(node)
    node.deployed("second", FUNCTION, beside)
    node.deployed("first", FUNCTION + "\n# another version\n", beside)
    for name in ("second", "first"):
        answer = node.result(name, {})
        assert answer["x"] == pytest.approx(expected, abs=1e-4)
        assert (answer["file"], answer["arena"] < SMALL_NBYTES) == (FILE_NBYTES, True)
    assert read_nbytes(node) - before < SMALL_NBYTES

    # What one function writes is neither the other's nor the file's.
    assert node.result("second", {"write": True})["x"] != pytest.approx(expected, abs=1e-4)
    assert node.result("first", {})["x"] == pytest.approx(expected, abs=1e-4)


def test_another_file_of_the_same_name_is_read(node: TestNode, expected: list[float]) -> None:
    """Outside the snapshot, where it may change."""
    path = node.shared / "weights.safetensors"
    kept = weights(node).read_bytes()
    outside = FUNCTION.replace("Path(__file__).parent", f"Path({str(node.shared)!r})")
    state = safetensors.torch.load(kept)
    state[str(LAYERS - 1)] = torch.zeros(WIDTH, WIDTH)
    safetensors.torch.save_file(state, path)
    path.chmod(0o644)
    node.deployed("third", outside)
    assert node.result("third", {})["x"] == pytest.approx(torch.tanh(state["bias"])[:8].tolist(), abs=1e-4)
    # The same inode with other bytes.
    path.write_bytes(kept)
    node.deployed("third", outside + "\n# another version\n")
    assert node.result("third", {})["x"] == pytest.approx(expected, abs=1e-4)


def test_from_pretrained_of_a_local_folder(node: TestNode) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=1024, vocab_size=8000
    )
    torch.manual_seed(0)
    original = BertModel(config)
    original.train(False)
    folder = node.directory / "bert"
    original.save_pretrained(folder)
    large = sum(value.nbytes for value in original.parameters() if value.nbytes >= SMALL_NBYTES)
    node.deployed("bert", PRETRAINED, {"bert": folder})
    answer = node.result("bert", {"ids": [1, 7, 3]})
    with torch.no_grad():
        native = original(torch.tensor([[1, 7, 3]])).last_hidden_state[0, 0]
    assert answer["hidden"] == pytest.approx(native.tolist(), abs=1e-4)
    assert answer["file"] == large
    assert answer["arena"] < sum(value.nbytes for value in original.parameters()) - large + SMALL_NBYTES
