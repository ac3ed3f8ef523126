"""Emulates pinned host memory, which this process has no use for: bytes for the GPU are sent through the arena from any
memory. So pinning is a copy whose storage is marked as pinned, for its views too.

The mark is an attribute of the storage object, which PyTorch keeps as long as the memory; there is nothing to free.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Final

import torch

from dormouse.client_shim import torch_private
from dormouse.client_shim.patches import patch
from dormouse.client_shim.torch_face.device_numbers import named
from dormouse.client_shim.torch_face.rng import CudaGenerator

FACTORIES: Final = (
    "arange", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full", "full_like", "linspace",
    "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "scalar_tensor", "tensor", "zeros", "zeros_like",
)  # fmt: skip
"""Functions of `torch` that take `pin_memory=True`."""

UNPINNED: Final = (
    "as_tensor", "asarray", "bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window",
    "normal", "range", "tril_indices", "triu_indices",
)  # fmt: skip
"""Those that hardly anybody pins; their device may be a number all the same."""

METHODS: Final = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def install() -> None:
    # PyTorch's own modes (`with torch.device(...)`) meet the functions below these, and must have listed them before.
    torch_private.list_factories()
    for name in (*FACTORIES, *UNPINNED):
        patch(torch, name, _pinning(getattr(torch, name)))
    for name in ("fftfreq", "rfftfreq"):
        patch(torch.fft, name, _pinning(getattr(torch.fft, name)))
    for name in METHODS:
        patch(torch.Tensor, name, _pinning(getattr(torch.Tensor, name)))
    tensor: Any = torch.Tensor
    patch(tensor, "pin_memory", pin_memory)
    patch(tensor, "is_pinned", is_pinned)


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """`Tensor.pin_memory` of a CPU tensor."""
    _check(self)
    return self if is_pinned(self) else _mark(self.clone())


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    """`Tensor.is_pinned`."""
    return self.layout is torch.strided and self.device.type == "cpu" and _is_marked(self.untyped_storage())


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    storage: Any = tensor.untyped_storage()
    storage.dormouse_pinned = True
    return tensor


def _is_marked(storage: Any) -> bool:
    return getattr(storage, "dormouse_pinned", False)


@cache  # for ever, as PyTorch knows functions by their address
def _pinning(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(real)
    def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            if type(kwargs.get("device")) is int:
                kwargs["device"] = named(kwargs["device"])
            if kwargs.get("pin_memory"):
                # It is new, so the memory that it has is marked.
                made = real(*args, **{**kwargs, "pin_memory": False})
                _check(made)
                return _mark(made)
            if type(kwargs.get("generator")) is CudaGenerator:  # to PyTorch's own kernels it is one of the CPU
                made = real(*args, **kwargs)
                if made.device.type == "cpu":
                    raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
                return made
        return real(*args, **kwargs)

    factory.__qualname__ = real.__name__  # by which it is pickled
    torch_private.same_for_jit(factory, real)
    return factory
