"""Links to the dashboard for callers at the node: a ticket that is good once, for a short time, and the session that it
begins.

All state is in memory: sessions end with the router.
"""

import hashlib
import secrets
from collections.abc import Callable
from typing import Final, TypeVar

from dormouse.router.access.access import IMPLIED, Caller

T = TypeVar("T")

TICKET_S: Final = 60.0
"""From the command until the browser has the page."""

SESSION_S: Final = 12 * 3600.0
"""A person's day."""

MAX_TICKETS: Final = 16
MAX_SESSIONS: Final = 64
"""One more takes the place of the oldest."""


class Passes:
    """``clock`` is one that nobody sets."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tickets: dict[bytes, tuple[float, str]] = {}  # until when, and whose; by hash, oldest first
        self._sessions: dict[bytes, tuple[float, Caller]] = {}  # likewise

    def ticket(self, user: str) -> str:
        """A new one, for a user at the node."""
        token = f"dt_{secrets.token_hex(32)}"
        _keep(self._tickets, token.encode(), (self._clock() + TICKET_S, user), MAX_TICKETS)
        return token

    def redeem(self, ticket: bytes) -> str | None:
        """The key of a new session, which may do what one of scope admin may; None if the ticket is good no more."""
        until_s, user = self._tickets.pop(_hash(ticket), (0.0, ""))
        if self._clock() >= until_s:
            return None
        token = f"dm_session_{secrets.token_hex(32)}"
        key = f"session {secrets.token_hex(6)}"
        caller = Caller(f"{key} of {user}", None, "", IMPLIED["admin"], key=key)
        _keep(self._sessions, token.encode(), (self._clock() + SESSION_S, caller), MAX_SESSIONS)
        return token

    def find(self, token: bytes) -> Caller | None:
        """The caller of this session."""
        until_s, caller = self._sessions.get(_hash(token), (0.0, None))
        return caller if self._clock() < until_s else None

    def end(self) -> int:
        """All sessions, and the links that nobody has opened yet; how many sessions there were."""
        now_s = self._clock()
        ended = sum(now_s < until_s for until_s, _ in self._sessions.values())
        self._tickets.clear()
        self._sessions.clear()
        return ended

    def holds(self, key: str) -> bool:
        """Whether there is this session still."""
        now_s = self._clock()
        return any(caller.key == key and now_s < until_s for until_s, caller in self._sessions.values())


def _hash(token: bytes) -> bytes:
    """By which it is kept: how long a search takes tells nothing of the token."""
    return hashlib.sha256(token).digest()


def _keep(kept: dict[bytes, T], token: bytes, value: T, most: int) -> None:
    while len(kept) >= most:
        del kept[next(iter(kept))]
    kept[_hash(token)] = value
