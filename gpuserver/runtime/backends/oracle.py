"""Attention by torch alone: runs everywhere, and is the reference for the kernels."""

from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F

from dormouse.gpuserver.runtime.backends.protocol import Scores
from dormouse.gpuserver.runtime.low_rank import AdapterRows, Table, add_each
from dormouse.gpuserver.runtime.tables import KvLayout, StepPart, StepTables


class TorchBackend:
    """``memory``: as of `BlockAttention`."""

    def __init__(self, layout: KvLayout, memory: torch.Tensor) -> None:
        self.layout, self.memory = layout, memory

    def warm(self, heads: int, capped: bool, inputs: Collection[int]) -> None:
        """Nothing."""

    def columns(self, parts: Sequence[StepPart]) -> Sequence[Sequence[int]]:
        return ()

    def write(self, step: StepTables, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        layout, device = self.layout, self.memory.device
        tile = layout.block_tokens * layout.head_dim
        heads = torch.arange(layout.kv_heads, device=device)[:, None, None] * tile
        dims = torch.arange(layout.head_dim, device=device)
        places = step.places[None, :, None] + layer * layout.layer_numel + heads + dims
        self.memory[places] = key
        self.memory[places + layout.kv_heads * tile] = value

    def attend(self, step: StepTables, layer: int, query: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        for part in step.parts:
            self.attend_part(part, layer, query, out, scores)

    def add(self, table: Table, given: torch.Tensor, out: torch.Tensor, rows: AdapterRows, head: bool) -> None:
        add_each(table, given, out, rows, head)

    def attend_part(self, part: StepPart, layer: int, query: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        """Only the rows of this part."""
        rows = slice(part.row, part.row + part.tokens)
        out[rows] = self._part(part, layer, query[:, rows], scores)

    def _part(self, part: StepPart, layer: int, query: torch.Tensor, scores: Scores) -> torch.Tensor:
        """``[tokens, heads, dim]``"""
        key, value = self._gather(part, layer)
        groups = query.shape[0] // key.shape[0]
        key, value = (each.repeat_interleave(groups, 0) for each in (key, value))
        first = part.context - part.tokens
        at = torch.arange(part.context, device=query.device)
        own = at[first:, None]
        mask = at <= own
        if scores.window:
            mask &= at > own - scores.window
        if scores.cap:
            found = torch.tanh(query @ key.transpose(1, 2) * scores.scale / scores.cap) * scores.cap
            weights = found.masked_fill(~mask, float("-inf")).float().softmax(-1).to(query.dtype)
            return (weights @ value).transpose(0, 1)
        plain = not first and not scores.window
        result = F.scaled_dot_product_attention(
            query[None], key[None], value[None], None if plain else mask, is_causal=plain, scale=scores.scale
        )
        return result[0].transpose(0, 1)

    def _gather(self, part: StepPart, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[kv_heads, context, dim]`` of a sequence."""
        layout = self.layout
        shape = (2, layout.kv_heads, layout.block_tokens, layout.head_dim)
        used = part.blocks[: -(-part.context // layout.block_tokens)]
        starts = (offset + layer * layout.layer_numel for offset in used)
        blocks = [self.memory[start : start + layout.layer_numel].view(shape) for start in starts]
        both = torch.cat(blocks, dim=2)[:, :, : part.context]
        return both[0], both[1]
