"""A process that is to take over from another: it imports all, says so, and waits for its turn with nothing in hand.

Its supervisor has the other end of a socket pair. Without a pair, its turn has come from the beginning.
"""

import os
import socket
from typing import Final

STANDBY_FD: Final = "DORMOUSE_STANDBY_FD"
"""Names the inherited descriptor in the process's environment."""

NEXT: Final = "DORMOUSE_NEXT"
"""Is set while the process's node is not there yet."""

IMPORTED: Final = b"i"
TURN: Final = b"t"


def await_turn() -> None:
    """Returns when it has come; the process ends if its supervisor does before that."""
    fd = os.environ.pop(STANDBY_FD, "")
    os.environ.pop(NEXT, None)
    if not fd:
        return
    with socket.socket(fileno=int(fd)) as turn:
        turn.sendall(IMPORTED)
        if turn.recv(1) != TURN:
            os._exit(0)


def stands_by() -> bool:
    """Whether this process's node is not there yet."""
    return NEXT in os.environ
