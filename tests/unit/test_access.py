"""Who may do what over TCP: every route with every kind of caller, names by which a node is called, pages of others."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from dormouse.core.audit import Audit
from dormouse.core.config import NodeSection
from dormouse.core.keys import KeyFile
from dormouse.core.rate import Bucket
from dormouse.router.access import access
from dormouse.router.access.access import CALLS, NEEDS, OPEN, ROUTES, Act
from dormouse.router.access.gate import Entered, HttpGate, Turned
from dormouse.router.access.passes import MAX_SESSIONS, MAX_TICKETS, SESSION_S, TICKET_S
from dormouse.schemas import admin as a
from dormouse.schemas.admin import Wish

JSON = {"content-type": "application/json"}
INVOKE = ("POST", "/functions/f/invoke")
PATHS = {
    Act.INVOKE: INVOKE,
    Act.SCHEMA: ("GET", "/functions/f/schema"),
    Act.INFER: ("POST", "/v2/models/f/infer"),
    Act.MOVE: ("POST", "/v2/repository/models/f/load"),
    Act.INDEX: ("POST", "/v2/repository/index"),
    Act.INFERENCE: ("GET", "/v2/models/f"),
    Act.OPENAPI: ("GET", "/openapi.json"),
    Act.PAGE: ("GET", "/docs"),
    Act.JOBS: ("GET", "/jobs"),
    Act.CANCEL: ("DELETE", "/jobs/j1"),
    Act.OPENAI: ("POST", "/v1/chat/completions"),
    Act.MODELS: ("GET", "/v1/models"),
    Act.LOAD_ADAPTER: ("POST", "/v1/load_lora_adapter"),
    Act.UNLOAD_ADAPTER: ("POST", "/openai/v1/unload_lora_adapter"),
    Act.HEALTH: ("GET", "/healthz"),
    Act.READY: ("GET", "/readyz"),
    Act.METRICS: ("GET", "/metrics"),
    Act.LIST: ("GET", "/admin/functions"),
    Act.DEPLOY: ("POST", "/admin/functions"),
    Act.REMOVE: ("DELETE", "/admin/functions/f"),
    Act.RESTART: ("POST", "/admin/functions/f/restart"),
    Act.ERRORS: ("GET", "/admin/functions/f/errors"),
    Act.VERSIONS: ("GET", "/admin/functions/f/versions"),
    Act.ROLLBACK: ("POST", "/admin/functions/f/rollback"),
    Act.TRAFFIC: ("PUT", "/admin/functions/f/traffic"),
    Act.PIN: ("PUT", "/admin/functions/f/pin"),
    Act.UNPIN: ("DELETE", "/admin/functions/f/pin"),
    Act.LOGS: ("GET", "/admin/functions/f/logs"),
    Act.SECRETS: ("GET", "/admin/secrets"),
    Act.SET_SECRET: ("PUT", "/admin/secrets/TOKEN"),
    Act.REMOVE_SECRET: ("DELETE", "/admin/secrets/TOKEN"),
    Act.STATUS: ("GET", "/admin/status"),
    Act.USAGE: ("GET", "/admin/usage"),
    Act.REQUESTS: ("GET", "/admin/requests"),
    Act.WATCH: ("GET", "/admin/watch"),
    Act.SESSION: ("POST", "/dashboard/session"),
    Act.DASHBOARD: ("GET", "/"),
}
NEEDS_NO_KEY = {Act.HEALTH, Act.READY, Act.PAGE, Act.DASHBOARD, Act.SESSION}
DEPLOYS = {
    Act.SECRETS,
    Act.SET_SECRET,
    Act.REMOVE_SECRET,
    Act.WATCH,
    Act.ERRORS,
    Act.VERSIONS,
    Act.ROLLBACK,
    Act.PIN,
    Act.TRAFFIC,
    Act.MOVE,
    Act.UNPIN,
    Act.REQUESTS,
    Act.USAGE,
    Act.LIST,
    Act.DEPLOY,
    Act.REMOVE,
    Act.RESTART,
    Act.LOGS,
    Act.LOAD_ADAPTER,
    Act.UNLOAD_ADAPTER,
}


class Node:
    """A gate with keys and a clock."""

    def __init__(self, directory: Path, **node: Any) -> None:
        self.keys = KeyFile(directory / "keys.json")
        self.now_s = 100.0
        self.log = directory / "audit.log"
        self.gate = HttpGate(NodeSection(**node), self.keys, Audit(self.log), lambda: self.now_s)

    def key(self, **wish: Any) -> dict[str, str]:
        _, token = self.keys.create(Wish(**wish), "user tester", 0.0)
        return {"authorization": f"Bearer {token}"}

    def ask(
        self,
        method: str = "POST",
        path: str = INVOKE[1],
        headers: dict[str, str] = JSON,
        host: str | None = "127.0.0.1:8700",
        client: tuple[str, int] | None = ("127.0.0.1", 50_000),
        more: list[tuple[bytes, bytes]] | None = None,
    ) -> Entered | Turned:
        pairs = [] if host is None else [(b"host", host.encode())]
        pairs += [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        return self.gate.judge({"method": method, "path": path, "headers": [*pairs, *(more or [])], "client": client})

    def code(self, *args: Any, **kwargs: Any) -> tuple[int, str]:
        """(200, "") for what may go on."""
        judged = self.ask(*args, **kwargs)
        if isinstance(judged, Entered):
            return 200, ""
        return judged.status, judged.failure.code if judged.failure is not None else ""

    def may(self, headers: dict[str, str]) -> set[Act]:
        return {act for act, asked in PATHS.items() if self.code(*asked, JSON | headers) == (200, "")}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_the_table_of_routes_is_what_is_tested_here() -> None:
    assert [route.act for route in ROUTES] == list(PATHS)


def test_all_that_is_said_over_the_socket_needs_something() -> None:
    assert set(access.OF_SOCKET) == set(get_args(a.Act))
    assert all(NEEDS[act] is not None for act in access.OF_SOCKET.values())
    assert set(NEEDS) == set(Act)


def test_who_stays_is_let_in_until_the_key_is_revoked(node: Node) -> None:
    """And nobody without one from when the first is made."""
    without = node.ask("GET", "/admin/watch")
    assert isinstance(without, Entered)
    assert node.gate.admits(without.caller)
    headers = node.key(scopes=("deploy",))
    assert not node.gate.admits(without.caller)
    assert node.gate.admits(access.at_the_node(0, "root"))
    judged = node.ask("GET", "/admin/watch", headers)
    assert isinstance(judged, Entered)
    assert node.gate.admits(judged.caller)
    node.keys.revoke(judged.caller.key, 1.0)
    assert not node.gate.admits(judged.caller)


def test_only_who_is_at_the_node_makes_keys(node: Node) -> None:
    judged = node.ask(headers=JSON | node.key(scopes=("admin",)))
    assert isinstance(judged, Entered)
    for act in (a.Keys(), a.CreateKey(wish=Wish()), a.RevokeKey(id="x")):
        refusal = access.permit(judged.caller, act)
        assert refusal is not None
        assert (refusal.status, refusal.code) == (403, "scope_missing")
        assert access.permit(access.at_the_node(0, "root"), act) is None
    assert access.permit(judged.caller, a.Status()) is None


def test_d1_without_a_key_tcp_invokes_and_reads_health_and_nothing_else(node: Node) -> None:
    assert node.may({}) == {*OPEN, *NEEDS_NO_KEY}
    for act in set(PATHS) - node.may({}):
        assert node.code(*PATHS[act]) == (401, "unauthorized")


def test_d1_a_connection_whose_peer_cannot_be_told_is_nobody_special(node: Node) -> None:
    """A client that resets its connection at once has no address any more when its request is read."""
    assert node.code(*PATHS[Act.REMOVE], client=None) == (401, "unauthorized")


def test_once_there_was_a_key_everybody_needs_one(node: Node) -> None:
    node.key()
    assert node.may({}) == NEEDS_NO_KEY
    assert node.code() == (401, "unauthorized")
    node.keys.revoke(node.keys.all()[0].id, 1.0)
    assert node.may({}) == NEEDS_NO_KEY, "revoking the last key does not open the node"


def test_a_node_that_stays_open_to_its_machine(tmp_path: Path) -> None:
    node = Node(tmp_path, open_loopback=True)
    key = node.key(scopes=("deploy",))
    assert node.may({}) == {*OPEN, *NEEDS_NO_KEY}
    assert node.code(headers=JSON | key) == (403, "scope_missing"), "who shows a key is judged by it"


@pytest.mark.parametrize("section", [{"behind_proxy": True}, {"host": "0.0.0.0"}])
def test_a_node_that_others_reach_is_never_open(tmp_path: Path, section: dict[str, Any]) -> None:
    node = Node(tmp_path, **section)
    assert node.may({}) == NEEDS_NO_KEY


@pytest.mark.parametrize(
    ("scopes", "acts"),
    [
        (("invoke",), {*CALLS}),
        (("deploy",), DEPLOYS),
        (("invoke", "deploy"), {*CALLS, *DEPLOYS}),
        (("admin",), set(PATHS)),
        (("metrics",), {Act.METRICS}),
    ],
)
def test_what_each_scope_is_for(node: Node, scopes: tuple[str, ...], acts: set[Act]) -> None:
    key = node.key(scopes=scopes)
    assert node.may(key) == acts | NEEDS_NO_KEY
    for act in set(PATHS) - node.may(key):
        assert node.code(*PATHS[act], JSON | key) == (403, "scope_missing")


def test_a_revoked_or_wrong_key_is_refused_also_where_none_is_needed(tmp_path: Path) -> None:
    node = Node(tmp_path, open_loopback=True)
    key = node.key()
    wrong = {"authorization": key["authorization"][:-1] + ("0" if key["authorization"][-1] != "0" else "1")}
    assert node.code(headers=JSON | key) == (200, "")
    assert node.code(headers=JSON | wrong) == (401, "unauthorized")
    node.keys.revoke(node.keys.all()[0].id, 1.0)
    assert node.code(headers=JSON | key) == (401, "unauthorized")
    assert node.code(headers=JSON) == (200, "")


@pytest.mark.parametrize("other", ["Basic dXNlcjpwYXNz", "Bearer sk-of-another-service", "Bearer", ""])
def test_credentials_for_something_else_count_as_none(node: Node, other: str) -> None:
    assert node.code(headers=JSON | {"authorization": other}) == (200, "")
    node.key()
    assert node.code(headers=JSON | {"authorization": other}) == (401, "unauthorized")


def test_a_key_is_for_its_tenant_and_its_functions(node: Node) -> None:
    judged = node.ask(headers=JSON | node.key(tenant="t", functions=("chat", "img-*")))
    assert isinstance(judged, Entered)
    caller = judged.caller
    assert [caller.sees(name, "t") for name in ("chat", "img-1", "img-", "chat2", "IMG-1")] == [True] * 3 + [False] * 2
    assert not caller.sees("chat", "default")
    everybodys = node.ask(headers=JSON | node.key(scopes=("admin",)))
    assert isinstance(everybodys, Entered)
    assert everybodys.caller.sees("chat", "t")
    assert everybodys.caller.sees("chat", "default")


# --- what is called what


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8700",
        "127.0.0.1",
        "localhost:8700",
        "LOCALHOST",
        "localhost.",
        "[::1]:8700",
        "127.1.2.3",
        "node.lan:1",
    ],
)
def test_names_of_a_node(tmp_path: Path, host: str) -> None:
    node = Node(tmp_path, hosts=("node.lan",))
    assert node.code(host=host) == (200, "")
    assert node.code(host=host) == (200, ""), "also when it is known already"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8700",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1",
        "0.0.0.0:8700",
        "[::]:8700",
        "evil@127.0.0.1",
        "127.0.0.1:8700, evil.example",
        "127.0.0.1/",
        "",
        "é",
    ],
)
@pytest.mark.parametrize("asked", [INVOKE, ("GET", "/healthz"), ("GET", "/admin/status")])
def test_d10_another_name_is_refused(node: Node, host: str, asked: tuple[str, str]) -> None:
    """DNS rebinding: a page's own name leads here, but the browser still says that name."""
    judged = node.ask(*asked, JSON | node.key(scopes=("admin",)), host=host)
    assert isinstance(judged, Turned)
    assert judged.failure is not None
    assert (judged.status, judged.failure.code) == (421, "unknown_host")
    assert "[node] hosts" in judged.failure.text


