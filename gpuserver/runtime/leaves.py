"""Modules of `transformers` that one call of the C++ kernels computes: linear layers, gated MLPs, norms; and rotary
embeddings, which are a function.
"""

import ctypes
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional as F

from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime import kernels, recognition
from dormouse.gpuserver.runtime.adapted import Places
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.groups import by_group, concerned, rows_of
from dormouse.gpuserver.runtime.low_rank import table_of

_ROTARY: Final = "apply_rotary_pos_emb"
"""The name of that function in all families."""


class NativeLinear:
    """``forward`` of a linear layer. ``wide``: in fp32 whatever the weights are, as logits are wanted."""

    def __init__(self, linear: nn.Linear, library: ctypes.CDLL, wide: bool, attention: BlockAttention) -> None:
        self._linear, self._library, self._wide, self._attention = linear, library, wide, attention

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        given = given.contiguous()
        outputs, inputs = weight.shape
        dtype = torch.float32 if self._wide else given.dtype
        out = torch.empty((*given.shape[:-1], outputs), dtype=dtype)
        self._library.dormouse_linear(
            given.dtype is torch.bfloat16, self._wide, given.data_ptr(), weight.data_ptr(),
            None if bias is None else bias.data_ptr(), out.data_ptr(), given.numel() // inputs, inputs, outputs,
            *self._adapters(),
        )  # fmt: skip
        return out

    def _adapters(self) -> tuple[int | None, int | None, int]:
        rows, table = rows_of(self._attention), table_of(self._linear)
        if rows is None or table is None:
            return None, None, 0
        return rows.of(self._wide).data_ptr(), ctypes.addressof(table.native), rows.most_rank


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


class TorchNorm:
    """The same by torch, in one operation, as GPUs have it; families write it in six or eight. Where there is a ``one``
    it takes five, in fp32: one more than a weight is in general no number of bf16.
    """

    def __init__(self, norm: nn.Module, epsilon: float, one: float) -> None:
        self._norm, self._epsilon, self._one = norm, epsilon, one

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        weight: Any = self._norm.weight
        if not self._one:
            return F.rms_norm(given, weight.shape, weight, self._epsilon)
        return F.rms_norm(given.float(), weight.shape, weight.float() + self._one, self._epsilon).to(given.dtype)


class OwnRotary:
    """Rotary position embedding as attention modules call it, by ``rotate`` where it is the usual one: a row of tokens,
    all of a head, one type. ``otherwise``: the function that it stands for, which takes ten operations.
    """

    def __init__(self, rotate: recognition.Rotary, otherwise: recognition.Rotary) -> None:
        self._rotate, self._otherwise = rotate, otherwise

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        usual = len(q) == 1 and cos.shape[-1] == q.shape[-1] and cos.dtype is q.dtype
        if more or named or not usual:
            return self._otherwise(q, k, cos, sin, *more, **named)
        return self._rotate(q, k, cos, sin)


class NativeRotary(OwnRotary):
    """By the C++ kernels."""

    def __init__(self, library: ctypes.CDLL, otherwise: recognition.Rotary) -> None:
        super().__init__(self._both, otherwise)
        self._library = library

    def _both(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        return self._rotated(q, cos, sin), self._rotated(k, cos, sin)

    def _rotated(self, given: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        given = given.transpose(1, 2).contiguous()  # as linear layers leave it
        out = torch.empty_like(given)
        _, tokens, heads, dim = given.shape
        self._library.dormouse_rotate(
            given.dtype is torch.bfloat16, given.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), tokens,
            heads, dim,
        )  # fmt: skip
        return out.transpose(1, 2)


class NativeMlp:
    """``forward`` of a gated MLP."""

    def __init__(self, mlp: nn.Module, library: ctypes.CDLL, activation: str, attention: BlockAttention) -> None:
        self._library, self._attention, number = library, attention, kernels.ACTIVATIONS[activation]
        self.places = Places(lambda: gated(mlp, number))

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        if not (own := concerned(self._attention, self.places.own)):
            return self._computed(NO_ADAPTER, given)
        return by_group(self._attention, own, False, 1, lambda number, rows: self._computed(number, rows(given)))

    def _computed(self, number: int, given: torch.Tensor) -> torch.Tensor:
        given = given.contiguous()
        out = torch.empty_like(given)
        at, rows = self.places.of(number), rows_of(self._attention)
        self._library.dormouse_gated(
            given.dtype is torch.bfloat16, ctypes.addressof(at), given.data_ptr(), out.data_ptr(),
            given.numel() // at.hidden,
            *(None, 0) if rows is None else (rows.tokens.data_ptr(), rows.most_rank),
        )  # fmt: skip
        return out


Native = NativeLinear | NativeNorm | NativeMlp


def native(module: nn.Module, library: ctypes.CDLL, wide: bool, attention: BlockAttention) -> Native | None:
    """Its ``forward`` by the kernels, if they have one. ``wide``: see NativeLinear."""
    if type(module) is nn.Linear:
        return NativeLinear(module, library, wide, attention)
    if (found := recognition.norm(module)) is not None:
        return NativeNorm(module, library, *found)
    if (activation := recognition.gated(module)) is not None:
        return NativeMlp(module, library, activation, attention)
    return None


def rotating(
    module: nn.Module, rotated: Callable[[recognition.Rotary], recognition.Rotary]
) -> Callable[..., Any] | None:
    """Its ``forward`` with rotary embeddings as ``rotated`` makes them, if it calls a function for them that turns
    halves. A copy with globals of its own: others go on with the module's as it is.
    """
    forward = type(module).forward
    rotary = getattr(forward, "__globals__", {}).get(_ROTARY)
    if rotary is None or _ROTARY not in forward.__code__.co_names or not recognition.turns_halves(rotary):
        return None
    names = {**forward.__globals__, _ROTARY: rotated(rotary)}
    made = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    return types.MethodType(made, module)


def pointers(linears: Mapping[str, nn.Linear]) -> dict[str, int | None]:
    """Addresses of their weights and biases, and of adapters' additions, as the kernels' structures name them."""
    found: dict[str, int | None] = {}
    for name, linear in linears.items():
        assert linear.weight.is_contiguous()
        found[name] = linear.weight.data_ptr()
        found[f"{name}_bias"] = None if linear.bias is None else linear.bias.data_ptr()
        table = table_of(linear)
        found[f"{name}_loras"] = None if table is None else ctypes.addressof(table.native)
    return found


def gated(mlp: Any, activation: int) -> kernels.NativeGated:
    sizes = {"hidden": mlp.gate_proj.in_features, "inner": mlp.gate_proj.out_features, "activation": activation}
    return kernels.NativeGated(
        **pointers({name: getattr(mlp, f"{name}_proj") for name in recognition.PROJECTIONS}), **sizes
    )
