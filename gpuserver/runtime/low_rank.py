"""What adapters add to a linear layer (LoRA): a low-rank product for each row, by the number of the row's adapter."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from dormouse.gpuserver.runtime import kernels

MOST: Final = 512
"""Adapters in one runtime: each product has a table of so many entries."""

_TABLE: Final = "_dormouse_low_rank"


class LowRank(NamedTuple):
    """To one product: ``scale * up.T @ down @ x``. ``down``: [rank][inputs], ``up``: [rank][outputs]; both contiguous,
    of the model's dtype and on its device, as they lie in the pool.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class Table:
    """What adapters add to one product, by their numbers."""

    def __init__(self) -> None:
        self.by_number: dict[int, LowRank] = {}
        self.native = (kernels.NativeLora * MOST)()

    def put(self, number: int, low: LowRank) -> None:
        self.by_number[number] = low
        self.native[number] = kernels.NativeLora(low.down.data_ptr(), low.up.data_ptr(), len(low.down), low.scale)

    def drop(self, number: int) -> None:
        del self.by_number[number]
        self.native[number] = kernels.NativeLora()


def table_of(linear: nn.Module) -> Table | None:
    """None as long as no adapter has added to it."""
    found: Table | None = linear.__dict__.get(_TABLE)
    return found


def made_table(linear: nn.Module) -> Table:
    if (found := table_of(linear)) is None:
        found = linear.__dict__[_TABLE] = Table()
    return found


class AdapterRows(NamedTuple):
    """The number of each row's adapter, -1 without one: of all tokens of a step, and of those that want logits."""

    tokens: torch.Tensor
    kept: torch.Tensor
    numbers: Sequence[int]  # each once
    most_rank: int

    def of(self, kept: bool) -> torch.Tensor:
        return self.kept if kept else self.tokens


class TorchLinear:
    """``forward`` of a linear layer that adapters add to, where torch computes it. ``attention`` has the step;
    ``head``: it is asked for the tokens whose logits are wanted only.
    """

    def __init__(self, linear: nn.Linear, attention: Any, head: bool) -> None:
        self._linear, self._attention, self._head = linear, attention, head

    def __call__(self, given: torch.Tensor) -> torch.Tensor:
        linear, rows = self._linear, self._attention.step.adapters
        out = F.linear(given, linear.weight, linear.bias)
        table = table_of(linear)
        if rows is None or table is None:
            return out
        flat, to = given.reshape(-1, given.shape[-1]), out.view(-1, out.shape[-1])
        for number in rows.numbers:
            if (low := table.by_number.get(number)) is not None:
                own = (rows.of(self._head) == number).nonzero().flatten()
                to[own] += (flat[own] @ low.down.T @ low.up * low.scale).to(to.dtype)
        return out
