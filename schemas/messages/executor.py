"""Messages to an executor: from the controller and the store, and in its inbox, where descriptors come."""

from dormouse.schemas.messages.shared import Arena, JoinRule, Lease, Message


class Entry(Message, frozen=True, kw_only=True):
    """A persistent storage of an instance: bytes ``[offset, +nbytes)`` of a segment."""

    storage: int
    segment: int
    offset: int
    nbytes: int


class Place(Message, frozen=True, kw_only=True):
    """The place of a segment on the host: bytes ``[offset, +nbytes)`` of a slab."""

    segment: int
    slab: int
    offset: int
    nbytes: int


class Wake(Message, frozen=True, kw_only=True, tag=1):
    """Begin a lease: bind manifest ``version``, copy what is missing, evict what is worth least if room is needed.

    ``worth`` is, by instance, what keeping a byte of its model here is worth (decisions/scheduling/keeping.py); one
    that is not named is worth nothing. The executor makes of it the cost of evicting a segment (as Tangram's Eq. 2).
    ``peers`` are GPUs on which the instance is resident, nearest first. ``activation_nbytes`` is what its requests took
    at most so far: the executor leaves that much free if it can. ``over`` as in Over. ``joins``: of a language model.
    """

    lease: Lease
    instance: str
    version: int
    worth: dict[str, float]
    peers: list[int]
    activation_nbytes: int
    over: list[int] = []
    joins: JoinRule | None = None


class Revoke(Message, frozen=True, kw_only=True, tag=2):
    """End this lease now; answer its Done."""

    serial: int


class Forget(Message, frozen=True, kw_only=True, tag=3):
    """The instance is gone: drop its tables and its resident segments."""

    instance: str


class Pause(Message, frozen=True, kw_only=True, tag=4):
    """This lease loses its turn and keeps its seat. Frames that it has sent are executed; later ones wait."""

    serial: int


class Turn(Message, frozen=True, kw_only=True, tag=5):
    """This lease has a turn again."""

    serial: int


class Over(Message, frozen=True, kw_only=True, tag=6):
    """These leases are over without an END: their instances say that they have given the GPU nothing. Answered with a
    Done only where a model had to be brought.
    """

    serials: list[int]


class Retire(Message, frozen=True, kw_only=True, tag=7):
    """End in order: another executor drives this GPU from then on, by what the node's configuration says by then. There
    is no lease any more, or those that there are end with this.
    """


class Preload(Message, frozen=True, kw_only=True, tag=8):
    """Bring a model that nobody has asked for yet, beside what is worth more. ``worth`` is of what this GPU has and of
    this instance, by the waits that it saves (decisions/scheduling/holding.py); ``peers`` as in Wake. It is given up
    for the first thing that is to be done here. Answered with one Preloaded. The runtime of a language model is opened.
    """

    instance: str
    version: int
    worth: dict[str, float]
    peers: list[int]


class StopPreload(Message, frozen=True, kw_only=True, tag=9):
    """Give that up, if it is not over."""


class DropModel(Message, frozen=True, kw_only=True, tag=10):
    """Drop the model that these instances have, as far as no seat and no other instance has it. Unloaded answers."""

    query: int
    instances: list[str]


class DrainSeats(Message, frozen=True, kw_only=True, tag=11):
    """Seats of language models end as soon as they rest, for this GPU is drained; or (``on`` false) not any more."""

    on: bool


ControllerToExecutor = (
    Wake | Revoke | Forget | Pause | Turn | Over | Retire | Preload | StopPreload | DropModel | DrainSeats
)


class Manifest(Message, frozen=True, kw_only=True, tag=1):
    """Store to executor: the whole persistent set of an instance.

    ``segments`` are ``(segment, nbytes)`` in first-use order, as far as it is known; a Manifest of the same version
    may come again with a better order. A segment id means the same bytes for ever.
    """

    instance: str
    version: int
    entries: list[Entry]
    segments: list[tuple[int, int]]


class Placed(Message, frozen=True, kw_only=True, tag=2):
    """Store to executor: write back here, the storages in the order of AskPlace. The segments are new and belong to no
    manifest until Written.
    """

    ticket: int
    places: list[Place]


class PlaceRefused(Message, frozen=True, kw_only=True, tag=3):
    ticket: int
    text: str


class Dropped(Message, frozen=True, kw_only=True, tag=4):
    """Store to executor: this instance has no manifest any more."""

    instance: str


class Fetched(Message, frozen=True, kw_only=True, tag=5):
    """Store to executor: these segments of the ticket lie here and stay until LetGo. Several may answer one Fetch, as
    parts of it are read from files; ``file_nbytes`` counts those. ``last`` if no more will come.
    """

    ticket: int
    places: list[Place]
    file_nbytes: int
    last: bool


class FetchFailed(Message, frozen=True, kw_only=True, tag=6):
    """No more will come for this ticket: a file is damaged or cannot be read, or the host has no room. With
    ``damaged`` its model has to be loaded anew, else a retry may succeed.
    """

    ticket: int
    text: str
    damaged: bool = False


StoreToExecutor = Manifest | Placed | PlaceRefused | Dropped | Fetched | FetchFailed


class AttachInstance(Message, frozen=True, kw_only=True, tag=1):
    """To executors and the store, with the arena's descriptor: bind this instance's endpoint.

    ``directory`` is RUN/i/<instance>; the receiver binds ``store`` and ``files``, or ``gpu<k>.<epoch>``, in it and
    chowns the sockets to ``uid``.
    """

    instance: str
    tenant: str
    function: str  # empty for a session, of whose model nothing is kept
    function_version: int
    directory: str
    uid: int
    arena: Arena
    quota_nbytes: int
    llm: bool = False  # it serves a language model: what it sends executors is for a runtime
    group: str = ""  # which may be one of all instances of this group whose models are the same; "": its own
    adapter: bool = False  # its model has more than that of others of the group
    eager: bool = False  # nothing of it is captured


class DetachInstance(Message, frozen=True, kw_only=True, tag=2):
    """No descriptor: unbind, unmap."""

    instance: str


class SlabMade(Message, frozen=True, kw_only=True, tag=3):
    """Store to executors, with the slab's descriptor. ``pinnable``: as core/shm.py has it."""

    slab: int
    nbytes: int
    pinnable: bool


class PoolExported(Message, frozen=True, kw_only=True, tag=4):
    """Executor to executor: the memory of its pool, from which the receiver may read what PeerPinned names. ``handle``
    is the device's own. The descriptors come in ``parts`` packets; this one is number ``part``.
    """

    gpu: int
    epoch: int
    nbytes: int
    handle: bytes
    part: int
    parts: int


class PeerPin(Message, frozen=True, kw_only=True, tag=5):
    """Executor ``gpu`` to executor: which of these segments do you have? Keep them where they are until PeerUnpin."""

    gpu: int
    epoch: int
    ticket: int
    segments: list[int]


class PeerPinned(Message, frozen=True, kw_only=True, tag=6):
    """The answer of executor ``gpu``: by segment that it has, ``[(offset, nbytes)]`` in its exported memory."""

    gpu: int
    epoch: int
    ticket: int
    extents: list[tuple[int, list[tuple[int, int]]]]


class PeerUnpin(Message, frozen=True, kw_only=True, tag=7):
    gpu: int
    epoch: int
    ticket: int


class SlabGone(Message, frozen=True, kw_only=True, tag=8):
    """Store to executors: nothing lies in it any more, and nothing will."""

    slab: int


InboxPacket = AttachInstance | DetachInstance | SlabMade | SlabGone | PoolExported | PeerPin | PeerPinned | PeerUnpin
