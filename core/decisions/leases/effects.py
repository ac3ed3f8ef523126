"""What the machine of leases orders and answers: frozen values, no behaviour, no torch.

Orders to the compute thread are carried out there in the order in which they were given. Messages to the controller and
to the store are effects as they go.
"""

from typing import Any

from msgspec import Struct, field

from dormouse.core.decisions.memory.pools.protocol import PoolChange
from dormouse.schemas import messages as m

# --- orders to the compute thread


class Arrange(Struct, frozen=True, gc=False):
    """Make the device as the pool's books say, for this lease if for one. Activations may have ``limit_nbytes``."""

    plans: list[PoolChange]
    limit_nbytes: int
    serial: int = 0


class Adopt(Struct, frozen=True, gc=False):
    """The instance's manifest from now on."""

    manifest: m.Manifest


class Begin(Struct, frozen=True, gc=False):
    """A lease's first frame follows, or its copies. ``places``: ``(offset, nbytes)`` by segment; None if all is where
    it was. ``missing``: what is to be copied, ``(segment, offset, nbytes)``. ``refused``: why the model is not here.
    """

    serial: int
    secret: int
    instance: str
    places: dict[int, tuple[int, int]] | None
    missing: list[tuple[int, int, int]]
    peers: list[int]
    refused: str = ""


class Listen(Struct, frozen=True, gc=False):
    """Begin with this lease when its instance has sent its first frame: the compute thread hears it itself, and those
    that follow, until there is something else to do. It sleeps until then, or until this time on the monotonic clock,
    in seconds. Answered with `Executed`, or `NotLent`.
    """

    begin: Begin
    until_s: float


class Execute(Struct, frozen=True, gc=False):
    """A frame. ``alone``: the lease has no other on its way, nor has anybody else a turn: the compute thread may hear
    those that follow it from its instance itself, until there is something else to do.
    """

    serial: int
    data: bytes
    instance: str = ""
    alone: bool = False


class CopyOut(Struct, frozen=True, gc=False):
    """Write storages to these places; with ``spill``, they go."""

    serial: int
    storages: list[int]
    places: list[m.Place]
    spill: bool = False


class Own(Struct, frozen=True, gc=False):
    """Answered with `Owned` of events.py."""

    serial: int


class Return(Struct, frozen=True, gc=False):
    """A lease that has left its seat begins again, as by Begin. Its own storages are read back from ``places``."""

    begin: Begin
    storages: list[int]
    places: list[m.Place]


class Close(Struct, frozen=True, gc=False):
    """The lease is over. ``version``: what it wrote has become that one, and ``brought`` are storages that are copied
    into the pool, ``(storage, segment, offset, nbytes)``; None: nothing of what it did is kept. ``refused`` is why the
    store did not take what it wrote.
    """

    serial: int
    cancel: bool
    version: int | None = None
    brought: list[tuple[int, int, int, int]] = field(default_factory=list)
    refused: str = ""


class Recall(Struct, frozen=True, gc=False):
    """The lease is to lose its turn: hear no more frames of it."""

    serial: int


class Detach(Struct, frozen=True, gc=False):
    """The instance is gone, and all that is its own."""

    instance: str


class Mark(Struct, frozen=True, gc=False):
    """Answered with `Marked` of events.py, when all orders before it are carried out."""

    serial: int
    extents: list[int]


class Bring(Struct, frozen=True, gc=False):
    """Copy what is missing of a model, as for Begin, but for no lease: nobody waits for it. Answered with `Brought` of
    events.py.
    """

    serial: int
    missing: list[tuple[int, int, int]]
    peers: list[int]


Order = Bring | Arrange | Adopt | Begin | Execute | CopyOut | Own | Return | Close | Recall | Detach | Mark

# --- other effects


class Skip(Struct, frozen=True, gc=False):
    """Frames of this lease that the compute thread has not begun are not to be; what it waits for will not come."""

    serial: int


class StopBringing(Struct, frozen=True, gc=False):
    """Begin no further copy of this preload."""

    serial: int


class OpenRuntime(Struct, frozen=True, gc=False):
    """Have the runtime of this name there for this instance, before it has a lease."""

    instance: str
    runtime: str


class Reply(Struct, frozen=True, gc=False):
    """For an instance."""

    instance: str
    message: bytes


class Expel(Struct, frozen=True, gc=False):
    """The instance broke the protocol: close its endpoint, tell the controller."""

    instance: str
    text: str
    story: str = ""


ForRuntime = (
    m.SeatGiven
    | m.SegmentsCame
    | m.SeatEnds
    | m.TurnBegins
    | m.TurnEnds
    | m.KvGiven
    | m.GranulesGiven
    | m.KvReclaim
    | m.MemberLeaves
)


class ToRuntimeOf(Struct, frozen=True, gc=False):
    """For the runtime of this name, which computes for this instance under this lease, and maybe for others."""

    serial: int
    instance: str
    runtime: str
    message: ForRuntime


class ComputeAnswer(Struct, frozen=True, gc=False):
    """The answer to the compute thread's question."""

    value: Any


ToController = m.Done | m.Pressed | m.Idle | m.Busy | m.WantsTurn | m.Preloaded | m.Metered | m.Unloaded
ToStore = m.AskPlace | m.Written | m.LetGo | m.FirstUse
Effect = (
    Order
    | Listen
    | Skip
    | StopBringing
    | OpenRuntime
    | Reply
    | Expel
    | ToRuntimeOf
    | ComputeAnswer
    | ToController
    | ToStore
)
