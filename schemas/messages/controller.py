"""What the controller hears, from the router, the executors and the store."""

from dormouse.schemas.messages.shared import DeviceInfo, EngineLoad, FunctionSpec, Message, StepsDue, WokenFrom


class PoolStats(Message, frozen=True, kw_only=True):
    """What a GPU's memory is used for, in bytes; ``weights + kv + lost + activations + free`` is all of it.

    ``lost`` is held by no segment and free to none: the rounding of granules or blocks. ``largest`` is the largest
    segment that would fit without eviction and without a move. ``moved`` counts since the start. KV grows without being
    told here: EngineLoad has what a runtime has now.
    """

    weights_nbytes: int = 0
    lost_nbytes: int = 0
    activation_nbytes: int = 0
    free_nbytes: int = 0
    largest_nbytes: int = 0
    moved_nbytes: int = 0
    segments: int = 0
    kv_nbytes: int = 0


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
    runtime: str = ""  # of a language model: whose runtime may compute for it, as in AttachInstance; "": it has none


class InstanceGone(Message, frozen=True, kw_only=True, tag=4):
    instance: str


class BatchAsk(Message, frozen=True, kw_only=True):
    """Requests that wait for one ``handle_batch``, at most ``most``: how long each has until its deadline, in order of
    arrival. They may wait for more for ``wait_ms`` in all.
    """

    left_ms: list[int]
    most: int
    wait_ms: int


class Acquire(Message, frozen=True, kw_only=True, tag=5):
    """A request wants a lease, or a ``batch`` of some. ``deadline_ms`` counts from now. ``version`` is the manifest
    version that must be resident, if known. ``own``: it is for load() or a session, which have no deadline to keep.
    """

    request: int
    instance: str
    deadline_ms: int
    version: int | None = None
    own: bool = False
    batch: BatchAsk | None = None


class Release(Message, frozen=True, kw_only=True, tag=6):
    """The request no longer wants its lease, whether it waits or has one: cancelled, timed out, or its instance is
    dead.
    """

    request: int


class AskStatus(Message, frozen=True, kw_only=True, tag=7):
    query: int


class AskPolicy(Message, frozen=True, kw_only=True, tag=12):
    """Change these settings of the scheduler's policy, then say what the policy is."""

    query: int
    changes: dict[str, str | int | float | bool] = {}


class AskPin(Message, frozen=True, kw_only=True, tag=16):
    """Keep this function's model where it is, as far as there is room, or not any more; Status answers."""

    query: int
    name: str
    pinned: bool


class AskMove(Message, frozen=True, kw_only=True, tag=19):
    """Bring this function's model "gpu", or have it leave GPUs ("host") and host memory too ("disk"); Status answers,
    when that is so or cannot be.
    """

    query: int
    name: str
    to: str


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
    """The function may be started again."""

    name: str


class Answered(Message, frozen=True, kw_only=True, tag=11):
    """The instance says that it is through with the request's lease. ``used``: it has given the GPU commands, the last
    of them an END, so that the executor will say Done; else nobody does.
    """

    request: int
    used: bool


class Served(Message, frozen=True, kw_only=True, tag=13):
    """Requests that were answered, in whichever way, since this was last said: ``(function, tenant, requests)``."""

    functions: list[tuple[str, str, int]]


class AskUsage(Message, frozen=True, kw_only=True, tag=14):
    """What functions have used since then, in seconds of the Unix clock; 0: as far back as it is known."""

    query: int
    since_s: float


class BatchWaits(Message, frozen=True, kw_only=True, tag=17):
    """What waits for this lease, which has not been granted yet, is now that; as in BatchAsk."""

    request: int
    left_ms: list[int]


class Met(Message, frozen=True, kw_only=True, tag=18):
    """A request of a function with ``concurrency``, which shares a lease with others, was answered so long after it had
    come.
    """

    function: str
    latency_ms: int


class AskMeasures(Message, frozen=True, kw_only=True, tag=15):
    """What the controller has counted, for `/metrics`; Measures answers."""

    query: int


RouterToController = (
    Deployed
    | Removed
    | InstanceUp
    | InstanceGone
    | Acquire
    | Release
    | AskStatus
    | AskPolicy
    | AskPin
    | AskMove
    | Missed
    | Quarantined
    | Lifted
    | Answered
    | Served
    | AskUsage
    | AskMeasures
    | BatchWaits
    | Met
)


class GpuPlace(Message, frozen=True, kw_only=True):
    """The place of a GPU among others of the machine, all by UUID: the GPUs with which it shares a PCIe switch, and the
    GPUs to which it has NVLink. ``reason`` says why the place is not known; else it is empty.
    """

    uuid: str
    switch_with: list[str] = []
    nvlink_with: list[str] = []
    reason: str = ""


