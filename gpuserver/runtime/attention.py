"""Attention over the block table, as `transformers` calls it, for a step that has tokens of many sequences in one row.

Keys and values of the step's tokens are written to their blocks first, in each layer. Then each token sees those of its
sequence up to itself. A backend (backends/), chosen by the device of the memory, computes that.
"""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

import torch

from dormouse.gpuserver.runtime import kernels
from dormouse.gpuserver.runtime.backends.native import NativeBackend
from dormouse.gpuserver.runtime.backends.oracle import TorchBackend
from dormouse.gpuserver.runtime.backends.protocol import AttentionBackend, Scores
from dormouse.gpuserver.runtime.packing import Pack, packed
from dormouse.gpuserver.runtime.tables import KvLayout, StepPart, StepTables


def backend_for(layout: KvLayout, memory: torch.Tensor) -> AttentionBackend:
    """The fastest that there is."""
    if memory.device.type == "cuda" and importlib.util.find_spec("triton") is not None:  # torch for CUDA brings it
        from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend, trouble

        if not (why := trouble()):
            return TritonBackend(layout, memory)
        print(f"language models will be slow: Triton cannot be used: {why}", file=sys.stderr)
    fits = memory.device.type == "cpu" and layout.block_tokens % kernels.SPAN == 0
    if fits and (library := kernels.load()) is not None:
        return NativeBackend(layout, memory, library)
    return TorchBackend(layout, memory)


class BlockAttention:
    """Of one runtime. ``memory``: all of the address space that blocks can lie in, one-dimensional; only the memory of
    blocks is ever touched.
    """

    def __init__(self, layout: KvLayout, memory: torch.Tensor, backend: AttentionBackend | None = None) -> None:
        self.layout, self.memory = layout, memory
        self.step: StepTables | None = None
        self.backend = backend or backend_for(layout, memory)

    def begin(
        self, parts: Sequence[StepPart], inputs: Sequence[Sequence[int]] = (), pack: Pack = packed
    ) -> list[torch.Tensor]:
        """A step of these. Returns the inputs as tensors on the memory's device, where they come with the tables."""
        columns = self.backend.columns(parts)
        self.step = StepTables(parts, self.layout, self.memory.device, columns, inputs, pack)
        return self.step.inputs

    def end(self) -> None:
        self.step = None

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
        self.backend.write(step, layer, key[0], value[0])
        out = torch.empty_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
        self.backend.attend(step, layer, query[0], out, Scores(scale, sliding_window or 0, softcap or 0.0))
        return out[None], None
