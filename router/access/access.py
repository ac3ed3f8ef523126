"""Access rules: the routes, the right that each needs, and the rights of each caller. Pure: no I/O.

Callers are people at the node, over its admin Unix socket (known to the kernel by their uid), holders of API keys, and,
on a node that only this machine reaches and that has never had a key, anybody. ``ROUTES`` and ``OF_SOCKET`` list the
acts, ``NEEDS`` the right that each needs. Limits on how much a caller may send are elsewhere.

For the holder of a key, a function of another tenant, or one that the key is not for, does not exist.
"""

import re
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple

from dormouse.core.keys import Key
from dormouse.core.names import base_of
from dormouse.schemas import admin as a
from dormouse.schemas.admin import Scope

Right = Literal["invoke", "deploy", "admin", "metrics", "keys"]
"""A key's scopes, and a right that no key has: only callers at the node make keys."""


class Act(Enum):
    """The kind of a request; the audit log has its value."""

    OPENAI = "openai"
    MODELS = "models"
    HEALTH = "health"
    READY = "ready"
    DASHBOARD = "dashboard"
    OPEN_DASHBOARD = "dashboard open"
    SESSION = "session"
    WATCH = "watch"
    ERRORS = "errors"
    METRICS = "metrics"
    INVOKE = "invoke"
    INFER = "infer"
    INFERENCE = "open inference"
    INDEX = "repository index"
    SCHEMA = "schema"
    OPENAPI = "openapi"
    PAGE = "page"
    JOBS = "jobs"
    CANCEL = "jobs cancel"
    LIST = "ls"
    LOGS = "logs"
    DEPLOY = "deploy"
    REMOVE = "rm"
    RESTART = "restart"
    VERSIONS = "history"
    ROLLBACK = "rollback"
    PIN = "pin"
    MOVE = "move"
    UNPIN = "unpin"
    TRAFFIC = "traffic"
    STATUS = "status"
    LOAD_ADAPTER = "deploy lora"
    UNLOAD_ADAPTER = "rm lora"
    POLICY = "policy"
    DRAIN = "drain"
    DRAIN_GPU = "gpu drain"
    USAGE = "cost"
    REQUESTS = "requests"
    KEYS = "keys ls"
    CREATE_KEY = "keys create"
    REVOKE_KEY = "keys revoke"
    SECRETS = "secret ls"
    SET_SECRET = "secret set"
    REMOVE_SECRET = "secret rm"


NEEDS: Final[dict[Act, Right | None]] = {
    Act.HEALTH: None,
    Act.READY: None,
    Act.DASHBOARD: None,
    Act.OPEN_DASHBOARD: "keys",
    Act.SESSION: None,
    Act.WATCH: "deploy",
    Act.ERRORS: "deploy",
    Act.INVOKE: "invoke",
    Act.INFER: "invoke",
    Act.INFERENCE: "invoke",
    Act.INDEX: "invoke",
    Act.SCHEMA: "invoke",
    Act.OPENAPI: "invoke",
    Act.PAGE: None,
    Act.JOBS: "invoke",
    Act.CANCEL: "invoke",
    Act.OPENAI: "invoke",
    Act.MODELS: "invoke",
    Act.METRICS: "metrics",
    Act.LIST: "deploy",
    Act.LOGS: "deploy",
    Act.DEPLOY: "deploy",
    Act.REMOVE: "deploy",
    Act.RESTART: "deploy",
    Act.VERSIONS: "deploy",
    Act.ROLLBACK: "deploy",
    Act.PIN: "deploy",
    Act.MOVE: "deploy",
    Act.UNPIN: "deploy",
    Act.TRAFFIC: "deploy",
    Act.LOAD_ADAPTER: "deploy",
    Act.UNLOAD_ADAPTER: "deploy",
    Act.SECRETS: "deploy",
    Act.SET_SECRET: "deploy",
    Act.REMOVE_SECRET: "deploy",
    Act.USAGE: "deploy",
    Act.REQUESTS: "deploy",
    Act.STATUS: "admin",
    Act.POLICY: "admin",
    Act.DRAIN: "admin",
    Act.DRAIN_GPU: "admin",
    Act.KEYS: "keys",
    Act.CREATE_KEY: "keys",
    Act.REVOKE_KEY: "keys",
}

IMPLIED: Final[dict[Scope, frozenset[Right]]] = {
    "invoke": frozenset({"invoke"}),
    "deploy": frozenset({"deploy"}),
    "admin": frozenset({"invoke", "deploy", "admin", "metrics"}),
    "metrics": frozenset({"metrics"}),
}
"""Rights that a scope of a key grants."""

EVERYTHING: Final[frozenset[Right]] = frozenset({"invoke", "deploy", "admin", "metrics", "keys"})


class Route(NamedTuple):
    act: Act
    method: str
    path: re.Pattern[str]  # its group is a function's name


