"""Messages of a node's handover to a newer version of itself: from `dormouse up --replace` to the node's supervisor,
and between the two supervisors. Both sides may be of different versions of Dormouse, so fields and members are only
ever added, with defaults, and FORMAT is raised if that does not do. Imports nothing of ours.
"""

from typing import Final

import msgspec

FORMAT: Final = 1


class SuccessionPacket(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all of these; unknown fields are passed over."""


# --- the command line -> the old supervisor


class Replace(SuccessionPacket, frozen=True, kw_only=True, tag="replace"):
    """Start ``command`` as successor; requests that run have ``wait_s`` to end."""

    command: list[str]
    wait_s: float
    format: int = FORMAT


# --- and back


class Going(SuccessionPacket, frozen=True, kw_only=True, tag="going"):
    """Progress of the handover, in words."""

    text: str


class Replaced(SuccessionPacket, frozen=True, kw_only=True, tag="replaced"):
    """The node is the successor's, whose process this is."""

    pid: int


class NotReplaced(SuccessionPacket, frozen=True, kw_only=True, tag="not_replaced"):
    """The old node goes on. ``status`` is the successor's, if it was the one that ended."""

    text: str
    status: int = 1


SaidToAsker = Going | Replaced | NotReplaced


# --- the old supervisor -> its successor


class Estate(SuccessionPacket, frozen=True, kw_only=True, tag="estate"):
    """The first packet. With it come, in this order: the listening socket, the run directory and the state directory,
    both locked, and the ends at which connections and models arrive. ``epochs``: of each role's next process.
    ``goes_back``: whether it undoes a migration of the state directory, should it have to go on (core/wayback.py);
    ``drops``: and drops the way back itself, once it has heard that its successor serves.
    """

    run: str
    state: str
    epochs: dict[str, int]
    generation: int
    goes_back: bool = False
    drops: bool = False
    format: int = FORMAT


class Yours(SuccessionPacket, frozen=True, kw_only=True, tag="yours"):
    """Nothing of the old node runs any more but its supervisor and its zygotes."""


ToHeir = Estate | Yours


# --- and back


class HeirReady(SuccessionPacket, frozen=True, kw_only=True, tag="ready"):
    """All is imported."""


class HeirServes(SuccessionPacket, frozen=True, kw_only=True, tag="serves"):
    """All processes are up."""


class HeirFailed(SuccessionPacket, frozen=True, kw_only=True, tag="failed"):
    """It ends, and why; also where no file can be written."""

    text: str


FromHeir = HeirReady | HeirServes | HeirFailed
