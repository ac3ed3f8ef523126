"""Effects of the lease machine, orders and messages: frozen values, no behaviour, no torch.

The compute thread carries out its orders in the order in which they were given. Messages to the controller and to the
store are effects unchanged.
"""

from typing import Any

from msgspec import Struct, field

from dormouse.core.decisions.memory.pools.protocol import PoolChange
from dormouse.schemas import messages as m

# --- orders to the compute thread


class Arrange(Struct, frozen=True, gc=False):
    """Bring the device to the state of the pool's books, for this lease if for one. Activations may use
    ``limit_nbytes``.
    """

    plans: list[PoolChange]
    limit_nbytes: int
    serial: int = 0


class Adopt(Struct, frozen=True, gc=False):
    """The instance's manifest from now on."""

    manifest: m.Manifest


class Begin(Struct, frozen=True, gc=False):
    """A lease's first frame follows, or its copies. ``places``: ``(offset, nbytes)`` by segment; None if no segment has
    moved. ``missing``: the copies to make, ``(segment, offset, nbytes)``. ``refused``: the reason why the model is not
    here.
    """

    serial: int
    secret: int
    instance: str
    places: dict[int, tuple[int, int]] | None
    missing: list[tuple[int, int, int]]
    peers: list[int]
    refused: str = ""


class Listen(Struct, frozen=True, gc=False):
    """Begin with this lease when its instance has sent its first frame: the compute thread receives that frame itself,
    and those that follow, until it has another order. It sleeps until then, or until this time on the monotonic clock,
    in seconds. Answered with `Executed`, or `NotLent`.
    """

    begin: Begin
    until_s: float


class Execute(Struct, frozen=True, gc=False):
    """A frame. ``alone``: this lease has no other frame on its way, and no other lease has a turn: the compute thread
    may receive the following frames from the instance itself, until it has another order.
    """

    serial: int
    data: bytes
    instance: str = ""
    alone: bool = False


class CopyOut(Struct, frozen=True, gc=False):
    """Write storages to these places; with ``spill``, their device memory is released."""

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
    """The lease is over. ``version``: the version that its writes have become, and ``brought`` are storages that are
    copied into the pool, ``(storage, segment, offset, nbytes)``; None: nothing that it did is kept. ``refused`` is the
    reason why the store did not accept its writes.
    """

    serial: int
    cancel: bool
    version: int | None = None
    brought: list[tuple[int, int, int, int]] = field(default_factory=list)
    refused: str = ""


class Recall(Struct, frozen=True, gc=False):
    """The lease is to lose its turn: receive no more frames of it."""

    serial: int


class Detach(Struct, frozen=True, gc=False):
    """The instance is gone, with everything that is its own."""

    instance: str


class Mark(Struct, frozen=True, gc=False):
    """Answered with `Marked` of events.py, once all earlier orders are carried out."""

    serial: int
    extents: list[int]


class Bring(Struct, frozen=True, gc=False):
    """Copy the missing part of a model, as for Begin, but for no lease: no request waits for it. Answered with
    `Brought` of events.py.
    """

    serial: int
    missing: list[tuple[int, int, int]]
    peers: list[int]


Order = Bring | Arrange | Adopt | Begin | Execute | CopyOut | Own | Return | Close | Recall | Detach | Mark

# --- other effects


class Skip(Struct, frozen=True, gc=False):
    """Do not begin the frames of this lease that the compute thread has yet to begin; its missing segments will not
    come.
    """

    serial: int


class StopBringing(Struct, frozen=True, gc=False):
    """Begin no further copy of this preload."""

    serial: int


class OpenRuntime(Struct, frozen=True, gc=False):
    """Start the runtime of this name for this instance, before it has a lease."""

    instance: str
    runtime: str


class Reply(Struct, frozen=True, gc=False):
    """For an instance."""

    instance: str
    message: bytes


class Expel(Struct, frozen=True, gc=False):
    """The instance broke the protocol: close its endpoint, report it to the controller."""

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
