"""The tables of one step for attention: the places of its tokens' keys and values, and which tokens see which. No
attention here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dormouse.gpuserver.runtime.low_rank import AdapterRows
from dormouse.gpuserver.runtime.packing import Pack, packed


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """The layout of keys and values in a block: per layer ``[2][kv_heads][block_tokens][head_dim]``."""

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def layer_numel(self) -> int:
        return 2 * self.kv_heads * self.block_tokens * self.head_dim

    @property
    def block_nbytes(self) -> int:
        return self.layers * self.layer_numel * self.dtype.itemsize


@dataclass(frozen=True)
class StepPart:
    """``tokens`` tokens of one sequence, in the row from ``row`` on, with ``context`` tokens up to the last of them.
    ``blocks``: the offset of each of its blocks, in elements; ``adapter``: its number, -1 without one.
    """

    row: int
    tokens: int
    context: int
    blocks: Sequence[int]
    adapter: int = -1


def tiles(parts: Sequence[StepPart], most_tokens: int) -> tuple[list[int], ...]:
    """The parts cut into pieces of at most so many tokens: the offsets of all their blocks; and of each piece its row,
    its tokens, the context up to the last of them, and where its sequence's blocks begin.
    """
    blocks: list[int] = []
    pieces: list[tuple[int, int, int, int]] = []
    for part in parts:
        first = part.context - part.tokens
        for start in range(0, part.tokens, most_tokens):
            tokens = min(most_tokens, part.tokens - start)
            pieces.append((part.row + start, tokens, first + start + tokens, len(blocks)))
        blocks += part.blocks
    return blocks, *([piece[column] for piece in pieces] for column in range(4))


class StepTables:
    """The tables of one step, made once for all layers. ``inputs``: those of the model itself, ``columns``: those of
    the backend; all travel to the device together.

    ``places``: of each token's keys, in elements, of the first layer and head.
    """

    def __init__(
        self,
        parts: Sequence[StepPart],
        layout: KvLayout,
        device: torch.device,
        columns: Sequence[Sequence[int]] = (),
        inputs: Sequence[Sequence[int]] = (),
        pack: Pack = packed,
    ) -> None:
        size = layout.block_tokens
        self.parts = parts
        places: list[int] = []
        for part in parts:
            first = part.context - part.tokens
            places += [part.blocks[at // size] + at % size * layout.head_dim for at in range(first, part.context)]
        self.places, *rest = pack(device, places, *columns, *inputs)
        self.columns, self.inputs = rest[: len(columns)], rest[len(columns) :]
        self.numbers = frozenset(part.adapter for part in parts)
        self.adapters: AdapterRows | None = None
        self.groups: dict[frozenset[int], StepTables] = {}  # groups.py
