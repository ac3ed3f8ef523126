"""Transfer of a step's numbers to the device."""

from collections.abc import Callable, Sequence
from itertools import accumulate, count
from typing import Final

import torch

Pack = Callable[..., tuple[torch.Tensor, ...]]
"""Puts columns of numbers onto a device: see `packed`."""


NOWHERE: Final = -1
"""The place of a token that is none."""

FREE: Final = -1
"""The width of a column that has as many numbers as it has."""


def packed(device: torch.device, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """These as tensors of int64 on the device, which takes them in one copy."""
    flat = torch.tensor([number for column in columns for number in column], dtype=torch.int64)
    if device.type == "cuda":
        flat = flat.pin_memory()  # else the copy would wait for all that the stream has been given
    return torch.split(flat.to(device, non_blocking=True), [len(column) for column in columns])


class FixedColumns:
    """The places of steps' numbers on the device, the same each time: columns that are filled up with zeros, but the
    first one with NOWHERE, and free ones, each with ``room``.
    """

    def __init__(self, device: torch.device, most: Sequence[int], room: int) -> None:
        *starts, self._end = accumulate((0 if width == FREE else width for width in most), initial=0)
        free = count(self._end, room)
        self._starts = [next(free) if width == FREE else start for width, start in zip(most, starts, strict=True)]
        self.room = room
        self._here = torch.zeros(self._end + room * most.count(FREE), dtype=torch.int64)
        if device.type == "cuda":
            self._here = self._here.pin_memory()
        self._numbers = self._here.numpy()
        self._there = torch.zeros_like(self._here, device=device)

    def put(self, widths: Sequence[int], columns: Sequence[Sequence[int]]) -> tuple[torch.Tensor, ...]:
        """These, filled up to these widths. Nobody may be about to read the last ones."""
        found, used = [], [(0, self._end)]
        for start, width, column in zip(self._starts, widths, columns, strict=False):
            end = start + len(column)
            self._numbers[start:end] = column
            if width == FREE:
                width = len(column)
                used.append((start, end))
            self._numbers[end : start + width] = 0 if start else NOWHERE
            found.append(self._there[start : start + width])
        for start, end in used:
            self._there[start:end].copy_(self._here[start:end], non_blocking=True)
        return tuple(found)
