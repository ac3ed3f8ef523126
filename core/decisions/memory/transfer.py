"""Decides how a list of segment copies becomes a list of chunks; pure, no memory is touched here.

Neighbours on both sides are merged, because per-copy overhead keeps hundreds of small tensors below the link's
bandwidth; the merged runs are cut into chunks of about the link's elbow size, because a chunk is the unit at which
computation can begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from dormouse.core.decisions.memory.freelist import aligned


class Kind(Enum):
    """The link over which bytes come."""

    SLAB = "host"
    PEER = "peer"
    POOL = "pool"  # a move inside the pool


class Origin(NamedTuple):
    """Source of a copy: a slab or another GPU, by its number, or this pool."""

    kind: Kind
    number: int


POOL: Final = Origin(Kind.POOL, 0)


def slab(number: int) -> Origin:
    return Origin(Kind.SLAB, number)


def peer(gpu: int) -> Origin:
    return Origin(Kind.PEER, gpu)


@dataclass(frozen=True, slots=True)
class Copy:
    """``nbytes`` from offset ``start`` of ``origin`` to offset ``device`` of the pool's address space."""

    origin: Origin
    start: int
    device: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One asynchronous memory copy, after which the copies with indices below ``finished`` are complete."""

    origin: Origin
    start: int
    device: int
    nbytes: int
    finished: int


def chunked(copies: Sequence[Copy], chunk_nbytes: int) -> list[Chunk]:
    """Chunks that perform ``copies`` in their order.

    Spans are aligned, so two neighbours touch up to padding, and the padding is copied with them. Chunk boundaries
    fall at multiples of ``chunk_nbytes`` from a run's start; a segment may straddle several chunks, and a chunk may
    finish several segments. A move inside the pool is one chunk, whatever its size: its spans may overlap.
    """
    chunks: list[Chunk] = []
    first = 0
    while first < len(copies):
        start = copies[first]
        last = first
        if start.origin.kind is Kind.POOL:
            chunks.append(Chunk(start.origin, start.start, start.device, start.nbytes, first + 1))
            first += 1
            continue
        while last + 1 < len(copies) and _touch(copies[last], copies[last + 1]):
            last += 1
        total = copies[last].start + copies[last].nbytes - start.start
        ends = [copies[index].start + copies[index].nbytes - start.start for index in range(first, last + 1)]
        finished = 0
        for offset in range(0, max(total, 1), chunk_nbytes):
            nbytes = min(chunk_nbytes, total - offset)
            while finished < len(ends) and ends[finished] <= offset + nbytes:
                finished += 1
            chunks.append(Chunk(start.origin, start.start + offset, start.device + offset, nbytes, first + finished))
        first = last + 1
    return chunks


def _touch(before: Copy, after: Copy) -> bool:
    span = aligned(before.nbytes)
    return before.origin == after.origin and before.start + span == after.start and before.device + span == after.device
