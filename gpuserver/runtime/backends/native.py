"""Attention by the C++ kernels on the CPU (kernels.cpp) for single tokens, and by torch for prompts."""

import ctypes
from collections.abc import Sequence
from typing import Final

import torch

from dormouse.gpuserver.runtime.backends.oracle import TorchBackend
from dormouse.gpuserver.runtime.backends.protocol import Scores
from dormouse.gpuserver.runtime.tables import KvLayout, StepPart, StepTables, tiles

FEW_TOKENS: Final = 8
"""Parts of so many tokens go to the kernels: for more, torch's matrix multiplications are faster."""


class NativeBackend:
    """``library``: of `kernels.load`."""

    def __init__(self, layout: KvLayout, memory: torch.Tensor, library: ctypes.CDLL) -> None:
        self._layout, self._memory, self._library = layout, memory, library
        self._torch = TorchBackend(layout, memory)

    def columns(self, parts: Sequence[StepPart]) -> Sequence[Sequence[int]]:
        blocks, rows, _, contexts, starts = tiles([part for part in parts if part.tokens <= FEW_TOKENS], 1)
        return blocks, starts, contexts, rows

    def write(self, step: StepTables, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        if key.stride(-1) != 1 or value.stride(-1) != 1:
            self._torch.write(step, layer, key, value)
            return
        layout = self._layout
        self._library.dormouse_write(
            key.element_size(), key.data_ptr(), value.data_ptr(), self._memory.data_ptr(), step.places.data_ptr(),
            key.shape[1], layout.kv_heads, layout.head_dim, layout.block_tokens, layer * layout.layer_numel,
            key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        )  # fmt: skip

    def attend(self, step: StepTables, layer: int, query: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        if len(step.columns[0]):
            self._few(step, layer, query, out, scores)
        for part in step.parts:
            if part.tokens > FEW_TOKENS:
                self._torch.attend_part(part, layer, query, out, scores)

    def _few(self, step: StepTables, layer: int, query: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        layout = self._layout
        blocks, starts, contexts, rows = step.columns
        whole = len(rows) == query.shape[1]  # only single tokens: no copy
        q = query.transpose(0, 1)
        q = (q if whole else q[rows]).contiguous()
        result = out if whole else torch.empty_like(q)
        self._library.dormouse_attend(
            q.dtype is torch.bfloat16, q.data_ptr(), result.data_ptr(), self._memory.data_ptr(), blocks.data_ptr(),
            starts.data_ptr(), contexts.data_ptr(), len(rows), q.shape[1], layout.kv_heads, q.shape[2],
            layout.block_tokens, layer * layout.layer_numel, scores.window, ctypes.c_float(scores.scale),
            ctypes.c_float(scores.cap),
        )  # fmt: skip
        if not whole:
            out[rows] = result
