"""Attention by Triton's kernels (triton_kernels.py) on a CUDA device. Tests run it in Triton's interpreter on the
CPU, compile it for GPUs, and on a GPU compare it with torch (docs/gpu.md).

Imported only where there is such a device, or by those tests.
"""

import subprocess
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple, Self

import torch
import triton

from dormouse.gpuserver.runtime.backends import triton_kernels
from dormouse.gpuserver.runtime.backends.low_rank_on_triton import ROWS as ROWS_OF_ADAPTER
from dormouse.gpuserver.runtime.backends.low_rank_on_triton import TritonLowRank
from dormouse.gpuserver.runtime.backends.protocol import Scores
from dormouse.gpuserver.runtime.low_rank import AdapterRows, Table
from dormouse.gpuserver.runtime.tables import KvLayout, StepPart, StepTables, tiles

INTERPRETED: Final = not isinstance(triton_kernels.attend, triton.JITFunction)

PIECE_TOKENS: Final = 64
"""Tokens of a prompt in one piece."""

ROWS: Final = 64
"""Of a program that has tokens of a prompt: enough to fill tensor cores, and few enough to leave registers for the
sums.
"""

MIN_ROWS: Final = 16
"""The fewest that a product of tensor cores has."""

SPLIT_TOKENS: Final = 256
"""A split has so many tokens of the context at least: with fewer, its launch and the merge cost more than they save."""

SPLITS: Final = 32

KEYS_NBYTES: Final = 16 << 10
"""Keys that a program has at once: with as many values, twice, and its queries, they fit the 99 KiB of shared memory
that a program has on the smallest GPUs of today.
"""