def test_d10_no_name_is_refused(node: Node) -> None:
    assert node.code(host=None) == (421, "unknown_host")


def test_d10_two_names_are_refused(node: Node) -> None:
    assert node.code(more=[(b"host", b"evil.example")]) == (400, "bad_headers")


def test_a_node_that_others_reach_is_called_by_any_of_its_addresses(tmp_path: Path) -> None:
    node = Node(tmp_path, host="0.0.0.0")
    key = JSON | node.key()
    assert node.code(headers=key, host="192.168.1.7:8700") == (200, "")
    assert node.code(headers=key, host="[fe80::1]") == (200, "")
    assert node.code(headers=key, host="evil.example") == (421, "unknown_host")


# --- pages of others


FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:3000"},  # another program of this machine is another origin
    {"origin": "http://127.0.0.1:8700.evil.example"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:8700"},
    {"sec-fetch-site": "what it will be called one day"},
]


@pytest.mark.parametrize("page", FOREIGN)
@pytest.mark.parametrize("keyed", [False, True])
def test_d10_a_page_of_another_site_invokes_nothing(node: Node, page: dict[str, str], keyed: bool) -> None:
    key = node.key(scopes=("admin",)) if keyed else {}
    assert node.code(headers=JSON | key | page) == (403, "foreign_origin")
    for act in (Act.REMOVE, Act.LIST, Act.STATUS, Act.LOGS, Act.WATCH, Act.ERRORS):
        assert node.code(*PATHS[act], JSON | key | page) == (403, "forbidden")
    assert node.code("GET", "/", JSON | key | page) == (200, ""), "a link to it may stand anywhere: it tells nothing"


