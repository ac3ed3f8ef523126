"""Decides the outcome of each message of one instance to the store: pure, no memory, no thread, no lock, no clock.

Requests are carried out one after the other, and each but a StoreFree has one answer. The table in drafts.py has all
transitions of a storage's bytes; a request goes through these steps, as far as it needs them::

    StoreFile     Look             of bytes that are known, the storage becomes their segment: answered
    StoreUpload,  waits            until the storage is no longer SEALED
    StoreFile     FindSpan         of a storage that has no Working
                  CopySegment      of one that has a segment, as it is not written all; anew if it is replaced meanwhile
                  CopyFromArena,   answered; a large storage that is complete is hashed behind the answer, so a second
                  ReadFile         instance of the same function never needs much more than its own share of memory
    StoreFree     at once
    Commit        waits            for all hashes: the pack depends on how large the model is
                  FindSpan         of small storages in common; anew if they are others by then
                  waits            for all hashes: all that has no segment is hashed, the small ones together
                  answered         everything has its segment

When the instance goes, the step under way is the last one. Decisions that wait for no step are made anew at each event.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, assert_never

from dormouse.gpuserver.store.ingest import steps as o
from dormouse.gpuserver.store.ingest.drafts import DraftState, Piece, Placed
from dormouse.gpuserver.store.ingest.hashing import Hashing
from dormouse.gpuserver.store.ingest.models import MAX_STORAGES, ModelError, StoredModel
from dormouse.gpuserver.store.ingest.parts import Parts, StoreRequest
from dormouse.gpuserver.store.memory.segments import Segments
from dormouse.gpuserver.store.memory.slabs import SlabSpan
from dormouse.schemas import messages as m
from dormouse.schemas.errors import RemoteProtocolError

MAX_WAITING: Final = 2 * MAX_STORAGES
"""Messages and freed storages that may wait behind a slow one: an honest instance has no more storages to free, and has
one upload unanswered."""


class Uploads:
    """The uploads of one instance. ``handle`` is the way in, its effects the way out.

    Args:
        scope: within which its segments are shared.
        stream_nbytes: of its arena.
    """

    def __init__(self, model: StoredModel, segments: Segments, scope: str, stream_nbytes: int) -> None:
        self._model = model
        self._draft = model.draft
        self._segments = segments
        self._hashing = Hashing(model.draft, segments, scope)
        self._out: list[o.Effect] = []
        self._parts = Parts(model, segments, self._hashing, stream_nbytes, self._out)
        self._waiting: deque[m.InstanceToStore] = deque()
        self._weight = 0  # of messages that wait
        self._request: StoreRequest | None = None
        self._broken = False  # it broke the protocol: none of its messages counts any more
        self._gone = False

    def handle(self, event: o.Event) -> list[o.Effect]:
        """Everything that is to be done because of ``event``, in order."""
        match event:
            case m.StoreUpload() | m.StoreFile() | m.StoreFree() | m.Commit():
                self._hear(event)
            case o.Hashed():
                self._hashed(event)
            case o.WrittenBack():
                self._model.written(event.segments, event.freed)
            case o.Broke():
                self._break(event.text)
            case o.Gone():
                self._leave()
            case o.GoOn():
                pass
            case o.Seen() | o.SpanFound() | o.Copied() | o.BytesWritten() | o.Failed():
                self._stepped(event)
            case _:
                assert_never(event)
        self._go_on()
        freed, self._segments.freed = self._segments.freed, []
        out = [o.GiveBack(freed), *self._out] if freed else [*self._out]
        self._out.clear()
        return out

    # --- requests

    def _hear(self, message: m.InstanceToStore) -> None:
        if self._broken or self._gone:
            return
        self._weight += _weight(message)
        if self._weight > MAX_WAITING:
            self._break(f"more than {MAX_WAITING:,} messages and freed storages wait for the store")
            return
        self._waiting.append(message)

    def _go_on(self) -> None:
        """Go on as far as nothing is waited for."""
        if (request := self._request) is not None and request.step is None:
            self._decide(request)
        while self._request is None and self._waiting and not self._out:
            message = self._waiting.popleft()
            self._weight -= _weight(message)
            self._request = StoreRequest(message)
            self._decide(self._request)
        if self._request is None and self._waiting:
            self._out.append(o.GoOn())  # the version is published as it is now

    def _decide(self, request: StoreRequest, event: o.Outcome | None = None) -> None:
        """Order the next step, after the one whose outcome is ``event`` if there was one."""
        try:
            match request.message:
                case m.StoreFree(storages=storages):
                    self._draft.free(storages)
                    self._end(request)
                case m.Commit():
                    self._commit(request, event)
                case m.StoreUpload() | m.StoreFile() as part:
                    if answer := self._parts.decide(request, part, event):
                        self._end(request, answer)
                case _:
                    assert_never(request.message)
        except RemoteProtocolError as error:
            self._break(str(error))
            self._end(request)
        except ModelError as error:
            self._end(request, m.StoreFailed(text=str(error)))

    def _stepped(self, event: o.Outcome) -> None:
        request = self._request
        assert request is not None
        assert request.step is not None
        assert isinstance(event, o.Failed | o.ANSWERS[request.step])
        request.step = None
        if isinstance(event, o.SpanFound) and self._gone:
            self._segments.freed.append(event.span)
        if self._gone:
            self._end(request)
        elif isinstance(event, o.Failed):
            if event.raised:
                self._break(event.text)
            self._end(request, None if event.raised else m.StoreFailed(text=event.text))
        else:
            self._decide(request, event)

    def _end(self, request: StoreRequest, answer: m.StoreToInstance | None = None) -> None:
        self._request = None
        self._parts.let_go(request)
        if self._gone:
            self._out.append(o.ReadersGone())
        elif answer is not None:
            self._out.append(o.Say(answer))

    def _break(self, text: str) -> None:
        """The instance broke the protocol: send that once, then take no more messages of it. Its own ``load()`` will
        time out.
        """
        if not (self._broken or self._gone):
            self._broken = True
            self._waiting.clear()
            self._out += [o.Warn(text), o.Say(m.StoreFailed(text=text))]

    def _leave(self) -> None:
        self._gone = True
        self._waiting.clear()
        self._model.close()
        if self._request is None:
            self._out.append(o.ReadersGone())
        elif self._request.step is None:
            self._end(self._request)

    # --- commits

    def _commit(self, request: StoreRequest, event: o.Outcome | None) -> None:
        if not isinstance(event, o.SpanFound) and self._hashing:
            return  # first: looking at all storages for each one that is hashed took minutes
        packed, nbytes = self._draft.small()
        if isinstance(event, o.SpanFound):
            if len(packed) > 1 and event.span.nbytes == nbytes:
                self._hash(packed, event.span)
            else:  # a write-back has replaced some meanwhile
                self._segments.freed.append(event.span)
        if len(packed) > 1 and not self._hashing:
            request.step = o.FindSpan
            self._out.append(o.FindSpan(nbytes))
            return
        for storage, working in self._draft.unsealed():
            self._hash([(storage, working, 0)], working.span)
        if not self._hashing:
            self._out.append(o.DonePlacing())
            if self._model.commit():
                self._out.append(o.Publish())
            self._end(request, m.Committed(version=self._model.version, nbytes=self._model.nbytes))

    def _hash(self, placed: Sequence[Placed], span: SlabSpan) -> None:
        self._out.append(self._hashing.begin(placed, span))

    def _hashed(self, hashed: o.Hashed) -> None:
        if note := self._hashing.end(hashed):
            self._out.append(note)
        if hashed.fingerprint is None and self._request is not None and isinstance(self._request.message, m.Commit):
            self._end(self._request)  # not all of it will ever have a segment

    def check(self) -> None:
        """Assert what holds between any two events."""
        self._segments.check()
        sealed, request = self._hashing.workings, self._request
        nbytes = 0
        segments = set()
        for item in self._draft.items.values():
            if isinstance(item, Piece):
                segments.add(item.segment)
                continue
            nbytes += item.nbytes
            busy = request is not None and request.working is item and request.step in (o.CopyFromArena, o.ReadFile)
            assert item.state is (
                DraftState.BUSY if busy else DraftState.SEALED if item in sealed else DraftState.WORKING
            )
        assert self._draft.nbytes == nbytes + sum(segment.nbytes for segment in segments)
        assert self._broken or self._gone or self._weight == sum(map(_weight, self._waiting))
        assert request is None or request.step is not None or self._hashing, "it waits for nothing"


def _weight(message: m.InstanceToStore) -> int:
    return 1 + (len(message.storages) if isinstance(message, m.StoreFree) else 0)
