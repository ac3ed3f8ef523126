"""Sockets for the handover from a store and a router to those of the next node.

Owns them: a pair by role. The process has one end (``HEIR_FD``) and its successor will have the other (``LEGACY_FD``).
The messages there are theirs.
"""

import socket

from dormouse.core.listening import HEIR_FD, LEGACY_FD


class Legacies:
    """``given``: descriptors, by role, that the predecessor of this node has handed over; they are taken from it."""

    def __init__(self, given: dict[str, int]) -> None:
        self._given = given
        self._inherited: dict[str, list[socket.socket]] = {}  # by role: its ends
        self._heir_ends: dict[str, socket.socket] = {}  # by role: a successor's

    def inherits(self, role: str) -> dict[str, int]:
        """Descriptors for a process of this role, as it starts, by the variable that has the number."""
        for old in self._inherited.pop(role, ()):
            old.close()
        legacy = self._heir_ends.pop(role, None)  # for a successor that has not come
        if (given := self._given.pop(role, None)) is not None:
            legacy = socket.socket(fileno=given)
        self._heir_ends[role], its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._inherited[role] = [its] if legacy is None else [its, legacy]
        return {HEIR_FD: its.fileno()} | ({} if legacy is None else {LEGACY_FD: legacy.fileno()})

    def heir_end(self, role: str) -> int:
        """The descriptor for its successor."""
        return self._heir_ends[role].fileno()
