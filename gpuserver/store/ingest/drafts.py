"""Decides the contents of an instance's next version, storage by storage; pure.

A storage of the draft is a Piece, bytes of a segment, which is immutable; or a Working, bytes in a span of its own. A
free, a write-back or the end of the instance may take a Working out of the draft at any time, also while somebody
copies to its span or hashes it: then their report gives it back. An upload to a Piece begins a new Working, so a
committed storage is copied when it is written.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from dormouse.gpuserver.store.ingest.coverage import Coverage
from dormouse.gpuserver.store.ingest.packing import SMALL_NBYTES, pack
from dormouse.gpuserver.store.memory.segments import Segment, Segments
from dormouse.gpuserver.store.memory.slabs import SlabSpan
from dormouse.schemas.errors import RemoteProtocolError


class DraftState(Enum):
    """The state of a Working."""

    BUSY = auto()  # bytes are being copied or read to its span; it begins so
    WORKING = auto()  # nobody has it in hand
    SEALED = auto()  # to be written no more: a hash reads it, or copies it to a pack first
    LOST = auto()  # out of the draft, and still in somebody's hands
    SETTLED = auto()  # over: its bytes are in a segment
    FREED = auto()  # over: its span is given back


class Change(Enum):
    """An event of a Working."""

    WRITE = auto()  # bytes are to come
    WROTE = auto()  # they have, or never will
    SEAL = auto()
    HASHED = auto()
    UNHASHED = auto()  # the hash has failed
    DROP = auto()  # the draft has no use for it any more


TABLE: Final = {
    DraftState.BUSY: {Change.WROTE: DraftState.WORKING, Change.DROP: DraftState.LOST},
    DraftState.WORKING: {Change.WRITE: DraftState.BUSY, Change.SEAL: DraftState.SEALED, Change.DROP: DraftState.FREED},
    DraftState.SEALED: {
        Change.HASHED: DraftState.SETTLED,
        Change.UNHASHED: DraftState.FREED,
        Change.DROP: DraftState.LOST,
    },
    DraftState.LOST: {
        Change.WROTE: DraftState.FREED,
        Change.HASHED: DraftState.SETTLED,
        Change.UNHASHED: DraftState.FREED,
    },
    DraftState.SETTLED: {},
    DraftState.FREED: {},
}
"""All transitions: anything else raises."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A storage that has its segment: bytes ``[offset, +nbytes)`` of it."""

    segment: Segment
    offset: int
    nbytes: int


class Working:
    """A storage that is being uploaded into ``span``."""

    __slots__ = ("coverage", "nbytes", "span", "state")

    def __init__(self, span: SlabSpan) -> None:
        self.span = span
        self.nbytes = span.nbytes
        self.coverage = Coverage(span.nbytes)
        self.state = DraftState.BUSY


Placed = tuple[int, Working, int]
"""A storage, its bytes, and their place in the hashed bytes."""