@pytest.mark.parametrize("page", [{"origin": "http://127.0.0.1:8700"}, {"sec-fetch-site": "none"}])
def test_its_own_origin_and_a_persons_own_request_are_not_foreign(node: Node, page: dict[str, str]) -> None:
    assert node.code(headers=JSON | page) == (200, "")


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "TEXT/PLAIN; charset=utf-8",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "",
        None,
    ],
)
def test_d10_what_a_page_may_send_unasked_needs_a_key(node: Node, kind: str | None) -> None:
    """An old browser's form says neither where it is from nor what it sends, and cannot say what a key is."""
    headers = {} if kind is None else {"content-type": kind}
    if kind != "":
        judged = node.ask(headers=headers)
        assert isinstance(judged, Turned)
        assert judged.failure is not None
        assert (judged.status, judged.failure.code) == (415, "content_type")
        assert ("x-request-id: 1" if "form-data" in (kind or "") else "--json") in judged.failure.text
        # what a browser would have asked about first, and what only this node's own page makes it say
        assert node.code(headers=headers | {"x-request-id": "1"}) == (200, "")
        assert node.code(headers=headers | {"sec-fetch-site": "same-origin"}) == (200, "")
        assert node.code(headers=headers | {"sec-fetch-site": "cross-site"}) == (403, "foreign_origin")
    assert node.code(headers=headers | node.key()) == (200, "")


