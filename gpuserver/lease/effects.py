"""What the machine of leases orders and answers: frozen values, no behaviour, no torch.

Orders to the compute thread are carried out there in the order in which they were given. Messages to the controller and
to the store are effects as they go.
"""

from dataclasses import dataclass, field
from typing import Any

from dormouse.gpuserver.pools.protocol import Plan
from dormouse.schemas import messages as m

# --- orders to the compute thread


@dataclass(frozen=True, slots=True)
class Arrange:
    """Make the device as the pool's books say, for this lease if for one. Activations may have ``limit_nbytes``."""

    plans: list[Plan]
    limit_nbytes: int
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Adopt:
    """The instance's manifest from now on."""

    manifest: m.Manifest


@dataclass(frozen=True, slots=True)
class Begin:
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


@dataclass(frozen=True, slots=True)
class Execute:
    serial: int
    data: bytes


@dataclass(frozen=True, slots=True)
class CopyOut:
    """Write storages to these places; with ``spill``, they go."""

    serial: int
    storages: list[int]
    places: list[m.Place]
    spill: bool = False


@dataclass(frozen=True, slots=True)
class Own:
    """Answered with `Owned` of events.py."""

    serial: int


@dataclass(frozen=True, slots=True)
class Return:
    """As Begin, for a lease that has left; ``places_of`` its own storages are read back from."""

    begin: Begin
    storages: list[int]
    places: list[m.Place]


@dataclass(frozen=True, slots=True)
class Close:
    """The lease is over. ``version``: what it wrote has become that one, and ``brought`` are storages that are copied
    into the pool, ``(storage, segment, offset, nbytes)``; None: nothing of what it did is kept. ``refused`` is why the
    store did not take what it wrote.
    """

    serial: int
    cancel: bool
    version: int | None = None
    brought: list[tuple[int, int, int, int]] = field(default_factory=list)
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Detach:
    """The instance is gone, and all that is its own."""

    instance: str


Order = Arrange | Adopt | Begin | Execute | CopyOut | Own | Return | Close | Detach

# --- other effects


@dataclass(frozen=True, slots=True)
class Skip:
    """Frames of this lease that the compute thread has not begun are not to be; what it waits for will not come."""

    serial: int


@dataclass(frozen=True, slots=True)
class Reply:
    """For an instance."""

    instance: str
    message: bytes


@dataclass(frozen=True, slots=True)
class Expel:
    """The instance broke the protocol: close its endpoint, tell the controller."""

    instance: str
    text: str
    story: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """To the compute thread's question."""

    value: Any


ToController = m.Done | m.Pressed | m.Idle | m.Busy | m.WantsTurn
ToStore = m.AskPlace | m.Written | m.LetGo | m.FirstUse
Effect = Order | Skip | Reply | Expel | Answer | ToController | ToStore
