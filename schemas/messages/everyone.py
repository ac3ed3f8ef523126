"""Messages from the supervisor to every process."""

from dormouse.schemas.messages.shared import Message


class Peers(Message, frozen=True, kw_only=True, tag=1):
    """Epoch of every role that has said Ready and is alive, and why others are not: those that could not start and are
    tried again. Sent to everyone whenever it changes. ``ended``: how often one has ended unasked, and when it last did,
    by the machine's monotonic clock in seconds; ``left``: likewise of those that ended because they were told to.
    """

    up: dict[str, int]
    down: dict[str, str] = {}
    ended: dict[str, tuple[int, float]] = {}
    left: dict[str, tuple[int, float]] = {}


class Shutdown(Message, frozen=True, kw_only=True, tag=2):
    """Finish and exit with status 0."""


class Blame(Message, frozen=True, kw_only=True, tag=3):
    """To the router: an executor has died of this instance's commands; ``text`` says how."""

    instance: str
    text: str


class Leave(Message, frozen=True, kw_only=True, tag=4):
    """A successor takes over; Shutdown follows. To the router: accept nothing more, end what runs, give away what
    connections are idle, and say Left, at the latest after so long. To the store: leave what is here when it stops.
    """

    within_ms: int = 0


FromSupervisor = Peers | Shutdown | Blame | Leave
