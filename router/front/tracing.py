"""The part of a trace that a request is, as W3C's Trace Context says it: pure but for the random number of a part."""

import os
import re
from typing import Final

_TRACEPARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


def continued(traceparent: bytes | None) -> str:
    """For what this node does of the trace: the same trace, a part of its own. "" if the client has said none, or what
    is none: that must not fail a request.
    """
    match = None if traceparent is None else _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return ""
    version, trace, parent, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more is not None) or not trace.strip(b"0") or not parent.strip(b"0"):
        return ""
    return f"00-{trace.decode()}-{os.urandom(8).hex()}-{int(flags, 16) & 1:02x}"


def trace_of(traceparent: str) -> str:
    """The number of the whole trace; "" if there is none."""
    return traceparent[3:35]
