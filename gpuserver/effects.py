"""What the device thread's half of an executor wants done outside; the I/O half does it, in order. No behaviour."""

from dataclasses import dataclass

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


Effect = (
    Reply
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
