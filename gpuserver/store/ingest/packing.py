"""Decides which small storages of a model go into one segment, and where in it; pure.

A segment of its own for each bias would cost a copy and at least 512 bytes each; one segment for many tensors defeats
sharing as soon as one of them differs. So only small tensors are packed, and only as many as hardly matter: measured,
tensors of at most 64 KiB are at most 1 % of the published models.
"""

from collections.abc import Sequence
from typing import Final

from dormouse.core.decisions.memory.freelist import aligned

SMALL_NBYTES: Final = 64 << 10
PACK_SHARE: Final = 100  # a pack has at most the hundredth part of its model
PACK_NBYTES: Final = 1 << 20  # or this, if it is more


def pack(sizes: Sequence[int], model_nbytes: int) -> tuple[list[tuple[int, int]], int]:
    """``([(index, offset)], nbytes of the pack)`` for those of ``sizes`` that are packed: the smallest, as many as may
    be, laid out in the order given.
    """
    limit = max(model_nbytes // PACK_SHARE, PACK_NBYTES)
    chosen: list[int] = []
    total = 0
    for index in sorted(range(len(sizes)), key=lambda index: (sizes[index], index)):
        total += aligned(sizes[index])
        if sizes[index] > SMALL_NBYTES or total > limit:
            break
        chosen.append(index)
    layout: list[tuple[int, int]] = []
    offset = end = 0
    for index in sorted(chosen):
        layout.append((index, offset))
        end = offset + sizes[index]
        offset += aligned(sizes[index])
    return layout, end
