"""Devices by number: `torch.device(0)`, `x.to(0)`, `model.cuda(0)`, `torch.zeros(2, device=0)`.

A CPU build of PyTorch does not know the device type of number 0, and refuses; so the number becomes `cuda:0` here.
Factories are wrapped once for this and for pinned memory, in `pinning.py`.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from dormouse.client_shim import torch_device, torch_private
from dormouse.client_shim.patches import patch


def install() -> None:
    tensor: Any = torch.Tensor
    for name in ("to", "cuda"):
        patch(tensor, name, _first_may_be_number(getattr(tensor, name)))
    torch_device.watch_device_type()
    patch(torch_device.Devices, "arguments", staticmethod(_first_named))
    nn = torch_private.bindings()._nn
    patch(nn, "_parse_to", _parsing(nn._parse_to))  # of `Module.to`


def named(device: Any) -> Any:
    """A device by number as one by name; everything else as it is."""
    return torch.device("cuda", device) if type(device) is int else device


def expect_first(index: int | None) -> None:
    """A device's number, if it was given one, is that of the only one."""
    if index not in (None, 0):
        raise RuntimeError("CUDA error: invalid device ordinal (a Dormouse function has one device, cuda:0)")


def expect_device(device: Any) -> None:
    """Check that a named device is the only one, where cuda is meant."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    if device is not None and not isinstance(device, int) and torch.device(device).type != "cuda":
        raise ValueError(f"Expected a cuda device, but got: {device}")
    if index != -1:
        expect_first(index)


def _first_named(args: tuple[Any, ...]) -> tuple[Any, ...]:
    if args and type(args[0]) is int and args[0] >= 0:
        return ("cuda", args[0], *args[1:])
    return args


@cache
def _first_may_be_number(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(real)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and type(args[0]) is int:
            return real(self, named(args[0]), *args[1:], **kwargs)
        if kwargs and type(kwargs.get("device")) is int:
            kwargs["device"] = named(kwargs["device"])
        return real(self, *args, **kwargs)

    return method


@cache
def _parsing(real: Callable[..., Any]) -> Callable[..., Any]:
    def parse_to(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = named(kwargs["device"])
        return real(*map(named, args[:1]), *args[1:], **kwargs)

    return parse_to
