"""Events of the scheduler: a closed union of frozen data. No behaviour. The scheduler returns actions (actions.py)."""

import msgspec

from dormouse.core.decisions.scheduling.actions import (
    Action as Action,
)
from dormouse.core.decisions.scheduling.actions import (
    DismissExecutor as DismissExecutor,
)
from dormouse.core.decisions.scheduling.actions import (
    DrainOn as DrainOn,
)
from dormouse.core.decisions.scheduling.actions import (
    FinishLease as FinishLease,
)
from dormouse.core.decisions.scheduling.actions import (
    ForgetInstance as ForgetInstance,
)
from dormouse.core.decisions.scheduling.actions import (
    KillExecutor as KillExecutor,
)
from dormouse.core.decisions.scheduling.actions import (
    LoseLease as LoseLease,
)
from dormouse.core.decisions.scheduling.actions import (
    OverOn as OverOn,
)
from dormouse.core.decisions.scheduling.actions import (
    PauseOn as PauseOn,
)
from dormouse.core.decisions.scheduling.actions import (
    PreloadOn as PreloadOn,
)
from dormouse.core.decisions.scheduling.actions import (
    RefuseAsk as RefuseAsk,
)
from dormouse.core.decisions.scheduling.actions import (
    RetireExecutor as RetireExecutor,
)
from dormouse.core.decisions.scheduling.actions import (
    RevokeOn as RevokeOn,
)
from dormouse.core.decisions.scheduling.actions import (
    StopPreloadOn as StopPreloadOn,
)
from dormouse.core.decisions.scheduling.actions import (
    TurnOn as TurnOn,
)
from dormouse.core.decisions.scheduling.actions import (
    WakeOn as WakeOn,
)
from dormouse.core.decisions.scheduling.actions import (
    WantExecutor as WantExecutor,
)
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.messages import Done, PoolStats, StepsDue, StepTimes
from dormouse.schemas.policy import Policy


