"""Checks for operations that are allowed but whose kernels read operands without looking at their sizes.

Each was found by calling it with operands that its schema accepts and that lie beside other memory; each check names
what it refuses.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

Check = Callable[[list[Any], dict[str, Any]], str | None]


def _per_channel(*names_at: tuple[int, str], channel_dim: int = 1) -> Check:
    """One value per channel of the first argument."""

    def check(args: list[Any], kwargs: dict[str, Any]) -> str | None:
        data = args[0] if args else None
        if not isinstance(data, torch.Tensor) or data.dim() <= channel_dim:
            if isinstance(data, torch.Tensor) and data.numel() == 0:
                return None  # PyTorch's empty batch; nothing is read
            return f"the input needs at least {channel_dim + 1} dimensions"
        channels = data.size(channel_dim)
        for position, name in names_at:
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor) and value.numel() != channels:
                return f"{name} should contain {channels} elements not {value.numel()}"
        return None

    return check


def _fft(args: list[Any], kwargs: dict[str, Any]) -> str | None:
    """`torch.fft` wraps and checks its dimensions before it calls these; they do not."""
    data, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(data, torch.Tensor) or not isinstance(dims, list) or not dims:
        return "a transform needs a tensor and at least one dimension"
    if len(set(dims)) != len(dims) or any(type(dim) is not int or not 0 <= dim < data.dim() for dim in dims):
        return f"dimensions {dims} of a tensor that has {data.dim()}"
    if any(data.shape[dim] < 1 for dim in dims):
        return "a transform over an empty dimension"
    return None


def _fft_to_real(args: list[Any], kwargs: dict[str, Any]) -> str | None:
    problem = _fft(args, kwargs)
    if problem is None:
        data, dims = args[0], args[1]
        last = args[3] if len(args) > 3 else kwargs.get("last_dim_size")
        if not data.is_complex() or type(last) is not int or not last >= 1 or last // 2 + 1 != data.size(dims[-1]):
            return f"a real result of {last!r} from {tuple(data.shape)}"
    return problem


def _weight_norm(args: list[Any], kwargs: dict[str, Any]) -> str | None:
    direction, magnitude = args[0], args[1] if len(args) > 1 else None
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    if not isinstance(direction, torch.Tensor) or not isinstance(magnitude, torch.Tensor) or type(dim) is not int:
        return "weight_norm needs two tensors and a dimension"
    if direction.numel() == 0:
        return "weight_norm of nothing"
    if not -1 <= dim < direction.dim() or direction.dim() == 0:
        return f"dimension {dim} of a tensor that has {direction.dim()}"
    expected = 1 if dim == -1 else direction.size(dim)
    if magnitude.numel() != expected or magnitude.dtype != direction.dtype:
        return f"a magnitude of {magnitude.numel()} {magnitude.dtype} for {expected} {direction.dtype} directions"
    return None


_norm_sizes = _per_channel((1, "weight"), (2, "bias"), (3, "running_mean"), (4, "running_var"))


def _norm(args: list[Any], kwargs: dict[str, Any]) -> str | None:
    """Sizes, and that there are statistics where none are computed: the kernel would follow a null pointer."""
    if len(args) > 3 and isinstance(args[3], bool):  # the overload without statistics
        return _norm_sizes(args[:3], {}) if args[3] else "without running statistics a norm has to compute them"
    if len(args) > 5 and args[5] is False and (args[3] is None or args[4] is None):
        return "a norm in evaluation mode needs running_mean and running_var"
    return _norm_sizes(args, kwargs)


CHECKS: Final[dict[str, Check]] = {
    "native_batch_norm": _norm,
    "batch_norm": _norm,
    "instance_norm": _norm,
    "_native_batch_norm_legit": _norm,
    "_native_batch_norm_legit_no_training": _norm,
    "_native_batch_norm_legit_functional": _norm,
    "_batch_norm_no_update": _norm,
    "_batch_norm_with_update": _norm,
    "_batch_norm_with_update_functional": _norm,
    "_batch_norm_impl_index": _norm,
    "cudnn_batch_norm": _norm,
    "batch_norm_update_stats": _per_channel((1, "running_mean"), (2, "running_var")),
    "_fft_c2c": _fft,
    "_fft_r2c": _fft,
    "_fft_c2r": _fft_to_real,
    "_weight_norm": _weight_norm,
    "_weight_norm_interface": _weight_norm,
    "batch_norm_elemt": _per_channel((1, "weight"), (2, "bias"), (3, "mean"), (4, "invstd")),
}
"""By operation name without overload."""