def trouble() -> str:
    """Why Triton cannot be used here, for it compiles a part of itself first; nothing if it can be."""
    try:
        triton.runtime.driver.active.get_current_target()
    except (OSError, RuntimeError, ImportError, subprocess.CalledProcessError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def splits_of(programs: int, longest: int, processors: int) -> int:
    """Into how many parts the contexts of single tokens are split, a power of two: until there are two programs for
    each multiprocessor, as long as that leaves enough of the ``longest`` context in each.
    """
    wanted = -(-2 * processors // max(1, programs))
    most = max(1, min(wanted, longest // SPLIT_TOKENS, SPLITS))
    return 1 << most.bit_length() - 1


@dataclass(frozen=True)
class TileShape:
    """The cut of programs: see triton_kernels.py."""

    width: int
    columns: int
    narrow: int  # rows of a program that has one token
    rows: int  # of another
    warps: int

    @classmethod
    def of(cls, layout: KvLayout, heads: int) -> Self:
        width = max(MIN_ROWS, triton.next_power_of_2(layout.head_dim))
        narrow = max(MIN_ROWS, triton.next_power_of_2(heads // layout.kv_heads))
        nbytes = width * layout.dtype.itemsize
        most = 64 if layout.dtype.itemsize == 2 else 32  # products without tensor cores take more registers
        columns = max(MIN_ROWS, min(most, KEYS_NBYTES // nbytes))
        rows = ROWS if nbytes <= 512 else ROWS // 2
        return cls(width, columns, narrow, max(rows, narrow), 4 if nbytes <= 128 else 8)


tile_shape = cache(TileShape.of)


class _OfStep(NamedTuple):
    """Values that are the same in all layers: the memory from some block of the step on, and its place. Triton asks the
    driver about each pointer that it is given, and behind most of the address space there is nothing. ``splits``: of
    single tokens.
    """

    memory: torch.Tensor
    anchor: int
    splits: int


class TritonBackend:
    """``processors``: how many multiprocessors the GPU has; 0: as torch says."""

    PIECE_TOKENS: Final = PIECE_TOKENS
    PIECE_ROWS: Final = ROWS_OF_ADAPTER
    """Rows beside each other of one adapter that a program has at most."""

    def __init__(self, layout: KvLayout, memory: torch.Tensor, processors: int = 0) -> None:
        self._layout, self._memory = layout, memory
        self._low_rank = TritonLowRank()
        self._known: tuple[StepTables, _OfStep] | None = None
        self._processors = processors or torch.cuda.get_device_properties(memory.device).multi_processor_count

    def warm(self, heads: int, capped: bool, inputs: Collection[int]) -> None:
        """Kernels are compiled, or loaded, for steps like these; as are products of matrices."""
        layout, device = replace(self._layout, layers=1), self._memory.device
        count = 2 * SPLIT_TOKENS // layout.block_tokens
        memory = torch.zeros(count * layout.layer_numel, dtype=layout.dtype, device=device)
        backend = TritonBackend(layout, memory, self._processors)
        blocks = [number * layout.layer_numel for number in range(count)]
        scores = Scores(1.0, 0, 1.0 if capped else 0.0)
        for tokens, context in ((1, 2 * SPLIT_TOKENS), (1, 1), (2, 2)):
            part = StepPart(0, tokens, context, blocks)
            step = StepTables([part], layout, device, backend.columns([part]))
            shape = tokens, layout.kv_heads, layout.head_dim
            rows = memory.new_zeros(shape).transpose(0, 1)
            backend.write(step, 0, rows, rows)
            query = memory.new_zeros(tokens, heads, layout.head_dim)
            angles = memory.new_zeros(1, tokens, layout.head_dim)
            backend.rotate(query.transpose(0, 1)[None], rows[None], angles, angles)
            backend.attend(step, 0, query.transpose(0, 1), torch.empty_like(query), scores)
        self._low_rank.warm(inputs, memory)
        square = memory.new_zeros(MIN_ROWS, MIN_ROWS)
        torch.mm(square, square)

    def columns(self, parts: Sequence[StepPart]) -> Sequence[Sequence[int]]:
        """Of single tokens, and of pieces of prompts."""
        single = tiles([part for part in parts if part.tokens == 1], 1)
        return *single, *tiles([part for part in parts if part.tokens > 1], PIECE_TOKENS)

    def splits(self, parts: Sequence[StepPart], rows: int) -> int:
        """Of the contexts of these that are single tokens, where there is room for so many."""
        longest = max((part.context for part in parts if part.tokens == 1), default=0)
        return splits_of(rows * self._layout.kv_heads, longest, self._processors)

    def _of(self, step: StepTables) -> "_OfStep":
        if self._known is None or self._known[0] is not step:
            anchor = step.parts[0].blocks[0]
            splits = self.splits(step.parts, len(step.columns[1]))
            self._known = step, _OfStep(self._memory[anchor:], anchor, splits)
        return self._known[1]

    def write(self, step: StepTables, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        layout = self._layout
        key, value = _rows(key), _rows(value)
        memory, anchor, _ = self._of(step)
        triton_kernels.write[key.shape[1], layout.kv_heads](
            key,
            value,
            memory,
            step.places,
            layer * layout.layer_numel - anchor,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            layout.kv_heads,
            layout.block_tokens,
            layout.head_dim,
            triton.next_power_of_2(layout.head_dim),
            num_warps=1,
        )

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Rotates` has it. The output lies as linear layers leave it: a token's heads beside each other."""
        query, key, cos, sin = (_rows(each[0]) for each in (q, k, cos, sin))
        (heads, tokens, dim), kv_heads = query.shape, len(key)
        query_out, key_out = query.new_empty(tokens, heads, dim), key.new_empty(tokens, kv_heads, dim)
        triton_kernels.rotate[tokens, heads + kv_heads](
            query,
            key,
            cos,
            sin,
            query_out,
            key_out,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            cos.stride(0),
            sin.stride(0),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            WIDTH=triton.next_power_of_2(dim // 2),
            num_warps=1,
        )
        return query_out.transpose(0, 1)[None], key_out.transpose(0, 1)[None]

    def add(self, table: Table, given: torch.Tensor, out: torch.Tensor, rows: AdapterRows, head: bool) -> None:
        self._low_rank.add(table, given, out, rows, head)

    def follow(self, tables: Iterable[Table]) -> None:
        """Make changes in these known to kernels that were launched before, and are captured."""
        self._low_rank.follow(tables)

    def attend(self, step: StepTables, layer: int, query: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        query = _rows(query)
        shape = tile_shape(self._layout, query.shape[0])
        single, pieces = step.columns[:5], step.columns[5:]
        if len(single[1]):
            self._launch(step, single, layer, query, out, scores, shape, shape.narrow, 1, self._of(step).splits)
        if len(pieces[1]):
            shares = triton.cdiv(PIECE_TOKENS, shape.rows // (query.shape[0] // self._layout.kv_heads))
            self._launch(step, pieces, layer, query, out, scores, shape, shape.rows, shares, 1)

    def _launch(
        self,
        step: StepTables,
        columns: Sequence[torch.Tensor],
        layer: int,
        query: torch.Tensor,
        out: torch.Tensor,
        scores: Scores,
        shape: TileShape,
        rows: int,
        shares: int,
        splits: int,
    ) -> None:
        """Of single tokens ``splits`` programs have each, of pieces ``shares``."""
        layout, heads = self._layout, query.shape[0]
        memory, anchor, _ = self._of(step)
        blocks, firsts, counts, contexts, starts = columns
        programs = len(firsts) * layout.kv_heads
        lines = programs * splits * rows if splits > 1 else 0
        scratch = query.new_empty((shape.width + 2) * lines, dtype=torch.float32)
        sums, tops, totals = torch.split(scratch, [shape.width * lines, lines, lines])
        triton_kernels.attend[len(firsts) * shares, layout.kv_heads, splits](
            query,
            out,
            memory,
            blocks,
            firsts,
            counts,
            contexts,
            starts,
            layer * layout.layer_numel - anchor,
            query.stride(0),
            query.stride(1),
            scores.scale,
            scores.cap,
            scores.window,
            sums,
            tops,
            totals,
            splits,
            HEADS=heads,
            KV_HEADS=layout.kv_heads,
            BLOCK_TOKENS=layout.block_tokens,
            DIM=layout.head_dim,
            WIDTH=shape.width,
            ROWS=rows,
            COLUMNS=shape.columns,
            SHARES=shares,
            CAPPED=scores.cap > 0,
            SPLIT=splits > 1,
            WIDE=INTERPRETED,
            num_warps=shape.warps,
        )
        if splits > 1:
            triton_kernels.merge[len(firsts), layout.kv_heads](
                out,
                firsts,
                counts,
                sums,
                tops,
                totals,
                splits,
                HEADS=heads,
                KV_HEADS=layout.kv_heads,
                DIM=layout.head_dim,
                WIDTH=shape.width,
                ROWS=rows,
                num_warps=shape.warps,
            )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """With the numbers of a head beside each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
