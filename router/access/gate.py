"""The gate of the HTTP face: judges each request over TCP before anything else looks at it.

Owns the keys' token buckets and carries out the decisions of doorkeeper.py.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

from dormouse.core.audit import Audit
from dormouse.core.config import NodeSection
from dormouse.core.keys import Key, KeyFile
from dormouse.core.rate import Bucket
from dormouse.router.access import access
from dormouse.router.access.access import Caller, Refusal, Route
from dormouse.router.access.doorkeeper import Doorkeeper, Headers, Pairs
from dormouse.router.access.passes import Passes
from dormouse.schemas.messages import Failure


class Entered(NamedTuple):
    """A request that may go on."""

    route: Route
    name: str  # of the function, if the route has one
    caller: Caller
    headers: Pairs  # for the answer, whatever it will be


class Turned(NamedTuple):
    """A request that is answered here: refused, or a browser's question before one."""

    status: int
    failure: Failure | None
    headers: Pairs
    caller: Caller | None = None  # the one that may ask again on this connection, which else ends
    name: str = ""  # of the function that it has asked for


class HttpGate:
    """See the module."""

    def __init__(
        self, node: NodeSection, keys: KeyFile, audit: Audit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.keys = keys
        self._audit = audit
        self._behind_proxy = node.behind_proxy
        self._rules = Doorkeeper(node.host, node.hosts, node.cors, node.behind_proxy, node.open_loopback)
        self.passes = Passes(clock)
        self._clock = clock
        self._holders: dict[str, Caller] = {}  # by key; as many as there have been since the start, at most
        self._buckets: dict[str, Bucket] = {}  # likewise

    def judge(self, scope: Any) -> Entered | Turned:
        """``scope`` is ASGI's."""
        h = Headers.of(scope["headers"])
        if isinstance(h, Refusal):
            return _refused(h, ())
        if (refusal := self._rules.host_refusal(h)) is not None:
            return _refused(refusal, ())
        extra = self._rules.cors_headers(h)
        if scope["method"] == "OPTIONS" and h.asks is not None:
            asked = self._rules.preflight(scope["path"], h)
            return _refused(asked, extra) if isinstance(asked, Refusal) else Turned(204, None, asked, access.ANYBODY)
        found = access.find(scope["method"], scope["path"])
        if scope["method"] == "OPTIONS":
            return _options(scope["path"], found, extra)
        if isinstance(found, Refusal):
            return _refused(found, extra)
        route, name = found
        key = self.keys.find(h.token) if h.token is not None else None
        holder = self._holder(key) if key is not None else self.passes.find(h.token) if h.token is not None else None
        caller = self._rules.admit(route, h, holder, self.keys.wanted)
        if not isinstance(caller, Refusal) and key is not None and key.rate_s and (late := self._in_time(key)):
            if route.act not in access.ADMINISTRATIVE:
                return _refused(late, extra)._replace(caller=caller, name=name)
            caller = late
        administrative = route.act in access.ADMINISTRATIVE
        if isinstance(caller, Refusal):
            if administrative:
                who = holder or access.ANYBODY
                self._audit.write(who.name, self._origin(scope, h), route.act.value, name, caller.code)
            return _refused(caller, extra)
        if administrative:
            caller = replace(caller, origin=self._origin(scope, h))
        return Entered(route, name, caller, extra)

    def admits(self, caller: Caller) -> bool:
        """Whether a caller let in earlier would be let in now: the one answer for each kind of caller."""
        if caller.uid is not None:
            return True  # at the node: let in by the admin socket
        if caller.key:
            return self.keys.holds(caller.key) or self.passes.holds(caller.key)
        return self._rules.open(self.keys.wanted)

    def _holder(self, key: Key) -> Caller:
        holder = self._holders.get(key.id)
        if holder is None:
            holder = self._holders[key.id] = access.with_key(key)
        return holder

    def _in_time(self, key: Key) -> Refusal | None:
        now_s = self._clock()
        bucket = self._buckets.get(key.id)
        if bucket is None:
            bucket = self._buckets[key.id] = Bucket.full(key.rate_s, key.burst, now_s)
        wait_s = bucket.take(now_s)
        if wait_s == 0.0:
            return None
        text = f"this key may send {key.rate_s:g} requests a second, {key.burst} at once; send it again later"
        return Refusal(429, "rate_limited", text, ((b"retry-after", b"%d" % ceil(wait_s)),))

    def _origin(self, scope: Any, h: Headers) -> str:
        """Where from, for the audit log: the proxy's statement is believed there and nowhere else."""
        client = scope.get("client")
        peer = f"{client[0]}:{client[1]}" if client is not None else "unknown"
        if self._behind_proxy and h.forwarded is not None:
            return f"{peer} for {h.forwarded[:100].decode('latin-1')}"
        return peer


def _options(path: str, found: Any, extra: Pairs) -> Turned:
    """Methods allowed at this path, or on the whole node: reveals neither permissions nor functions."""
    if path == "*":
        return Turned(204, None, ((b"allow", b"GET, HEAD, POST, PUT, DELETE, OPTIONS"), *extra), access.ANYBODY)
    if isinstance(found, Refusal) and found.status == 405:
        ((name, methods),) = found.headers
        return Turned(204, None, ((name, methods + b", OPTIONS"), *extra), access.ANYBODY)
    return _refused(found, extra)


def _refused(refusal: Refusal, extra: Pairs) -> Turned:
    failure = Failure(code=refusal.code, status=refusal.status, text=refusal.text)
    return Turned(refusal.status, failure, (*refusal.headers, *extra))
