"""Decides how the bytes of one upload come into their storage: pure.

The states of a storage's Working are in the table of drafts.py, the order of the steps in that of uploads.py.
"""

from dataclasses import dataclass
from typing import Any

from dormouse.gpuserver.store.disk.index import Identity
from dormouse.gpuserver.store.ingest import steps as o
from dormouse.gpuserver.store.ingest.drafts import Change, DraftState, Piece, Working
from dormouse.gpuserver.store.ingest.hashing import Hashing
from dormouse.gpuserver.store.ingest.models import ModelError, StoredModel
from dormouse.gpuserver.store.ingest.packing import SMALL_NBYTES
from dormouse.gpuserver.store.memory.segments import Segments
from dormouse.schemas import messages as m
from dormouse.schemas.errors import RemoteProtocolError

Part = m.StoreUpload | m.StoreFile


@dataclass(slots=True)
class StoreRequest:
    """The request of an instance that is being carried out."""

    message: m.InstanceToStore
    step: type[o.Step] | None = None  # under way
    file: Any = None
    identity: Identity | None = None  # of all of the storage, in the file
    working: Working | None = None
    piece: Piece | None = None  # pinned: ``working`` begins with its bytes


class Parts:
    """The requests of one instance, step by step. Its arena has ``stream_nbytes``. Orders go to ``out``."""

    def __init__(
        self, model: StoredModel, segments: Segments, hashing: Hashing, stream_nbytes: int, out: list[o.Effect]
    ) -> None:
        self._model = model
        self._draft = model.draft
        self._segments = segments
        self._hashing = hashing
        self._stream_nbytes = stream_nbytes
        self._out = out

    def decide(self, request: StoreRequest, part: Part, event: o.Outcome | None) -> m.Uploaded | None:
        """Order the next step, after the one whose outcome is ``event`` if there was one, or return the answer. Raises
        RemoteProtocolError, ModelError.
        """
        working = request.working
        match event:
            case None:
                if isinstance(part, m.StoreFile):
                    if request.file is None:
                        self._order(request, o.Look(part, _whole(part)))
                        return None
                elif min(part.arena_offset, part.nbytes) < 0 or _end_of(part) > self._stream_nbytes:
                    raise RemoteProtocolError(
                        f"an upload of bytes [{part.arena_offset}, {_end_of(part)}) of a stream area of "
                        f"{self._stream_nbytes} bytes"
                    )
                self._open(request, part)
            case o.Seen():
                assert isinstance(part, m.StoreFile)
                return self._seen(request, part, event)
            case o.SpanFound():
                request.working = Working(event.span)
                self._placed(request, part, request.working)
            case o.Copied():
                assert working is not None
                self._copied(request, part, working)
            case o.BytesWritten():
                assert working is not None
                return self._wrote(request, part, working, event.text)
            case _:
                raise AssertionError(event)
        return None

    def _open(self, request: StoreRequest, part: Part) -> None:
        item = self._find(part)
        if not isinstance(item, Working):
            self._model.admit(part.storage, part.total_nbytes)
            self._order(request, o.FindSpan(part.total_nbytes))
        elif item.state is DraftState.WORKING:
            request.working = item
            self._draft.change(item, Change.WRITE)
            self._write(request, part, item)
        else:
            assert item.state is DraftState.SEALED

    def _seen(self, request: StoreRequest, part: m.StoreFile, seen: o.Seen) -> m.Uploaded | None:
        end = part.file_offset + part.nbytes
        if part.file_offset < 0 or part.nbytes < 0 or end > seen.size:
            raise ModelError(
                f"bytes [{part.file_offset:,}, {end:,}) are not in file {part.file}, which has {seen.size:,} bytes: it "
                "is truncated or was replaced; load it again"
            )
        item = self._find(part)
        known = None if seen.fingerprint is None else self._segments.find(seen.fingerprint)
        if known is not None and known.nbytes == part.nbytes:
            if item is None:
                self._model.admit(part.storage, part.nbytes)
            self._draft.changed = True
            self._draft.point(part.storage, Piece(known, 0, known.nbytes))
            return m.Uploaded()
        request.file, request.identity = seen.file, seen.identity
        self._open(request, part)
        return None

    def _placed(self, request: StoreRequest, part: Part, working: Working) -> None:
        item = self._find(part)  # as a write-back may have made it meanwhile
        assert not isinstance(item, Working)
        if item is not None and part.nbytes < part.total_nbytes:
            request.piece = item
            self._segments.pin(item.segment)
            self._order(request, o.CopySegment(item.segment, item.offset, working.span))
        else:
            self._draft.put(part.storage, working)
            self._write(request, part, working)

    def _copied(self, request: StoreRequest, part: Part, working: Working) -> None:
        assert request.piece is not None
        if self._draft.items.get(part.storage) is not request.piece:
            self.let_go(request)
            self._open(request, part)
            return
        self._out.append(o.Unpin(request.piece.segment))
        request.piece = None
        working.coverage.add(0, working.nbytes)
        self._draft.put(part.storage, working)
        self._write(request, part, working)

    def _write(self, request: StoreRequest, part: Part, working: Working) -> None:
        if isinstance(part, m.StoreFile):
            self._order(request, o.ReadFile(part, request.file, working.span))
        else:
            self._order(request, o.CopyFromArena(part, working.span))

    def _wrote(self, request: StoreRequest, part: Part, working: Working, text: str) -> m.Uploaded:
        used = self._draft.change(working, Change.WROTE) is DraftState.WORKING
        if text:  # the range is as if it had not come: the instance sends its bytes instead, or fails
            if used and working.coverage.empty:
                self._draft.free([part.storage])
            raise ModelError(text)
        if used:
            working.coverage.add(part.offset, part.nbytes)
            if working.nbytes > SMALL_NBYTES and working.coverage.complete:
                self._out.append(self._hashing.begin([(part.storage, working, 0)], working.span, request.identity))
        return m.Uploaded()

    def _find(self, part: Part) -> Piece | Working | None:
        return self._draft.find(part.storage, part.total_nbytes, part.offset, part.nbytes)

    def _order(self, request: StoreRequest, step: o.Step) -> None:
        request.step = type(step)
        self._out.append(step)

    def let_go(self, request: StoreRequest) -> None:
        """The request is over: give back the segment and the span that it held."""
        working, request.working = request.working, None
        piece, request.piece = request.piece, None
        if piece is not None:
            self._out.append(o.Unpin(piece.segment))
        if working is not None and working.state is DraftState.BUSY:
            self._draft.drop_working(working)
        if working is not None and working.state is DraftState.LOST:
            self._draft.change(working, Change.WROTE)


def _whole(part: m.StoreFile) -> bool:
    return part.nbytes == part.total_nbytes and part.nbytes > SMALL_NBYTES


def _end_of(upload: m.StoreUpload) -> int:
    return upload.arena_offset + upload.nbytes
