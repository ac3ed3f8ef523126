"""Where a store and a router leave what those of the next node are given.

Owns the sockets: by role a pair, of which the process has one end (``HEIR_FD``) and its successor will have the other
(``LEGACY_FD``). What is said there is theirs.
"""

import socket

from dormouse.core.listening import HEIR_FD, LEGACY_FD


class Legacies:
    """``given``: descriptors, by role, of what a node before this one has left; they are taken from it."""

    def __init__(self, given: dict[str, int]) -> None:
        self._given = given
        self._inherited: dict[str, list[socket.socket]] = {}  # by role: its ends
        self._heir_ends: dict[str, socket.socket] = {}  # by role: a successor's

    def inherits(self, role: str) -> dict[str, int]:
        """What a process of this role is given, as it starts: descriptors, by the variable that tells it the number."""
        for old in self._inherited.pop(role, ()):
            old.close()
        legacy = self._heir_ends.pop(role, None)  # for a successor that has not come
        if (given := self._given.pop(role, None)) is not None:
            legacy = socket.socket(fileno=given)
        self._heir_ends[role], its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._inherited[role] = [its] if legacy is None else [its, legacy]
        return {HEIR_FD: its.fileno()} | ({} if legacy is None else {LEGACY_FD: legacy.fileno()})

    def heir_end(self, role: str) -> int:
        """What its successor is given."""
        return self._heir_ends[role].fileno()
