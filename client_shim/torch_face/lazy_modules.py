"""Lazy modules on cuda:0: `LazyLinear(2, device="cuda")`, and `LazyLinear(2).to("cuda")`.

A parameter without a size is an object of PyTorch's own class, which no remote tensor can be. So it stays on the CPU,
where it has no bytes either, and remembers where it belongs until it gets its size.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from dormouse.client_shim.patches import patch

_PLACE: Final = "_dormouse_place"
"""The attribute of those that belong on cuda:0."""


def install() -> None:
    mixin: Any = UninitializedParameter.__mro__[1]
    for kind in (UninitializedParameter, UninitializedBuffer):
        patch(kind, "__new__", staticmethod(_making(kind.__new__)))
    patch(UninitializedParameter, "__deepcopy__", _deepcopy)
    patch(mixin, "materialize", _materializing(mixin.materialize))
    patch(mixin, "device", property(_place))
    patch(mixin, "is_cuda", property(lambda self: _place(self).type == "cuda"))
    patch(nn.Module, "_apply", _applying(nn.Module._apply))


def _place(tensor: Any) -> torch.device:
    place: torch.device = tensor.__dict__.get(_PLACE) or torch.device("cpu")
    return place


def _put(tensor: Any, place: torch.device) -> None:
    if place.type == "cpu":
        tensor.__dict__.pop(_PLACE, None)
    else:
        setattr(tensor, _PLACE, place)


def _making(real: Callable[..., Any]) -> Callable[..., Any]:
    def new(cls: type, requires_grad: bool | None = None, device: Any = None, **kwargs: Any) -> Any:
        place = torch.get_default_device() if device is None else torch.device(device)
        if requires_grad is None:
            requires_grad = issubclass(cls, UninitializedParameter)
        made = real(cls, requires_grad, torch.device("cpu") if place.type == "cuda" else device, **kwargs)
        if place.type == "cuda":
            _put(made, place)
        return made

    return new


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    if id(self) not in memo:
        memo[id(self)] = type(self)(self.requires_grad, device=_place(self), dtype=self.data.dtype)
    return memo[id(self)]


def _materializing(real: Callable[..., None]) -> Callable[..., None]:
    def materialize(self: Any, shape: Any, device: Any = None, dtype: torch.dtype | None = None) -> None:
        place = _place(self) if device is None else torch.device(device)
        if place.type != "cuda":
            return real(self, shape, device, dtype)
        _put(self, torch.device("cpu"))
        real(self, (0,), torch.device("cpu"), dtype)  # an ordinary one now, which can become a remote one
        self.data = torch.empty(shape, device=place, dtype=self.dtype)

    return materialize


def _applying(real: Callable[..., Any]) -> Callable[..., Any]:
    """`to`, `cuda`, `half` and their like, of which a lazy parameter needs only the resulting device and dtype."""

    def apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        tables: tuple[dict[str, Any], ...] = (self._parameters, self._buffers)
        lazy = [(table, name, value) for table in tables for name, value in table.items() if is_lazy(value)]
        for table, name, value in lazy:
            with torch.no_grad():
                probe = fn(torch.empty(0, dtype=value.data.dtype, device=_place(value)))
            value.data = torch.empty(0, dtype=probe.dtype, device="cpu")
            _put(value, probe.device)
            table[name] = None  # which is passed over, and keeps its place in the order
        try:
            return real(self, fn, recurse)
        finally:
            for table, name, value in lazy:
                table[name] = value

    return apply
