"""Handover of a node to its successor, a newer version of it: the old supervisor's side. Pure: no I/O, no clock.

The successor is a supervisor of its own, with processes that have imported all and hold nothing yet::

    IDLE --Asked--> IMPORTING --HeirImported--> LEAVING --RouterLeft--> STOPPING --Stopped--> STARTING --HeirUp--> DONE
                    old serves                  requests end            old ends              new starts

At any time before DONE the successor may end, or take too long: then it is killed if need be, the old node goes on, and
the caller receives the reason. The old node starts the processes anew that it has ended by then. So the rollback of a
migration belongs to the old node: it is possible until the successor has reported that it serves. DONE is reached when
the old node has dropped it.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

IMPORT_S: Final = 180.0  # as a node's start may take
ROUTER_S: Final = 5.0  # for a router to say that it has left, beyond the time that it was given
STOP_S: Final = 50.0  # four times what a supervisor waits for some of its children, and room
START_S: Final = 120.0
LONGEST_WAIT_S: Final = 600.0  # for requests that run


class Stage(Enum):
    IDLE = "idle"
    IMPORTING = "imports"
    LEAVING = "requests end"
    STOPPING = "the old processes end"
    STARTING = "the new processes start"
    DONE = "done"


# --- what happens


@dataclass(frozen=True, slots=True)
class SuccessionAsked:
    """``wait_s``: how long requests that run may take to end."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class HeirImported:
    pass


@dataclass(frozen=True, slots=True)
class RouterLeft:
    """It has answered all, or its time is over."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """All processes but zygotes have ended."""


@dataclass(frozen=True, slots=True)
class HeirUp:
    pass


@dataclass(frozen=True, slots=True)
class WayBackDropped:
    pass


@dataclass(frozen=True, slots=True)
class WayBackStays:
    """The disk does not let it be dropped: a node that served with it would lose at its next start what it has done."""

    text: str


@dataclass(frozen=True, slots=True)
class HeirEnded:
    """The successor's process; ``text`` says why."""

    text: str


@dataclass(frozen=True, slots=True)
class ChildLost:
    """One of the old node's processes on which all depend has died by itself."""

    role: str


@dataclass(frozen=True, slots=True)
class Overdue:
    """The time that the last Within gave is over."""


SuccessionEvent = (
    SuccessionAsked
    | HeirImported
    | RouterLeft
    | Stopped
    | HeirUp
    | WayBackDropped
    | WayBackStays
    | HeirEnded
    | ChildLost
    | Overdue
)


# --- what is to be done


@dataclass(frozen=True, slots=True)
class StartHeir:
    pass


@dataclass(frozen=True, slots=True)
class HaveRouterLeave:
    wait_s: float


@dataclass(frozen=True, slots=True)
class StopChildren:
    pass


@dataclass(frozen=True, slots=True)
class GiveAll:
    """The successor owns the node now."""


@dataclass(frozen=True, slots=True)
class DropWayBack:
    """WayBackDropped comes of it, or WayBackStays."""


@dataclass(frozen=True, slots=True)
class RetireSelf:
    """End, and leave all to the successor."""


@dataclass(frozen=True, slots=True)
class KillHeir:
    pass


@dataclass(frozen=True, slots=True)
class ServeOn:
    """Serve as before; ``anew``: the processes that were ended have to be started again."""

    anew: bool
    text: str


@dataclass(frozen=True, slots=True)
class Within:
    """Overdue comes after so long, unless another Within does."""

    seconds: float


SuccessionEffect = (
    StartHeir | HaveRouterLeave | StopChildren | GiveAll | DropWayBack | RetireSelf | KillHeir | ServeOn | Within
)


class Succession:
    """One node's; after a failure it may be asked again."""

    def __init__(self) -> None:
        self.stage = Stage.IDLE
        self._wait_s = 0.0
        self._why = ""  # the successor is killed

    def handle(self, event: SuccessionEvent) -> list[SuccessionEffect]:
        match event:
            case SuccessionAsked(wait_s=wait_s) if self.stage is Stage.IDLE:
                self.stage, self._wait_s, self._why = Stage.IMPORTING, wait_s, ""
                return [StartHeir(), Within(IMPORT_S)]
            case HeirImported() if self.stage is Stage.IMPORTING and not self._why:
                self.stage = Stage.LEAVING
                return [HaveRouterLeave(self._wait_s), Within(self._wait_s + ROUTER_S)]
            case RouterLeft() if self.stage is Stage.LEAVING and not self._why:
                self.stage = Stage.STOPPING
                return [StopChildren(), Within(STOP_S)]
            case Stopped() if self.stage is Stage.STOPPING and not self._why:
                self.stage = Stage.STARTING
                return [GiveAll(), Within(START_S)]
            case HeirUp() if self.stage is Stage.STARTING and not self._why:
                return [DropWayBack()]
            case WayBackDropped() if self.stage is Stage.STARTING and not self._why:
                self.stage = Stage.DONE
                return [RetireSelf()]
            case WayBackStays(text=text) if self.stage is Stage.STARTING:
                return self._give_up(text)
            case HeirEnded(text=text) if self.stage not in (Stage.IDLE, Stage.DONE):
                anew = self.stage is not Stage.IMPORTING
                self.stage = Stage.IDLE
                return [ServeOn(anew, self._why or text)]
            case Overdue() if self.stage is Stage.LEAVING and not self._why:
                self.stage = Stage.STOPPING  # its requests are told that the node is started anew
                return [StopChildren(), Within(STOP_S)]
            case Overdue() if self.stage not in (Stage.IDLE, Stage.DONE):
                return self._give_up(f"it took too long ({self.stage.value})")
            case ChildLost(role=role) if self.stage in (Stage.IMPORTING, Stage.LEAVING):
                return self._give_up(f"{role} died meanwhile, and the node starts anew; try again")
            case _:
                return []  # out of its time

    def _give_up(self, why: str) -> list[SuccessionEffect]:
        if self._why:
            return []
        self._why = why
        return [KillHeir()]
