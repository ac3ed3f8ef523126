"""The functions that modules of `transformers` compute, recognised by trying them.

Families have classes of their own for the same mathematics. So a copy with small random weights is compared with the
formula; a name says nothing.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from dormouse.gpuserver.runtime import kernels

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]

PROJECTIONS: Final = ("gate", "up", "down")
_ACTIVATIONS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}


def norm(module: nn.Module) -> tuple[float, float] | None:
    """``(epsilon, one)`` of a norm by the root mean square."""
    weight = module._parameters.get("weight")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    if weight is None or weight.ndim != 1 or not isinstance(epsilon, float) or not alone:
        return None
    given, weights = _random(3, len(weight)), _random(len(weight))
    given[0] *= epsilon  # so that a row shows its effect
    small = copy.copy(module)
    small._parameters = {"weight": nn.Parameter(weights, requires_grad=False)}
    found = _tried(small.forward, given)
    scaled = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + epsilon)
    return next(((epsilon, one) for one in (0.0, 1.0) if _same(found, scaled * (weights + one))), None)


@functools.cache
def turns_halves(rotary: Rotary) -> bool:
    q, k, (cos, sin) = _random(1, 3, 5, 8), _random(1, 2, 5, 8), _random(2, 1, 5, 8)
    found = _tried(rotary, q, k, cos, sin, defaults=True)
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    halves = (torch.cat((-each[..., 4:], each[..., :4]), -1) for each in (q, k))
    formula = (each * cos + turned * sin for each, turned in zip((q, k), halves, strict=True))
    return all(_same(each, wanted) for each, wanted in zip(found, formula, strict=True))


def gated(module: nn.Module) -> str | None:
    """The name of a gated MLP's."""
    linears = [module._modules.get(f"{name}_proj") for name in PROJECTIONS]
    if any(type(linear) is not nn.Linear for linear in linears) or module._parameters or module._buffers:
        return None
    small, made = copy.copy(module), dict(module._modules)
    for name, linear, (inputs, outputs) in zip(PROJECTIONS, linears, ((8, 16), (8, 16), (16, 8)), strict=True):
        assert isinstance(linear, nn.Linear)
        other = made[f"{name}_proj"] = nn.Linear(inputs, outputs, bias=linear.bias is not None, device="meta")
        for each, parameter in list(other.named_parameters()):  # on meta first, so that no random number is drawn
            setattr(other, each, nn.Parameter(_random(*parameter.shape), requires_grad=False))
    small._modules = made
    given = _random(3, 8)
    found = _tried(small.forward, given)
    gate, up, down = (made[f"{name}_proj"] for name in PROJECTIONS)
    assert gate is not None
    assert up is not None
    assert down is not None
    known = {name: of for name, of in _ACTIVATIONS.items() if name in kernels.ACTIVATIONS}
    return next((name for name, of in known.items() if _same(found, down(of(gate(given)) * up(given)))), None)


@torch.inference_mode()
def _tried(function: Callable[..., Any], *given: torch.Tensor, defaults: bool = False) -> Any:
    """Its result; None for a function that wants other sizes, or can take more than this, unless by ``defaults``."""
    if not defaults and len(inspect.signature(function).parameters) != len(given):
        return None
    try:
        return function(*given)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _same(found: Any, formula: torch.Tensor) -> bool:
    same = isinstance(found, torch.Tensor) and found.shape == formula.shape
    return same and torch.allclose(found, formula, rtol=1e-5, atol=1e-5)


def _random(*shape: int) -> torch.Tensor:
    """Numbers between 1/2 and 3/2 with either sign; the caller's generator is left alone."""
    generator = torch.Generator().manual_seed(len(shape))
    return (torch.rand(*shape, generator=generator) + 0.5) * torch.randn(*shape, generator=generator).sign()