def test_pages_of_origins_that_are_configured(tmp_path: Path) -> None:
    node = Node(tmp_path, cors=("https://app.example",))
    page = {"origin": "https://app.example", "sec-fetch-site": "cross-site"}
    judged = node.ask(headers=JSON | page)
    assert isinstance(judged, Entered)
    assert dict(judged.headers)[b"access-control-allow-origin"] == b"https://app.example"
    refused = node.ask(headers=page | {"content-type": "text/plain"})
    assert isinstance(refused, Turned)
    assert refused.status == 415
    assert dict(refused.headers)[b"access-control-allow-origin"] == b"https://app.example", "a page may read why"
    other = node.ask(headers=JSON | {"origin": "https://evil.example"})
    assert isinstance(other, Turned)
    assert (other.status, other.headers) == (403, ())
    assert node.code(*PATHS[Act.LIST], node.key(scopes=("admin",)) | page) == (403, "forbidden")


def test_a_browsers_question_before_a_request(tmp_path: Path) -> None:
    node = Node(tmp_path, cors=("https://app.example",))
    node.key()  # a question has none
    asks = {"access-control-request-method": "POST", "origin": "https://app.example"}
    judged = node.ask("OPTIONS", INVOKE[1], asks)
    assert isinstance(judged, Turned)
    assert (judged.status, judged.failure) == (204, None)
    assert dict(judged.headers) | {b"vary": b"", b"access-control-expose-headers": b""} == {
        b"access-control-allow-origin": b"https://app.example",
        b"access-control-allow-methods": b"POST",
        b"access-control-allow-headers": (
            b"authorization, content-type, x-request-id, traceparent, tracestate, prefer, idempotency-key, "
            b"inference-header-content-length"
        ),
        b"access-control-max-age": b"600",
        b"access-control-expose-headers": b"",
        b"vary": b"",
    }
    for asked, path, origin in (
        ("POST", INVOKE[1], "https://evil.example"),
        ("GET", "/admin/functions", "https://app.example"),
        ("DELETE", "/admin/functions/f", "https://app.example"),
    ):
        judged = node.ask("OPTIONS", path, {"access-control-request-method": asked, "origin": origin})
        assert isinstance(judged, Turned)
        assert judged.status == 403


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (INVOKE[1], b"POST, OPTIONS"),
        ("/healthz", b"GET, HEAD, OPTIONS"),
        ("/admin/functions", b"GET, HEAD, POST, OPTIONS"),
        ("/jobs/1", b"GET, HEAD, DELETE, OPTIONS"),
        ("*", b"GET, HEAD, POST, PUT, DELETE, OPTIONS"),
    ],
)
def test_what_may_be_done_at_a_path_is_said_to_anybody(tmp_path: Path, path: str, allowed: bytes) -> None:
    node = Node(tmp_path)
    node.key()
    judged = node.ask("OPTIONS", path, {})
    assert isinstance(judged, Turned)
    assert (judged.status, judged.failure, dict(judged.headers)) == (204, None, {b"allow": allowed})
    assert node.code("OPTIONS", "/nowhere") == (404, "unknown_route")
    assert node.code("OPTIONS", path, host="evil.example") == (421, "unknown_host")


