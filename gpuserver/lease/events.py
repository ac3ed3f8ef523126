"""What the machine of leases is told: frozen values, no behaviour, no torch.

Messages of the controller and of the store are events as they come.
"""

from dataclasses import dataclass, field

from dormouse.gpuserver.lease.wake import Sources
from dormouse.schemas import messages as m


@dataclass(frozen=True, slots=True)
class Attached:
    """The instance has an endpoint here. ``tenant`` owns its memory."""

    instance: str
    tenant: str


@dataclass(frozen=True, slots=True)
class Detached:
    """The instance is gone."""

    instance: str


@dataclass(frozen=True, slots=True)
class Heard:
    """Bytes from an instance's endpoint: a frame, or anything."""

    instance: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Expelled:
    """Nothing more is to be heard of this instance."""

    instance: str
    text: str


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second at which segments would come back: over the link to the host, and from other GPUs."""

    slab: float
    peer: float


@dataclass(frozen=True, slots=True)
class Woken:
    """The controller's Wake, and what copies take now."""

    wake: m.Wake
    rates: Rates


@dataclass(frozen=True, slots=True)
class Use:
    """Device memory outside the pool, in bytes: now, and the most since the last lease began."""

    now: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class Left:
    """What a wake has brought by its end, by segment, and what it has not."""

    there: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    sources: Sources = field(default_factory=Sources)


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease's END has been executed. ``storages`` are to be written back, those that lie in ``claimed`` segments
    where they are; ``freed`` are to be forgotten; ``dropped`` are claimed segments that nobody keeps. If there is
    nothing to write and nothing to free, the lease is over.
    """

    storages: list[tuple[int, int]]
    claimed: dict[int, int]
    freed: list[int]
    dropped: list[int]
    wrote: bool
    rebind: bool  # not all of the model is where it was
    used: list[int]  # segments in the order of their first use
    repaired: int
    left: Left

    @property
    def over(self) -> bool:
        return not self.storages and not self.freed


@dataclass(frozen=True, slots=True)
class Executed:
    """One frame of a lease, in ``busy_s`` seconds."""

    serial: int
    replies: list[bytes]
    busy_s: float
    use: Use
    ended: Ended | None = None


@dataclass(frozen=True, slots=True)
class Escaped:
    """What an instance has sent is refused, or has raised: ``story`` says where, for the log."""

    instance: str
    text: str
    story: str = ""


@dataclass(frozen=True, slots=True)
class Unmapped:
    """The device had no memory for a lease's plans after all; ``moving`` segments have not been moved."""

    serial: int
    text: str
    moving: list[int]


@dataclass(frozen=True, slots=True)
class CopiedOut:
    """What the lease wrote is where the store wants it. ``spilled``: it was to make room here, and is not here now, nor
    are the claimed segments ``dropped``.
    """

    serial: int
    spilled: bool
    dropped: list[int]
    use: Use


@dataclass(frozen=True, slots=True)
class Owned:
    """What a lease that is to leave has made or changed: ``(storage, nbytes)``. Its wake is over."""

    serial: int
    storages: list[tuple[int, int]]
    left: Left


@dataclass(frozen=True, slots=True)
class Returned:
    """What was in host memory is back; ``refused`` says why not."""

    serial: int
    use: Use
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Closed:
    """The compute thread has let go of a lease. ``dropped`` are claimed segments that nobody keeps, ``kept`` segments
    whose bytes have been moved into the pool.
    """

    serial: int
    replies: list[bytes]
    dropped: list[int]
    kept: list[int]
    used: list[int]
    repaired: int
    left: Left
    use: Use


@dataclass(frozen=True, slots=True)
class Moved:
    """A plan's moves have been made."""

    segments: list[int]


@dataclass(frozen=True, slots=True)
class Came:
    """These segments of a wake have arrived; or will not: ``lost``."""

    serial: int
    segments: list[int]
    lost: bool = False


@dataclass(frozen=True, slots=True)
class MayWrite:
    """The compute thread asks, and waits for the answer: may this segment be written where it is? Answered with its new
    number, or None.
    """

    serial: int
    segment: int


@dataclass(frozen=True, slots=True)
class Relieve:
    """An operation was refused memory, and the compute thread waits: is there room now? Answered with None, or why not;
    "" if there is nothing to be said.
    """

    serial: int
    refused_nbytes: int
    beside_nbytes: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was kept only for another GPU."""

    segments: list[int]


@dataclass(frozen=True, slots=True)
class Tick:
    """``next_deadline_s`` has come."""


Event = (
    Attached
    | Detached
    | Heard
    | Expelled
    | Woken
    | Executed
    | Escaped
    | Unmapped
    | CopiedOut
    | Owned
    | Returned
    | Closed
    | Moved
    | Came
    | MayWrite
    | Relieve
    | Forgotten
    | Tick
    | m.Turn
    | m.Pause
    | m.Over
    | m.Revoke
    | m.Manifest
    | m.Placed
    | m.PlaceRefused
    | m.Dropped
)
