"""What passes between the compute thread, wakes and other GPUs. No behaviour."""

from dataclasses import dataclass

from dormouse.gpuserver.device import Event
from dormouse.gpuserver.lease.arrivals import Board


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
