"""Every typed message between processes, declared once: one tagged union per link and direction.

Frozen, array-like msgpack with integer tags; tags are appended, never reused. Decoding checks every field and can build
nothing but these. Large data never travels here: a message names bytes in an arena or a slab. A message has no sender:
that is the endpoint at which it arrived. Who says what to whom is drawn in docs/design.md.
"""

from typing import Final

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages. Subclasses repeat ``frozen`` for type checkers and ``kw_only``, which is not inherited."""


# --- shared parts


class Lease(Message, frozen=True, kw_only=True):
    """The right of one instance to use one GPU for one request."""

    gpu: int
    epoch: int
    serial: int
    secret: int


CONTROL_NBYTES: Final = 8


class Arena(Message, frozen=True, kw_only=True):
    """Layout of an instance's arena, in bytes: ``[request | response | stream | control]``.

    The control area holds one little-endian word of 8 bytes, written by the router only: the last ``Run.request`` that
    it asked the instance to give up. A signal carries no number, so without it one could meet the next request.
    """

    request_nbytes: int
    response_nbytes: int
    stream_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.control_offset + CONTROL_NBYTES

    @property
    def control_offset(self) -> int:
        return self.request_nbytes + self.response_nbytes + self.stream_nbytes

    @property
    def stream_offset(self) -> int:
        return self.request_nbytes + self.response_nbytes


class Entry(Message, frozen=True, kw_only=True):
    """A persistent storage of an instance: bytes ``[offset, +nbytes)`` of a segment."""

    storage: int
    segment: int
    offset: int
    nbytes: int


class Place(Message, frozen=True, kw_only=True):
    """Where a segment lies on the host: bytes ``[offset, +nbytes)`` of a slab."""

    segment: int
    slab: int
    offset: int
    nbytes: int


class PoolStats(Message, frozen=True, kw_only=True):
    """What a GPU's memory is used for, in bytes; ``weights + lost + activations + free`` is all of it.

    ``lost`` is held by no segment and free to none: the rounding of granules or blocks. ``largest`` is the largest
    segment that would fit without eviction and without a move. ``moved`` counts since the start.
    """

    weights_nbytes: int = 0
    lost_nbytes: int = 0
    activation_nbytes: int = 0
    free_nbytes: int = 0
    largest_nbytes: int = 0
    moved_nbytes: int = 0
    segments: int = 0


class FunctionSpec(Message, frozen=True, kw_only=True):
    """A deployed function: what the catalogue keeps.

    Durations are in milliseconds. ``version`` counts successful deploys; ``snapshot`` names what was deployed, and
    ``entry`` the file in it that has ``load`` and ``handle``.
    """

    name: str
    version: int
    entry: str
    snapshot: str
    tenant: str = "default"
    deadline_ms: int = 1000
    percentile: float = 98.0
    timeout_ms: int = 60_000
    load_timeout_ms: int = 300_000
    idempotent: bool = False
    max_queue: int = 256
    quota_nbytes: int = 1 << 30  # growth of the persistent set after load()
    stateless: bool = False  # any instance may answer any request: none changes what load() has made
    max_instances: int = 0  # of a stateless one, at the same time; 0: as many as there are GPUs


class Failure(Message, frozen=True, kw_only=True):
    """An error as it crosses processes: ``code`` and ``status`` as in schemas/errors.py, ``text`` for a person."""

    code: str
    status: int
    text: str
    retryable: bool = False


class DeviceInfo(Message, frozen=True, kw_only=True):
    """What functions are told of a GPU through ``torch.cuda``."""

    name: str
    total_nbytes: int
    capability: tuple[int, int]
    multiprocessors: int
    cuda: str = ""  # version that the executor's PyTorch was built for; "": none, the GPU is emulated


# --- supervisor <-> everyone


class Ready(Message, frozen=True, kw_only=True, tag=1):
    """The process has bound and connected all it needs."""


class Heartbeat(Message, frozen=True, kw_only=True, tag=2):
    """The process's loop turns."""


