"""Who may do what: pure decisions on one request's route, caller and headers. No I/O; time is an argument.

Callers are people at the node, over its admin Unix socket (known to the kernel by their uid), holders of API keys, and,
on a node that only this machine reaches and that has never had a key, anybody. ``ROUTES`` and ``OF_SOCKET`` say what is
there, ``NEEDS`` what each needs. Limits on how much a caller may send are elsewhere.

A function of another tenant, or one that is none of a key's, is to its holder as if it were not there.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple

from dormouse.core.exposure import is_loopback
from dormouse.core.keys import Key
from dormouse.schemas import admin as a
from dormouse.schemas.admin import Scope

Right = Literal["invoke", "deploy", "admin", "keys"]
"""A key's scopes, and what no key has: only who is at the node makes keys."""


class Act(Enum):
    """What a request is about; the value stands in the audit log."""

    HEALTH = "health"
    READY = "ready"
    INVOKE = "invoke"
    LIST = "ls"
    LOGS = "logs"
    DEPLOY = "deploy"
    REMOVE = "rm"
    RESTART = "restart"
    STATUS = "status"
    KEYS = "keys ls"
    CREATE_KEY = "keys create"
    REVOKE_KEY = "keys revoke"


NEEDS: Final[dict[Act, Right | None]] = {
    Act.HEALTH: None,
    Act.READY: None,
    Act.INVOKE: "invoke",
    Act.LIST: "deploy",
    Act.LOGS: "deploy",
    Act.DEPLOY: "deploy",
    Act.REMOVE: "deploy",
    Act.RESTART: "deploy",
    Act.STATUS: "admin",
    Act.KEYS: "keys",
    Act.CREATE_KEY: "keys",
    Act.REVOKE_KEY: "keys",
}

IMPLIED: Final[dict[Scope, frozenset[Right]]] = {
    "invoke": frozenset({"invoke"}),
    "deploy": frozenset({"deploy"}),
    "admin": frozenset({"invoke", "deploy", "admin"}),
}
"""What a scope of a key lets do."""

EVERYTHING: Final[frozenset[Right]] = frozenset({"invoke", "deploy", "admin", "keys"})


class Route(NamedTuple):
    act: Act
    method: str
    path: re.Pattern[str]  # its group is a function's name


ROUTES: Final = (
    Route(Act.INVOKE, "POST", re.compile(r"/functions/([^/]+)/invoke")),
    Route(Act.HEALTH, "GET", re.compile(r"/healthz")),
    Route(Act.READY, "GET", re.compile(r"/readyz")),
    Route(Act.LIST, "GET", re.compile(r"/admin/functions")),
    Route(Act.DEPLOY, "POST", re.compile(r"/admin/functions")),
    Route(Act.REMOVE, "DELETE", re.compile(r"/admin/functions/([^/]+)")),
    Route(Act.RESTART, "POST", re.compile(r"/admin/functions/([^/]+)/restart")),
    Route(Act.LOGS, "GET", re.compile(r"/admin/functions/([^/]+)/logs")),
    Route(Act.STATUS, "GET", re.compile(r"/admin/status")),
)
"""All that there is over HTTP."""

OF_SOCKET: Final[dict[type[a.Act], Act]] = {
    a.Deploy: Act.DEPLOY,
    a.Invoke: Act.INVOKE,
    a.Remove: Act.REMOVE,
    a.Restart: Act.RESTART,
    a.Functions: Act.LIST,
    a.Status: Act.STATUS,
    a.Logs: Act.LOGS,
    a.Keys: Act.KEYS,
    a.CreateKey: Act.CREATE_KEY,
    a.RevokeKey: Act.REVOKE_KEY,
}
"""All that there is over the admin socket."""

ADMINISTRATIVE: Final = frozenset(Act) - {Act.HEALTH, Act.READY, Act.INVOKE}
"""Whose refusals the audit log has."""

OPEN: Final = Act.INVOKE
"""What needs no key where a node is open."""

