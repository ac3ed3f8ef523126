"""Numbers of a step, on their way to the device."""

from collections.abc import Callable, Sequence

import torch

Pack = Callable[..., tuple[torch.Tensor, ...]]
"""Puts columns of numbers onto a device: see `packed`."""


def packed(device: torch.device, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """These as tensors of int64 on the device, which takes them in one copy."""
    flat = torch.tensor([number for column in columns for number in column], dtype=torch.int64)
    if device.type == "cuda":
        flat = flat.pin_memory()  # else the copy would wait for all that the stream has been given
    return torch.split(flat.to(device, non_blocking=True), [len(column) for column in columns])