def test_head_is_let_in_where_get_is_and_nowhere_else(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for path in ("/healthz", "/readyz", "/v2/health/ready", "/v1/models", "/docs", "/", "/jobs", "/metrics"):
        assert node.code("HEAD", path) == node.code("GET", path) == (200, ""), path
    assert node.code("HEAD", "/admin/status") == node.code("GET", "/admin/status") == (401, "unauthorized")
    assert node.code("HEAD", INVOKE[1]) == (405, "method_not_allowed")


def test_without_cors_no_answer_is_for_pages(node: Node) -> None:
    judged = node.ask("OPTIONS", INVOKE[1], {"access-control-request-method": "POST", "origin": "https://app.example"})
    assert isinstance(judged, Turned)
    assert (judged.status, judged.headers) == (403, ())


# --- what is not there


def test_what_is_not_there(node: Node) -> None:
    assert node.code("GET", "/") == (200, "")
    assert node.code("GET", "/dashboard/") == (404, "unknown_route")
    assert node.code("GET", "/dashboard/..") == (404, "unknown_route")
    assert node.code("POST", "/functions/a/b/invoke") == (404, "unknown_route")
    assert node.code("POST", "/functions//invoke") == (404, "unknown_route")
    judged = node.ask("GET", INVOKE[1])
    assert isinstance(judged, Turned)
    assert (judged.status, judged.headers) == (405, ((b"allow", b"POST"),))
    judged = node.ask("PUT", "/admin/functions")
    assert isinstance(judged, Turned)
    assert (judged.status, judged.headers) == (405, ((b"allow", b"GET, HEAD, POST"),))


@pytest.mark.parametrize("name", ["origin", "authorization", "content-type", "sec-fetch-site"])
def test_a_header_that_decides_stands_once(node: Node, name: str) -> None:
    headers = JSON | {"authorization": "Basic x", "origin": "http://127.0.0.1:8700", "sec-fetch-site": "same-origin"}
    assert node.code(headers=headers) == (200, "")
    assert node.code(headers=headers, more=[(name.encode(), b"x")]) == (400, "bad_headers")


# --- how often


def test_a_bucket() -> None:
    bucket = Bucket.full(rate_s=2.0, burst=3, now_s=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.take(10.25) == pytest.approx(0.25)
    assert bucket.take(10.5) == 0.0
    assert bucket.take(10.5) == pytest.approx(0.5)
    assert [bucket.take(100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5], "it holds no more than its burst"
    assert bucket.take(-86_400.0) == pytest.approx(0.5), "a clock was set"
    assert bucket.take(-86_399.5) == 0.0


def test_a_key_with_a_rate(node: Node) -> None:
    slow, fast = node.key(rate_s=0.5, burst=2), node.key()
    assert [node.code(headers=JSON | slow) for _ in range(2)] == [(200, "")] * 2
    judged = node.ask(headers=JSON | slow)
    assert isinstance(judged, Turned)
    assert judged.failure is not None
    assert (judged.status, judged.failure.code, judged.headers) == (429, "rate_limited", ((b"retry-after", b"2"),))
    assert node.code(headers=JSON | fast) == (200, ""), "each key has its own"
    node.now_s += 2.0
    assert node.code(headers=JSON | slow) == (200, "")
    assert node.code(headers=JSON | slow) == (429, "rate_limited")


def test_the_proxys_word_is_for_the_log_alone(tmp_path: Path) -> None:
    node = Node(tmp_path, behind_proxy=True)
    assert node.code(headers=JSON | {"x-forwarded-for": "127.0.0.1"}) == (401, "unauthorized")
    key = node.key(scopes=("invoke",))
    assert node.code(*PATHS[Act.REMOVE], key | {"x-forwarded-for": "1.2.3.4"}) == (403, "scope_missing")
    assert json.loads(node.log.read_text())["from"] == "127.0.0.1:50000 for 1.2.3.4"


def test_only_a_node_behind_a_proxy_notes_what_one_says(node: Node) -> None:
    assert node.code(*PATHS[Act.REMOVE], {"x-forwarded-for": "1.2.3.4"}) == (401, "unauthorized")
    line = json.loads(node.log.read_text())
    assert (line["who"], line["from"], line["act"], line["name"]) == ("anybody", "127.0.0.1:50000", "rm", "f")


def _let_in(node: Node, token: str) -> int:
    return node.code("GET", "/admin/status", {"authorization": f"Bearer {token}"})[0]


def test_a_link_to_the_dashboard_is_good_once_and_soon_and_its_session_for_a_day(node: Node) -> None:
    passes = node.gate.passes
    ticket = passes.ticket("user ann")
    assert _let_in(node, ticket) == 401, "it is no key"
    key = passes.redeem(ticket.encode())
    assert key is not None
    assert passes.redeem(ticket.encode()) is None, "it was used"
    judged = node.ask("GET", "/admin/status", {"authorization": f"Bearer {key}"})
    assert isinstance(judged, Entered)
    assert (judged.caller.rights, judged.caller.tenant) == (frozenset({"invoke", "deploy", "admin", "metrics"}), None)
    assert judged.caller.name.endswith("of user ann")
    assert node.gate.admits(judged.caller)
    late = passes.ticket("user ann")
    node.now_s += TICKET_S
    assert passes.redeem(late.encode()) is None, "it is too late"
    assert _let_in(node, key) == 200
    node.now_s += SESSION_S - TICKET_S
    assert _let_in(node, key) == 401
    assert not node.gate.admits(judged.caller), "what it watches ends, too"


def test_all_sessions_and_links_can_be_ended(node: Node) -> None:
    passes = node.gate.passes
    keys = [passes.redeem(passes.ticket("user ann").encode()) or "" for _ in range(2)]
    ticket = passes.ticket("user ann")
    judged = node.ask("GET", "/admin/status", {"authorization": f"Bearer {keys[0]}"})
    assert isinstance(judged, Entered)
    assert passes.end() == 2
    assert [_let_in(node, key) for key in keys] == [401, 401]
    assert passes.redeem(ticket.encode()) is None
    assert not node.gate.admits(judged.caller), "what it watches ends, too"
    assert passes.end() == 0


def test_links_and_sessions_are_few(node: Node) -> None:
    passes = node.gate.passes
    first = passes.ticket("a")
    for _ in range(MAX_TICKETS):
        passes.ticket("a")
    assert passes.redeem(first.encode()) is None
    keys = [passes.redeem(passes.ticket("a").encode()) for _ in range(MAX_SESSIONS + 1)]
    assert [_let_in(node, keys[place] or "") for place in (0, 1, -1)] == [401, 200, 200]


def test_a_page_of_another_origin_begins_no_session(node: Node) -> None:
    asked = "POST", "/dashboard/session"
    assert node.code(*asked, {"origin": "http://evil.example", "sec-fetch-site": "cross-site"})[0] == 403
    assert node.code(*asked, {"origin": "http://127.0.0.1:8700", "sec-fetch-site": "same-origin"})[0] == 200
