"""Decides which spans of one instance are hashed, and which segments they become; pure.

A span becomes the segment of its bytes, unless there is one with its bytes already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dormouse.gpuserver.store.disk.index import Identity
from dormouse.gpuserver.store.ingest.drafts import Change, Draft, Placed, Working
from dormouse.gpuserver.store.ingest.steps import Hash, Hashed, NoteFileRange
from dormouse.gpuserver.store.memory.segments import Segments
from dormouse.gpuserver.store.memory.slabs import SlabSpan


@dataclass(frozen=True, slots=True)
class _Seal:
    placed: Sequence[Placed]
    span: SlabSpan
    identity: Identity | None


class Hashing:
    """The hashes under way of one draft, whose segments are shared within ``scope``."""

    def __init__(self, draft: Draft, segments: Segments, scope: str) -> None:
        self._draft = draft
        self._segments = segments
        self._scope = scope
        self._seals: dict[int, _Seal] = {}  # by number
        self._begun = 0

    def __bool__(self) -> bool:
        return bool(self._seals)

    @property
    def workings(self) -> list[Working]:
        return [working for seal in self._seals.values() for _, working, _ in seal.placed]

    def begin(self, placed: Sequence[Placed], span: SlabSpan, identity: Identity | None = None) -> Hash:
        """``identity``: of the file range that the bytes are."""
        for _, working, _ in placed:
            self._draft.change(working, Change.SEAL)
        self._begun += 1
        self._seals[self._begun] = _Seal(placed, span, identity)
        parts = [(working.span, offset) for _, working, offset in placed if working.span is not span]  # if packed
        return Hash(self._begun, span, parts)

    def end(self, hashed: Hashed) -> NoteFileRange | None:
        seal = self._seals.pop(hashed.number)
        if hashed.fingerprint is None:
            self._draft.give_up(seal.placed, seal.span)
            return None
        segment = self._segments.settle(seal.span.nbytes, self._scope, seal.span, hashed.fingerprint)
        self._draft.settle(seal.placed, seal.span, segment)
        return None if seal.identity is None else NoteFileRange(seal.identity, hashed.fingerprint)
