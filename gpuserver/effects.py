"""What the device thread's half of an executor wants done outside; the I/O half does it, in order. No behaviour."""

from dataclasses import dataclass

from dormouse.gpuserver.device import Event
from dormouse.gpuserver.lease.arrivals import Board
from dormouse.schemas import messages as m


@dataclass(frozen=True, slots=True)
class Reply:
    """Messages for an instance; ``frames`` more of its frames have been executed."""

    instance: str
    serial: int
    frames: int
    messages: list[bytes]


@dataclass(frozen=True, slots=True)
class Violated:
    """What the instance sent is refused, or has raised: ``story`` says where, for the log."""

    instance: str
    text: str
    story: str = ""


@dataclass(frozen=True, slots=True)
class AskPeer:
    """PeerPin for another GPU."""

    gpu: int
    ticket: int
    segments: list[int]


@dataclass(frozen=True, slots=True)
class LeavePeer:
    """PeerUnpin for another GPU."""

    gpu: int
    ticket: int


@dataclass(frozen=True, slots=True)
class BeginWake:
    """Bring what is missing, ``(segment, offset in the pool, nbytes)`` in the order in which it is wanted, and say on
    the board how that goes. ``after``: the point on the compute stream after which the pool is as it has to be.
    """

    serial: int
    board: Board
    after: Event
    missing: list[tuple[int, int, int]]
    peers: list[int]
    began_s: float


@dataclass(frozen=True, slots=True)
class StopWake:
    """Begin no further copy; the compute thread waits at the board for that."""

    serial: int
    cancel: bool


@dataclass(frozen=True, slots=True)
class WakeOver:
    """No copy of it is under way any more."""

    serial: int


Effect = (
    BeginWake
    | StopWake
    | WakeOver
    | Reply
    | Violated
    | AskPeer
    | LeavePeer
    | m.Done
    | m.Awake
    | m.Pressed
    | m.AskPlace
    | m.Written
    | m.LetGo
    | m.Fetch
    | m.FirstUse
)
