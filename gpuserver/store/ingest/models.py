"""Decides which versions an instance's model has, by commits and write-backs, and how large it may grow; pure.

The contents of the next version are decided in drafts.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from dormouse.core.quantities import size, sizes
from dormouse.gpuserver.store.ingest.drafts import Draft, Piece
from dormouse.gpuserver.store.memory.segments import Segment, Segments
from dormouse.schemas.errors import DormouseError
from dormouse.schemas.messages import Entry, Manifest

MAX_STORAGES: Final = 1 << 16
"""Per instance: ten times the largest models seen, and a manifest of that many is still about a megabyte."""


class ModelError(DormouseError):
    """This instance may not store that; the text has the reason. Not worth a retry."""


class StoredModel:
    """The persistent storages of one instance.

    Args:
        instance: holds the segments.
        segments: shared with all other models.
        quota_nbytes: growth allowed beyond the size after the first write-back (that is: beyond the end of ``load()``).
        ranks: first-use position of a fingerprint, as far as an earlier instance of the function has taught it.
    """

    def __init__(self, instance: str, segments: Segments, quota_nbytes: int, ranks: Mapping[bytes, int]) -> None:
        self.instance = instance
        self.version = 0
        self.nbytes = 0  # of the current version's segments
        self.draft = Draft(instance, segments, lambda segment: segment in self._order)
        self._quota_nbytes = quota_nbytes
        self._ranks = ranks
        self._baseline: int | None = None  # bytes that growth is counted from
        self._current: dict[int, Piece] = {}  # by storage
        self._order: dict[Segment, None] = {}  # the current segments in first-use order

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

    def admit(self, storage: int, nbytes: int) -> None:
        """Raises ModelError if the draft may not grow by this storage."""
        known = storage in self.draft.items
        self._admit(len(self.draft.items) + (not known), self.draft.nbytes + (0 if known else nbytes))

    def commit(self) -> bool:
        """Make a new version of the draft, in which nothing is Working, if it has changed; whether it had."""
        if not self.draft.changed:
            return False
        self.draft.changed = False
        pieces = {storage: item for storage, item in self.draft.items.items() if isinstance(item, Piece)}
        assert len(pieces) == len(self.draft.items)
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
        pieces = {storage: Piece(segment, 0, segment.nbytes) for storage, segment in segments.items()}
        for storage in gone:
            self.draft.drop(storage)
        for storage, piece in pieces.items():
            self.draft.point(storage, piece)
        self._replace({storage: piece for storage, piece in self._current.items() if storage not in gone} | pieces)
        if self._baseline is None:
            self._baseline = self.nbytes

    def first_use(self, version: int, segments: Iterable[int]) -> bool:
        """Learn the order in which a request used segments, by id; whether it is another than was known. The request
        may have made a new version since: segments that it replaced are left out.
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
        current, self._current, self._order = self._current, {}, {}
        for storage in list(self.draft.items):
            self.draft.drop(storage)
        for segment in {piece.segment for piece in current.values()}:
            self.draft.release_unused(segment)

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
                self.draft.release_unused(segment)

    def _admit(self, count: int, nbytes: int) -> None:
        if count > MAX_STORAGES:
            raise ModelError(
                f"the model has {count:,} storages; at most {MAX_STORAGES:,} are kept: merge small tensors"
            )
        if self._baseline is not None and nbytes > self._baseline + self._quota_nbytes:
            grown, had = sizes(nbytes, self._baseline)
            raise ModelError(
                f"the persistent tensors would grow to {grown}; when a request first changed them they had {had}, and "
                f"may grow by {size(self._quota_nbytes)} since: keep less on the GPU between requests, or deploy a "
                "larger quota"
            )