class Draft:
    """The storages of one instance.

    Args:
        instance: holds the segments.
        kept: whether a segment is held although the draft does not have it.
    """

    def __init__(self, instance: str, segments: Segments, kept: Callable[[Segment], bool]) -> None:
        self.items: dict[int, Piece | Working] = {}  # by storage
        self.nbytes = 0  # of its segments and workings
        self.changed = True  # by the instance, since the last version
        self._instance = instance
        self._segments = segments
        self._kept = kept
        self._uses: Counter[Segment] = Counter()

    def find(self, storage: int, total_nbytes: int, offset: int, nbytes: int) -> Piece | Working | None:
        """The draft's item for a storage whose bytes ``[offset, +nbytes)`` are about to be uploaded; None if it is new.

        Raises RemoteProtocolError for bounds that cannot be.
        """
        if not (offset >= 0 and nbytes >= 0 and total_nbytes >= 0 and offset + nbytes <= total_nbytes):
            raise RemoteProtocolError(f"an upload of bytes [{offset}, +{nbytes}) of a storage of {total_nbytes} bytes")
        item = self.items.get(storage)
        if item is not None and item.nbytes != total_nbytes:
            raise RemoteProtocolError(f"storage {storage} has {item.nbytes} bytes, then {total_nbytes}")
        return item

    def change(self, working: Working, change: Change) -> DraftState:
        working.state = TABLE[working.state][change]
        if working.state is DraftState.FREED:
            self._segments.freed.append(working.span)
        return working.state

    def put(self, storage: int, working: Working) -> None:
        """The instance writes the storage anew."""
        self.changed = True
        self.drop(storage)
        self.items[storage] = working
        self.nbytes += working.nbytes

    def point(self, storage: int, piece: Piece) -> None:
        """The storage is this now."""
        self._segments.hold(piece.segment, self._instance)
        self.nbytes += 0 if self._uses[piece.segment] else piece.segment.nbytes
        self._uses[piece.segment] += 1  # first: the storage may be the only one that has had the segment so far
        self.drop(storage)
        self.items[storage] = piece

    def free(self, storages: Iterable[int]) -> None:
        """The instance forgets these; unknown ones were never uploaded and are ignored."""
        for storage in storages:
            self.changed = self.drop(storage) or self.changed

    def drop(self, storage: int) -> bool:
        """Take a storage out; whether it was there."""
        item = self.items.pop(storage, None)
        if isinstance(item, Working):
            self.nbytes -= item.nbytes
            self.change(item, Change.DROP)
        elif item is not None:
            self._uses[item.segment] -= 1
            if not self._uses[item.segment]:
                del self._uses[item.segment]
                self.nbytes -= item.segment.nbytes
                self.release_unused(item.segment)
        return item is not None

    def drop_working(self, working: Working) -> None:
        """Take it out if it is in, and give it up."""
        storage = next((storage for storage, item in self.items.items() if item is working), None)
        if storage is None:
            self.change(working, Change.DROP)
        else:
            self.drop(storage)

    def release_unused(self, segment: Segment) -> None:
        if segment not in self._uses and not self._kept(segment):
            self._segments.release(segment, self._instance)

    # --- hashes

    def unsealed(self) -> list[tuple[int, Working]]:
        """The storages that a Commit has yet to hash."""
        return [
            (storage, item)
            for storage, item in self.items.items()
            if isinstance(item, Working) and item.state is DraftState.WORKING
        ]

    def small(self) -> tuple[list[Placed], int]:
        """The unsealed storages that are packed, and the nbytes of the pack."""
        items = [(storage, item) for storage, item in self.unsealed() if item.nbytes <= SMALL_NBYTES]
        layout, nbytes = pack([item.nbytes for _, item in items], self.nbytes)
        return [(*items[index], offset) for index, offset in layout], nbytes

    def settle(self, placed: Sequence[Placed], span: SlabSpan, segment: Segment) -> None:
        """The bytes in ``span`` are a segment now. Storages that were replaced or freed meanwhile are left out."""
        self._segments.hold(segment, self._instance)
        for storage, working, offset in placed:
            if self._over(storage, working, Change.HASHED):
                self.point(storage, Piece(segment, offset, working.nbytes))
            if working.span is not span:  # packed
                self._segments.freed.append(working.span)
        self.release_unused(segment)

    def give_up(self, placed: Sequence[Placed], span: SlabSpan) -> None:
        """The bytes in ``span`` could not be hashed."""
        for storage, working, _ in placed:
            self._over(storage, working, Change.UNHASHED)
        if all(working.span is not span for _, working, _ in placed):
            self._segments.freed.append(span)

    def _over(self, storage: int, working: Working, change: Change) -> bool:
        """Whether the draft had it until now."""
        self.change(working, change)
        known = self.items.get(storage) is working
        if known:
            del self.items[storage]
            self.nbytes -= working.nbytes
        return known
