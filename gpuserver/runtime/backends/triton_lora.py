# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Kernels in Triton's language for the additions of adapters to products (LoRA), in steps with rows of many adapters.

A piece is some rows beside each other of one adapter, or none. `shrink` multiplies them by the adapter's first matrix,
`expand` multiplies the result by the second one, and adds it. ``entries`` have the addresses of each adapter's tensors.
Sums are of the same numbers in the same order, whatever else is in the step.
"""

import triton
import triton.language as tl

ENTRY = tl.constexpr(5)
"""Numbers of an adapter: addresses of its two matrices and of a bias or 0, its rank, and the bits of its scale in fp32.
With a rank of 0 it adds nothing here.
"""

ANYWHERE = ("entries", "rows", "counts", "numbers")
"""Pointers that may be aligned in any way: one kernel for all."""


@triton.jit
def _tensor(address, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The start of one of an adapter's tensors. Those ``ALIGNED`` to 16 bytes are read in wide words."""
    pointer = address.to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, [16]) if ALIGNED else pointer


@triton.jit(do_not_specialize=ANYWHERE)
def shrink(
    given,
    entries,
    rows,
    counts,
    numbers,
    inner,
    inputs,
    given_row,
    inner_split,
    inner_row,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """``ROWS`` times ``RANKS`` numbers of one piece, of one of ``SPLITS`` parts of the inputs."""
    piece, some, split = tl.program_id(0), tl.program_id(1) * RANKS, tl.program_id(2)
    count = tl.load(counts + piece)
    entry = entries + tl.load(numbers + piece) * ENTRY
    rank = tl.load(entry + 3).to(tl.int32)
    if (count > 0) & (some < rank):
        row = tl.load(rows + piece)
        lines, places, columns = tl.arange(0, ROWS), some + tl.arange(0, RANKS), tl.arange(0, COLUMNS)
        x = given + (row + lines)[:, None] * given_row + columns[None, :]
        matrix = _tensor(tl.load(entry), given.dtype.element_ty, ALIGNED)
        a = matrix + places[None, :].to(tl.int64) * inputs + columns[:, None]
        length = tl.cdiv(tl.cdiv(inputs, SPLITS), COLUMNS) * COLUMNS
        end = tl.minimum(inputs, (split + 1) * length)
        found = tl.zeros([ROWS, RANKS], tl.float32)
        for start in range(split * length, end, COLUMNS):
            inside = start + columns < end
            left = tl.load(x + start, mask=(lines < count)[:, None] & inside[None, :], other=0.0)
            right = tl.load(a + start, mask=(places < rank)[None, :] & inside[:, None], other=0.0)
            if WIDE:
                left, right = left.to(tl.float32), right.to(tl.float32)
            found += tl.dot(left, right, input_precision="ieee")
        to = inner + split * inner_split + (row + lines)[:, None] * inner_row + places[None, :]
        tl.store(to, found, mask=(lines < count)[:, None])


@triton.jit(do_not_specialize=ANYWHERE)
def expand(
    out,
    entries,
    rows,
    counts,
    numbers,
    inner,
    outputs,
    out_row,
    inner_split,
    inner_row,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """To ``COLUMNS`` columns of one piece."""
    piece = tl.program_id(0)
    count = tl.load(counts + piece)
    entry = entries + tl.load(numbers + piece) * ENTRY
    rank = tl.load(entry + 3).to(tl.int32)
    if (count > 0) & (rank > 0):
        row = tl.load(rows + piece)
        lines, places = tl.arange(0, ROWS), tl.arange(0, RANKS)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        own = (lines < count)[:, None] & (columns < outputs)[None, :]
        b = _tensor(tl.load(entry + 1), out.dtype.element_ty, ALIGNED) + columns[None, :]
        found = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, rank, RANKS):
            inside = start + places < rank
            left = tl.zeros([ROWS, RANKS], tl.float32)
            at = inner + (row + lines)[:, None] * inner_row + start + places[None, :]
            for split in tl.static_range(SPLITS):
                left += tl.load(at + split * inner_split, mask=(lines < count)[:, None], other=0.0)
            right = tl.load(
                b + (start + places)[:, None].to(tl.int64) * outputs,
                mask=inside[:, None] & (columns < outputs)[None, :],
                other=0.0,
            )
            if WIDE:
                right = right.to(tl.float32)
            found += tl.dot(left.to(right.dtype), right, input_precision="ieee")
        bias = tl.load(entry + 2)
        if bias != 0:
            place = _tensor(bias, out.dtype.element_ty, ALIGNED) + columns
            found += tl.load(place, mask=columns < outputs, other=0.0).to(tl.float32)[None, :]
        scale = tl.load(entry + 4).to(tl.int32).to(tl.float32, bitcast=True)
        to = out + (row + lines)[:, None] * out_row + columns[None, :]
        sums = tl.load(to, mask=own, other=0.0).to(tl.float32) + found * scale
        tl.store(to, sums.to(out.dtype.element_ty), mask=own)
