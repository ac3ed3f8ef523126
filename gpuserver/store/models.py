"""Decides what an instance's model consists of: what is uploaded, what is committed, what it may grow to; pure.

A storage is in the draft (what the next Commit makes current) as one of two things::

    Working  its bytes lie in a span of their own and are still written to; once sealed (complete, being hashed) not
    Piece    bytes [offset, +nbytes) of a segment, which is immutable

A Working becomes a Piece when its hash is known: at once for a large storage, at Commit for those that are packed. An
upload to a Piece begins a new Working, so a committed storage is copied when it is written.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dormouse.gpuserver.store.coverage import Coverage
from dormouse.gpuserver.store.packing import SMALL_NBYTES, pack
from dormouse.gpuserver.store.segments import Segment, Segments
from dormouse.gpuserver.store.slabs import Span
from dormouse.schemas.errors import DormouseError, RemoteProtocolError
from dormouse.schemas.messages import Entry, Manifest

MAX_STORAGES: Final = 1 << 16
"""Per instance: ten times the largest models seen, and a manifest of that many is still about a megabyte."""


class ModelError(DormouseError):
    """This instance may not store that; the text says why. Not worth a retry."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A storage that has its segment."""

    segment: Segment
    offset: int
    nbytes: int


class Working:
    """A storage that is being uploaded into ``span``. While it is ``busy`` (bytes are being written) or ``sealed`` (a
    hash reads it), whoever does that has the span, and gives it away if the model has no use for it any more.
    """

    __slots__ = ("busy", "coverage", "nbytes", "sealed", "span")

    def __init__(self, span: Span) -> None:
        self.span = span
        self.nbytes = span.nbytes
        self.coverage = Coverage(span.nbytes)
        self.busy = False
        self.sealed = False


