"""What the scheduler is told and what it answers: closed unions of frozen data. No behaviour."""

from dataclasses import dataclass

from dormouse.schemas.messages import Done, Failure, Lease, PoolStats


@dataclass(frozen=True, slots=True)
class ExecutorUp:
    """With the books of its pool, in which nothing is resident yet."""

    gpu: int
    epoch: int
    stats: PoolStats


@dataclass(frozen=True, slots=True)
class ExecutorDown:
    gpu: int


@dataclass(frozen=True, slots=True)
class InstanceKnown:
    """A new instance, or more about one: also said again when its ``load()`` has finished."""

    instance: str
    function: str


@dataclass(frozen=True, slots=True)
class InstanceLost:
    instance: str


@dataclass(frozen=True, slots=True)
class ModelSized:
    instance: str
    version: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A request wants a lease; ``deadline_s`` is an absolute time of the scheduler's clock."""

    request: int
    instance: str
    deadline_s: float
    version: int


@dataclass(frozen=True, slots=True)
class Released:
    request: int


@dataclass(frozen=True, slots=True)
class Woken:
    """All copies of a lease's wake have finished."""

    gpu: int
    epoch: int
    serial: int
    wake_us: int


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """What the executor says when it is through with a lease."""

    gpu: int
    epoch: int
    done: Done


@dataclass(frozen=True, slots=True)
class Evicted:
    """The executor needed memory outside a wake: what these instances have left, in bytes."""

    gpu: int
    epoch: int
    resident: tuple[tuple[str, int], ...]
    stats: PoolStats


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent when ``next_deadline_s`` is reached."""


Event = (
    ExecutorUp
    | ExecutorDown
    | InstanceKnown
    | InstanceLost
    | ModelSized
    | Asked
    | Released
    | Woken
    | LeaseOver
    | Evicted
    | Tick
)


@dataclass(frozen=True, slots=True)
class WakeOn:
    """Begin a lease: tell the executor, and at the same time the router.

    ``worth``, ``peers`` and ``activation_nbytes`` as in Wake. ``wake_nbytes`` is what is missing by the last that the
    executor has told.
    """

    request: int
    lease: Lease
    instance: str
    version: int
    worth: dict[str, float]
    peers: tuple[int, ...]
    activation_nbytes: int
    wake_nbytes: int


@dataclass(frozen=True, slots=True)
class RefuseAsk:
    request: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class LoseLease:
    """The executor of a granted lease died."""

    request: int


@dataclass(frozen=True, slots=True)
class FinishLease:
    request: int
    gpu_us: int
    copied_nbytes: int


@dataclass(frozen=True, slots=True)
class RevokeOn:
    gpu: int
    serial: int


@dataclass(frozen=True, slots=True)
class ForgetInstance:
    """Tell every executor and the store."""

    instance: str


@dataclass(frozen=True, slots=True)
class KillExecutor:
    gpu: int
    epoch: int
    text: str


Action = WakeOn | RefuseAsk | LoseLease | FinishLease | RevokeOn | ForgetInstance | KillExecutor
