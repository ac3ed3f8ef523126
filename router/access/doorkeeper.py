"""Admission of requests over TCP by the node's configuration: pure decisions on their routes and headers.

Covers the names of the node, pages of other origins, and keys. No I/O; the rights of a caller are access.py's.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from dormouse.core.exposure import is_loopback
from dormouse.router.access.access import (
    ANYBODY,
    FOR_OWN_PAGES,
    FOR_PAGES,
    NEEDS,
    OPEN,
    Act,
    Caller,
    Refusal,
    Right,
    Route,
    find,
)

_SIMPLE: Final = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")
"""Types that a web page may send anywhere without asking first (Fetch standard, "CORS-safelisted")."""


_EXPOSED: Final = (
    b"x-request-id, server-timing, retry-after, location, preference-applied, idempotency-replayed, "
    b"inference-header-content-length, x-dormouse-version"
)
_ALLOWED: Final = (
    b"authorization, content-type, x-request-id, traceparent, tracestate, prefer, idempotency-key, "
    b"inference-header-content-length"
)
"""Headers of answers that a page of ``[node] cors`` may read, and of requests that it may send."""

Pairs = tuple[tuple[bytes, bytes], ...]


class Headers(NamedTuple):
    """The headers that decide. Each may stand only once in a request: of two, nobody could say which one counts."""

    host: bytes | None = None
    origin: bytes | None = None
    site: bytes | None = None
    token: bytes | None = None  # of an API key
    kind: bytes | None = None  # content-type, without parameters
    asks: bytes | None = None  # access-control-request-method
    forwarded: bytes | None = None  # for the audit log alone
    id: bytes | None = None  # x-request-id

    @staticmethod
    def of(raw: Iterable[tuple[bytes, bytes]]) -> "Headers | Refusal":
        found: dict[str, bytes] = {}
        for name, value in raw:
            if (field := _FIELDS.get(name)) is not None:
                if field in found and field not in ("forwarded", "id"):
                    return Refusal(400, "bad_headers", f"the header {name.decode()} stands twice; send it once")
                found[field] = value
        scheme, _, token = found.pop("token", b"").partition(b" ")
        token = token.strip()
        # Another scheme, or another system's key, is not meant for us: it counts as none.
        if scheme.lower() == b"bearer" and token.startswith(b"dm_"):
            found["token"] = token
        if "kind" in found:
            found["kind"] = found["kind"].partition(b";")[0].strip().lower()
        return Headers(**found)


_FIELDS: Final = {
    b"host": "host",
    b"origin": "origin",
    b"sec-fetch-site": "site",
    b"authorization": "token",
    b"content-type": "kind",
    b"access-control-request-method": "asks",
    b"x-forwarded-for": "forwarded",
    b"x-request-id": "id",
}


class Doorkeeper:
    """The node's rules for requests over TCP, from its configuration; judges one at a time and remembers none."""

    def __init__(
        self, host: str, hosts: Iterable[str], cors: Iterable[str], behind_proxy: bool, open_loopback: bool
    ) -> None:
        self._local = is_loopback(host)
        self._hosts = {"localhost", host, *hosts}
        self._cors = {origin.encode() for origin in cors}
        self._may_be_open = self._local and not behind_proxy
        self._open_loopback = open_loopback
        self._known: set[bytes] = set()  # Host headers that were found good: few, because their names are

    def host_refusal(self, h: Headers) -> Refusal | None:
        """DNS rebinding: a page's own name is made to mean this machine, but its requests still carry that name."""
        if h.host in self._known:
            return None
        name = host_name(h.host or b"")
        if not self._takes(name):
            shown = name[:100] or "none"
            text = (
                f'this node does not answer as {shown!r}: call it by its own address, or set [node] hosts = ["NAME"] '
                "to the names by which its clients call it"
            )
            return Refusal(421, "unknown_host", text)
        if len(self._known) < 64 and h.host is not None:
            self._known.add(h.host)
        return None

    def _takes(self, name: str) -> bool:
        if name in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        # No name can be rebound that is an address; a node that others reach has addresses that it does not know.
        return address.is_loopback or not self._local

    def page_refusal(self, act: Act | None, h: Headers) -> Refusal | None:
        """A page of another origin: the browser reports it, in one of two headers or both."""
        if h.origin is None and h.site in (None, b"same-origin", b"none"):
            return None
        if act in (Act.PAGE, Act.DASHBOARD):
            return None  # it is the same for everybody, and others may link to it
        if act in FOR_PAGES and self.cors_headers(h):
            return None
        if (
            h.origin is not None
            and _own(h.origin, h.host)
            and act in FOR_OWN_PAGES
            and h.site in (None, b"same-origin")
        ):
            return None
        page = (h.origin or b"another site").decode("latin-1")[:200]
        if act not in FOR_PAGES:
            return Refusal(403, "forbidden", f"this is not for web pages ({page}); use the `dormouse` command")
        text = f"a page of {page} may not do this; if it is yours, set [node] cors to its origin"
        return Refusal(403, "foreign_origin", text)

    def cors_headers(self, h: Headers) -> Pairs:
        """For the answer, so that a page of ``[node] cors`` may read it; none for others."""
        if h.origin is None or h.origin not in self._cors:
            return ()
        return (
            (b"access-control-allow-origin", h.origin),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        )

    def preflight(self, path: str, h: Headers) -> Pairs | Refusal:
        """A browser asks whether a page may send what it announces: headers of an answer without a body."""
        found = find((h.asks or b"").decode("latin-1"), path)
        if isinstance(found, Refusal):
            return found
        if (refusal := self.page_refusal(found[0].act, h)) is not None:
            return refusal
        return (
            *self.cors_headers(h),
            (b"access-control-allow-methods", found[0].method.encode()),
            (b"access-control-allow-headers", _ALLOWED),
            (b"access-control-max-age", b"600"),
        )

    def open(self, keys_wanted: bool) -> bool:
        """Whether anybody may request the acts of OPEN."""
        return self._may_be_open and (self._open_loopback or not keys_wanted)

    def admit(self, route: Route, h: Headers, holder: Caller | None, keys_wanted: bool) -> Caller | Refusal:
        """The caller, or a refusal. ``holder``: of the request's key; ``keys_wanted``: there was a key once."""
        if (refusal := self.page_refusal(route.act, h)) is not None:
            return refusal
        needed = NEEDS[route.act]
        if needed is None:
            return ANYBODY
        if holder is not None:
            if needed not in holder.rights:
                scopes = ", ".join(sorted(holder.rights))
                return Refusal(
                    403, "scope_missing", f"this key has no scope {needed!r}, only {scopes}; use another key"
                )
            return holder
        if h.token is not None:
            return _unauthorized("there is no such API key, or it is revoked", needed)
        if route.act not in OPEN or not self.open(keys_wanted):
            return _unauthorized("this needs an API key", needed)
        if route.method == "POST" and not _asked_first(route.act, h):
            kind = (h.kind or b"none").decode("latin-1")[:100]
            what = "add a header that a page cannot send: -H 'x-request-id: 1'"
            if h.kind != b"multipart/form-data":
                what = "name what the body is: -H 'content-type: application/json' (curl: --json instead of -d)"
            text = f"the content-type is {kind}, which a web page may send to anybody; without an API key, {what}"
            return Refusal(415, "content_type", text)
        return ANYBODY


