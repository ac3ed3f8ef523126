"""What attention must know of one step: where its tokens' keys and values lie, and which tokens see which. No attention
here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

FEW_TOKENS: Final = 8
"""Parts of so many tokens go to the C++ kernels: for more, torch's matrix multiplications are faster."""


@dataclass(frozen=True, kw_only=True)
class KvLayout:
    """Where keys and values lie in a block: per layer ``[2][kv_heads][block_tokens][head_dim]``."""

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

    @property
    def token_nbytes(self) -> int:
        return self.block_nbytes // self.block_tokens


@dataclass(frozen=True)
class StepPart:
    """``tokens`` tokens of one sequence, in the row from ``row`` on, with ``context`` tokens up to the last of them.
    ``blocks``: the offset of each of its blocks, in elements.
    """

    row: int
    tokens: int
    context: int
    blocks: Sequence[int]


def packed(device: torch.device, *columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """These as tensors of int64 on the device, which takes them in one copy."""
    flat = torch.tensor([number for column in columns for number in column], dtype=torch.int64)
    if device.type == "cuda":
        flat = flat.pin_memory()  # else the copy would wait for all that the stream has been given
    return torch.split(flat.to(device, non_blocking=True), [len(column) for column in columns])


class StepTables:
    """The tables of one step, made once for all layers. ``inputs``: what the model itself takes; they travel with them.

    ``places``: of each token's keys, in elements, of the first layer and head. The rest is of the tokens in ``few``: in
    which ``rows`` they lie, how long their ``contexts`` are, and where in ``blocks`` theirs begin.
    """

    def __init__(
        self,
        parts: Sequence[StepPart],
        layout: KvLayout,
        device: torch.device | None = None,
        inputs: Sequence[Sequence[int]] = (),
    ) -> None:
        size = layout.block_tokens
        self.parts = parts
        self.few = [part for part in parts if part.tokens <= FEW_TOKENS]
        self.many = [part for part in parts if part.tokens > FEW_TOKENS]
        places: list[int] = []
        for part in parts:
            first = part.context - part.tokens
            places += [part.blocks[at // size] + at % size * layout.head_dim for at in range(first, part.context)]
        blocks: list[int] = []
        starts: list[int] = []
        contexts: list[int] = []
        rows: list[int] = []
        for part in self.few:
            for token in range(part.tokens):
                starts.append(len(blocks))
                contexts.append(part.context - part.tokens + token + 1)
                rows.append(part.row + token)
            blocks += part.blocks
        columns = packed(device or torch.device("cpu"), places, blocks, starts, contexts, rows, *inputs)
        self.places, self.blocks, self.starts, self.contexts, self.rows, *self.inputs = columns