class RoleFailed(Message, frozen=True, kw_only=True, tag=3):
    """The process cannot start; it exits after this."""

    text: str


class KillRole(Message, frozen=True, kw_only=True, tag=4):
    """Controller only: this process holds something it will not give back; kill that epoch of it."""

    role: str
    epoch: int
    text: str


ToSupervisor = Ready | Heartbeat | RoleFailed | KillRole


class Peers(Message, frozen=True, kw_only=True, tag=1):
    """Epoch of every role that has said Ready and is alive, and why others are not: those that could not start and are
    tried again. Sent to everyone whenever it changes.
    """

    up: dict[str, int]
    down: dict[str, str] = {}


class Shutdown(Message, frozen=True, kw_only=True, tag=2):
    """Finish and exit with status 0."""


class Blame(Message, frozen=True, kw_only=True, tag=3):
    """To the router: an executor has died of this instance's commands; ``text`` says how."""

    instance: str
    text: str


FromSupervisor = Peers | Shutdown | Blame


# --- router -> controller


class Deployed(Message, frozen=True, kw_only=True, tag=1):
    """A new version has loaded in an instance of its own and passed its checks: keep it and serve it."""

    spec: FunctionSpec


class Removed(Message, frozen=True, kw_only=True, tag=2):
    name: str


class InstanceUp(Message, frozen=True, kw_only=True, tag=3):
    """An instance can take requests (``loaded``) or at least needs the GPU for its ``load()``."""

    instance: str
    function: str
    tenant: str
    loaded: bool


class InstanceGone(Message, frozen=True, kw_only=True, tag=4):
    instance: str


class Acquire(Message, frozen=True, kw_only=True, tag=5):
    """A request wants a lease. ``deadline_ms`` counts from now. ``version`` is the manifest version that must be
    resident, if known. ``own``: it is for load() or a session, which have no deadline to keep.
    """

    request: int
    instance: str
    deadline_ms: int
    version: int | None = None
    own: bool = False


class Release(Message, frozen=True, kw_only=True, tag=6):
    """The request no longer wants its lease, whether it waits or has one: cancelled, timed out, or its instance is
    dead.
    """

    request: int


class AskStatus(Message, frozen=True, kw_only=True, tag=7):
    query: int


class AskPolicy(Message, frozen=True, kw_only=True, tag=12):
    """What the scheduler's policy is, after these settings were changed."""

    query: int
    changes: dict[str, str | int | float | bool] = {}


class Missed(Message, frozen=True, kw_only=True, tag=8):
    """A request of this function has failed, so it missed its deadline. ``request`` as in Acquire, 0 if the controller
    knows of none.
    """

    function: str
    request: int


class Quarantined(Message, frozen=True, kw_only=True, tag=9):
    """Executors died of this function's commands: it is not to be started, also after a restart of the node."""

    name: str
    text: str


class Lifted(Message, frozen=True, kw_only=True, tag=10):
    """It may be started again."""

    name: str


class Answered(Message, frozen=True, kw_only=True, tag=11):
    """The instance says that it is through with the request's lease. ``used``: it has given the GPU commands, the last
    of them an END, so that the executor will say Done; else nobody does.
    """

    request: int
    used: bool


RouterToController = (
    Deployed
    | Removed
    | InstanceUp
    | InstanceGone
    | Acquire
    | Release
    | AskStatus
    | AskPolicy
    | Missed
    | Quarantined
    | Lifted
    | Answered
)


# --- controller -> router


class Catalogue(Message, frozen=True, kw_only=True, tag=1):
    """All functions; sent once per router start. ``held``: why some of them are not to be started, by name."""

    functions: list[FunctionSpec]
    held: dict[str, str] = {}


class Kept(Message, frozen=True, kw_only=True, tag=2):
    """The deploy or removal of this name is durable."""

    name: str


class Granted(Message, frozen=True, kw_only=True, tag=3):
    """``wake_nbytes`` is what must be copied first; 0 if the model was already there."""

    request: int
    lease: Lease
    wake_nbytes: int


class Refused(Message, frozen=True, kw_only=True, tag=4):
    request: int
    failure: Failure