def _asked_first(act: Act, h: Headers) -> bool:
    """Whether a browser would have asked this node before it let another's page send that, or says that the page is
    the node's own. Clients of the Open Inference Protocol name no type: with none, only a script sends a body, and then
    browsers say whose page it is.
    """
    if h.kind is None and act in (Act.INFER, Act.INDEX):
        return True
    return (h.kind is not None and h.kind not in _SIMPLE) or h.id is not None or h.site == b"same-origin"


def _unauthorized(why: str, needed: Right) -> Refusal:
    text = (
        f"{why}; send `Authorization: Bearer dm_...` with a key of scope {needed}, which `dormouse keys create "
        f"--scope {needed}` makes on the node"
    )
    return Refusal(401, "unauthorized", text, ((b"www-authenticate", b'Bearer realm="dormouse"'),))


def host_name(host: bytes) -> str:
    """The name in a Host header, without the port; "" if it has none."""
    match = _HOST.fullmatch(host.decode("latin-1").lower())
    return "" if match is None else (match[1] or match[2]).rstrip(".")


_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")


def _own(origin: bytes, host: bytes | None) -> bool:
    """Whether a page's origin is this node itself, by the name that the request has for it."""
    return host is not None and origin.lower() in (b"http://" + host.lower(), b"https://" + host.lower())
