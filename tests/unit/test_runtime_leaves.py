"""Which modules of `transformers` the C++ kernels compute by themselves, and that they compute the same."""

import ctypes
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import needs
import pytest
import torch
from language_models import reference
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dormouse.gpuserver.runtime import kernels, leaves, recognition


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if (found := kernels.load()) is None:
        pytest.skip(needs.NO_COMPILER)
    return found


def found_in(module: nn.Module, library: ctypes.CDLL) -> leaves.Native | None:
    attention: Any = SimpleNamespace(step=None)
    return leaves.native(module, library, wide=False, attention=attention)


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
            leaf.places.bind()
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
            leaf.places.bind()
        assert isinstance(leaf, (leaves.NativeNorm, leaves.NativeMlp))
        computed = leaf(given)
        assert computed.dtype is dtype
        tolerance = 1e-4 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(computed.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 24, 6])
def test_heads_are_turned_as_transformers_does(library: ctypes.CDLL, dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(3)
    q, k = (torch.randn(1, 7, heads, dim).to(dtype).transpose(1, 2) for heads in (6, 2))
    cos, sin = torch.randn(2, 1, 7, dim).to(dtype)
    exact = apply_rotary_pos_emb(q.double(), k.double(), cos.double(), sin.double())
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    turned = leaves.NativeRotary(library, _never)(q, k, cos, sin)
    for found, each in zip(turned, exact, strict=True):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), each, rtol=tolerance, atol=tolerance)


def _never(*_: Any) -> Any:
    pytest.fail("not for these")


def test_what_the_kernel_does_not_turn_the_function_does(library: ctypes.CDLL) -> None:
    rotary = leaves.NativeRotary(library, lambda *given, **_: (given[0], given[1]))
    q, k, cos = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8)
    assert rotary(q, k, cos, cos)[0] is not q
    for given in ((torch.randn(2, 2, 3, 8), k, cos, cos), (q, k, cos[..., :4], cos), (q, k, cos.double(), cos)):
        assert rotary(*given)[0] is given[0]
    assert rotary(q, k, cos, cos, unsqueeze_dim=2)[0] is q


@pytest.mark.parametrize(
    ("family", "turns"), [("llama", True), ("qwen3", True), ("gemma2", True), ("phi", True), ("gpt2", False)]
)
def test_attention_that_turns_halves_turns_by_the_kernel(library: ctypes.CDLL, family: str, turns: bool) -> None:
    """In a copy of its function: the class, and other models of it, stay as they are."""
    for module in reference(family).modules():
        if type(module).__name__.endswith("Attention"):
            names = type(module).forward.__globals__
            forward = leaves.rotating(module, partial(leaves.NativeRotary, library))
            assert (forward is not None) == turns
            assert forward is None or isinstance(forward.__globals__["apply_rotary_pos_emb"], leaves.NativeRotary)
            assert not isinstance(names.get("apply_rotary_pos_emb"), leaves.NativeRotary)
        else:
            assert leaves.rotating(module, partial(leaves.NativeRotary, library)) is None


def test_who_turns_neighbours_is_left_alone() -> None:
    def neighbours(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        even, odd = q[..., ::2], q[..., 1::2]
        return q * cos + torch.stack((-odd, even), -1).flatten(-2) * sin, k

    def fails(q: torch.Tensor) -> Any:
        raise ValueError

    assert recognition.turns_halves(apply_rotary_pos_emb)
    assert not recognition.turns_halves(neighbours)
    assert not recognition.turns_halves(fails)


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
