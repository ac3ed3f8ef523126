"""Messages from executors to the controller: leases and turns, residency, and use."""

from dormouse.schemas.messages.shared import DeviceInfo, EngineLoad, HeldBytes, Message, StepsDue, WokenFrom


class PoolStats(Message, frozen=True, kw_only=True):
    """The use of a GPU's memory, in bytes; ``weights + kv + lost + activations + free`` is all of it.

    ``lost`` is held by no segment and free to none: the rounding of granules or blocks. ``largest`` is the largest
    segment that would fit without eviction and without a move. ``moved`` counts since the start. Growth of KV is not
    reported here: EngineLoad has a runtime's KV now.
    """

    weights_nbytes: int = 0
    lost_nbytes: int = 0
    activation_nbytes: int = 0
    free_nbytes: int = 0
    largest_nbytes: int = 0
    moved_nbytes: int = 0
    segments: int = 0
    kv_nbytes: int = 0


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
    replayed: int = 0


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
    """For a person: the shortcomings with which this GPU's device goes on."""

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
    """The load of the runtime that computes for these instances; None: it is gone. ``number`` is its executor's."""

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


class InstanceUse(Message, frozen=True, kw_only=True):
    """An instance's use of a GPU: a seat, its time; tokens of prompts, and tokens that were made."""

    instance: str
    seat_ms: int
    gpu_us: int
    prompt: int = 0
    made: int = 0


class Metered(Message, frozen=True, kw_only=True, tag=12):
    """The use of a GPU since the last statement. The owners of bytes are instances."""

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
