"""Attention over the block table, as `transformers` calls it, for a step that has tokens of many sequences in one row.

Keys and values of the step's tokens are written to their blocks first, in each layer. Then each token sees those of its
sequence up to itself. Single tokens go to the C++ kernels (kernels.cpp); prompts, and everything where these cannot be
built, to torch.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F

from dormouse.gpuserver.runtime import kernels

FEW_TOKENS: Final = 8
"""Parts of so many tokens go to the kernels: for more, torch's matrix multiplications are faster."""


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


class StepTables:
    """The tables of one step, made once for all layers."""

    def __init__(self, parts: Sequence[StepPart], layout: KvLayout) -> None:
        size = layout.block_tokens
        self.parts = parts
        self.few = [part for part in parts if part.tokens <= FEW_TOKENS]
        self.many = [part for part in parts if part.tokens > FEW_TOKENS]
        places: list[int] = []
        for part in parts:
            first = part.context - part.tokens
            places += [part.blocks[at // size] + at % size * layout.head_dim for at in range(first, part.context)]
        self.places = torch.tensor(places, dtype=torch.int64)
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
        self.blocks = torch.tensor(blocks, dtype=torch.int64)
        self.starts = torch.tensor(starts, dtype=torch.int64)
        self.contexts = torch.tensor(contexts, dtype=torch.int64)
        self.rows = torch.tensor(rows, dtype=torch.int64)


class BlockAttention:
    """Of one runtime. ``memory``: all of the address space that blocks can lie in, one-dimensional; only what blocks
    have is ever touched. ``native``: use the C++ kernels if they can be built.
    """

    def __init__(self, layout: KvLayout, memory: torch.Tensor, native: bool = True) -> None:
        self.layout, self.memory = layout, memory
        self.step: StepTables | None = None
        self._library = kernels.load() if native and memory.device.type == "cpu" else None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """``transformers``' attention interface: query ``[1, heads, tokens, dim]``, key and value with their own heads;
        returns ``[1, tokens, heads, dim]``.
        """
        assert self.step is not None, "a step is under way"
        step, layer = self.step, int(module.layer_idx)  # type: ignore[arg-type]
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        window, cap = sliding_window or 0, softcap or 0.0
        self._write(step, layer, key[0], value[0])
        out = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
        if step.few:
            self._few(step, layer, query[0], out, scale, window, cap)
        for part in step.many:
            rows = slice(part.row, part.row + part.tokens)
            out[rows] = self._torch(part, layer, query[0][:, rows], scale, window, cap)
        return out[None], None

    def _write(self, step: StepTables, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        layout = self.layout
        if self._library is not None and key.stride(-1) == value.stride(-1) == 1:
            self._library.dormouse_write(
                key.element_size(), key.data_ptr(), value.data_ptr(), self.memory.data_ptr(), step.places.data_ptr(),
                key.shape[1], layout.kv_heads, layout.head_dim, layout.block_tokens, layer * layout.layer_numel,
                key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            )  # fmt: skip
            return
        tile = layout.block_tokens * layout.head_dim
        heads = torch.arange(layout.kv_heads)[:, None, None] * tile
        places = step.places[None, :, None] + layer * layout.layer_numel + heads + torch.arange(layout.head_dim)
        self.memory[places] = key
        self.memory[places + layout.kv_heads * tile] = value

    def _few(
        self,
        step: StepTables,
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int,
        cap: float,
    ) -> None:
        layout = self.layout
        if self._library is None:
            for part in step.few:
                rows = slice(part.row, part.row + part.tokens)
                out[rows] = self._torch(part, layer, query[:, rows], scale, window, cap)
            return
        whole = len(step.rows) == query.shape[1]  # only single tokens: no copy
        q = query.transpose(0, 1)
        q = (q if whole else q[step.rows]).contiguous()
        result = out if whole else torch.empty_like(q)
        self._library.dormouse_attend(
            q.dtype is torch.bfloat16, q.data_ptr(), result.data_ptr(), self.memory.data_ptr(), step.blocks.data_ptr(),
            step.starts.data_ptr(), step.contexts.data_ptr(), len(step.rows), q.shape[1], layout.kv_heads, q.shape[2],
            layout.block_tokens, layer * layout.layer_numel, window, ctypes.c_float(scale), ctypes.c_float(cap),
        )  # fmt: skip
        if not whole:
            out[step.rows] = result

    def _torch(
        self, part: StepPart, layer: int, query: torch.Tensor, scale: float, window: int, cap: float
    ) -> torch.Tensor:
        """One part, ``[tokens, heads, dim]``: the kernels' oracle."""
        key, value = self._gather(part, layer)
        groups = query.shape[0] // key.shape[0]
        key, value = (each.repeat_interleave(groups, 0) for each in (key, value))
        first = part.context - part.tokens
        at = torch.arange(part.context)
        own = torch.arange(first, part.context)[:, None]
        mask = at <= own
        if window:
            mask &= at > own - window
        if cap:
            scores = torch.tanh(query @ key.transpose(1, 2) * scale / cap) * cap
            weights = scores.masked_fill(~mask, float("-inf")).float().softmax(-1).to(query.dtype)
            return (weights @ value).transpose(0, 1)
        plain = not first and not window
        result = F.scaled_dot_product_attention(
            query[None], key[None], value[None], None if plain else mask, is_causal=plain, scale=scale
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