class LeaseLost(Message, frozen=True, kw_only=True, tag=5):
    """The executor of a granted lease died."""

    request: int


class Wrote(Message, frozen=True, kw_only=True, tag=12):
    """A lease of this instance has changed its model, and that was kept: ``wrote`` of Done."""

    instance: str


class Status(Message, frozen=True, kw_only=True, tag=7):
    """Answer to AskStatus and AskPolicy: JSON for people."""

    query: int
    json: bytes
    failure: Failure | None = None  # why nothing was changed


class Device(Message, frozen=True, kw_only=True, tag=8):
    """What functions shall see as ``cuda:0``: the smallest of the node's GPUs. Sent when the first executor is up, and
    on change.
    """

    info: DeviceInfo


class InstanceViolated(Message, frozen=True, kw_only=True, tag=9):
    """The instance broke the command stream's protocol: end it; its request fails with ``violation``."""

    instance: str
    text: str


class EndInstance(Message, frozen=True, kw_only=True, tag=10):
    """This instance cannot go on: end it; its request, or what it was loaded for, fails with this.

    ``unkept`` names the function if this is the answer to its Deployed: nothing was kept and no Kept follows.
    """

    instance: str
    failure: Failure
    unkept: str = ""


class NotRemoved(Message, frozen=True, kw_only=True, tag=11):
    """The answer to Removed when the catalogue cannot be written: the function stays."""

    name: str
    text: str


ControllerToRouter = (
    InstanceViolated
    | Catalogue
    | Kept
    | Granted
    | Refused
    | LeaseLost
    | Wrote
    | Status
    | Device
    | EndInstance
    | NotRemoved
)


# --- controller <-> executor


class Wake(Message, frozen=True, kw_only=True, tag=1):
    """Begin a lease: bind manifest ``version``, copy what is missing, evict what is worth least if room is needed.

    ``worth`` is, by instance, what keeping a byte of its model here is worth (controller/keeping.py); one that is not
    named is worth nothing. The executor makes of it the cost of evicting a segment (as Tangram's Eq. 2). ``peers`` are
    GPUs on which the instance is resident, nearest first. ``activation_nbytes`` is what its requests took at most so
    far: the executor leaves that much free if it can. ``over`` as in Over.
    """

    lease: Lease
    instance: str
    version: int
    worth: dict[str, float]
    peers: list[int]
    activation_nbytes: int
    over: list[int] = []


class Revoke(Message, frozen=True, kw_only=True, tag=2):
    """End this lease now; answer its Done."""

    serial: int


class Forget(Message, frozen=True, kw_only=True, tag=3):
    """The instance is gone: drop its tables and its resident segments."""

    instance: str


class Pause(Message, frozen=True, kw_only=True, tag=4):
    """This lease loses its turn and keeps its seat: what it has sent is executed, what comes next waits."""

    serial: int


class Turn(Message, frozen=True, kw_only=True, tag=5):
    """This lease has a turn again."""

    serial: int


class Over(Message, frozen=True, kw_only=True, tag=6):
    """These leases are over without an END: their instances say that they have given the GPU nothing. Answered with a
    Done only where a model had to be brought.
    """

    serials: list[int]


ControllerToExecutor = Wake | Revoke | Forget | Pause | Turn | Over


class GpuPlace(Message, frozen=True, kw_only=True):
    """Where a GPU is among others of the machine, all by UUID: those with which it shares a PCIe switch, and those to
    which it has NVLink. ``reason`` says why that is not known, else it is empty.
    """

    uuid: str
    switch_with: list[str] = []
    nvlink_with: list[str] = []
    reason: str = ""


class Hello(Message, frozen=True, kw_only=True, tag=1):
    """An executor is up. ``pool`` is its strategy; ``reason`` says why this device was chosen. An emulated GPU has no
    ``place``.
    """

    info: DeviceInfo
    pool: str
    reason: str
    stats: PoolStats
    place: GpuPlace | None = None