FOR_PAGES: Final = frozenset({Act.INVOKE, Act.HEALTH, Act.READY})
"""What pages of ``[node] cors`` may ask for."""

_SIMPLE: Final = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")
"""Types that a web page may send anywhere without asking first (Fetch standard, "CORS-safelisted")."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. ``tenant``: whose functions it may see and change; None: everybody's."""

    name: str  # a user's, or "key ID", or "anybody"
    uid: int | None  # None: not of this machine, as far as the node knows
    origin: str  # where it calls from: "unix", or an address; "" where nobody asks, which is on a request's path
    rights: frozenset[Right]
    tenant: str | None = None
    functions: tuple[str, ...] = ("*",)

    def sees(self, function: str, tenant: str) -> bool:
        return (self.tenant is None or self.tenant == tenant) and self.names(function)

    def names(self, function: str) -> bool:
        """Whether the key is for functions of this name."""
        return self.functions == ("*",) or any(fnmatchcase(function, pattern) for pattern in self.functions)


ANYBODY: Final = Caller("anybody", None, "", IMPLIED["invoke"])


def with_key(key: Key) -> Caller:
    rights: frozenset[Right] = frozenset().union(*(IMPLIED[scope] for scope in key.scopes))
    return Caller(f"key {key.id}", None, "", rights, key.tenant, key.functions)


def at_the_node(uid: int, user: str) -> Caller:
    """Whom the admin socket has let in."""
    return Caller(user, uid, "unix", EVERYTHING)


def permit(caller: Caller, act: a.Act) -> "Refusal | None":
    """Whether the caller may do such a thing at all; whose functions it may do it to is router/tenancy.py's."""
    needed = NEEDS[OF_SOCKET[type(act)]]
    if needed is None or needed in caller.rights:
        return None
    return Refusal(403, "scope_missing", f"{caller.name} may not do this, which needs {needed!r}")


class Refusal(NamedTuple):
    """An answer that ends the request; ``text`` says what to do."""

    status: int
    code: str
    text: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Preflight(NamedTuple):
    """A browser asks whether a page may send what it wants to; the answer has no body."""

    headers: tuple[tuple[bytes, bytes], ...]


class Headers(NamedTuple):
    """Those that decide; each stands once in a request, or nobody could say which counts."""

    host: bytes | None = None
    origin: bytes | None = None
    site: bytes | None = None
    token: bytes | None = None  # of an API key
    kind: bytes | None = None  # content-type, without parameters
    asks: bytes | None = None  # access-control-request-method
    forwarded: bytes | None = None  # for the audit log alone

    @staticmethod
    def of(raw: Iterable[tuple[bytes, bytes]]) -> "Headers | Refusal":
        found: dict[bytes, bytes] = {}
        for name, value in raw:
            if name in _ONCE:
                if name in found and name != b"x-forwarded-for":
                    return Refusal(400, "bad_headers", f"the header {name.decode()} stands twice; send it once")
                found[name] = value
        scheme, _, token = found.get(b"authorization", b"").partition(b" ")
        token = token.strip()
        # Another scheme, or another system's key, is not meant for us: it counts as none.
        ours = scheme.lower() == b"bearer" and token.startswith(b"dm_")
        kind = found.get(b"content-type")
        return Headers(
            found.get(b"host"),
            found.get(b"origin"),
            found.get(b"sec-fetch-site"),
            token if ours else None,
            kind.partition(b";")[0].strip().lower() if kind is not None else None,
            found.get(b"access-control-request-method"),
            found.get(b"x-forwarded-for"),
        )


_ONCE: Final = frozenset(
    (
        b"host",
        b"origin",
        b"sec-fetch-site",
        b"authorization",
        b"content-type",
        b"access-control-request-method",
        b"x-forwarded-for",
    )
)