ROUTES: Final = (
    Route(Act.INVOKE, "POST", re.compile(r"/functions/([^/]+)/invoke")),
    Route(Act.SCHEMA, "GET", re.compile(r"/functions/([^/]+)/schema")),
    Route(Act.INFER, "POST", re.compile(r"/v2/models/(.+?)(?:/versions/[^/]+)?/infer")),
    Route(Act.MOVE, "POST", re.compile(r"/v2/repository/models/(.+)/(?:un)?load")),
    Route(Act.INDEX, "POST", re.compile(r"/v2/repository/index")),
    Route(
        Act.INFERENCE,
        "GET",
        re.compile(
            r"/v2/models(?:/stats|/((?!stats$).+?)(?:/versions/[^/]+)?(?:/(?:ready|config|stats))?)?(?<!/infer)"
        ),
    ),
    Route(Act.OPENAPI, "GET", re.compile(r"/openapi\.json")),
    Route(Act.PAGE, "GET", re.compile(r"/docs")),
    Route(Act.JOBS, "GET", re.compile(r"/jobs(?:/([^/]+)(?:/result)?)?")),
    Route(Act.CANCEL, "DELETE", re.compile(r"/jobs/([^/]+)")),
    Route(Act.OPENAI, "POST", re.compile(r"(?:/openai)?/v1/(?:chat/completions|completions|responses|embeddings)()")),
    Route(Act.MODELS, "GET", re.compile(r"(?:/openai)?/v1/models(?:/(.+))?")),
    Route(Act.LOAD_ADAPTER, "POST", re.compile(r"(?:/openai)?/v1/load_lora_adapter")),
    Route(Act.UNLOAD_ADAPTER, "POST", re.compile(r"(?:/openai)?/v1/unload_lora_adapter")),
    Route(Act.HEALTH, "GET", re.compile(r"/healthz|/v2/?|/v2/health/live")),
    Route(Act.READY, "GET", re.compile(r"/readyz|/v2/health/ready")),
    Route(Act.METRICS, "GET", re.compile(r"/metrics")),
    Route(Act.LIST, "GET", re.compile(r"/admin/functions")),
    Route(Act.DEPLOY, "POST", re.compile(r"/admin/functions")),
    Route(Act.REMOVE, "DELETE", re.compile(r"/admin/functions/([^/]+)")),
    Route(Act.RESTART, "POST", re.compile(r"/admin/functions/([^/]+)/restart")),
    Route(Act.ERRORS, "GET", re.compile(r"/admin/functions/([^/]+)/errors")),
    Route(Act.VERSIONS, "GET", re.compile(r"/admin/functions/([^/]+)/versions")),
    Route(Act.ROLLBACK, "POST", re.compile(r"/admin/functions/([^/]+)/rollback")),
    Route(Act.TRAFFIC, "PUT", re.compile(r"/admin/functions/([^/]+)/traffic")),
    Route(Act.PIN, "PUT", re.compile(r"/admin/functions/([^/]+)/pin")),
    Route(Act.UNPIN, "DELETE", re.compile(r"/admin/functions/([^/]+)/pin")),
    Route(Act.LOGS, "GET", re.compile(r"/admin/functions/([^/]+)/logs")),
    Route(Act.SECRETS, "GET", re.compile(r"/admin/secrets")),
    Route(Act.SET_SECRET, "PUT", re.compile(r"/admin/secrets/([^/]+)")),
    Route(Act.REMOVE_SECRET, "DELETE", re.compile(r"/admin/secrets/([^/]+)")),
    Route(Act.STATUS, "GET", re.compile(r"/admin/status")),
    Route(Act.USAGE, "GET", re.compile(r"/admin/usage")),
    Route(Act.REQUESTS, "GET", re.compile(r"/admin/requests")),
    Route(Act.WATCH, "GET", re.compile(r"/admin/watch|/admin/functions/([^/]+)/minutes")),
    Route(Act.SESSION, "POST", re.compile(r"/dashboard/session")),
    Route(Act.DASHBOARD, "GET", re.compile(r"/(?:dashboard/([a-z]+\.[a-z]+))?")),
)
"""All that there is over HTTP."""

