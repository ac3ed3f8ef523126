"""Messages to an instance, from the router and the store, and to a session where it has attached."""

from dormouse.schemas.messages.shared import Arena, DeviceInfo, Lease, Message


class Uploaded(Message, frozen=True, kw_only=True, tag=1):
    """The store has copied the oldest unanswered upload; its arena region may be used again."""


class Committed(Message, frozen=True, kw_only=True, tag=2):
    version: int
    nbytes: int


class StoreFailed(Message, frozen=True, kw_only=True, tag=3):
    text: str


StoreToInstance = Uploaded | Committed | StoreFailed


class Run(Message, frozen=True, kw_only=True, tag=1):
    """Run ``handle`` on a request: ``body`` if it is small, else ``nbytes`` of the request area. ``kind`` is its
    content type, "" for JSON; ``accept`` what the client would like to have, "" if it does not say. A language model
    has no lease and always a body; ``route`` says which of OpenAI's routes it came by. ``id`` is its X-Request-Id,
    ``trace`` its traceparent, if it has one, and ``tracestate`` what goes with that.
    """

    request: int
    lease: Lease | None
    body: bytes | None
    nbytes: int
    route: str = ""
    id: str = ""
    trace: str = ""
    kind: str = ""
    accept: str = ""
    tracestate: str = ""


class LeaseGranted(Message, frozen=True, kw_only=True, tag=2):
    """``requests``: the first so many of those that wait are its batch, of a function that has such."""

    lease: Lease
    requests: int = 0


class LeaseRefused(Message, frozen=True, kw_only=True, tag=3):
    code: str
    text: str


class Exit(Message, frozen=True, kw_only=True, tag=4):
    """Nothing more will come; leave."""


class PartsTaken(Message, frozen=True, kw_only=True, tag=5):
    """The client has taken so much more of this request's chunks: as much may follow."""

    request: int
    nbytes: int


class Abandon(Message, frozen=True, kw_only=True, tag=6):
    """Nobody waits for this request of a language model any more: answer Raised."""

    request: int


class CallAnswered(Message, frozen=True, kw_only=True, tag=7):
    """The answer of a function that this instance has called, as over HTTP. ``headers``: in small letters."""

    number: int
    status: int
    headers: dict[str, str]
    body: bytes


RouterToInstance = Run | LeaseGranted | LeaseRefused | Exit | PartsTaken | Abandon | CallAnswered


class FileTaken(Message, frozen=True, kw_only=True, tag=1):
    """StoreFile may name it now."""

    file: int


class FileRefused(Message, frozen=True, kw_only=True, tag=2):
    """Not a regular file that the descriptor can read, or too many: upload the bytes."""

    file: int
    text: str


FileAnswer = FileTaken | FileRefused


class Attached(Message, frozen=True, kw_only=True, tag=1):
    """The session's identity. Comes with the arena's descriptor."""

    instance: str
    directory: str
    arena: Arena
    device: DeviceInfo
    gpus: int


class AttachRefused(Message, frozen=True, kw_only=True, tag=2):
    text: str


class SessionEnd(Message, frozen=True, kw_only=True, tag=3):
    """The session is over, and why; the socket's end of file follows. Without this, its router was killed."""

    text: str


FromAttach = Attached | AttachRefused | SessionEnd
