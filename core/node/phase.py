"""Phases of a node's supervisor, and their consequences for its processes. Pure: no I/O, no clock.

    phase      begins with                  a process that ends      one that is missing is started
    ---------  ---------------------------  -----------------------  ------------------------------
    STANDS_BY  as a node's successor        ends the successor       to import all, and to wait
    RUNS       as the first; it has it all  deaths.py says           at once, or after a pause
    ANEW       a death that all share       one fewer to wait for    once all but zygotes have ended
    GOES_OVER  its own successor's turn     is wanted                by the successor
    ENDS       SIGTERM, or it cannot go on  is wanted                never

    STANDS_BY --> RUNS <--> ANEW <-- GOES_OVER <-- RUNS        all --> ENDS

The supervisor returns from GOES_OVER, by ANEW, if its successor does not start.
"""

from enum import Enum
from typing import Final


class NodePhase(Enum):
    """See the module."""

    STANDS_BY = "stands by"
    RUNS = "runs"
    ANEW = "starts anew"
    GOES_OVER = "goes over"
    ENDS = "ends"

    @property
    def wants_ends(self) -> bool:
        """Whether a process that ends does what it was told to."""
        return self in (NodePhase.GOES_OVER, NodePhase.ENDS)

    @property
    def starts_roles(self) -> bool:
        """Whether a role without a process is given one."""
        return self in (NodePhase.STANDS_BY, NodePhase.RUNS)


NEXT: Final = {
    NodePhase.STANDS_BY: (NodePhase.RUNS, NodePhase.ENDS),
    NodePhase.RUNS: (NodePhase.ANEW, NodePhase.GOES_OVER, NodePhase.ENDS),
    NodePhase.ANEW: (NodePhase.RUNS, NodePhase.ENDS),
    NodePhase.GOES_OVER: (NodePhase.ANEW, NodePhase.ENDS),
    NodePhase.ENDS: (),
}


def entered(before: NodePhase, phase: NodePhase) -> NodePhase:
    """``phase``, which may follow. It may be entered again from itself: of what all share two may die."""
    assert phase is before or phase in NEXT[before], f"{before} -> {phase}"
    return phase
