"""Decides what an instance's model consists of on the host: what is uploaded, what is committed, what may be freed;
pure.

States of a segment::

    working    uploaded, in no manifest yet: still written to
    current    in the newest manifest: immutable
    retired    dropped by manifest v: freed when every executor has settled at v or later, as one may still copy it
    placed     given to an executor's ticket: current once Written, freed when the ticket is given up
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dormouse.gpuserver.slabs import Place, Slabs
from dormouse.schemas.errors import DormouseError, RemoteProtocolError
from dormouse.schemas.messages import Manifest, Segment

MAX_STORAGES: Final = 1 << 16
"""Per instance: ten times the largest models seen, and a manifest of that many is still about a megabyte."""


class ModelError(DormouseError):
    """This instance may not store that; the text says why. Not worth a retry."""


@dataclass(slots=True)
class _Ticket:
    places: dict[int, Place]  # by storage


_segment_ids = itertools.count(1)
"""Shared by all models: a segment id means one segment on the whole node."""


class Model:
    """The persistent storages of one instance.

    Args:
        slabs: where segments are placed; shared with all other models.
        quota_nbytes: growth allowed beyond what the first write-back left (that is: beyond the end of ``load()``).
    """

    def __init__(self, slabs: Slabs, quota_nbytes: int) -> None:
        self.version = 0
        self.nbytes = 0
        self._slabs = slabs
        self._quota_nbytes = quota_nbytes
        self._baseline: int | None = None  # bytes that growth is counted from
        self._ids: dict[Place, int] = {}  # segment ids
        self._current: dict[int, Place] = {}  # by storage, in upload order
        self._working: dict[int, Place] = {}  # by storage: what the next Commit will make current
        self._working_nbytes = 0
        self._changed = True  # since the last version
        self._retired: list[tuple[int, Place]] = []  # (version that dropped it, place)
        self._tickets: dict[tuple[str, int], _Ticket] = {}  # by executor's role and its number
        self._settled: dict[str, int] = {}  # by executor's role

    def manifest(self, instance: str) -> Manifest:
        """The newest committed version."""
        segments = [
            Segment(
                storage=storage, segment=self._ids[place], slab=place.slab, offset=place.offset, nbytes=place.nbytes
            )
            for storage, place in self._current.items()
        ]
        return Manifest(instance=instance, version=self.version, segments=segments)

    # --- from the instance

    def upload(self, storage: int, total_nbytes: int, offset: int, nbytes: int) -> tuple[Place, bool, Place | None]:
        """Where to write bytes ``[offset, +nbytes)`` of a storage: ``(place, covers all of it, the committed place or
        None)``.

        The committed place is given only when this upload is the first to change it.

        Raises:
            RemoteProtocolError: bounds that cannot be.
            HostFull, ModelError: no room.
        """
        if not (offset >= 0 and nbytes >= 0 and total_nbytes >= 0 and offset + nbytes <= total_nbytes):
            raise RemoteProtocolError(f"an upload of bytes [{offset}, +{nbytes}) of a storage of {total_nbytes} bytes")
        whole = nbytes == total_nbytes
        place = self._working.get(storage)
        if place is not None and place.nbytes != total_nbytes:
            raise RemoteProtocolError(f"storage {storage} has {place.nbytes} bytes, then {total_nbytes}")
        previous = self._current.get(storage)
        if place is not None and place is not previous:
            return place, whole, None
        self._admit(len(self._working) + 1, self._working_nbytes + (0 if place else total_nbytes))
        fresh = self._new(self._slabs.place(self, total_nbytes))
        self._working[storage] = fresh
        self._working_nbytes += 0 if place else total_nbytes
        self._changed = True
        return fresh, whole, place

    def free(self, storages: Iterable[int]) -> None:
        """The instance forgets these; unknown ones were never uploaded and are ignored."""
        for storage in storages:
            self._forget_working(storage)

    def _forget_working(self, storage: int) -> None:
        place = self._working.pop(storage, None)
        if place is None:
            return
        self._changed = True
        self._working_nbytes -= place.nbytes
        if place is not self._current.get(storage):
            self._retire(place)

    def commit(self) -> bool:
        """Make a new version if anything has changed; whether it did."""
        if not self._changed:
            return False
        self._slabs.close(self)
        self._changed = False
        self._replace(dict(self._working))
        return True

    # --- from executors

    def place(self, role: str, ticket: int, storages: list[tuple[int, int]]) -> list[Segment]:
        """Segments for a write-back. Raises HostFull, ModelError."""
        sizes = dict(storages)
        kept = {storage: place for storage, place in self._current.items() if storage not in sizes}
        self._admit(len(kept) + len(sizes), self._total(kept) + sum(sizes.values()))
        places = self._slabs.place_all((role, ticket), sizes.values())
        for place in places:
            self._new(place)
        self._tickets[role, ticket] = _Ticket(dict(zip(sizes, places, strict=True)))
        return [
            Segment(
                storage=storage, segment=self._ids[place], slab=place.slab, offset=place.offset, nbytes=place.nbytes
            )
            for storage, place in zip(sizes, places, strict=True)
        ]

    def has_ticket(self, role: str, ticket: int) -> bool:
        return (role, ticket) in self._tickets

    def written(self, role: str, ticket: int, freed: Iterable[int]) -> None:
        """The bytes of a ticket are in place: they and all else but ``freed`` are the next manifest."""
        places = self._tickets.pop((role, ticket)).places
        gone = set(freed) - places.keys()
        current = {storage: place for storage, place in self._current.items() if storage not in gone}
        current.update(places)
        for storage in gone | places.keys():
            self._forget_working(storage)
        self._working.update(places)
        self._working_nbytes += self._total(places)
        self._replace(current)
        if self._baseline is None:
            self._baseline = self.nbytes

    def settled(self, role: str, version: int) -> None:
        """The executor copies nothing older than ``version`` and has given up its unwritten tickets."""
        self._settled[role] = version
        self._give_up(role)

    def forget_executor(self, role: str) -> None:
        self._settled.pop(role, None)
        self._give_up(role)

    def _give_up(self, role: str) -> None:
        for key in [key for key in self._tickets if key[0] == role]:
            for place in self._tickets.pop(key).places.values():
                self._retire(place)

    # --- freeing

    def collect(self, roles: set[str]) -> list[Place]:
        """Retired segments that none of the executors ``roles`` can be copying from; forgotten here, to be freed by
        the caller.
        """
        settled = min((self._settled.get(role, 0) for role in roles), default=self.version)
        ready = [place for version, place in self._retired if version <= settled]
        self._retired = [(version, place) for version, place in self._retired if version > settled]
        for place in ready:
            del self._ids[place]
        return ready

    def release(self) -> list[Place]:
        """Everything, for an instance that is gone."""
        self._slabs.close(self)
        places = list(self._ids)
        self._ids.clear()
        return places

    def _replace(self, current: dict[int, Place]) -> None:
        self.version += 1
        before, self._current = self._current, current
        self.nbytes = self._total(current)
        for storage, place in before.items():
            if current.get(storage) is not place:
                self._retired.append((self.version, place))

    def _retire(self, place: Place) -> None:
        """It never was in a manifest, so no executor can have begun to copy from it."""
        self._retired.append((0, place))

    def _new(self, place: Place) -> Place:
        self._ids[place] = next(_segment_ids)
        return place

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

    @staticmethod
    def _total(places: dict[int, Place]) -> int:
        return sum(place.nbytes for place in places.values())