class _Event(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    pass


class ExecutorUp(_Event, frozen=True):
    """An executor is up, with the books of its pool, in which nothing is resident yet. A runtime's process has
    ``context_nbytes`` of the ``beside_nbytes`` that there are beside the pool.
    """

    gpu: int
    epoch: int
    stats: PoolStats
    context_nbytes: int = 0
    beside_nbytes: int = 0


class ExecutorDown(_Event, frozen=True):
    gpu: int


class FunctionKnown(_Event, frozen=True):
    """A deployed function's service level: ``percentile`` of its requests within ``deadline_s``. ``base``: the function
    to whose model its own only adds; "": none. ``base_nbytes``: of that, if it is no function with instances.
    ``context_nbytes``: its runtime's process has so much of the memory that is for models. ``batch_times``: times of
    batches of so many requests, in seconds, as they were learned before.
    """

    function: str
    deadline_s: float
    percentile: float  # in (0, 1)
    sensitivity: float  # how much its latency counts beside others'
    tenant: str = ""
    base: str = ""
    tpot_s: float = 0.0  # wanted of each token after the first, of a language model
    times: StepTimes | None = None  # of its steps, as they were learned before
    base_nbytes: int = 0
    context_nbytes: int = 0
    pinned: bool = False  # its model is the last to leave a GPU
    batch_times: tuple[tuple[int, float], ...] = ()


class FunctionGone(_Event, frozen=True):
    """It is no longer deployed; its statistics are forgotten with its last instance."""

    function: str


class InstanceKnown(_Event, frozen=True):
    """A new instance, or more about one, as when its ``load()`` has finished. ``runtime`` as in InstanceUp."""

    instance: str
    function: str
    tenant: str = ""
    runtime: str = ""


class InstanceLost(_Event, frozen=True):
    instance: str


class ModelSized(_Event, frozen=True):
    instance: str
    version: int
    nbytes: int


class BatchWanted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Requests that wait for one lease, at most ``most`` of which it is to serve: of each its number and when it is to
    be answered. Numbers are in order of arrival. They may wait for more for ``longest_s`` in all.
    """

    requests: tuple[tuple[int, float], ...]
    most: int
    longest_s: float


class Asked(_Event, frozen=True):
    """A request wants a lease, or a ``batch`` of some; ``deadline_s`` is an absolute time of the scheduler's clock.
    ``counts``: it has a deadline to keep, which load() and sessions have not. ``beyond_s`` as in Acquire.
    """

    request: int
    instance: str
    deadline_s: float
    version: int
    counts: bool = True
    batch: BatchWanted | None = None
    beyond_s: float = 0.0


class BatchChanged(_Event, frozen=True):
    """Requests have come to those that wait for this lease, as in BatchWanted, or have left them."""

    request: int
    came: tuple[tuple[int, float], ...] = ()
    left: tuple[int, ...] = ()


class Released(_Event, frozen=True):
    """It is no longer wanted, whether it waits or has a lease."""

    request: int


class Answered(_Event, frozen=True):
    """The instance reports that it is through with its lease; ``used``, ``taken`` and ``together`` as in the router's
    message.
    """

    request: int
    used: bool
    taken: int = 0
    together: int = 0


class RequestFailed(_Event, frozen=True):
    """It is late, whenever its lease ends or has ended. ``request`` 0: one that was never asked for."""

    function: str
    request: int


class RequestAnswered(_Event, frozen=True):
    """One that shared a lease with others, so long after it had come."""

    function: str
    latency_s: float


class Woken(_Event, frozen=True):
    """All copies of a lease's wake have finished."""

    gpu: int
    epoch: int
    serial: int
    wake_us: int


class LeaseOver(_Event, frozen=True):
    """The executor's report at the end of a lease."""

    gpu: int
    epoch: int
    done: Done


class TurnIdle(_Event, frozen=True):
    """The lease with this turn gives the GPU nothing for now: another may have the turn. ``rests`` as in Idle."""

    gpu: int
    epoch: int
    serial: int
    rests: bool = False


class TurnBusy(_Event, frozen=True):
    """It gives the GPU work again."""

    gpu: int
    epoch: int
    serial: int


class TurnWanted(_Event, frozen=True):
    """A lease without a turn has commands again. ``due`` as in WantsTurn."""

    gpu: int
    epoch: int
    serial: int
    due: StepsDue | None = None


class StepsTimed(_Event, frozen=True):
    """The step times of these instances' runtime differ from those reported before."""

    instances: tuple[str, ...]
    times: StepTimes


class Evicted(_Event, frozen=True):
    """The bytes of these instances on a GPU have changed before the end of a lease: the executor needed memory, or an
    instance is new whose model others have there, or a lease was ``seated`` that can last for long.
    """

    gpu: int
    epoch: int
    resident: tuple[tuple[str, int], ...]
    stats: PoolStats
    seated: bool = False


class RuntimesOn(_Event, frozen=True):
    """Runtimes of language models, by name, that have a process on a GPU."""

    gpu: int
    epoch: int
    runtimes: tuple[str, ...]


class PreloadOver(_Event, frozen=True):
    """Outcome of a PreloadOn, once: ``outcome`` as in the executor's message, the others as in Evicted."""

    gpu: int
    epoch: int
    instance: str
    outcome: str
    copied_nbytes: int
    resident: tuple[tuple[str, int], ...]
    stats: PoolStats


class BringAsked(_Event, frozen=True):
    """This function's model is wanted on a GPU, and waited for until then."""

    function: str
    until_s: float


class KeptAway(_Event, frozen=True):
    """It is not wanted on a GPU until then, except for a request."""

    function: str
    until_s: float


class PolicyChosen(_Event, frozen=True):
    """Another policy from now on, also for waiting requests. It differs in nothing of `policy.FIXED`."""

    policy: Policy


class TopologyKnown(_Event, frozen=True):
    """Links between GPUs, as far as executors have found out. Sent again only when they change."""

    topology: Topology


class ExecutorLeaves(_Event, frozen=True):
    """This executor is to be drained and replaced: it gets no more leases, and ends when its leases are over."""

    gpu: int
    epoch: int


class DrainChosen(_Event, frozen=True):
    """These GPUs are to be drained: given up once their leases are over, and left alone; all others serve."""

    gpus: tuple[int, ...]


class SharesKnown(_Event, frozen=True):
    """``(tenant, share)`` of the GPUs' time; others have a share of 1. None: tenants are all alike to the scheduler."""

    shares: tuple[tuple[str, float], ...]


class Tick(_Event, frozen=True):
    """Time has passed; sent when ``next_deadline_s`` is reached."""


Event = (
    ExecutorUp
    | ExecutorDown
    | FunctionKnown
    | FunctionGone
    | InstanceKnown
    | InstanceLost
    | ModelSized
    | Asked
    | Released
    | Woken
    | LeaseOver
    | Evicted
    | Tick
    | TopologyKnown
    | RequestFailed
    | Answered
    | TurnIdle
    | TurnBusy
    | TurnWanted
    | PolicyChosen
    | ExecutorLeaves
    | SharesKnown
    | PreloadOver
    | StepsTimed
    | RuntimesOn
    | BatchChanged
    | RequestAnswered
    | BringAsked
    | KeptAway
    | DrainChosen
)
