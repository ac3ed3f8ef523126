"""Modules of `transformers` that one call of the C++ kernels computes: linear layers, gated MLPs, norms.

Families have classes of their own for the same mathematics. So a module is known by what it computes: a copy of it with
small random weights is compared with the formula.
"""

import copy
import ctypes
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from dormouse.gpuserver.runtime import kernels

_PROJECTIONS: Final = ("gate", "up", "down")
_ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


class NativeLinear:
    """``forward`` of a linear layer. ``wide``: in fp32 whatever the weights are, as logits are wanted."""

    def __init__(self, linear: nn.Linear, library: ctypes.CDLL, wide: bool) -> None:
        self._linear, self._library, self._wide = linear, library, wide

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        given = given.contiguous()
        outputs, inputs = weight.shape
        dtype = torch.float32 if self._wide else given.dtype
        out = torch.empty((*given.shape[:-1], outputs), dtype=dtype)
        self._library.dormouse_linear(
            given.dtype is torch.bfloat16, self._wide, given.data_ptr(), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), out.data_ptr(), given.numel() // inputs, inputs, outputs,
        )  # fmt: skip
        return out


class NativeNorm:
    """``forward`` of a norm by the root mean square. ``one`` is added to its weights."""

    def __init__(self, norm: nn.Module, library: ctypes.CDLL, epsilon: float, one: float) -> None:
        self._norm, self._library, self._epsilon, self._one = norm, library, epsilon, one

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        given = given.contiguous()
        weight: Any = self._norm.weight
        out, numel = torch.empty_like(given), len(weight)
        self._library.dormouse_norm(
            given.dtype is torch.bfloat16, given.data_ptr(), weight.data_ptr(), out.data_ptr(), given.numel() // numel,
            numel, self._epsilon, self._one,
        )  # fmt: skip
        return out


class NativeMlp:
    """``forward`` of a gated MLP."""

    def __init__(self, mlp: nn.Module, library: ctypes.CDLL, activation: str) -> None:
        self._mlp, self._library, self._activation = mlp, library, kernels.ACTIVATIONS[activation]
        self._bound: kernels.NativeGated | None = None

    def bind(self) -> None:
        """Its parameters are where they will be."""
        self._bound = gated(self._mlp, self._activation)

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        assert self._bound is not None, "its weights are bound"
        given = given.contiguous()
        out = torch.empty_like(given)
        self._library.dormouse_gated(
            given.dtype is torch.bfloat16, ctypes.addressof(self._bound), given.data_ptr(), out.data_ptr(),
            given.numel() // self._bound.hidden,
        )  # fmt: skip
        return out


Native = NativeLinear | NativeNorm | NativeMlp


def native(module: nn.Module, library: ctypes.CDLL, wide: bool) -> Native | None:
    """Its ``forward`` by the kernels, if they have one. ``wide``: see NativeLinear."""
    if type(module) is nn.Linear:
        return NativeLinear(module, library, wide)
    if (found := _norm(module)) is not None:
        return NativeNorm(module, library, *found)
    if (activation := _activation(module)) is not None:
        return NativeMlp(module, library, activation)
    return None


def pointers(linears: Mapping[str, nn.Linear]) -> dict[str, int | None]:
    """Where their weights and biases are, as the kernels' structures name them."""
    found: dict[str, int | None] = {}
    for name, linear in linears.items():
        assert linear.weight.is_contiguous()
        found[name] = linear.weight.data_ptr()
        found[f"{name}_bias"] = None if linear.bias is None else linear.bias.data_ptr()
    return found


def gated(mlp: Any, activation: int) -> kernels.NativeGated:
    sizes = {"hidden": mlp.gate_proj.in_features, "inner": mlp.gate_proj.out_features, "activation": activation}
    return kernels.NativeGated(**pointers({name: getattr(mlp, f"{name}_proj") for name in _PROJECTIONS}), **sizes)


def _norm(module: nn.Module) -> tuple[float, float] | None:
    """``(epsilon, one)`` of a norm by the root mean square."""
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    if weight is None or weight.ndim != 1 or not isinstance(epsilon, float) or not alone:
        return None
    given, weights = _random(3, len(weight)), _random(len(weight))
    given[0] *= epsilon  # so that a row shows what is done with it
    small = copy.copy(module)
    small._parameters = {"weight": nn.Parameter(weights, requires_grad=False)}
    found = _tried(small, given)
    scaled = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + epsilon)
    return next(((epsilon, one) for one in (0.0, 1.0) if _same(found, scaled * (weights + one))), None)


def _activation(module: nn.Module) -> str | None:
    """The name of a gated MLP's."""
    linears = [module._modules.get(f"{name}_proj") for name in _PROJECTIONS]
    if any(type(linear) is not nn.Linear for linear in linears) or module._parameters or module._buffers:
        return None
    small, made = copy.copy(module), dict(module._modules)
    for name, linear, (inputs, outputs) in zip(_PROJECTIONS, linears, ((8, 16), (8, 16), (16, 8)), strict=True):
        assert isinstance(linear, nn.Linear)
        other = made[f"{name}_proj"] = nn.Linear(inputs, outputs, bias=linear.bias is not None, device="meta")
        for each, parameter in list(other.named_parameters()):  # on meta first, so that no random number is drawn
            setattr(other, each, nn.Parameter(_random(*parameter.shape), requires_grad=False))
    small._modules = made
    given = _random(3, 8)
    found = _tried(small, given)
    gate, up, down = (made[f"{name}_proj"] for name in _PROJECTIONS)
    assert gate is not None
    assert up is not None
    assert down is not None
    known = {name: of for name, of in _ACTIVATIONS.items() if name in kernels.ACTIVATIONS}
    return next((name for name, of in known.items() if _same(found, down(of(gate(given)) * up(given)))), None)


@torch.inference_mode()
def _tried(module: nn.Module, given: torch.Tensor) -> torch.Tensor | None:
    """What it computes; None for one that wants other sizes, or more than this."""
    wanted = inspect.signature(module.forward).parameters
    if len(wanted) != 1:
        return None
    try:
        found = module.forward(given)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None
    return found if isinstance(found, torch.Tensor) else None


def _same(found: torch.Tensor | None, formula: torch.Tensor) -> bool:
    return found is not None and found.shape == formula.shape and torch.allclose(found, formula, rtol=1e-5, atol=1e-5)


def _random(*shape: int) -> torch.Tensor:
    """Numbers between 1/2 and 3/2 with either sign; the caller's generator is left alone."""
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.rand(*shape, generator=generator) + 0.5) * torch.randn(*shape, generator=generator).sign()
