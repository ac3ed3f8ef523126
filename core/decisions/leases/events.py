"""Events of the lease machine: frozen values, no behaviour, no torch.

Messages of the controller and of the store are events unchanged.
"""

from msgspec import Struct, field

from dormouse.core.decisions.leases.wake import Sources
from dormouse.schemas import messages as m


class InstanceAttached(Struct, frozen=True, gc=False):
    """The instance has an endpoint here. ``tenant`` owns its memory. For the others see `AttachedInstance`."""

    instance: str
    tenant: str
    llm: bool = False
    group: str = ""
    adapter: bool = False


class Detached(Struct, frozen=True, gc=False):
    """The instance is gone."""

    instance: str


class Heard(Struct, frozen=True, gc=False):
    """Bytes from an instance's endpoint: a frame, or anything."""

    instance: str
    data: bytes


class Expelled(Struct, frozen=True, gc=False):
    """Nothing more is to be received from this instance."""

    instance: str
    text: str


class WakeRates(Struct, frozen=True, gc=False):
    """Bytes per second at which segments would come back: over the link to the host, and from other GPUs."""

    slab: float
    peer: float


class WakeAsked(Struct, frozen=True, gc=False):
    """The controller's Wake, and the present rates of copies."""

    wake: m.Wake
    rates: WakeRates


class PreloadAsked(Struct, frozen=True, gc=False):
    """The controller's Preload, and the present rates of copies."""

    preload: m.Preload
    rates: WakeRates


class Brought(Struct, frozen=True, gc=False):
    """A preload is over: no copy of it is under way any more."""

    serial: int
    left: "WakeRemains"


class Use(Struct, frozen=True, gc=False):
    """Device memory outside the pool, in bytes: now, and the most since the last lease began."""

    now: int = 0
    peak: int = 0


class WakeRemains(Struct, frozen=True, gc=False):
    """Segments that a wake has brought by its end, and those that it has not."""

    there: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    sources: Sources = field(default_factory=Sources)


class Counts(Struct, frozen=True, gc=False):
    """Of a lease: results that were copied into another layout than the GPU gave them, and sections of sequences that
    the GPU was given at once, as CUDA graphs.
    """

    repaired: int = 0
    replayed: int = 0


class Ended(Struct, frozen=True, gc=False):
    """A lease's END has been executed. ``storages`` are to be written back, those that lie in ``claimed`` segments
    where they are; ``freed`` are to be forgotten; ``dropped`` are claimed segments that are not kept. If there is
    nothing to write and nothing to free, the lease is over.
    """

    storages: list[tuple[int, int]]
    claimed: dict[int, int]
    freed: list[int]
    dropped: list[int]
    wrote: bool
    rebind: bool  # not all of the model is where it was
    used: list[int]  # segments in the order of their first use
    counts: Counts
    left: WakeRemains

    @property
    def over(self) -> bool:
        return not self.storages and not self.freed


class Executed(Struct, frozen=True, gc=False):
    """Frames of a lease were executed, in ``busy_s`` seconds; the last was ``idle_s`` ago. The compute thread has
    received ``heard`` of them itself.
    """

    serial: int
    replies: list[bytes]
    busy_s: float
    use: Use
    ended: Ended | None = None
    frames: int = 1
    heard: int = 0
    idle_s: float = 0.0


class NotLent(Struct, frozen=True, gc=False):
    """The compute thread cannot receive frames of this lease's instance itself, and does not know the lease."""

    serial: int


class Escaped(Struct, frozen=True, gc=False):
    """A frame of an instance was refused, or has raised an error: ``story`` locates it, for the log."""

    instance: str
    text: str
    story: str = ""


class Unmapped(Struct, frozen=True, gc=False):
    """The device had no memory for a lease's plans after all; ``moving`` segments have not been moved."""

    serial: int
    text: str
    moving: list[int]


class CopiedOut(Struct, frozen=True, gc=False):
    """The lease's storages are copied to their places in the store. ``spilled``: they were copied to make room here,
    and neither they nor the ``dropped`` claimed segments are here now.
    """

    serial: int
    spilled: bool
    dropped: list[int]
    use: Use


class Owned(Struct, frozen=True, gc=False):
    """Storages that a leaving lease has made or changed: ``(storage, nbytes)``. Its wake is over."""

    serial: int
    storages: list[tuple[int, int]]
    left: WakeRemains


class SeatReturned(Struct, frozen=True, gc=False):
    """The storages of a lease are back from host memory; or ``refused`` is the reason why not."""

    serial: int
    use: Use
    refused: str = ""


class Closed(Struct, frozen=True, gc=False):
    """The compute thread has let go of a lease. ``dropped`` are claimed segments that are not kept, ``kept`` segments
    whose bytes have been moved into the pool.
    """

    serial: int
    replies: list[bytes]
    dropped: list[int]
    kept: list[int]
    used: list[int]
    counts: Counts
    left: WakeRemains
    use: Use


class Begun(Struct, frozen=True, gc=False):
    """The compute thread has begun with this lease: from now on it can leave its seat, even without a frame."""

    serial: int


class Came(Struct, frozen=True, gc=False):
    """These segments have arrived, of a wake or by a plan's moves; or will not: ``lost``."""

    serial: int
    segments: list[int]
    lost: bool = False


class MayWrite(Struct, frozen=True, gc=False):
    """The compute thread asks, and waits for the answer: may this segment be written in place? Answered with its new
    number, or None.
    """

    serial: int
    segment: int


class Relieve(Struct, frozen=True, gc=False):
    """An operation was refused memory, and the compute thread waits: is there room now? Answered with None, or the
    reason why not; "" if there is no more to report.
    """

    serial: int
    refused_nbytes: int
    beside_nbytes: int


class Forgotten(Struct, frozen=True, gc=False):
    """Segments that were kept only for another GPU, which no longer reads them."""

    segments: list[int]


class Tick(Struct, frozen=True, gc=False):
    """``next_deadline_s`` has come."""


# --- of runtimes


class Marked(Struct, frozen=True, gc=False):
    """The compute thread has reached this Mark: the device is in the state of the books."""

    serial: int
    extents: list[int]


class SaidByRuntime(Struct, frozen=True, gc=False):
    """A report of this lease's runtime, about it or others of its leases."""

    serial: int
    message: (
        m.SeatLeft
        | m.TurnGivenBack
        | m.Stepped
        | m.StepsWanted
        | m.KvWanted
        | m.KvReturned
        | m.LoadChanged
        | m.MemberLeft
        | m.StepWaits
    )


class SeatUnwanted(Struct, frozen=True, gc=False):
    """Its instance no longer needs this lease; or its runtime cannot have it (``outcome`` "revoked")."""

    serial: int
    outcome: str = "ended"


class RuntimeGone(Struct, frozen=True, gc=False):
    """The process is gone: nothing is mapped there, and it sends nothing more."""

    runtime: str


Event = (
    Marked
    | SaidByRuntime
    | SeatUnwanted
    | RuntimeGone
    | InstanceAttached
    | Detached
    | Heard
    | Expelled
    | WakeAsked
    | Begun
    | Executed
    | NotLent
    | Escaped
    | Unmapped
    | CopiedOut
    | Owned
    | SeatReturned
    | Closed
    | Came
    | MayWrite
    | Relieve
    | Forgotten
    | Tick
    | PreloadAsked
    | Brought
    | m.StopPreload
    | m.DropModel
    | m.DrainSeats
    | m.Turn
    | m.Pause
    | m.Over
    | m.Revoke
    | m.Manifest
    | m.Placed
    | m.PlaceRefused
    | m.Dropped
)