def find(method: str, path: str) -> tuple[Route, str] | Refusal:
    """The route and the function's name in it, if it has one."""
    others = []
    for route in ROUTES:
        if (match := route.path.fullmatch(path)) is not None:
            if route.method == method:
                return route, match[1] if route.path.groups else ""
            others.append(route.method)
    if others:
        allowed = ", ".join(others)
        return Refusal(
            405, "method_not_allowed", f"{path} takes {allowed}, not {method}", ((b"allow", allowed.encode()),)
        )
    text = "there is nothing at this path; invoke a function with POST /functions/NAME/invoke"
    return Refusal(404, "unknown_route", text)


class Doorkeeper:
    """What the node's configuration says of requests over TCP; decides one at a time and remembers none."""

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
        """DNS rebinding: a page's own name is made to mean this machine, but its requests still say that name."""
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
        """A page of another origin: the browser says so, in one of two headers or both."""
        if h.origin is None and h.site in (None, b"same-origin", b"none"):
            return None
        if act in FOR_PAGES and self.cors_headers(h):
            return None
        if h.origin is not None and _own(h.origin, h.host) and act in FOR_PAGES and h.site in (None, b"same-origin"):
            return None
        page = (h.origin or b"another site").decode("latin-1")[:200]
        if act not in FOR_PAGES:
            return Refusal(403, "forbidden", f"this is not for web pages ({page}); use the `dormouse` command")
        text = f"a page of {page} may not do this; if it is yours, set [node] cors to its origin"
        return Refusal(403, "foreign_origin", text)

    def cors_headers(self, h: Headers) -> tuple[tuple[bytes, bytes], ...]:
        """For the answer, so that a page of ``[node] cors`` may read it; none for others."""
        if h.origin is None or h.origin not in self._cors:
            return ()
        return (
            (b"access-control-allow-origin", h.origin),
            (b"access-control-expose-headers", b"x-request-id, server-timing, retry-after"),
            (b"vary", b"origin"),
        )

    def preflight(self, path: str, h: Headers) -> Preflight | Refusal:
        """Whether a page may send the request that it announces."""
        found = find((h.asks or b"").decode("latin-1"), path)
        if isinstance(found, Refusal):
            return found
        if (refusal := self.page_refusal(found[0].act, h)) is not None:
            return refusal
        return Preflight(
            (
                *self.cors_headers(h),
                (b"access-control-allow-methods", found[0].method.encode()),
                (b"access-control-allow-headers", b"authorization, content-type, x-request-id"),
                (b"access-control-max-age", b"600"),
            )
        )

    def admit(self, route: Route, h: Headers, holder: Caller | None, keys_wanted: bool) -> Caller | Refusal:
        """Who asks, if they may. ``holder``: of the request's key; ``keys_wanted``: there was a key once."""
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
        if route.act is not OPEN or not self._may_be_open or (keys_wanted and not self._open_loopback):
            return _unauthorized("this needs an API key", needed)
        if h.kind is None or h.kind in _SIMPLE:
            kind = (h.kind or b"none").decode("latin-1")[:100]
            text = (
                f"the content-type is {kind}, which a web page may send to anybody; without an API key, name what the "
                "body is: -H 'content-type: application/json' (curl: --json instead of -d)"
            )
            return Refusal(415, "content_type", text)
        return ANYBODY


def _unauthorized(why: str, needed: Right) -> Refusal:
    text = (
        f"{why}; send `Authorization: Bearer dm_...` with a key of scope {needed}, which `dormouse keys create "
        f"--scope {needed}` makes on the node"
    )
    return Refusal(401, "unauthorized", text, ((b"www-authenticate", b'Bearer realm="dormouse"'),))


def host_name(host: bytes) -> str:
    """Of a Host header, without the port; "" if it is none."""
    match = _HOST.fullmatch(host.decode("latin-1").lower())
    return "" if match is None else (match[1] or match[2]).rstrip(".")


_HOST: Final = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")


def _own(origin: bytes, host: bytes | None) -> bool:
    """Whether a page's origin is this node itself, by the name that the request has for it."""
    return host is not None and origin.lower() in (b"http://" + host.lower(), b"https://" + host.lower())
