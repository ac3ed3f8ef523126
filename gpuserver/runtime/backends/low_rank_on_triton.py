"""Additions of adapters to products, by Triton's kernels (triton_lora.py) on a CUDA device. Tests run it in Triton's
interpreter, and on a GPU.
"""

import struct
from collections.abc import Collection, Iterable
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
INPUTS: Final = 128
OUTPUTS: Final = 256
SPLIT_INPUTS: Final = 512
"""A product of so many is worth a program of its own: there are few pieces in a step, and many multiprocessors."""

SPLITS: Final = 8


def splits_of(inputs: int) -> int:
    return max(1, min(SPLITS, inputs // SPLIT_INPUTS))


class DeviceTable:
    """A table as kernels read it (triton_lora.py), at one place as long as it has so many entries."""

    def __init__(self, table: Table, device: torch.device) -> None:
        self.entries = torch.zeros((len(table.native), triton_lora.ENTRY.value), dtype=torch.int64, device=device)
        self._version = -1
        self.follow(table)

    def follow(self, table: Table) -> None:
        """Take over the changes since the last call."""
        if self._version == table.version:
            return
        self._version = table.version
        flat = [0] * self.entries.numel()
        for number, low in table.by_number.items():
            places = (0 if each is None else each.data_ptr() for each in (low.down, low.up, low.bias))
            at = number * triton_lora.ENTRY.value
            flat[at : at + triton_lora.ENTRY.value] = *places, low.rank, _bits(low.scale)
        (found,) = packed(self.entries.device, flat)
        self.entries.copy_(found.view_as(self.entries))


def _bits(scale: float) -> int:
    return int.from_bytes(struct.pack("<f", scale), "little")


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
            rows = AdapterRows(row, row, ([0], [0]), [0], RANKS, aligned=True)
            self.add(table, given, like.new_zeros(1, OUTPUTS), rows, False)

    def follow(self, tables: Iterable[Table]) -> None:
        """Before kernels that were launched for an earlier step read these."""
        for table in tables:
            if (known := self._tables.get(table)) is not None and len(known.entries) == len(table.native):
                known.follow(table)

    def _entries(self, table: Table, device: torch.device) -> torch.Tensor:
        known = self._tables.get(table)
        if known is None or len(known.entries) != len(table.native):
            known = self._tables[table] = DeviceTable(table, device)
        known.follow(table)
        return known.entries

    def add(self, table: Table, given: torch.Tensor, out: torch.Tensor, rows: AdapterRows, head: bool) -> None:
        """To ``out``, a row for each of ``given``."""
        if not table.by_number:
            return
        entries = self._entries(table, given.device)
        firsts, counts, numbers = rows.pieces(head, ROWS)
        if not len(firsts):
            return
        given = given if given.stride(-1) == 1 else given.contiguous()
        inputs, outputs = given.shape[1], out.shape[1]
        splits = splits_of(inputs)
        width = triton.cdiv(rows.most_rank, RANKS) * RANKS
        inner = given.new_empty((splits, len(given), width), dtype=torch.float32)
        triton_lora.shrink[len(firsts), width // RANKS, splits](
            given, entries, firsts, counts, numbers, inner, inputs, given.stride(0),
            inner.stride(0), inner.stride(1),
            ROWS=ROWS, RANKS=RANKS, COLUMNS=INPUTS, SPLITS=splits, ALIGNED=rows.aligned, WIDE=INTERPRETED, num_warps=2,
        )  # fmt: skip
        triton_lora.expand[len(firsts), triton.cdiv(outputs, OUTPUTS)](
            out, entries, firsts, counts, numbers, inner, outputs, out.stride(0),
            inner.stride(0), inner.stride(1),
            ROWS=ROWS, RANKS=RANKS, COLUMNS=OUTPUTS, SPLITS=splits, ALIGNED=rows.aligned, WIDE=INTERPRETED, num_warps=2,
        )  # fmt: skip
