"""Attention by the C++ kernels on the CPU (attention.h), for single tokens and for prompts."""

import ctypes
from collections.abc import Collection, Sequence
from typing import Final

import torch

from dormouse.gpuserver.runtime import kernels
from dormouse.gpuserver.runtime.backends.oracle import TorchBackend
from dormouse.gpuserver.runtime.backends.protocol import Scores
from dormouse.gpuserver.runtime.low_rank import AdapterRows, Table
from dormouse.gpuserver.runtime.tables import KvLayout, StepPart, StepTables, tiles

ITEM_TOKENS: Final = 16
"""Tokens of a prompt that are one piece of work: they read keys and values once for all of them."""


_NO_SCORES: Final = Scores(1.0, 0, 0.0)


class NativeBackend:
    """``library``: of `kernels.load`."""

    def __init__(self, layout: KvLayout, memory: torch.Tensor, library: ctypes.CDLL) -> None:
        self.layout, self.library = layout, library
        self._memory = memory
        self._torch = TorchBackend(layout, memory)
        self._step: StepTables | None = None
        self._tables = kernels.NativeStep()
        self._shapes: dict[tuple[int, int, Scores], kernels.NativeShape] = {}  # two of each layer at most

    def warm(self, heads: int, capped: bool, inputs: Collection[int]) -> None:
        """Nothing."""

    def columns(self, parts: Sequence[StepPart]) -> Sequence[Sequence[int]]:
        return tiles(parts, ITEM_TOKENS)

    def tables(self, step: StepTables) -> int:
        """The address of this step's tables for the kernels."""
        if step is not self._step:
            columns = (step.places, *step.columns)
            addresses = (column.data_ptr() for column in columns)
            rows = step.adapters
            adapters, most_rank = (None, 0) if rows is None else (rows.tokens.data_ptr(), rows.most_rank)
            sizes = len(step.places), len(step.columns[1]), most_rank
            self._tables = kernels.NativeStep(self._memory.data_ptr(), *addresses, adapters, *sizes)
            self._step = step  # kept: the tables lie in its tensors
        return ctypes.addressof(self._tables)

    def shape(self, layer: int, heads: int, scores: Scores) -> kernels.NativeShape:
        """Of a layer's attention."""
        if (known := self._shapes.get((layer, heads, scores))) is None:
            layout = self.layout
            sizes = (heads, layout.kv_heads, layout.head_dim, layout.block_tokens)
            known = kernels.NativeShape(*sizes, layer * layout.layer_numel, scores.window, scores.scale, scores.cap)
            self._shapes[layer, heads, scores] = known
        return known

    def write(self, step: StepTables, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if key.stride(-1) != 1 or value.stride(-1) != 1:
            self._torch.write(step, layer, key, value)
            return
        shape = self.shape(layer, self.layout.kv_heads, _NO_SCORES)
        self.library.dormouse_write(
            key.dtype is torch.bfloat16, ctypes.addressof(shape), self.tables(step), key.data_ptr(), key.stride(0),
            key.stride(1), value.data_ptr(), value.stride(0), value.stride(1),
        )  # fmt: skip

    def add(self, table: Table, given: torch.Tensor, out: torch.Tensor, rows: AdapterRows, head: bool) -> None:
        """GPT-2's: to all others the products themselves add it."""
        self._torch.add(table, given, out, rows, head)

    def attend(self, step: StepTables, layer: int, query: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        shape = self.shape(layer, query.shape[0], scores)
        query = query.transpose(0, 1).contiguous()
        self.library.dormouse_attend(
            query.dtype is torch.bfloat16, ctypes.addressof(shape), self.tables(step), query.data_ptr(), out.data_ptr()
        )
