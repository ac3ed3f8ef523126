"""Events, orders and answers of the machine of uploads: frozen values, no behaviour.

Messages of the instance are events as they come. Each of the orders that take time is answered by one event. A request
has one of them under way at most; hashes go on beside it.
"""

from typing import Any

from msgspec import Struct

from dormouse.gpuserver.store.disk.index import Identity
from dormouse.gpuserver.store.memory.segments import Segment
from dormouse.gpuserver.store.memory.slabs import SlabSpan
from dormouse.schemas import messages as m

# --- orders that take time


class Look(Struct, frozen=True, gc=False):
    """See how an offered file is now; with ``whole``, whether the store has had this range before."""

    part: m.StoreFile
    whole: bool


class FindSpan(Struct, frozen=True, gc=False):
    """Find a span of zeros, behind the instance's last one if possible."""

    nbytes: int


class CopySegment(Struct, frozen=True, gc=False):
    """Bring a pinned segment to host memory; the bytes of ``span`` are those from ``offset`` of it on."""

    segment: Segment
    offset: int
    span: SlabSpan


class CopyFromArena(Struct, frozen=True, gc=False):
    """Copy from the arena's stream area to ``offset`` of a span."""

    upload: m.StoreUpload
    span: SlabSpan


class ReadFile(Struct, frozen=True, gc=False):
    """Read from a file, which was as ``Seen`` had it, to ``offset`` of a span."""

    part: m.StoreFile
    file: Any
    span: SlabSpan


class Hash(Struct, frozen=True, gc=False):
    """Copy ``parts``, each to its offset, to a span, and hash all of it."""

    number: int
    span: SlabSpan
    parts: list[tuple[SlabSpan, int]]


# --- orders that take none


class GiveBack(Struct, frozen=True, gc=False):
    """Nobody has any use for these."""

    spans: list[SlabSpan]


class Unpin(Struct, frozen=True, gc=False):
    """A segment is copied from no more."""

    segment: Segment


class DonePlacing(Struct, frozen=True, gc=False):
    """The instance places nothing more for now."""


class NoteFileRange(Struct, frozen=True, gc=False):
    """A range of a file has these bytes."""

    identity: Identity
    fingerprint: bytes


class Publish(Struct, frozen=True, gc=False):
    """The model has a new version."""


class Say(Struct, frozen=True, gc=False):
    """Send this to the instance."""

    message: m.StoreToInstance


class Warn(Struct, frozen=True, gc=False):
    """The instance has broken the protocol, or its message has broken us."""

    text: str


class ReadersGone(Struct, frozen=True, gc=False):
    """The instance is gone, and nobody reads its arena or places for it any more. Hashes may be under way."""


class GoOn(Struct, frozen=True, gc=False):
    """Something waits: this is to be an event as soon as the other effects are carried out."""


# --- events


class Seen(Struct, frozen=True, gc=False):
    """A file has ``size`` bytes. ``fingerprint``: of the range, if it has not changed since that was known."""

    size: int
    file: Any
    identity: Identity | None = None
    fingerprint: bytes | None = None


class SpanFound(Struct, frozen=True, gc=False):
    """There was room."""

    span: SlabSpan


class Copied(Struct, frozen=True, gc=False):
    """The bytes of a segment are in a span."""


class BytesWritten(Struct, frozen=True, gc=False):
    """The request's bytes are in their span; ``text`` says why they are not: it has any bytes there."""

    text: str = ""


class Hashed(Struct, frozen=True, gc=False):
    """No fingerprint: it raised."""

    number: int
    fingerprint: bytes | None


class Failed(Struct, frozen=True, gc=False):
    """The request's step came to nothing; the text says why. ``raised``: by a fault of ours."""

    text: str
    raised: bool = False


class Broke(Struct, frozen=True, gc=False):
    """No message of the instance is taken any more."""

    text: str


class WrittenBack(Struct, frozen=True, gc=False):
    """An executor has written these, by storage; the instance has forgotten ``freed``."""

    segments: dict[int, Segment]
    freed: list[int]


class Gone(Struct, frozen=True, gc=False):
    """The instance is."""


ANSWERS = {
    Look: Seen,
    FindSpan: SpanFound,
    CopySegment: Copied,
    CopyFromArena: BytesWritten,
    ReadFile: BytesWritten,
    Hash: Hashed,
}
"""The outcome of each step; or Failed, but for a Hash."""

Step = Look | FindSpan | CopySegment | CopyFromArena | ReadFile | Hash
Deed = GiveBack | Unpin | DonePlacing | NoteFileRange | Publish | Say | Warn | ReadersGone
Effect = Step | Deed | GoOn
Outcome = Seen | SpanFound | Copied | BytesWritten | Failed
Event = m.InstanceToStore | Outcome | Hashed | Broke | WrittenBack | Gone | GoOn
