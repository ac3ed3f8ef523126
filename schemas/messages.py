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


class Segment(Message, frozen=True, kw_only=True):
    """A persistent storage of an instance and where its bytes lie on the host."""

    storage: int
    segment: int
    slab: int
    offset: int
    nbytes: int


class FunctionSpec(Message, frozen=True, kw_only=True):
    """A deployed function: what the catalogue keeps.

    Durations are in milliseconds. ``path`` is where the user's file was; ``version`` counts successful deploys.
    """

    name: str
    version: int
    path: str
    source: str
    tenant: str = "default"
    deadline_ms: int = 1000
    percentile: float = 98.0
    timeout_ms: int = 60_000
    load_timeout_ms: int = 300_000
    idempotent: bool = False
    max_queue: int = 256
    quota_nbytes: int = 1 << 30  # growth of the persistent set after load()


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
    """Epoch of every role that has said Ready and is alive. Sent to everyone whenever it changes."""

    up: dict[str, int]


class Shutdown(Message, frozen=True, kw_only=True, tag=2):
    """Finish and exit with status 0."""


FromSupervisor = Peers | Shutdown


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
    resident, if known.
    """

    request: int
    instance: str
    deadline_ms: int
    version: int | None = None


class Release(Message, frozen=True, kw_only=True, tag=6):
    """The request no longer wants its lease, whether it waits or has one: cancelled, timed out, instance dead, or
    answered early.
    """

    request: int


class AskStatus(Message, frozen=True, kw_only=True, tag=7):
    query: int


RouterToController = Deployed | Removed | InstanceUp | InstanceGone | Acquire | Release | AskStatus


# --- controller -> router


class Catalogue(Message, frozen=True, kw_only=True, tag=1):
    """All functions; sent once per router start."""

    functions: list[FunctionSpec]


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


class LeaseDone(Message, frozen=True, kw_only=True, tag=6):
    """The executor has finished with the lease."""

    request: int
    gpu_us: int
    copied_nbytes: int


class Status(Message, frozen=True, kw_only=True, tag=7):
    """Answer to AskStatus: JSON for people."""

    query: int
    json: bytes


class Device(Message, frozen=True, kw_only=True, tag=8):
    """What functions shall see as ``cuda:0``: the smallest of the node's GPUs. Sent when the first executor is up, and
    on change.
    """

    info: DeviceInfo


class InstanceViolated(Message, frozen=True, kw_only=True, tag=9):
    """The instance broke the command stream's protocol: end it; its request fails with ``violation``."""

    instance: str
    text: str


ControllerToRouter = InstanceViolated | Catalogue | Kept | Granted | Refused | LeaseLost | LeaseDone | Status | Device


# --- controller <-> executor


class Wake(Message, frozen=True, kw_only=True, tag=1):
    """Begin a lease: bind manifest ``version``, copy what is missing, evict these instances' segments first if room is
    needed.
    """

    lease: Lease
    instance: str
    version: int
    evict: list[str]


class Revoke(Message, frozen=True, kw_only=True, tag=2):
    """End this lease now; answer its Done."""

    serial: int


class Forget(Message, frozen=True, kw_only=True, tag=3):
    """The instance is gone: drop its tables and its resident segments."""

    instance: str


ControllerToExecutor = Wake | Revoke | Forget


class Hello(Message, frozen=True, kw_only=True, tag=1):
    info: DeviceInfo


class Done(Message, frozen=True, kw_only=True, tag=2):
    """The lease is over: exactly one per Wake.

    ``resident_nbytes`` is what the instance now has in this pool, ``version`` its manifest version by then.
    """

    serial: int
    outcome: str  # "ended" | "revoked" | "violated"
    gpu_us: int
    copied_nbytes: int
    evicted: list[str]
    resident_nbytes: int
    peak_activation_nbytes: int
    version: int


class Pressed(Message, frozen=True, kw_only=True, tag=3):
    """Instances that were evicted outside a Wake, because an operation was out of memory."""

    evicted: list[str]


class Violation(Message, frozen=True, kw_only=True, tag=4):
    """An instance broke the protocol; it is to be ended."""

    instance: str
    text: str


class Awake(Message, frozen=True, kw_only=True, tag=5):
    """All copies of this wake have finished."""

    serial: int
    copied_nbytes: int
    wake_us: int


ExecutorToController = Hello | Done | Pressed | Violation | Awake


