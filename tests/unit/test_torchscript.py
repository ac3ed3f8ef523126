"""TorchScript modules on cuda:0, loaded and moved."""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

CUDA = torch.device("cuda", 0)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.tied = torch.nn.Linear(4, 3, bias=False)
        self.tied.weight = self.linear.weight
        self.conv = torch.nn.Conv1d(1, 2, 2).half()
        self.register_buffer("scale", torch.arange(6.0).view(2, 3).t()[:, 1])
        self.scale: torch.Tensor
        self.plain = torch.full((3,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * self.scale + self.tied(x) + self.plain
        return y.softmax(-1) if bool(y.sum() > 0) else y.relu()


@pytest.fixture(params=["script", "trace"])
def path(request: pytest.FixtureRequest, tmp_path: Path, loopback: Any) -> Path:
    torch.manual_seed(1)
    jit: Any = torch.jit
    net = jit.script(Net()) if request.param == "script" else jit.trace(Net().linear, torch.ones(2, 4))
    net.save(tmp_path / "net.pt")
    return tmp_path / "net.pt"


X = torch.arange(8.0).view(2, 4) / 8
_numbers = itertools.count()

load: Callable[..., Any] = torch.jit.load


@pytest.mark.parametrize("location", ["cuda", "cuda:0", torch.device("cuda"), torch.device(CUDA)])
def test_n6_jit_load_to_cuda(path: Path, location: Any, loopback: Any) -> None:
    expected = load(path)(X)
    net = load(path, map_location=location)
    with path.open("rb") as file:
        again = load(file, map_location=location)
    assert {value.device for value in net.state_dict().values()} == {CUDA}
    for name, value in load(path).state_dict().items():
        torch.testing.assert_close(net.state_dict()[name].cpu(), value, rtol=0, atol=0)
    loopback.end_lease()  # as after load()
    loopback.begin_lease()
    for module in (net, again):
        torch.testing.assert_close(module(X.to(CUDA)).cpu(), expected)


def test_n6_a_loaded_module_moves(path: Path, loopback: Any) -> None:
    expected = load(path)(X)
    for spelling in (0, "cuda"):
        net = load(path).to(spelling)
        assert {value.device for value in net.parameters()} == {CUDA}
        if hasattr(net, "tied"):
            assert net.tied.weight is net.linear.weight
            net.plain = net.plain.to(CUDA)  # neither parameter nor buffer: PyTorch leaves it where it is
        torch.testing.assert_close(net(X.to(CUDA)).cpu(), expected)
        back = net.cpu()
        assert {value.device.type for value in back.parameters()} == {"cpu"}
    doubled = load(path).double()
    assert {value.dtype for value in doubled.parameters()} == {torch.float64}, "on the CPU all is as before"


@pytest.fixture
def code() -> Any:
    name = f"torchscript_code_{next(_numbers)}"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "torchscript_code.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def foreign(tmp_path: Path, code: Any) -> Path:
    """Saved where nothing of ours is."""
    torch.manual_seed(1)
    jit: Any = torch.jit
    jit.script(code.Moving()).save(tmp_path / "moving.pt")
    assert jit.script(code.moved).graph.str().count("aten::to(%") == 1
    return tmp_path / "moving.pt"


def test_n6_scripted_code_moves_tensors(foreign: Path, code: Any, loopback: Any) -> None:
    jit: Any = torch.jit
    net, compiled = code.Moving(), code.Moving()
    for each in (net, compiled):
        each.load_state_dict(load(foreign).state_dict())
    scripted, again = jit.script(compiled), foreign.with_name("again.pt")
    scripted.save(again)
    frozen = jit.freeze(load(foreign, map_location="cuda").eval())
    expected, device, total = net.to("cuda")(X)
    assert (device, total) == ("cuda:0", float(X.sum()))
    for module in (load(foreign, map_location="cuda"), load(again).to("cuda"), scripted.to("cuda"), frozen):
        for _ in range(3):  # the first runs are profiled, the next ones optimized
            values, where, found = module(X)
            assert (where, found) == (device, total)
            torch.testing.assert_close(values, expected)
    assert jit.script(code.moved)(X, net.linear.weight).is_cuda


def test_a_module_on_cuda_says_how_to_save_it(path: Path) -> None:
    net = load(path, map_location="cuda")
    save: Callable[..., Any] = torch.jit.save
    for attempt in (net.save_to_buffer, lambda: net.save(path), lambda: save(net, path)):
        with pytest.raises(NotImplementedError, match=r"save module\.cpu\(\)"):
            attempt()
    if hasattr(net, "plain"):
        net.plain = net.plain.cpu()
    net.cpu().save(path.with_name("saved.pt"))
    torch.testing.assert_close(load(path.with_name("saved.pt"))(X), load(path)(X))
