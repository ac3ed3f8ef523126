"""Messages from every process to the supervisor."""

from dormouse.schemas.messages.shared import Message


class Ready(Message, frozen=True, kw_only=True, tag=1):
    """The process has bound and connected all it needs."""


class Heartbeat(Message, frozen=True, kw_only=True, tag=2):
    """The process's loop turns."""


class RoleFailed(Message, frozen=True, kw_only=True, tag=3):
    """The process cannot start; it exits after this."""

    text: str


class KillRole(Message, frozen=True, kw_only=True, tag=4):
    """Controller only: this process holds something it will not give back; kill that epoch of it."""

    role: str
    epoch: int
    text: str


class WantRole(Message, frozen=True, kw_only=True, tag=5):
    """A process that is started when it is first wanted, and stays; nothing if it is there. Of the controller: the
    executor of a GPU that is drained no more.
    """

    role: str


class DismissRole(Message, frozen=True, kw_only=True, tag=6):
    """A zygote that is not wanted for now. Its epoch: a later one is wanted. Of the controller: the executor of a GPU
    that is drained, whichever there is or would be started (0).
    """

    role: str
    epoch: int


class Left(Message, frozen=True, kw_only=True, tag=7):
    """Router only: as it was told by Leave."""


ToSupervisor = Ready | Heartbeat | RoleFailed | KillRole | WantRole | DismissRole | Left
