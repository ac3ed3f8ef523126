"""TorchScript modules on cuda:0, loaded and moved."""

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
