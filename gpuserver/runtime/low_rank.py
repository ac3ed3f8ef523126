"""What adapters add to linear layers and embeddings (LoRA): a low-rank product for each row, by the number of the row's
adapter.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from dormouse.gpuserver.runtime import kernels

MOST: Final = 512
"""Adapters in one runtime."""

_TABLE: Final = "_dormouse_low_rank"


class LowRank(NamedTuple):
    """To one product: ``scale * (up.T @ down @ x + bias)``. ``down``: [rank][inputs], ``up``: [rank][outputs]. To an
    embedding: ``scale * (up.T @ down[token])``. All contiguous, of the model's dtype and on its device, as they lie in
    the pool.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float
    bias: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return len(self.up)

    def of(self, given: torch.Tensor) -> torch.Tensor:
        """What is added to what a module makes of this: rows, or tokens."""
        low = given @ self.down.T if given.is_floating_point() else F.embedding(given, self.down)
        found = low @ self.up
        return (found if self.bias is None else found + self.bias) * self.scale


class Table:
    """What adapters change of one product, by their numbers."""

    def __init__(self, size: int) -> None:
        self.by_number: dict[int, LowRank] = {}
        self.native: Any = (kernels.NativeLora * size)()

    def resize(self, size: int) -> None:
        """The kernels find it elsewhere then."""
        if size > len(self.native):
            self.native = (kernels.NativeLora * size)(*self.native)

    def put(self, number: int, low: LowRank) -> None:
        """What one adds."""
        self.by_number[number] = low
        entry = self.native[number]
        entry.a, entry.b, entry.rank, entry.scale = low.down.data_ptr(), low.up.data_ptr(), low.rank, low.scale
        entry.added = None if low.bias is None else low.bias.data_ptr()

    def put_bias(self, number: int, bias: torch.Tensor) -> None:
        """The kernels add this one and not the product's own."""
        self.native[number].bias = bias.data_ptr()

    def drop(self, number: int) -> None:
        self.by_number.pop(number, None)
        self.native[number] = kernels.NativeLora()


def table_of(module: nn.Module) -> Table | None:
    """None as long as no adapter has changed it."""
    found: Table | None = module.__dict__.get(_TABLE)
    return found


def made_table(module: nn.Module, size: int) -> Table:
    if (found := table_of(module)) is None:
        found = module.__dict__[_TABLE] = Table(size)
    return found


class AdapterRows:
    """The number of each row's adapter, -1 without one: of all tokens of a step, and of those that want logits."""

    def __init__(self, tokens: torch.Tensor, kept: torch.Tensor, numbers: Iterable[int], most_rank: int) -> None:
        self.tokens, self.kept = tokens, kept
        self.numbers = frozenset(numbers)
        self.most_rank = most_rank
        self._at: dict[tuple[bool, frozenset[int]], torch.Tensor] = {}

    def of(self, kept: bool) -> torch.Tensor:
        return self.kept if kept else self.tokens

    def at(self, numbers: Sequence[int] | frozenset[int], kept: bool) -> torch.Tensor:
        """Which rows are those of these adapters."""
        key = kept, frozenset(numbers)
        if (found := self._at.get(key)) is None:
            wanted = torch.tensor(sorted(numbers), device=self.tokens.device)
            found = self._at[key] = torch.isin(self.of(kept), wanted).nonzero().flatten()
        return found
