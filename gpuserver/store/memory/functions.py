"""Decides which functions' models outlive their instances and which index rows are written or dropped; pure.

A record is the newest model of a deployed function, ``(name, version)``: its segments in first-use order. It holds
them, so a function whose instance has died keeps its files, and its next instance finds them by their fingerprints. A
record is *saved* once all its segments are in files and its rows are in the index; until then it is to be written.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dormouse.gpuserver.store.memory.segments import Segment, Segments

Key = tuple[str, int]
"""A function's name and version."""


@dataclass(slots=True, eq=False)
class Record:
    """``generation`` counts its changes, so that a write that was overtaken is not taken for the newest."""

    segments: list[Segment]
    generation: int = 0
    saved: bool = False


class KeptFunctions:
    """The records of all functions, by key."""

    def __init__(self, segments: Segments) -> None:
        self.records: dict[Key, Record] = {}
        self.dropped: set[Key] = set()  # records whose rows are to go
        self._segments = segments
        self._living: Counter[Key] = Counter()  # instances by function
        self._kept: set[Key] | None = None  # None until the controller has reported which are deployed

    def restore(self, key: Key, segments: list[Segment]) -> None:
        """Take in a record as it was found in the index."""
        for segment in segments:
            self._segments.hold(segment, key)
        self.records[key] = Record(segments, saved=True)

    def attach(self, key: Key) -> None:
        """An instance of it lives."""
        self._living[key] += 1

    def detach(self, key: Key) -> None:
        self._living[key] -= 1
        self._drop_unwanted()

    def keep(self, keys: Iterable[Key]) -> None:
        """These are deployed; the records of all others go as soon as no instance has them."""
        self._kept = set(keys)
        self._drop_unwanted()

    def remember(self, key: Key, segments: Sequence[Segment]) -> None:
        """The function's model is now this."""
        wanted = [segment for segment in segments if not segment.damaged]
        record = self.records.get(key)
        if record is None:
            record = self.records[key] = Record([])
        elif record.segments == wanted:
            return
        before, record.segments = record.segments, wanted
        record.generation += 1
        record.saved = False
        self.dropped.discard(key)
        for segment in wanted:
            self._segments.hold(segment, key)
        for segment in set(before) - set(wanted):
            self._segments.release(segment, key)

    def ranks(self, key: Key) -> dict[bytes, int]:
        """Position of each fingerprint in the first-use order that is known of the function."""
        record = self.records.get(key)
        known = [] if record is None else record.segments
        return {segment.fingerprint: rank for rank, segment in enumerate(known) if segment.fingerprint is not None}

    def lose(self, segment: Segment) -> None:
        """The segment is damaged: no record has it any more."""
        for key in [holder for holder in segment.holders if isinstance(holder, tuple)]:
            if (record := self.records.get(key)) is not None and segment in record.segments:
                self.remember(key, [other for other in record.segments if other is not segment])

    def unsave(self, fingerprint: bytes) -> None:
        """Its file is gone: records that have these bytes elsewhere are to be written again."""
        for record in self.records.values():
            if any(segment.fingerprint == fingerprint for segment in record.segments):
                record.generation += 1
                record.saved = False

    def abandon(self) -> bool:
        """Host memory is short and nothing can be written: drop records that are not on disk and that no instance has;
        whether there were any.
        """
        lost = [key for key, record in self.records.items() if not record.saved and not self._living[key]]
        for key in lost:
            self._drop(key)
        return bool(lost)

    # --- for the writer

    def unfiled(self) -> list[Segment]:
        """Segments that must be in files before all records can be saved."""
        return [
            segment
            for record in self.records.values()
            if not record.saved
            for segment in record.segments
            if not self._segments.is_filed(segment)
        ]

    def savable(self, soon: set[bytes]) -> dict[Key, tuple[int, list[bytes]]]:
        """Records whose rows can be written once the files of ``soon`` are: ``(generation, fingerprints)`` by key."""
        ready: dict[Key, tuple[int, list[bytes]]] = {}
        for key, record in self.records.items():
            if record.saved:
                continue
            hashed = [segment.fingerprint for segment in record.segments if segment.fingerprint is not None]
            there = all(each in self._segments.filed or each in soon for each in hashed)
            if there and len(hashed) == len(record.segments):
                ready[key] = (record.generation, hashed)
        return ready

    def saved(self, key: Key, generation: int) -> None:
        """The rows of that generation are on disk."""
        record = self.records.get(key)
        if record is not None and record.generation == generation:
            record.saved = True

    # ---

    def _drop_unwanted(self) -> None:
        if self._kept is not None:
            for key in [key for key in self.records if key not in self._kept and not self._living[key]]:
                self._drop(key)

    def _drop(self, key: Key) -> None:
        self.dropped.add(key)
        for segment in self.records.pop(key).segments:
            self._segments.release(segment, key)