class Done(Message, frozen=True, kw_only=True, tag=2):
    """The lease is over: exactly one per Wake, but for those that Over has ended without a trace.

    ``copied_nbytes`` counts all that was copied in, ``peer_nbytes`` and ``file_nbytes`` what of it came from another
    GPU or had first to be read from a file. ``resident`` names every instance whose share of this pool has changed,
    with the bytes of its manifest that are there now: what several share counts for each. ``version`` is the manifest
    version of the lease's instance by then. ``wrote`` says that the lease changed a storage which the model had
    before, and that the change was kept; to create or free one is no such change.
    ``peers`` are the GPUs that the ``peer_nbytes`` came from.
    """

    serial: int
    outcome: str  # "ended" | "revoked" | "violated"
    gpu_us: int
    copied_nbytes: int
    peer_nbytes: int
    file_nbytes: int
    resident: list[tuple[str, int]]
    peak_activation_nbytes: int
    version: int
    stats: PoolStats
    wrote: bool = False
    peers: list[int] = []
    repaired: int = 0


class Pressed(Message, frozen=True, kw_only=True, tag=3):
    """What is resident has changed outside a Wake, as in Done: segments were evicted because an operation was out of
    memory, or an instance has become known of whose model others' copies are here already.
    """

    resident: list[tuple[str, int]]
    stats: PoolStats


class Violation(Message, frozen=True, kw_only=True, tag=4):
    """An instance broke the protocol; it is to be ended."""

    instance: str
    text: str


class Awake(Message, frozen=True, kw_only=True, tag=5):
    """All copies of this wake have finished."""

    serial: int
    copied_nbytes: int
    wake_us: int


class Trouble(Message, frozen=True, kw_only=True, tag=6):
    """For a person: what this GPU's device does not do as well as it could, and goes on without."""

    text: str


class Idle(Message, frozen=True, kw_only=True, tag=7):
    """The instance with this turn has given the GPU nothing for a while: another may have the turn."""

    serial: int


class Busy(Message, frozen=True, kw_only=True, tag=8):
    """It has a command again: Idle is no longer true."""

    serial: int


class WantsTurn(Message, frozen=True, kw_only=True, tag=9):
    """A command has come of a lease that has no turn; it waits for Turn."""

    serial: int


ExecutorToController = Hello | Done | Pressed | Violation | Awake | Trouble | Idle | Busy | WantsTurn


# --- store <-> others


class ModelSize(Message, frozen=True, kw_only=True, tag=1):
    """Store to controller: total of an instance's manifest."""

    instance: str
    version: int
    nbytes: int


class StoreStatus(Message, frozen=True, kw_only=True, tag=2):
    """Store to controller, whenever it changes. Bytes and budgets of the two host tiers; a budget of -1 is none."""

    host_nbytes: int
    host_budget_nbytes: int
    file_nbytes: int
    file_budget_nbytes: int
    segments: int
    slabs: int
    trouble: str  # what a person should know: the disk is full, or cannot be written; else empty


class InstanceBytes(Message, frozen=True, kw_only=True):
    """An instance's model by place. ``shared_nbytes`` of ``nbytes`` are in other functions' models too."""

    instance: str
    function: str
    nbytes: int
    host_nbytes: int
    file_nbytes: int
    shared_nbytes: int
    shared_with: list[str]


class StoreReport(Message, frozen=True, kw_only=True, tag=3):
    """Answer to AskStore."""

    query: int
    instances: list[InstanceBytes]


class ModelDamaged(Message, frozen=True, kw_only=True, tag=4):
    """A segment's bytes are not what they were: these instances must be loaded again."""

    instances: list[str]
    text: str


StoreToController = ModelSize | StoreStatus | StoreReport | ModelDamaged


class StoreForget(Message, frozen=True, kw_only=True, tag=1):
    """Controller to store: the instance is gone, free its segments."""

    instance: str


class Keep(Message, frozen=True, kw_only=True, tag=2):
    """Controller to store, at its start and after each change of the catalogue: all functions that are deployed, as
    ``(name, version)``. Models of others are forgotten as soon as no instance has them.
    """

    functions: list[tuple[str, int]]


