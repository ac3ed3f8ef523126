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


_norm = _per_channel((1, "weight"), (2, "bias"), (3, "running_mean"), (4, "running_var"))

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
    "batch_norm_elemt": _per_channel((1, "weight"), (2, "bias"), (3, "mean"), (4, "invstd")),
}
"""By operation name without overload."""
