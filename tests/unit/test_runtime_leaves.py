"""Which modules of `transformers` the C++ kernels compute by themselves, and that they compute the same."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_models import reference
from torch import nn
from torch.nn import functional as F

from dormouse.gpuserver.runtime import kernels, leaves


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    found = kernels.load()
    assert found is not None
    return found


def found_in(module: nn.Module, library: ctypes.CDLL) -> leaves.Native | None:
    return leaves.native(module, library, wide=False)


@pytest.mark.parametrize(
    ("family", "norms", "mlps"),
    [
        ("llama", 7, 3),
        ("qwen2", 7, 3),
        ("qwen3", 13, 3),  # of queries and keys, too
        ("mistral", 7, 3),
        ("gemma2", 17, 4),  # their weights lack one; four layers
        ("phi", 0, 0),  # LayerNorm, and no gate
        ("gpt2", 0, 0),
        ("opt", 0, 0),
        ("gpt_neox", 0, 0),
    ],
)
def test_of_each_family(library: ctypes.CDLL, family: str, norms: int, mlps: int) -> None:
    """And each computes what its module does."""
    torch.manual_seed(1)
    model, kinds = reference(family), []
    for module in model.modules():
        leaf = found_in(module, library)
        kinds.append(type(leaf))
        if not isinstance(leaf, (leaves.NativeNorm, leaves.NativeMlp)):
            continue
        owner: Any = module if isinstance(leaf, leaves.NativeNorm) else module.gate_proj
        weight = owner.weight
        if isinstance(leaf, leaves.NativeMlp):
            leaf.bind()
        given = torch.randn(1, 5, weight.shape[-1])
        torch.testing.assert_close(leaf(given), module.forward(given), rtol=1e-5, atol=1e-5)
        apart = torch.randn(1, weight.shape[-1], 300).transpose(1, 2)  # not contiguous, and enough for several threads
        torch.testing.assert_close(leaf(apart), module.forward(apart), rtol=1e-5, atol=1e-5)
    assert (kinds.count(leaves.NativeNorm), kinds.count(leaves.NativeMlp)) == (norms, mlps)


class Norm(nn.Module):
    def __init__(self, eps: Any = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(24)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Gated(nn.Module):
    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor] = F.silu, factor: float = 1.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 40), nn.Linear(24, 40, bias=False)
        self.down_proj = nn.Linear(40, 24)
        self.of, self.factor = of, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(self.of(self.gate_proj(x)) * self.up_proj(x)) * self.factor
        return found


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_compute_the_same(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    for module in (Norm(), Gated(), Gated(F.relu), Gated(F.gelu), Gated(lambda x: F.gelu(x, approximate="tanh"))):
        leaf = found_in(module, library)
        given = torch.randn(9, 24).to(dtype)
        exact = module.double()(given.double())
        module.to(dtype)
        if isinstance(leaf, leaves.NativeMlp):
            leaf.bind()
        assert isinstance(leaf, (leaves.NativeNorm, leaves.NativeMlp))
        computed = leaf(given)
        assert computed.dtype is dtype
        tolerance = 1e-4 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(computed.double(), exact, rtol=tolerance, atol=tolerance)


class WithoutEpsilon(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


class WithGate(Norm):
    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


class Swapped(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(self.of(self.up_proj(x)) * self.gate_proj(x))
        return found


class OfThisWidth(Gated):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, 24))


@pytest.mark.parametrize(
    "module",
    [
        nn.LayerNorm(24),
        nn.LayerNorm(24, bias=False),
        WithoutEpsilon(),
        WithGate(),
        Norm(eps=None),
        Swapped(),
        OfThisWidth(),
        Gated(factor=0.5),
        Gated(torch.tanh),
    ],
)
def test_what_computes_something_else_stays_as_it_is(library: ctypes.CDLL, module: nn.Module) -> None:
    assert found_in(module, library) is None


def test_looking_leaves_a_module_and_the_generator_as_they_are(library: ctypes.CDLL) -> None:
    for module in (Norm(), Gated()):
        before = {name: parameter.clone() for name, parameter in module.named_parameters()}
        state = torch.get_rng_state()
        assert found_in(module, library) is not None
        assert torch.equal(torch.get_rng_state(), state)
        assert before.keys() == dict(module.named_parameters()).keys()
        assert all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())
