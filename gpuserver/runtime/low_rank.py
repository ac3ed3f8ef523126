"""Additions of adapters to linear layers and embeddings (LoRA): a low-rank product for each row, by the number of the
row's adapter.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from dormouse.gpuserver.runtime import kernels
from dormouse.gpuserver.runtime.packing import packed

MAX: Final = 512
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
        """The addition to a module's output for this input: rows, or tokens."""
        low = given @ self.down.T if given.is_floating_point() else F.embedding(given, self.down)
        found = low @ self.up
        return (found if self.bias is None else found + self.bias) * self.scale


class Table:
    """The changes of adapters to one product, by their numbers."""

    def __init__(self, size: int) -> None:
        self.by_number: dict[int, LowRank] = {}
        self.version = 0  # it has been changed so often
        self.native: Any = (kernels.NativeLora * size)()

    def resize(self, size: int) -> None:
        """The kernels find it elsewhere then."""
        if size > len(self.native):
            self.version += 1
            self.native = (kernels.NativeLora * size)(*self.native)

    def put(self, number: int, low: LowRank) -> None:
        """The addition of one adapter."""
        self.version += 1
        self.by_number[number] = low
        entry = self.native[number]
        entry.a, entry.b, entry.rank, entry.scale = low.down.data_ptr(), low.up.data_ptr(), low.rank, low.scale
        entry.added = None if low.bias is None else low.bias.data_ptr()

    def put_bias(self, number: int, bias: torch.Tensor) -> None:
        """The kernels add this one and not the product's own."""
        self.native[number].bias = bias.data_ptr()

    def drop(self, number: int) -> None:
        self.version += 1
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
    """The number of each row's adapter, -1 without one: of all tokens of a step, and of those that want logits.
    ``owners`` are the same numbers on the host: asking the device for them would wait for all that it has to do.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        kept: torch.Tensor,
        owners: tuple[Sequence[int], Sequence[int]],
        numbers: Iterable[int],
        most_rank: int,
        pieces: Mapping[tuple[bool, int], tuple[torch.Tensor, ...]] = MappingProxyType({}),
        aligned: bool = False,
    ) -> None:
        self.tokens, self.kept = tokens, kept
        self.owners = owners
        self.numbers = frozenset(numbers)
        self.most_rank, self.aligned = most_rank, aligned
        self._at: dict[tuple[bool, frozenset[int]], torch.Tensor] = {}
        self._pieces = dict(pieces)

    def of(self, kept: bool) -> torch.Tensor:
        return self.kept if kept else self.tokens

    def rows(self, numbers: Collection[int], kept: bool) -> list[int]:
        """The rows of these adapters."""
        return [row for row, number in enumerate(self.owners[kept]) if number in numbers]

    def at(self, numbers: Sequence[int] | frozenset[int], kept: bool) -> torch.Tensor:
        """The same on the device."""
        key = kept, frozenset(numbers)
        if (found := self._at.get(key)) is None:
            (found,) = packed(self.tokens.device, self.rows(key[1], kept))
            self._at[key] = found
        return found

    def only(self, numbers: frozenset[int], named: frozenset[int]) -> "AdapterRows":
        """As if the others were not in the step. ``named``: those of the numbers that are an adapter's."""
        tokens, kept = (self.of(each)[self.at(numbers, each)] for each in (False, True))
        owners = [[number for number in self.owners[each] if number in numbers] for each in (False, True)]
        return AdapterRows(tokens, kept, (owners[0], owners[1]), named, self.most_rank, aligned=self.aligned)

    def pieces(self, kept: bool, most: int) -> tuple[torch.Tensor, ...]:
        """See `pieces_of`; on the device."""
        if (found := self._pieces.get((kept, most))) is None:
            found = self._pieces[kept, most] = packed(self.tokens.device, *pieces_of(self.owners[kept], most))
        return found


def pieces_of(owners: Sequence[int], most: int) -> list[list[int]]:
    """At most so many rows beside each other of one adapter: the first of each, how many, and whose."""
    made: list[list[int]] = []
    for row, number in enumerate(owners):
        if number >= 0 and row and owners[row - 1] == number and made[-1][1] < most:
            made[-1][1] += 1
        elif number >= 0:
            made.append([row, 1, number])
    return [[each[which] for each in made] for which in range(3)]


def add_each(table: Table, given: torch.Tensor, out: torch.Tensor, rows: AdapterRows, head: bool) -> None:
    """The additions of adapters to ``out``, a row for each of ``given``, by torch."""
    for number in sorted(rows.numbers.intersection(table.by_number)):
        at = rows.at([number], head)
        out[at] += table.by_number[number].of(given[at]).to(out.dtype)
