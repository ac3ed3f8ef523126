"""Decides how a list of segment copies becomes a list of chunks; pure, no memory is touched here.

Neighbours on both sides are merged, because per-copy overhead is what separates hundreds of small tensors from the
link's bandwidth; the merged runs are cut into chunks of about the link's elbow size, because a chunk is the unit at
which computation can begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dormouse.core.freelist import aligned


@dataclass(frozen=True, slots=True)
class Copy:
    """``nbytes`` between offset ``host`` of slab ``slab`` and offset ``device`` of the pool."""

    slab: int
    host: int
    device: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One asynchronous memory copy, after which the copies with indices below ``finished`` are complete."""

    slab: int
    host: int
    device: int
    nbytes: int
    finished: int


def chunked(copies: Sequence[Copy], chunk_nbytes: int) -> list[Chunk]:
    """Chunks that perform ``copies`` in their order.

    Spans are aligned, so two neighbours touch up to padding, and the padding is copied with them. Chunk boundaries
    fall at multiples of ``chunk_nbytes`` from a run's start; a segment may straddle several chunks, and a chunk may
    finish several segments.
    """
    chunks: list[Chunk] = []
    first = 0
    while first < len(copies):
        last = first
        while last + 1 < len(copies) and _touch(copies[last], copies[last + 1]):
            last += 1
        start = copies[first]
        total = copies[last].host + copies[last].nbytes - start.host
        ends = [copies[index].host + copies[index].nbytes - start.host for index in range(first, last + 1)]
        finished = 0
        for offset in range(0, max(total, 1), chunk_nbytes):
            nbytes = min(chunk_nbytes, total - offset)
            while finished < len(ends) and ends[finished] <= offset + nbytes:
                finished += 1
            chunks.append(Chunk(start.slab, start.host + offset, start.device + offset, nbytes, first + finished))
        first = last + 1
    return chunks


def _touch(before: Copy, after: Copy) -> bool:
    span = aligned(before.nbytes)
    return before.slab == after.slab and before.host + span == after.host and before.device + span == after.device
