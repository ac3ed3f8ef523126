"""What adapters add to products, by Triton's kernels (triton_lora.py) on a CUDA device. Tests run it in Triton's
interpreter, and on a GPU.
"""

from collections.abc import Collection
from typing import Final
from weakref import WeakKeyDictionary

import torch
import triton

from dormouse.gpuserver.runtime.backends import triton_lora
from dormouse.gpuserver.runtime.low_rank import AdapterRows, LowRank, Table
from dormouse.gpuserver.runtime.packing import packed

INTERPRETED: Final = not isinstance(triton_lora.shrink, triton.JITFunction)

ROWS: Final = 16
"""Of a piece: the fewest that a product of tensor cores has. Most pieces are of single tokens."""

RANKS: Final = 16
INPUTS: Final = 64
OUTPUTS: Final = 64
SPLIT_INPUTS: Final = 512
"""A product of so many is worth a program of its own: there are few pieces in a step, and many multiprocessors."""

SPLITS: Final = 8


def splits_of(inputs: int) -> int:
    return max(1, min(SPLITS, inputs // SPLIT_INPUTS))


class DeviceTable:
    """A table as kernels read it: offsets of a, b and the bias from the base, which is one of these tensors: there is
    memory behind it, which Triton wants of a pointer; ranks; and scales.
    """

    def __init__(self, table: Table) -> None:
        self.base = base = next(iter(table.by_number.values())).down
        size, device, itemsize = len(table.native), base.device, base.element_size()
        offsets = [[0, 0, triton_lora.NOTHING.value] for _ in range(size)]
        ranks, scales = [0] * size, [0.0] * size
        for number, low in table.by_number.items():
            for at, tensor in enumerate((low.down, low.up, *(() if low.bias is None else (low.bias,)))):
                offsets[number][at] = (tensor.data_ptr() - base.data_ptr()) // itemsize
            ranks[number], scales[number] = low.rank, low.scale
        self.version = table.version
        self.offsets = torch.tensor(offsets, device=device)
        self.ranks = torch.tensor(ranks, device=device)
        self.scales = torch.tensor(scales, dtype=torch.float32, device=device)


class TritonLowRank:
    """See the module."""

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[Table, DeviceTable] = WeakKeyDictionary()

    def warm(self, inputs: Collection[int], like: torch.Tensor) -> None:
        """Kernels for products of these widths, of the type and on the device of ``like``."""
        for width in {splits_of(width): width for width in inputs}.values():
            table, given = Table(1), like.new_zeros(1, width)
            table.put(0, LowRank(like.new_zeros(RANKS, width), like.new_zeros(RANKS, OUTPUTS), 1.0))
            (row,) = packed(like.device, [0])
            self.add(table, given, like.new_zeros(1, OUTPUTS), AdapterRows(row, row, ([0], [0]), [0], RANKS), False)

    def add(self, table: Table, given: torch.Tensor, out: torch.Tensor, rows: AdapterRows, head: bool) -> None:
        """To ``out``, a row for each of ``given``."""
        if not table.by_number:
            return
        at = self._tables.get(table)
        if at is None or at.version != table.version:
            at = self._tables[table] = DeviceTable(table)
        firsts, counts, numbers = rows.pieces(head, ROWS)
        if not len(firsts):
            return
        given = given if given.stride(-1) == 1 else given.contiguous()
        inputs, outputs = given.shape[1], out.shape[1]
        splits = splits_of(inputs)
        width = triton.cdiv(rows.most_rank, RANKS) * RANKS
        inner = given.new_empty((splits, len(given), width), dtype=torch.float32)
        triton_lora.shrink[len(firsts), width // RANKS, splits](
            given, at.base, at.offsets, at.ranks, firsts, counts, numbers, inner, inputs, given.stride(0),
            inner.stride(0), inner.stride(1),
            ROWS=ROWS, RANKS=RANKS, COLUMNS=INPUTS, SPLITS=splits, WIDE=INTERPRETED, num_warps=2,
        )  # fmt: skip
        triton_lora.expand[len(firsts), triton.cdiv(outputs, OUTPUTS)](
            out, at.base, at.offsets, at.ranks, at.scales, firsts, counts, numbers, inner, outputs, out.stride(0),
            inner.stride(0), inner.stride(1),
            ROWS=ROWS, RANKS=RANKS, COLUMNS=OUTPUTS, SPLITS=splits, WIDE=INTERPRETED, num_warps=2,
        )  # fmt: skip