class AskStore(Message, frozen=True, kw_only=True, tag=3):
    query: int


ControllerToStore = StoreForget | Keep | AskStore


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


class AskPlace(Message, frozen=True, kw_only=True, tag=1):
    """Executor to store: room for these storages ``[(storage, nbytes)]`` of an instance."""

    ticket: int
    instance: str
    storages: list[tuple[int, int]]


class Written(Message, frozen=True, kw_only=True, tag=2):
    """Executor to store: the bytes of this ticket are there; forget ``freed``, make it the next manifest version."""

    ticket: int
    freed: list[int]


class LetGo(Message, frozen=True, kw_only=True, tag=3):
    """Executor to store: this ticket of a Fetch or an AskPlace is done with. Nothing of it is read or written from now
    on; what was placed and not Written is given up.
    """

    ticket: int


class Fetch(Message, frozen=True, kw_only=True, tag=4):
    """Executor to store: where are these segments? In the order in which they are wanted."""

    ticket: int
    segments: list[int]


class FirstUse(Message, frozen=True, kw_only=True, tag=5):
    """Executor to store: the order in which a request of this instance first used its segments."""

    instance: str
    version: int
    segments: list[int]


ExecutorToStore = AskPlace | Written | LetGo | Fetch | FirstUse


# --- instance <-> store


class StoreUpload(Message, frozen=True, kw_only=True, tag=1):
    """Bytes ``[arena_offset, +nbytes)`` of the stream area are bytes ``[offset, +nbytes)`` of a storage of
    ``total_nbytes``.
    """

    storage: int
    total_nbytes: int
    offset: int
    arena_offset: int
    nbytes: int


class StoreFree(Message, frozen=True, kw_only=True, tag=2):
    storages: list[int]


class Commit(Message, frozen=True, kw_only=True, tag=3):
    """What has been uploaded and not freed is the next manifest version."""


class StoreFile(Message, frozen=True, kw_only=True, tag=4):
    """Bytes ``[file_offset, +nbytes)`` of an offered file are bytes ``[offset, +nbytes)`` of a storage of
    ``total_nbytes``. Answered like an upload.
    """

    storage: int
    total_nbytes: int
    offset: int
    file: int
    file_offset: int
    nbytes: int


InstanceToStore = StoreUpload | StoreFree | Commit | StoreFile


class Uploaded(Message, frozen=True, kw_only=True, tag=1):
    """The store has copied the oldest unanswered upload; its arena region may be used again."""


class Committed(Message, frozen=True, kw_only=True, tag=2):
    version: int
    nbytes: int


class StoreFailed(Message, frozen=True, kw_only=True, tag=3):
    text: str


StoreToInstance = Uploaded | Committed | StoreFailed


# --- instance <-> router


class Importing(Message, frozen=True, kw_only=True, tag=1):
    """Confinement is done; the function's module starts importing."""

    confinement: str


class NeedLease(Message, frozen=True, kw_only=True, tag=2):
    """The instance wants to compute outside a request (``load()``, `dormouse run`)."""

    version: int


class Loaded(Message, frozen=True, kw_only=True, tag=3):
    version: int
    nbytes: int


class LoadFailed(Message, frozen=True, kw_only=True, tag=4):
    code: str
    text: str


class Returned(Message, frozen=True, kw_only=True, tag=5):
    """The answer: ``body`` if it is small, else ``nbytes`` of the response area. ``used`` as in Answered."""

    request: int
    body: bytes | None
    nbytes: int
    used: bool = True


class Raised(Message, frozen=True, kw_only=True, tag=6):
    """The user's code raised. ``code`` is "function_raised", "out_of_memory", "executor_lost", "bad_response",
    "cancelled", "model_damaged", "wake_failed", "seat_lost". ``used`` as in Answered.
    """

    request: int
    code: str
    text: str
    used: bool = True


class LeaseEnded(Message, frozen=True, kw_only=True, tag=7):
    """A lease taken with NeedLease was given back; ``version`` is the newest manifest version it knows."""

    serial: int
    version: int


