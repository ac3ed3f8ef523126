"""The driver's copies for a job: its chunks, cut where necessary.

Decides how bytes that move inside the pool are cut so that no copy overlaps itself, and which event marks a chunk as
complete. Issues nothing (copies.py).
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from dormouse.core.decisions.memory.transfer import Chunk, Kind, Origin
from dormouse.gpuserver.device.cuda.host import Source
from dormouse.gpuserver.device.cuda.streams import CudaEvent

SCRATCH_NBYTES: Final = 16 << 20
"""Through which spans move that overlap: at 2 TB/s, 8 us each way, so that issuing is not the bound."""


class Step(NamedTuple):
    """One copy of the driver. ``event`` is recorded after it and may be shared by several copies of the job."""

    kind: Kind
    target: int
    source: int
    nbytes: int
    staged: bool
    event: CudaEvent


class Steps:
    """Of one job.

    Args:
        pool: address at which it begins.
        scratch: address of SCRATCH_NBYTES of the device.
        longest: bytes that are staged at once.
        event: makes one that no stream has been given yet.
    """

    def __init__(self, pool: int, scratch: int, longest: int, event: Callable[[], CudaEvent]) -> None:
        self.steps: list[Step] = []
        self.events: list[CudaEvent] = []  # of copies that are complete after the steps so far
        self.spans: list[tuple[int, int]] = []  # of the pool, read or written: (start, end)
        self.sources: dict[Origin, Source] = {}
        self._pool, self._scratch, self._longest, self._event = pool, scratch, longest, event

    def add(self, chunk: Chunk, source: Source | None) -> None:
        """``source``: None for the pool."""
        self.spans.append((chunk.device, chunk.device + chunk.nbytes))
        if source is None:
            self.spans.append((chunk.start, chunk.start + chunk.nbytes))
        else:
            self.sources[chunk.origin] = source
        self.steps += self._of(chunk, source)
        self.events += [self.steps[-1].event] * (chunk.finished - len(self.events))

    def _of(self, chunk: Chunk, source: Source | None) -> list[Step]:
        """The copies of one chunk, at least one; complete with the event of the last."""
        kind, number = chunk.origin
        target = self._pool + chunk.device
        if source is None:
            at = self._pool + chunk.start
            pieces = [
                (to, start, nbytes, False)
                for to, start, nbytes in moved(at, target, chunk.nbytes, self._scratch, SCRATCH_NBYTES)
            ]
        else:
            at = source.span(chunk.start, chunk.nbytes, f"{kind.value} {number}")
            parts = source.parts(chunk.start, chunk.nbytes, self._longest)
            pieces = [
                (target + part.offset - chunk.start, at + part.offset - chunk.start, part.nbytes, not part.pinned)
                for part in parts
            ]
        pieces = pieces or [(target, at, 0, False)]
        return [Step(kind, *piece, self._event()) for piece in pieces]


def moved(source: int, target: int, nbytes: int, scratch: int, scratch_nbytes: int) -> Iterator[tuple[int, int, int]]:
    """``(target, source, nbytes)`` copies, none overlapping itself, that together are a memmove on the device.

    Where the spans overlap, pieces as long as the distance are safe from the end that is not overwritten first; a
    distance shorter than the scratch buffer goes through that instead, because pieces could be as short as 512 bytes.
    """
    distance = abs(target - source)
    if distance == 0 or nbytes == 0:
        return
    direct = distance >= min(nbytes, scratch_nbytes)
    piece = min(nbytes, distance if direct else scratch_nbytes)
    starts = range(0, nbytes, piece)
    for start in starts if target < source else reversed(starts):
        length = min(piece, nbytes - start)
        if direct:
            yield target + start, source + start, length
        else:
            yield scratch, source + start, length
            yield target + start, scratch, length
