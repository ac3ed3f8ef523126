"""A request's part of a trace, in the form of W3C's Trace Context: pure but for random numbers."""

import os
import random
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MEMBER: Final = re.compile(rb"([a-z0-9][a-z0-9_\-*/@]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}")

STATE_MEMBERS: Final = 32
STATE_NBYTES: Final = 512
"""Of a tracestate: the part that W3C has everybody hand on. Of a longer one, the members at its end are left out."""


class Trace(NamedTuple):
    """``parent`` is the traceparent of what follows from the request, "" if it is no part of a trace; ``state`` its
    tracestate. ``above``: the client's part, if this node has one of its own, which it exports.
    """

    parent: str = ""
    state: str = ""
    above: str = ""

    @property
    def number(self) -> str:
        """Of the whole trace; "" if there is none."""
        return self.parent[3:35]

    @property
    def own(self) -> str:
        """The node's part, if it is exported, else ""."""
        return self.parent[36:52] if self.above else ""

    def __str__(self) -> str:
        return f"{self.parent} {self.above} {self.state}" if self.parent else ""

    @classmethod
    def read(cls, text: str) -> "Trace":
        """The inverse of str()."""
        parent, _, rest = text.partition(" ")
        above, _, state = rest.partition(" ")
        return cls(parent, state, above)


NO_TRACE: Final = Trace()
ROOT: Final = "0" * 16
"""For ``above``, of a trace that begins here."""


def traced(traceparent: bytes | None, states: Iterable[bytes], share: float | None) -> Trace:
    """The trace for this node's part. A client's header that is malformed must not fail a request. ``share``: of
    the requests without a trace, how many begin one; None if nothing is exported, and so no part is the node's own.
    """
    match = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
    if match is not None:
        version, trace, parent, flags, more = match.groups()
        bad = version == b"ff" or (version == b"00" and more is not None)
        if not bad and trace.strip(b"0") and parent.strip(b"0"):
            state, sampled, above = _state(states), int(flags, 16) & 1, parent.decode()
            if share is None or not sampled:
                return Trace(f"00-{trace.decode()}-{above}-{sampled:02x}", state)
            return Trace(f"00-{trace.decode()}-{os.urandom(8).hex()}-01", state, above)
    if share is None:
        return NO_TRACE
    fresh = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}"
    return Trace(f"{fresh}-01", "", ROOT) if random.random() < share else Trace(f"{fresh}-00")


def _state(given: Iterable[bytes]) -> str:
    """Of all its fields; "" if it is not well-formed."""
    members = [member for each in given for member in (part.strip(b" \t") for part in each.split(b",")) if member]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in found if match is not None}
    if len(keys) < len(members) or len(members) > STATE_MEMBERS:  # none is bad, none is there twice
        return ""
    while sum(map(len, members)) + len(members) - 1 > STATE_NBYTES:
        members.pop()
    return b",".join(members).decode()