class Hello(Message, frozen=True, kw_only=True, tag=1):
    """An executor is up. ``pool`` is its strategy; ``reason`` says why this device was chosen. An emulated GPU has no
    ``place``. Processes of runtimes have contexts of about ``context_nbytes`` each, beside the pool, where there are
    ``beside_nbytes``.
    """

    info: DeviceInfo
    pool: str
    reason: str
    stats: PoolStats
    place: GpuPlace | None = None
    context_nbytes: int = 0
    beside_nbytes: int = 0


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
    """The resident bytes have changed outside a Wake; fields as in Done. Segments were evicted because an operation was
    out of memory, or an instance has become known that shares segments which are here already. ``seated``: a lease that
    can last for long has begun, and this is what made room for its wake.
    """

    resident: list[tuple[str, int]]
    stats: PoolStats
    seated: bool = False


class Violation(Message, frozen=True, kw_only=True, tag=4):
    """An instance broke the protocol; it is to be ended."""

    instance: str
    text: str


class Awake(Message, frozen=True, kw_only=True, tag=5):
    """All copies of this wake have finished. ``source`` is where the bytes came from."""

    serial: int
    copied_nbytes: int
    wake_us: int
    source: WokenFrom = ""


class Trouble(Message, frozen=True, kw_only=True, tag=6):
    """For a person: what this GPU's device does not do as well as it could, and goes on without."""

    text: str


class Idle(Message, frozen=True, kw_only=True, tag=7):
    """The instance with this turn has given the GPU nothing for a while: another may have the turn. So it may at the
    end of a step; with ``rests``, there is no further one. Said again when that becomes so.
    """

    serial: int
    rests: bool = False


class Busy(Message, frozen=True, kw_only=True, tag=8):
    """The instance has a command again: Idle is no longer true."""

    serial: int


class WantsTurn(Message, frozen=True, kw_only=True, tag=9):
    """A command has come of a lease that has no turn; it waits for Turn. ``due``: what its runtime has to compute, if
    it has one; said again when a first prompt has come to that.
    """

    serial: int
    due: StepsDue | None = None


class RuntimeLoad(Message, frozen=True, kw_only=True, tag=10):
    """What the runtime that computes for these instances has to do; None: it is gone. ``number`` is its executor's."""

    instances: list[str]
    number: int
    pid: int
    load: EngineLoad | None


class Preloaded(Message, frozen=True, kw_only=True, tag=11):
    """A Preload is over: all of the model is "there", it has "yielded" to something else, what is worth more left no
    room ("refused"), somebody computes ("busy"), or its bytes could not be had ("failed"). Other fields as in Done.
    """

    instance: str
    outcome: str
    copied_nbytes: int
    resident: list[tuple[str, int]]
    stats: PoolStats


class HeldBytes(Message, frozen=True, kw_only=True):
    """Bytes of one kind over time, which these owners have together had, in byte-milliseconds. ``parts``: how much each
    of them has used them; if none has, all the same.
    """

    kind: str
    owners: list[str]
    nbyte_ms: int
    parts: list[int] = []


class InstanceUse(Message, frozen=True, kw_only=True):
    """What an instance has had of a GPU: a seat, its time; tokens of prompts, and tokens that were made."""

    instance: str
    seat_ms: int
    gpu_us: int
    prompt: int = 0
    made: int = 0


class Metered(Message, frozen=True, kw_only=True, tag=12):
    """What was used of a GPU since the last statement. The owners of bytes are instances."""

    held: list[HeldBytes]
    uses: list[InstanceUse]


class Unloaded(Message, frozen=True, kw_only=True, tag=13):
    """The answer to DropModel: ``left_nbytes`` of the model stay. Other fields as in Done."""

    query: int
    left_nbytes: int
    resident: list[tuple[str, int]]
    stats: PoolStats


ExecutorToController = (
    Hello
    | Done
    | Pressed
    | Violation
    | Awake
    | Trouble
    | Idle
    | Busy
    | WantsTurn
    | RuntimeLoad
    | Preloaded
    | Metered
    | Unloaded
)


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


class HostMetered(Message, frozen=True, kw_only=True, tag=5):
    """What was used of host memory since the last statement. Owners are functions, or sessions' instances."""

    held: list[HeldBytes]


class MovedDown(Message, frozen=True, kw_only=True, tag=6):
    """The answer to MoveDown: so many bytes of the model stay in host memory."""

    query: int
    left_nbytes: int


StoreToController = ModelSize | StoreStatus | StoreReport | ModelDamaged | HostMetered | MovedDown