# --- store <-> others


class ModelSize(Message, frozen=True, kw_only=True, tag=1):
    """Store to controller: total of an instance's manifest."""

    instance: str
    version: int
    nbytes: int


class StoreStatus(Message, frozen=True, kw_only=True, tag=2):
    """Store to controller, whenever it changes."""

    host_nbytes: int
    slabs: int


StoreToController = ModelSize | StoreStatus


class StoreForget(Message, frozen=True, kw_only=True, tag=1):
    """Controller to store: the instance is gone, free its segments."""

    instance: str


ControllerToStore = StoreForget


class Manifest(Message, frozen=True, kw_only=True, tag=1):
    """Store to executor: the whole persistent set of an instance."""

    instance: str
    version: int
    segments: list[Segment]


class Placed(Message, frozen=True, kw_only=True, tag=2):
    """Store to executor: write back here. ``segments`` are new and belong to no manifest until Written."""

    ticket: int
    segments: list[Segment]


class PlaceRefused(Message, frozen=True, kw_only=True, tag=3):
    ticket: int
    text: str


class Dropped(Message, frozen=True, kw_only=True, tag=4):
    """Store to executor: this instance has no manifest any more."""

    instance: str


StoreToExecutor = Manifest | Placed | PlaceRefused | Dropped


class Place(Message, frozen=True, kw_only=True, tag=1):
    """Executor to store: room for these storages ``[(storage, nbytes)]`` of an instance."""

    ticket: int
    instance: str
    storages: list[tuple[int, int]]


class Written(Message, frozen=True, kw_only=True, tag=2):
    """Executor to store: the bytes of this ticket are there; forget ``freed``, make it the next manifest version."""

    ticket: int
    freed: list[int]


class Settled(Message, frozen=True, kw_only=True, tag=3):
    """Executor to store: from now on it copies only segments of manifest ``version`` or newer of this instance.

    Sent at the end of every lease, and at once for a Manifest (or Dropped: -1) of an instance without a lease there.
    Tickets of this instance that are not Written are given up.
    """

    instance: str
    version: int


ExecutorToStore = Place | Written | Settled


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


InstanceToStore = StoreUpload | StoreFree | Commit


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
    """The answer: ``body`` if it is small, else ``nbytes`` of the response area."""

    request: int
    body: bytes | None
    nbytes: int


class Raised(Message, frozen=True, kw_only=True, tag=6):
    """The user's code raised. ``code`` is "function_raised", "out_of_memory", "executor_lost", "bad_response",
    "cancelled".
    """

    request: int
    code: str
    text: str


class LeaseEnded(Message, frozen=True, kw_only=True, tag=7):
    """A lease taken with NeedLease was given back; ``version`` is the newest manifest version it knows."""

    serial: int
    version: int


InstanceToRouter = Importing | NeedLease | Loaded | LoadFailed | Returned | Raised | LeaseEnded


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


# --- packets that carry descriptors (core/fds.py)


class AttachInstance(Message, frozen=True, kw_only=True, tag=1):
    """To executors and the store, with the arena's descriptor: bind this instance's endpoint.

    ``directory`` is RUN/i/<instance>; the receiver binds ``store`` or ``gpu<k>.<epoch>`` in it and chowns the socket to
    ``uid``.
    """

    instance: str
    tenant: str
    directory: str
    uid: int
    arena: Arena
    quota_nbytes: int


class DetachInstance(Message, frozen=True, kw_only=True, tag=2):
    """No descriptor: unbind, unmap."""

    instance: str


class SlabMade(Message, frozen=True, kw_only=True, tag=3):
    """Store to executors, with the slab's descriptor."""

    slab: int
    nbytes: int


InboxPacket = AttachInstance | DetachInstance | SlabMade


class Fork(Message, frozen=True, kw_only=True, tag=1):
    """Router to zygote, with descriptors [log, arena]: start an instance.

    ``path`` is the file to run (the node's copy) and ``origin`` what its ``__file__`` shall say. ``limits`` are
    resource limits by their name without RLIMIT_ ("AS", "NOFILE", "NPROC", "CPU").
    """

    instance: str
    function: str
    directory: str
    uid: int
    path: str
    origin: str
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
    """``status`` as in os.waitstatus_to_exitcode: negative is a signal."""

    instance: str
    pid: int
    status: int


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
