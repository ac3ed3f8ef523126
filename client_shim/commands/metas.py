"""Interned tensor geometry: one `Meta` object per (dtype, size, stride, offset, bits), so that comparing geometries
is comparing objects.

Owns the ids under which geometries are defined on the wire. It knows nothing of storages or connections.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from dormouse.client_shim.commands.room import out_of_memory

CONJUGATED: Final = 1
NEGATED: Final = 2

MAX_DIMS: Final = 64
"""PyTorch's own kernels take no more; the executor takes a geometry that has more for an attack."""

MAX_NBYTES: Final = 1 << 40
"""The bytes that a storage may have at an executor: more than any GPU has."""


@dataclass(slots=True, eq=False)
class Meta:
    """The geometry of a tensor within its storage."""

    id: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bits: int

    def definition(self) -> list[Any]:
        return [dtype_name(self.dtype), self.size, self.stride, self.offset, self.bits]

    def numel(self) -> int:
        return math.prod(self.size)

    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def extent(self) -> int:
        """Bytes that a storage must have to hold it."""
        if self.numel() == 0:
            return 0
        last = self.offset + sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True))
        return (last + 1) * self.dtype.itemsize

    def is_dense(self) -> bool:
        """Whether its elements fill one unbroken run of memory, in whatever order."""
        expected = 1
        for step, length in sorted((s, n) for s, n in zip(self.stride, self.size, strict=True) if n != 1):
            if step != expected:
                return False
            expected *= length
        return True


_interned: dict[tuple[Any, ...], Meta] = {}
_numbers = itertools.count(1)


def intern(dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, bits: int = 0) -> Meta:
    key = (dtype, size, stride, offset, bits)
    meta = _interned.get(key)
    if meta is None:
        check(dtype)
        if len(size) > MAX_DIMS:
            raise NotImplementedError(
                f"a tensor of {len(size)} dimensions on cuda:0 of a Dormouse function: at most {MAX_DIMS} are supported"
            )
        # next() and setdefault are atomic: two threads that meet here agree on one object; a number may be skipped.
        made = Meta(next(_numbers), dtype, size, stride, offset, bits)
        if made.extent() > MAX_NBYTES:
            raise out_of_memory(
                f"CUDA out of memory. Tried to allocate {made.extent() / 2**30:.2f} GiB. GPU 0 has less than that"
            )
        meta = _interned.setdefault(key, made)
    return meta


def of(tensor: torch.Tensor) -> Meta:
    """The geometry of an ordinary (meta or CPU) tensor."""
    bits = (CONJUGATED if tensor.is_conj() else 0) | (NEGATED if tensor.is_neg() else 0)
    return intern(tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()), bits)


def contiguous(dtype: torch.dtype, size: Sequence[int], offset: int = 0) -> Meta:
    return intern(dtype, tuple(size), contiguous_stride(size), offset)


def count() -> int:
    return len(_interned)


def forget() -> None:
    """Drop the table. Live tensors keep their `Meta` objects, whose ids stay unique; equal geometries made later are
    other objects."""
    _interned.clear()


def contiguous_stride(size: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for length in reversed(size):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


DTYPES: Final[dict[str, torch.dtype]] = {
    dtype_name(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not any(word in str(value) for word in ("qint", "quint", "bits", "float4"))
}
"""By name, those that an executor knows: it ends an instance that names another."""

SUPPORTED: Final = frozenset(DTYPES.values())


def check(dtype: torch.dtype) -> None:
    """Refuse a geometry that the wire cannot carry, before anything of it is recorded."""
    if dtype not in SUPPORTED:
        kind = "quantized tensors are" if "qu" in str(dtype) or "qint" in str(dtype) else f"{dtype} is"
        raise NotImplementedError(
            f"{kind} not supported on cuda:0 of a Dormouse function ({dtype}): use a plain integer or floating dtype"
        )


def check_layout(layout: torch.layout | None) -> None:
    if layout is not None and layout is not torch.strided:
        raise NotImplementedError(
            f"{layout} tensors are not supported on cuda:0 of a Dormouse function, only dense ones: "
            "call to_dense() first"
        )
