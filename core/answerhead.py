"""Checks the status and headers that a function answers with: pure. Called where an answer is made, and where it is
sent.
"""

import re
from collections.abc import Mapping
from typing import Final

MAX: Final = 32
NBYTES: Final = 8 << 10
"""Of all headers of an answer, names included."""

CODE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
"""The name of an error, for programs."""

BODILESS: Final = (204, 304)

_NAME: Final = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE: Final = re.compile(r"[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?|")

_NODES: Final = frozenset(
    {
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length", "date"),
        *("server", "server-timing", "x-request-id", "content-type", "idempotency-replayed", "preference-applied"),
        *("inference-header-content-length", "set-cookie", "set-cookie2", "clear-site-data", "refresh", "alt-svc"),
        *("content-security-policy", "content-security-policy-report-only", "strict-transport-security"),
        *("x-content-type-options", "x-frame-options", "x-xss-protection", "x-sendfile", "service-worker-allowed"),
        *("origin-agent-cluster", "permissions-policy", "referrer-policy", "nel", "report-to", "reporting-endpoints"),
        *("authorization", "host", "http2-settings", "x-permitted-cross-domain-policies", "sourcemap", "x-powered-by"),
    }
)
_FAMILIES: Final = ("access-control-", "cross-origin-", "proxy-", "sec-", "x-accel-", "x-forwarded-", "x-dormouse-")
"""Headers that frame an answer, that the node sets, that bind all functions of its origin, or that proxies obey."""


def wrong(status: int, headers: Mapping[str, str], least: int = 200) -> str:
    """Why an answer cannot have these; "" if it can. Names are in small letters."""
    if not least <= status <= 499:
        return f"the status {status}: a function answers with {least} to 499"
    if len(headers) > MAX or sum(len(name) + len(value) + 4 for name, value in headers.items()) > NBYTES:
        return f"{len(headers)} headers: an answer has at most {MAX}, together {NBYTES >> 10} KiB"
    for name, value in headers.items():
        if not _NAME.fullmatch(name):
            return f"a header called {name[:80]!r}: that is no name of one"
        if name in _NODES or name.startswith(_FAMILIES):
            return f"the header {name!r}, which is the node's own"
        if not _VALUE.fullmatch(value):
            return f"the header {name!r} with the value {value[:80]!r}: printable ASCII, in one line, is what it takes"
    return ""
