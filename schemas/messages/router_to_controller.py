"""Messages from the router to the controller: functions, instances, requests that want a lease, and questions."""

from dormouse.schemas.messages.shared import FunctionSpec, Message


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
    """Requests that wait for a ``handle_batch`` of at most ``most``, in order of arrival: of each its ticket and how
    long it has until its deadline, in ms. They may wait for more for ``wait_ms`` in all.
    """

    requests: list[tuple[int, int]]
    most: int
    wait_ms: int


class Acquire(Message, frozen=True, kw_only=True, tag=5):
    """A request wants a lease, or a ``batch`` of some. ``deadline_ms`` counts from now. ``version`` is the manifest
    version that must be resident, if known. ``own``: it is for load() or a session, which have no deadline to keep.
    ``beyond_ms``: the function's own deadline is so much later: it is due with the request that calls it.
    """

    request: int
    instance: str
    deadline_ms: int
    version: int | None = None
    own: bool = False
    batch: BatchAsk | None = None
    beyond_ms: int = 0


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


class AskTraffic(Message, frozen=True, kw_only=True, tag=20):
    """So many per cent of a function's requests go to this version of it, which is served beside; Status answers."""

    query: int
    name: str
    share: int


class AskDrainGpu(Message, frozen=True, kw_only=True, tag=21):
    """Drain this GPU, or (``undo``) have it serve again. Status answers. With ``waits`` nothing is changed, and it
    answers when the GPU is given up, or serves again.
    """

    query: int
    gpu: int
    undo: bool = False
    waits: bool = False


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
    of them an END, so that the executor will say Done; else nobody does. ``taken`` and ``together`` as in LeaseEnded.
    """

    request: int
    used: bool
    taken: int = 0
    together: int = 0


class Served(Message, frozen=True, kw_only=True, tag=13):
    """Requests that were answered, in whichever way, since this was last said: ``(function, tenant, requests)``."""

    functions: list[tuple[str, str, int]]


class AskUsage(Message, frozen=True, kw_only=True, tag=14):
    """Asks for the use of functions since then, in seconds of the Unix clock; 0: as far back as it is known."""

    query: int
    since_s: float


class BatchWaits(Message, frozen=True, kw_only=True, tag=17):
    """Requests have come to those that wait for this lease, which has not been granted yet, as in BatchAsk; the tickets
    of others have departed. Unchanged ones are not sent again.
    """

    request: int
    came: list[tuple[int, int]] = []
    left: list[int] = []


class Met(Message, frozen=True, kw_only=True, tag=18):
    """A request of a function with ``concurrency``, which shares a lease with others, was answered so long after it had
    come.
    """

    function: str
    latency_ms: int


class CallWaits(Message, frozen=True, kw_only=True, tag=22):
    """The request with this lease waits for a function that it has called, which may need its GPU: as Idle of the
    executor, which would say it ``turn_ms`` later.
    """

    gpu: int
    epoch: int
    serial: int


class AskMeasures(Message, frozen=True, kw_only=True, tag=15):
    """Asks for the controller's counts, for `/metrics`; Measures answers."""

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
    | AskTraffic
    | AskDrainGpu
    | Missed
    | Quarantined
    | Lifted
    | Answered
    | Served
    | AskUsage
    | AskMeasures
    | BatchWaits
    | Met
    | CallWaits
)
