"""Devices by number and by every other name, as on a GPU machine."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

X = torch.ones(2)
CUDA = torch.device("cuda", 0)
torch_: Any = torch


@pytest.mark.parametrize(
    "make",
    [
        lambda: X.to(0),
        lambda: X.to(0, torch.float16),
        lambda: X.to(device=0, dtype=torch.float16),
        lambda: X.cuda(0),
        lambda: X.cuda(device=0),
        lambda: X.cuda().to(0),
        lambda: torch.zeros(2, device=0),
        lambda: torch.tensor([1], device=0),
        lambda: torch.ones_like(X, device=0),
        lambda: X.new_zeros(2, device=0),
        lambda: torch.nn.Linear(2, 2, device=0).weight,
        lambda: torch.nn.Linear(2, 2).to(0).weight,
        lambda: torch.nn.Linear(2, 2).to(device=0).weight,
        lambda: torch.nn.Linear(2, 2).cuda(0).weight,
    ],
)
def test_number_0_is_cuda_0(loopback: Any, make: Callable[[], torch.Tensor]) -> None:
    assert make().device == torch.device("cuda", 0)


def test_generators(loopback: Any) -> None:
    generator: Any = torch.Generator(device=0)
    assert generator.device == torch.device("cuda", 0)


def test_there_is_no_number_1(loopback: Any) -> None:
    fail: Any
    for fail in (lambda: X.to(1), lambda: X.cuda(1), lambda: torch.zeros(2, device=1)):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            fail()


def test_what_is_not_a_number_is_left_alone(loopback: Any) -> None:
    assert X.to(torch.float16).dtype == torch.float16
    assert X.to(X.double()).dtype == torch.float64
    assert X.to("cpu") is X
    assert torch.nn.Linear(2, 2).to(torch.float16).weight.dtype == torch.float16


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_n6_the_type_takes_a_number_and_stays_what_it_is(loopback: Any) -> None:
    assert torch.device(0) == CUDA
    assert type(torch.device(0)) is torch.device is type(X.device)
    assert pickle.loads(pickle.dumps(torch.device(0))) == copy.deepcopy(torch.device(0)) == CUDA
    assert torch.device("cpu") == torch_.device(type="cpu") == torch.device(torch.device("cpu"))
    assert torch.device("cuda").index is None
    assert torch.device("cuda", index=0) == torch.device(device="cuda:0") == CUDA
    with pytest.raises(RuntimeError, match="must not be negative"):
        torch.device(-1)
    with pytest.raises(RuntimeError, match="Expected one of cpu, cuda"):
        torch.device("nonsense")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        X.to(torch.device(1))

    def made(device: torch.device) -> torch.Tensor:
        return torch.ones(2, device=device) + torch.ones(2, device=torch.device("cuda"))

    assert torch_.jit.script(made)(torch.device(0)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: X.to(torch.device(0)),
        lambda: torch.nn.Linear(2, 2).to(torch.device(0)).weight,
        lambda: torch.nn.Linear(2, 2, device="meta").to_empty(device=0).weight,
        lambda: torch.as_tensor([1.0], device=0),
        lambda: torch.asarray([1.0], device=0),
        lambda: torch.normal(0.0, 1.0, (2,), device=0),
        lambda: torch.hann_window(3, device=0),
        lambda: torch.fft.rfftfreq(3, device=0),
        lambda: torch.tril_indices(3, 3, device=0),
        lambda: torch.nn.Parameter(torch.ones(2, device=0)),
        lambda: X.type("torch.cuda.FloatTensor"),
        lambda: X.untyped_storage().cuda(0),
    ],
)
def test_n6_a_device_in_every_place(loopback: Any, make: Callable[[], Any]) -> None:
    assert make().device == CUDA


@contextmanager
def default(device: Any) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        assert torch.get_default_device() == CUDA
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, CUDA])
def test_n6_a_device_for_all_that_is_made(loopback: Any, device: Any) -> None:
    as_device = torch.device(device)
    for context in (lambda: as_device, lambda: default(device)):
        with context():
            made = [torch.ones(2), torch.tensor([1]), torch.as_tensor([2.0]), torch.nn.Linear(2, 2).weight]
        assert {value.device for value in made} == {CUDA}
    assert torch.get_default_device() == X.device == torch.ones(1).device
    with torch.cuda.device(device):
        assert torch.zeros(1, device="cuda").device == CUDA
    torch.cuda.set_device(device)
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device("cuda")
    accelerator.set_device_index(torch.device(device).index or 0)
    assert (accelerator.current_device_index(), accelerator.device_count(), accelerator.is_available()) == (0, 1, True)


def test_n6_map_location_in_every_form(loopback: Any, tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0), "b": torch.ones(2, 2).t()}
    torch.save(state, tmp_path / "cpu")
    torch.save({name: value.to(CUDA) for name, value in state.items()}, tmp_path / "cuda")
    locations: list[tuple[str, Any]] = [("cpu", here) for here in ("cuda", "cuda:0", CUDA, torch.device("cuda"))]
    locations += [("cpu", here) for here in (torch.device(0), {"cpu": "cuda:0"}, lambda storage, _: storage.cuda(0))]
    for file, location in (*locations, ("cuda", None), ("cuda", {"cuda:0": "cuda:0"}), ("cuda", "cuda")):
        loaded = torch.load(tmp_path / file, map_location=location)
        assert {value.device for value in loaded.values()} == {CUDA}
        assert [value.tolist() for value in loaded.values()] == [value.tolist() for value in state.values()]
    for location in ("cpu", {"cuda:0": "cpu"}, lambda storage, _: storage):
        loaded = torch.load(tmp_path / "cuda", map_location=location)
        assert {value.device.type for value in loaded.values()} == {"cpu"}
    with pytest.raises(TypeError, match="not callable"):
        torch_.load(tmp_path / "cpu", map_location=0)  # as PyTorch has it: a number is not among its forms


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "where", ["auto", "balanced", {"": 0}, {"": CUDA}, 0, "cuda", {"transformer": 0, "lm_head": 0}]
)
def test_n6_device_map(loopback: Any, tmp_path: Path, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: make setup")
    monkeypatch.setattr(
        pytest.importorskip("tqdm", reason="needs tqdm: make setup").tqdm, "monitor_interval", 0
    )  # a thread that would stay behind
    transformers = pytest.importorskip("transformers", reason="needs transformers: make setup")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2)).eval()
    model.save_pretrained(tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where)
    assert loaded.device == CUDA
    torch.testing.assert_close(loaded(ids.to(0)).logits.cpu(), model(ids).logits)


def test_n6_accelerate_puts_weights_in_place(loopback: Any) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: make setup")
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    ids = torch.tensor([1, 2])
    expected = layers(ids)
    offloaded = accelerate.cpu_offload(copy.deepcopy(layers), execution_device=0)
    torch.testing.assert_close(offloaded(ids).cpu(), expected)
    dispatched = accelerate.dispatch_model(copy.deepcopy(layers), device_map={"": 0})
    torch.testing.assert_close(dispatched(ids.to(0)).cpu(), expected)