OF_SOCKET: Final[dict[type[a.Act], Act]] = {
    a.Deploy: Act.DEPLOY,
    a.Invoke: Act.INVOKE,
    a.Remove: Act.REMOVE,
    a.Restart: Act.RESTART,
    a.Versions: Act.VERSIONS,
    a.Rollback: Act.ROLLBACK,
    a.Pin: Act.PIN,
    a.Traffic: Act.TRAFFIC,
    a.MoveModel: Act.MOVE,
    a.ListJobs: Act.JOBS,
    a.AskJob: Act.JOBS,
    a.JobResult: Act.JOBS,
    a.CancelJob: Act.CANCEL,
    a.Schema: Act.SCHEMA,
    a.Functions: Act.LIST,
    a.Status: Act.STATUS,
    a.Policy: Act.POLICY,
    a.Drain: Act.DRAIN,
    a.DrainGpu: Act.DRAIN_GPU,
    a.Usage: Act.USAGE,
    a.RecentRequests: Act.REQUESTS,
    a.Logs: Act.LOGS,
    a.OpenDashboard: Act.OPEN_DASHBOARD,
    a.Keys: Act.KEYS,
    a.CreateKey: Act.CREATE_KEY,
    a.RevokeKey: Act.REVOKE_KEY,
    a.Secrets: Act.SECRETS,
    a.SetSecret: Act.SET_SECRET,
    a.RemoveSecret: Act.REMOVE_SECRET,
}
"""All that there is over the admin socket."""

CALLS: Final = frozenset(
    {
        *(Act.INVOKE, Act.INFER, Act.INFERENCE, Act.INDEX, Act.SCHEMA, Act.OPENAPI),
        *(Act.OPENAI, Act.MODELS, Act.JOBS, Act.CANCEL),
    }
)
OPEN: Final = CALLS | {Act.METRICS, Act.WATCH}
"""Acts that need no key where a node is open."""

ADMINISTRATIVE: Final = frozenset(Act) - CALLS - {Act.HEALTH, Act.READY, Act.METRICS, Act.PAGE, Act.DASHBOARD}
"""Acts whose refusals are written to the audit log."""

FOR_PAGES: Final = CALLS | {Act.HEALTH, Act.READY}
"""Acts that pages of ``[node] cors`` may request."""

FOR_OWN_PAGES: Final = FOR_PAGES | {Act.SESSION}
"""Acts that the node's own pages may request."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Somebody who asks. ``tenant``: the caller may see and change this tenant's functions; None: everybody's."""

    name: str  # a user's, or "key ID", or "anybody"
    uid: int | None  # None: not of this machine, as far as the node knows
    origin: str  # where it calls from: "unix", or an address; "" where nobody asks, which is on a request's path
    rights: frozenset[Right]
    tenant: str | None = None
    functions: tuple[str, ...] = ("*",)
    key: str = ""  # its id; "": who has none

    def sees(self, function: str, tenant: str) -> bool:
        return (self.tenant is None or self.tenant == tenant) and self.names(function)

    def names(self, function: str) -> bool:
        """Whether the key is for functions of this name; `mood@4` is a version of `mood`."""
        name = base_of(function)
        return self.functions == ("*",) or any(fnmatchcase(name, pattern) for pattern in self.functions)


ANYBODY: Final = Caller("anybody", None, "", IMPLIED["invoke"] | IMPLIED["metrics"])


def with_key(key: Key) -> Caller:
    rights: frozenset[Right] = frozenset().union(*(IMPLIED[scope] for scope in key.scopes))
    return Caller(f"key {key.id}", None, "", rights, key.tenant, key.functions, key.id)


def at_the_node(uid: int, user: str) -> Caller:
    """The caller behind a connection that the admin socket has accepted."""
    return Caller(user, uid, "unix", EVERYTHING)


def act_of(act: a.Act) -> Act:
    return Act.UNPIN if isinstance(act, a.Pin) and not act.pinned else OF_SOCKET[type(act)]


def permit(caller: Caller, act: a.Act) -> "Refusal | None":
    """Whether the caller may do such a thing at all; whose functions it may do it to is tenancy.py's."""
    needed = NEEDS[act_of(act)]
    if needed is None or needed in caller.rights:
        return None
    return Refusal(403, "scope_missing", f"{caller.name} may not do this, which needs {needed!r}")


class Refusal(NamedTuple):
    """An answer that ends the request; ``text`` says what to do."""

    status: int
    code: str
    text: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


def find(method: str, path: str) -> tuple[Route, str] | Refusal:
    """The route and the function's name in it, if it has one. HEAD is GET whose answer's body is left out."""
    others = []
    for route in ROUTES:
        if (match := route.path.fullmatch(path)) is not None:
            if route.method == ("GET" if method == "HEAD" else method):
                return route, (match[1] or "") if route.path.groups else ""
            others += ["GET", "HEAD"] if route.method == "GET" else [route.method]
    if others:
        allowed = ", ".join(others)
        text = f"{path} takes {allowed}, not {method}"
        return Refusal(405, "method_not_allowed", text, ((b"allow", allowed.encode()),))
    if path.removeprefix("/openai").startswith("/v1/responses/"):
        return Refusal(404, "unknown_route", "no responses are stored: what POST /v1/responses answers is all there is")
    if path.startswith("/v2/"):
        return Refusal(501, "unsupported", f"this node does not do {path[:100]} of the Open Inference Protocol")
    text = "there is nothing at this path; invoke a function with POST /functions/NAME/invoke"
    return Refusal(404, "unknown_route", text)