class Model:
    """The persistent storages of one instance.

    Args:
        instance: holds the segments.
        segments: shared with all other models.
        quota_nbytes: growth allowed beyond what the first write-back left (that is: beyond the end of ``load()``).
        ranks: first-use position of a fingerprint, as far as an earlier instance of the function has taught it.
    """

    def __init__(self, instance: str, segments: Segments, quota_nbytes: int, ranks: Mapping[bytes, int]) -> None:
        self.instance = instance
        self.version = 0
        self.nbytes = 0  # of the current version's segments
        self.closed = False
        self._segments = segments
        self._quota_nbytes = quota_nbytes
        self._ranks = ranks
        self._baseline: int | None = None  # bytes that growth is counted from
        self._draft: dict[int, Piece | Working] = {}  # by storage
        self._draft_nbytes = 0  # of its segments and workings
        self._draft_uses: Counter[Segment] = Counter()
        self._current: dict[int, Piece] = {}  # by storage
        self._order: dict[Segment, None] = {}  # the current segments in first-use order
        self._changed = True  # since the last version

    def manifest(self) -> Manifest:
        """The newest committed version."""
        return Manifest(
            instance=self.instance,
            version=self.version,
            entries=[
                Entry(storage=storage, segment=piece.segment.id, offset=piece.offset, nbytes=piece.nbytes)
                for storage, piece in self._current.items()
            ],
            segments=[(segment.id, segment.nbytes) for segment in self._order],
        )

    @property
    def order(self) -> Sequence[Segment]:
        """The current segments in first-use order."""
        return list(self._order)

    # --- from the instance

    def find(self, storage: int, total_nbytes: int, offset: int, nbytes: int) -> Piece | Working | None:
        """What the draft has of a storage of which bytes ``[offset, +nbytes)`` are about to be uploaded.

        Raises RemoteProtocolError for bounds that cannot be.
        """
        if not (offset >= 0 and nbytes >= 0 and total_nbytes >= 0 and offset + nbytes <= total_nbytes):
            raise RemoteProtocolError(f"an upload of bytes [{offset}, +{nbytes}) of a storage of {total_nbytes} bytes")
        item = self._draft.get(storage)
        if item is not None and item.nbytes != total_nbytes:
            raise RemoteProtocolError(f"storage {storage} has {item.nbytes} bytes, then {total_nbytes}")
        return item

    def admit(self, storage: int, nbytes: int) -> None:
        """Raises ModelError if the draft may not grow by this storage."""
        known = storage in self._draft
        self._admit(len(self._draft) + (not known), self._draft_nbytes + (0 if known else nbytes))

    def put(self, storage: int, item: Segment | Working) -> None:
        """The storage is now this: a Working, or all of a segment."""
        self._changed = True
        if isinstance(item, Working):
            self._remove(storage)
            self._draft[storage] = item
            self._draft_nbytes += item.nbytes
        else:
            self._segments.pin(item)  # the storage may be the only one that has had it so far
            self._remove(storage)
            self._put_piece(storage, Piece(item, 0, item.nbytes))
            self._segments.unpin(item)

    def free(self, storages: Iterable[int]) -> None:
        """The instance forgets these; unknown ones were never uploaded and are ignored."""
        for storage in storages:
            self._changed = self._remove(storage) or self._changed

    def give_back(self, storage: int, working: Working) -> bool:
        """A busy Working is written; whether it is still in the draft. If not, its span is freed."""
        working.busy = False
        if self._draft.get(storage) is working:
            return True
        self._segments.freed.append(working.span)
        return False

    def settle(self, placed: Sequence[tuple[int, Working, int]], segment: Segment) -> None:
        """The bytes of sealed Workings are in a segment: ``(storage, working, offset)``. Those that were replaced or
        freed in the meantime are left out.
        """
        self._segments.hold(segment, self.instance)
        for storage, working, offset in placed:
            if self._draft.get(storage) is working:
                self._remove(storage)
                self._put_piece(storage, Piece(segment, offset, working.nbytes))
        self._release_unused(segment)

    def unsealed(self) -> list[tuple[int, Working]]:
        """What a Commit has yet to hash."""
        return [
            (storage, item) for storage, item in self._draft.items() if isinstance(item, Working) and not item.sealed
        ]

    def small(self) -> tuple[list[tuple[int, Working, int]], int]:
        """Which of the unsealed storages are packed: ``([(storage, working, offset)], nbytes of the pack)``."""
        items = [(storage, item) for storage, item in self.unsealed() if item.nbytes <= SMALL_NBYTES]
        layout, nbytes = pack([item.nbytes for _, item in items], self._draft_nbytes)
        return [(*items[index], offset) for index, offset in layout], nbytes

    def commit(self) -> bool:
        """Make a new version of the draft, in which nothing is Working, if it has changed; whether it had."""
        if not self._changed:
            return False
        self._changed = False
        pieces = {storage: item for storage, item in self._draft.items() if isinstance(item, Piece)}
        assert len(pieces) == len(self._draft)
        self._replace(pieces)
        return True

    # --- from executors

    def admit_write(self, storages: Mapping[int, int]) -> None:
        """Raises ModelError if the current model may not grow to this; ``storages`` is nbytes by storage."""
        kept = {piece.segment for storage, piece in self._current.items() if storage not in storages}
        count = len(self._current.keys() | storages.keys())
        self._admit(count, sum(segment.nbytes for segment in kept) + sum(storages.values()))

    def written(self, segments: Mapping[int, Segment], freed: Iterable[int]) -> None:
        """These segments, by storage, and all else but ``freed`` are the next version."""
        gone = set(freed) - segments.keys()
        for storage in gone:
            self._remove(storage)
        for storage, segment in segments.items():
            self._remove(storage)
            self._put_piece(storage, Piece(segment, 0, segment.nbytes))
        current = {storage: piece for storage, piece in self._current.items() if storage not in gone}
        current.update({storage: Piece(segment, 0, segment.nbytes) for storage, segment in segments.items()})
        self._replace(current)
        if self._baseline is None:
            self._baseline = self.nbytes

    def first_use(self, version: int, segments: Iterable[int]) -> bool:
        """Learn the order in which a request used segments, by id; whether it is another than was known. The request
        may have made a new version since: what it replaced is left out.
        """
        if version > self.version:
            return False
        known = {segment.id: segment for segment in self._order}
        used = {known[number]: None for number in segments if number in known}
        order = {**used, **self._order}
        changed = list(order) != list(self._order)
        self._order = order
        return changed

    # ---

    def close(self) -> None:
        """The instance is gone."""
        self.closed = True
        current, self._current, self._order = self._current, {}, {}
        for storage in list(self._draft):
            self._remove(storage)
        for segment in {piece.segment for piece in current.values()}:
            self._release_unused(segment)

    def _put_piece(self, storage: int, piece: Piece) -> None:
        self._segments.hold(piece.segment, self.instance)
        self._draft[storage] = piece
        self._draft_nbytes += 0 if self._draft_uses[piece.segment] else piece.segment.nbytes
        self._draft_uses[piece.segment] += 1

    def _remove(self, storage: int) -> bool:
        """Take a storage out of the draft; whether it was there."""
        item = self._draft.pop(storage, None)
        if isinstance(item, Working):
            self._draft_nbytes -= item.nbytes
            if not (item.sealed or item.busy):
                self._segments.freed.append(item.span)
        elif item is not None:
            self._draft_uses[item.segment] -= 1
            if not self._draft_uses[item.segment]:
                del self._draft_uses[item.segment]
                self._draft_nbytes -= item.segment.nbytes
                self._release_unused(item.segment)
        return item is not None

    def _release_unused(self, segment: Segment) -> None:
        if segment not in self._draft_uses and segment not in self._order:
            self._segments.release(segment, self.instance)

    def _replace(self, current: dict[int, Piece]) -> None:
        """A new segment takes the place of the one that its storage had; those of new storages come last, in the
        order that another instance has taught.
        """
        self.version += 1
        successors: dict[Segment, list[Segment]] = {}
        for storage, piece in current.items():
            if (before := self._current.get(storage)) is not None and before.segment is not piece.segment:
                successors.setdefault(before.segment, []).append(piece.segment)
        live = {piece.segment: None for piece in current.values()}
        order: dict[Segment, None] = {}
        for segment in self._order:
            order.update({item: None for item in (segment, *successors.get(segment, ())) if item in live})
        late = len(self._ranks)
        rest = [segment for segment in live if segment not in order]
        rest.sort(key=lambda segment: self._ranks.get(segment.fingerprint or b"", late))
        order.update(dict.fromkeys(rest))
        before_order, self._order, self._current = self._order, order, current
        self.nbytes = sum(segment.nbytes for segment in order)
        for segment in before_order:
            if segment not in order:
                self._release_unused(segment)

    def _admit(self, count: int, nbytes: int) -> None:
        if count > MAX_STORAGES:
            raise ModelError(
                f"the model has {count:,} storages; at most {MAX_STORAGES:,} are kept: merge small tensors"
            )
        if self._baseline is not None and nbytes > self._baseline + self._quota_nbytes:
            raise ModelError(
                f"the persistent tensors would grow to {nbytes:,} bytes; after load() they had {self._baseline:,} and "
                f"may grow by {self._quota_nbytes:,}: keep less on the GPU between requests, or deploy a larger quota"
            )
