"""Decides which dtypes can represent a number that goes with a command.

Plans are shared by calls whose numbers differ, unless that decides whether they succeed: a number that one dtype has
and another has not is of another magnitude.
"""

import math
from bisect import bisect_left
from typing import Final

import torch

from dormouse.client_shim.commands import metas

_INTEGERS: Final = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
_FLOATS: Final = [dtype for dtype in metas.SUPPORTED if dtype.is_floating_point or dtype.is_complex]
_MOST: Final = {
    **{dtype: float(torch.finfo(dtype).max) for dtype in _FLOATS},
    **{dtype: torch.iinfo(dtype).max for dtype in _INTEGERS},
}
LIMITS: Final = sorted(set(_MOST.values()))


def magnitude(value: float) -> int:
    """The same for numbers that the same dtypes have."""
    if not math.isfinite(value):
        return -1
    place = bisect_left(LIMITS, _size(value))
    return place if value >= 0 or isinstance(value, int) else -2 - place


def has(dtype: torch.dtype, value: complex) -> bool:
    """Whether the number can be converted to that."""
    if isinstance(value, complex):
        return dtype.is_complex
    if dtype not in _MOST:
        return True  # truth values; bits, which nothing computes with
    if not math.isfinite(value):
        return dtype.is_floating_point or dtype.is_complex
    wraps = dtype.is_signed or value >= 0 or isinstance(value, int)
    return wraps and _size(value) <= _MOST[dtype]


def _size(value: float) -> float:
    return -1 - value if isinstance(value, int) and value < 0 else abs(value)