class Spoiled(Message, frozen=True, kw_only=True, tag=8):
    """The instance keeps something that can never be used again, in these words: it is to be replaced once it has
    answered, which it does next.
    """

    text: str


InstanceToRouter = Importing | NeedLease | Loaded | LoadFailed | Returned | Raised | LeaseEnded | Spoiled


class Run(Message, frozen=True, kw_only=True, tag=1):
    """Run ``handle`` on a request: JSON ``body`` if it is small, else ``nbytes`` of the request area."""

    request: int
    lease: Lease
    body: bytes | None
    nbytes: int


class LeaseGranted(Message, frozen=True, kw_only=True, tag=2):
    lease: Lease


class LeaseRefused(Message, frozen=True, kw_only=True, tag=3):
    code: str
    text: str


class Exit(Message, frozen=True, kw_only=True, tag=4):
    """Nothing more will come; leave."""


RouterToInstance = Run | LeaseGranted | LeaseRefused | Exit


# --- packets that carry descriptors (core/links/fds.py)


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


class DetachInstance(Message, frozen=True, kw_only=True, tag=2):
    """No descriptor: unbind, unmap."""

    instance: str


class SlabMade(Message, frozen=True, kw_only=True, tag=3):
    """Store to executors, with the slab's descriptor. ``pinnable``: as core/shm.py has it."""

    slab: int
    nbytes: int
    pinnable: bool


class PoolExported(Message, frozen=True, kw_only=True, tag=4):
    """Executor to executor: its pool's memory, to read from it what PeerPinned names. ``handle`` is the device's own,
    the descriptors come in ``parts`` packets, of which this is number ``part``.
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


class FileOffer(Message, frozen=True, kw_only=True, tag=1):
    """Instance to store at its ``files`` socket, with a descriptor that it could open for reading itself; never a path.
    ``file`` is a number of its choice.
    """

    file: int


class FileTaken(Message, frozen=True, kw_only=True, tag=1):
    """StoreFile may name it now."""

    file: int


class FileRefused(Message, frozen=True, kw_only=True, tag=2):
    """Not a regular file that the descriptor can read, or too many: upload the bytes."""

    file: int
    text: str


FileAnswer = FileTaken | FileRefused


class Fork(Message, frozen=True, kw_only=True, tag=1):
    """Router to zygote, with descriptors [log, arena]: start an instance.

    ``folder`` is the snapshot, and ``entry`` the file in it to run. ``limits`` are resource limits
    by their name without RLIMIT_ ("AS", "NOFILE", "NPROC", "CPU").
    """

    instance: str
    function: str
    directory: str
    uid: int
    folder: str
    entry: str
    arena: Arena
    device: DeviceInfo
    gpus: int
    limits: dict[str, int]


class Signal(Message, frozen=True, kw_only=True, tag=2):
    """Router to zygote: send this signal number to an instance's process group, if it still lives."""

    instance: str
    signal: int


ToZygote = Fork | Signal


class Forked(Message, frozen=True, kw_only=True, tag=1):
    instance: str
    pid: int


class Exited(Message, frozen=True, kw_only=True, tag=2):
    """``status`` as in os.waitstatus_to_exitcode: negative is a signal. ``limit`` is that of the sandbox for which
    the kernel ended it ("memory"), or "".
    """

    instance: str
    pid: int
    status: int
    limit: str = ""


class ForkFailed(Message, frozen=True, kw_only=True, tag=3):
    instance: str
    text: str


class ZygoteReady(Message, frozen=True, kw_only=True, tag=4):
    """The interpreter is warm. ``confinement`` is the level that instances get on this host, for `doctor`."""

    confinement: str
    python: str
    torch: str


FromZygote = Forked | Exited | ForkFailed | ZygoteReady


class AttachSession(Message, frozen=True, kw_only=True, tag=1):
    """`dormouse run` to router: give me an instance's identity. The socket's end of file is the session's end."""

    name: str
    pid: int


class Attached(Message, frozen=True, kw_only=True, tag=1):
    """With the arena's descriptor."""

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
