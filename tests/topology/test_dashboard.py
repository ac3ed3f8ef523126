"""The dashboard's live stream on a real node: what is told to whom, what a reader that hangs costs, how it ends."""

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.router.dashboard.watch import OF_ONE
from dormouse.schemas.admin import Wish

FUNCTION = """
import torch

def load():
    return torch.ones(1 << 20).to("cuda")

def handle(weights, request):
    if request == "fail":
        raise ValueError("<b>as asked</b>")
    print("asked", request, flush=True)
    return weights.sum().item()
"""


def summed(minutes: dict[str, list[int]]) -> list[int]:
    """In time, late, failed, and all others; requests may come over the turn of a minute."""
    return [sum(kind) for kind in zip(*minutes.values(), strict=True)]


class Stream:
    """A reader of ``GET /admin/watch``."""

    def __init__(self, node: TestNode, key: str = "") -> None:
        self._connection = node.connect(120.0)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._connection.request("GET", "/admin/watch", headers=headers)
        self.answer = self._connection.getresponse()
        self.status = self.answer.status

    def next(self) -> tuple[str, Any]:
        """The next event: its name and data."""
        name = ""
        while True:
            line = self.answer.readline().decode().rstrip("\n")
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                return name, json.loads(line.removeprefix("data: "))

    def until(self, part: str, name: str = "change") -> Any:
        """The first event that tells of ``part``."""
        while True:
            event, told = self.next()
            if event == name and part in told:
                return told[part]

    def close(self) -> None:
        self.answer.close()
        self._connection.close()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def resident_nbytes(node: TestNode) -> int:
    """Of the router."""
    words = Path(f"/proc/{node.pids()['router']}/statm").read_text().split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE")


GPU = '[gpu]\ncount = 1\nmemory = "24MiB"\nactivations = "8MiB"\nthreads = 1\n'


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(GPU) as running:
        running.deployed("a", FUNCTION)
        yield running


def test_a_snapshot_and_then_what_changes(node: TestNode) -> None:
    with Stream(node) as stream:
        name, told = stream.next()
        assert (stream.status, stream.answer.getheader("content-type"), name) == (200, "text/event-stream", "snapshot")
        assert told["functions"]["a"]["state"] == "idle"
        assert (set(told["gpus"]), told["problems"], told["whole"]) == ({"0"}, [], True)
        assert node.result("a", 1) == 1 << 20
        while not (span := stream.until("spans", "spans")[-1])[7]:  # it was told while it ran
            pass
        assert (span[1], span[2], span[7]) == ("a", 0, "ok")
        assert span[3] <= span[5]
        with Stream(node) as late:
            told = late.next()[1]
        ended = told["spans"][-1]
        assert (ended[0], ended[1:3], ended[7]) == (-1, ["a", 0], "ok"), "also to who comes later"
        assert ended[3] <= ended[5] <= told["now"]
        assert stream.until("functions")["a"]["requests"] == 1
        node.deployed("b", FUNCTION)
        while "b" not in (rows := stream.until("functions")):
            pass
        assert rows["b"]["tenant"] == "default"
        node.remove("b")
        while stream.until("functions").get("b", rows["b"]) is not None:
            pass


def test_the_last_hour_is_told_to_who_comes_later_and_its_beginning_too(node: TestNode) -> None:
    with Stream(node) as stream:
        _, told = stream.next()
        had = summed(told["minutes"]) or [0, 0, 0, 0]
        assert 0 < told["now"] - told["since"] < 3600, "what was before the router's start is not known"
    node.deployed("b", FUNCTION)
    assert node.result("b", 1) == 1 << 20
    for _ in range(2):
        assert node.invoke("b", "fail").status == 500
    assert node.http("POST", "/functions/b/invoke", raw=b"{").status == 400
    own = node.http("GET", "/admin/functions/b/minutes").body
    counts = summed(own["minutes"])
    assert (counts[0] + counts[1], counts[2:], own["since"]) == (1, [2, 1], told["since"])
    node.remove("b")
    assert node.http("GET", "/admin/functions/b/minutes").code == "unknown_function"
    with Stream(node) as stream:
        now = summed(stream.until("minutes", "snapshot"))
        assert (sum(now) - sum(had), now[2] - had[2], now[3] - had[3]) == (4, 2, 1), "of what is gone, too"


def test_an_executor_that_dies_is_missed_and_found(node: TestNode) -> None:
    with Stream(node) as stream:
        _, told = stream.next()
        epoch = told["gpus"]["0"]["epoch"]
        node.kill("gpu0")
        problems: list[str] = []
        while "gpu0 has ended, and is started again" not in problems:
            problems = stream.until("problems")
        while problems:
            problems = stream.until("problems")
        assert node.result("a", 1) == 1 << 20
    with Stream(node) as stream:
        assert stream.next()[1]["gpus"]["0"]["epoch"] > epoch


def test_the_last_failures_need_a_key_where_the_stream_needs_none(node: TestNode) -> None:
    assert node.invoke("a", "fail").status == 500
    assert node.http("GET", "/admin/functions/a/errors").status == 401
    raises = 'def load():\n    raise ValueError("SECRET")\ndef handle(state, request): ...\n'
    with Stream(node) as stream:
        stream.next()
        assert node.deploy("a", raises).status != 200
        while (rows := stream.until("functions")).get("a", {}).get("error") is None:
            pass
        assert rows["a"]["error"] == "see its log"
    node.deployed("a", FUNCTION)


def test_the_page_says_what_a_browser_may_do_with_it(node: TestNode) -> None:
    answer = node.http("GET", "/")
    assert answer.status == 200
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")
    assert "require-trusted-types-for 'script'" in policy
    assert (answer.headers["x-frame-options"], answer.headers["x-content-type-options"]) == ("DENY", "nosniff")
    assert node.http("GET", "/dashboard/none.js").status == 404
    assert node.http("GET", "/admin/watch", headers={"Host": "evil.example"}).status == 421
    assert node.http("GET", "/admin/watch", headers={"Origin": "http://evil.example"}).status == 403


def test_one_that_leaves_watches_no_more(node: TestNode) -> None:
    """And with the last one the sampler ends, as tests/unit/test_dashboard.py has it."""
    with Stream(node) as stream:
        stream.next()
        node.wait(lambda: node.status()["node"]["watchers"] == 1, 60, "those of earlier tests to be gone")
    node.wait(lambda: node.status()["node"]["watchers"] == 0, 60, "the watcher to be gone")


def test_a_reader_that_hangs_costs_little_and_is_one_of_few(node: TestNode) -> None:
    hanging = []
    try:
        for _ in range(OF_ONE):
            raw = socket.create_connection(("127.0.0.1", node.port))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.sendall(b"GET /admin/watch HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert raw.recv(15) == b"HTTP/1.1 200 OK"
            hanging.append(raw)
        with Stream(node) as refused:
            assert refused.status == 503
        before = resident_nbytes(node)
        for _ in range(300):
            node.result("a", 1)
        assert resident_nbytes(node) - before < 8 << 20
    finally:
        for raw in hanging:
            raw.close()
    node.wait(lambda: node.status()["node"]["watchers"] == 0, 60, "the watchers to be gone")


def test_a_scraper_that_hangs_costs_nobody_anything(node: TestNode) -> None:
    """Eight of them, which ask again and again and read nothing, over sockets that hold little."""
    node.wait(lambda: node.http("GET", "/metrics").status == 200, 90.0, "the process that writes it")
    before_nbytes = resident_nbytes(node)
    hanging = [socket.socket() for _ in range(8)]
    try:
        for each in hanging:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            each.connect(("127.0.0.1", node.port))
            each.sendall(b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 400)
        for number in range(20):
            scraped = node.http("GET", "/metrics")
            assert scraped.status == 200
            assert "dormouse_process_up" in scraped.body
            assert node.result("a", number) == 1 << 20
        assert resident_nbytes(node) - before_nbytes < 32 << 20
    finally:
        for each in hanging:
            each.close()
    node.wait(lambda: node.http("GET", "/metrics").status == 200, 90.0, "one that reads")


def test_keys_and_tenants() -> None:
    """Where keys are needed, the page's files need none, and the stream shows the key's functions alone."""
    with running_node(GPU, node='tenants = "many"') as node:
        for name in ("ours", "theirs"):
            node.deployed(name, FUNCTION, tenant=name)
        key = node.admin.create_key(Wish(scopes=("deploy",), tenant="ours"))["key"]
        invoker = node.admin.create_key(Wish(scopes=("invoke",), tenant="ours"))["key"]
        whole = node.admin.create_key(Wish(scopes=("admin",)))["key"]
        assert node.http("GET", "/").status == 200
        assert node.http("GET", "/admin/watch").code == "unauthorized"
        assert node.http("GET", "/admin/watch", headers={"Authorization": f"Bearer {invoker}"}).code == "scope_missing"
        with Stream(node, key) as own, Stream(node, whole) as all_:
            _, told = own.next()
            assert (set(told["functions"]), told["gpus"], told["problems"]) == ({"ours"}, {}, [])
            assert set(all_.next()[1]["functions"]) == {"ours", "theirs"}
            given = {"Authorization": f"Bearer {whole}"}
            for name in ("theirs", "ours"):
                assert node.http("POST", f"/functions/{name}/invoke", "fail", headers=given).status == 500
            spans: list[Any] = []
            while len(spans) < 2:
                spans += all_.until("spans", "spans")
            assert {span[1] for span in spans} == {"ours", "theirs"}
            assert {span[1] for span in own.until("spans", "spans")} == {"ours"}
        named = node.admin.create_key(Wish(scopes=("deploy",), functions=("their*",), tenant="theirs"))["key"]
        for holder, failed in ((key, 1), (named, 1), (whole, 2)):
            with Stream(node, holder) as stream:
                _, told = stream.next()
                assert (summed(told["minutes"]), len(told["spans"])) == ([0, 0, failed, 0], failed)
        mine = {"Authorization": f"Bearer {key}"}
        assert summed(node.http("GET", "/admin/functions/ours/minutes", headers=mine).body["minutes"]) == [0, 0, 1, 0]
        assert node.http("GET", "/admin/functions/theirs/minutes", headers=mine).code == "unknown_function"
        given = {"Authorization": f"Bearer {invoker}"}
        assert node.http("GET", "/admin/functions/ours/minutes", headers=given).code == "scope_missing"
        errors = node.http("GET", "/admin/functions/ours/errors", headers=mine).body["errors"]
        assert [(each["code"], each["text"].splitlines()[-1]) for each in errors] == [
            ("function_raised", "ValueError: <b>as asked</b>")
        ]
        assert node.http("GET", "/admin/functions/theirs/errors", headers=mine).code == "unknown_function"
        assert node.http("GET", "/admin/functions/none/errors", headers=mine).code == "unknown_function"


@contextmanager
def followed(node: TestNode, key: str) -> Iterator[Callable[[], bytes]]:
    """What the function prints from now on, line by line; b"" at the end of it."""
    with closing(node.connect(120.0)) as connection:
        headers = {"Authorization": f"Bearer {key}"}
        connection.request("GET", "/admin/functions/a/logs?follow=1&tail=0", headers=headers)
        with connection.getresponse() as answer:
            yield answer.readline


def test_a_key_that_is_revoked_watches_and_follows_no_more() -> None:
    """And who has none, from when there is one."""
    with running_node(GPU) as node:
        node.deployed("a", FUNCTION)
        with Stream(node) as anybody:
            assert anybody.next()[0] == "snapshot"
            key = node.admin.create_key(Wish(scopes=("deploy",)))
            while anybody.answer.readline():
                pass
        following = node.connect(120.0)
        following.request("GET", "/admin/functions/a/logs?follow=1", headers={"Authorization": f"Bearer {key['key']}"})
        log = following.getresponse()
        assert log.readline().startswith(b"--- instance")
        with Stream(node, key["key"]) as stream:
            assert stream.next()[0] == "snapshot"
            node.admin.revoke_key(key["id"])
            while stream.answer.readline():
                pass
        while log.readline():
            pass
        following.close()
        _, _, ticket = node.admin.dashboard().partition("/#ticket=")
        answers = [node.http("POST", "/dashboard/session", headers={"x-dormouse-ticket": ticket}) for _ in range(2)]
        assert [(answer.status, answer.code) for answer in answers] == [(200, ""), (403, "ticket_used")]
        session = answers[0].body["key"]
        holders = [session, *(node.admin.create_key(Wish(scopes=(each,)))["key"] for each in ("deploy", "admin"))]
        with ExitStack() as stack:
            followers = [stack.enter_context(followed(node, key)) for key in holders]
            pieces = stack.enter_context(closing(node.admin.logs("a", 1, follow=True)))
            next(pieces)  # it follows from now on
            for number in range(4):  # the right is asked for again at each piece
                asked = node.http("POST", "/functions/a/invoke", number, headers={"authorization": f"Bearer {session}"})
                assert asked.status == 200
                said = b"asked %d\n" % number
                assert [said in iter(line, b"") for line in followers] == [True] * 3
                assert any(said in piece for piece in pieces)
        holders.append(node.admin.create_key(Wish(scopes=("invoke",)))["key"])
        failed = [
            node.http("POST", "/functions/a/invoke", "fail", headers={"authorization": f"Bearer {key}"})
            for key in (holders[0], *holders[2:])
        ]
        frames = ["line 9, in handle" in answer.message for answer in failed]
        assert frames == [True, True, False], "only who may deploy reads them"
        assert failed[2].message == "ValueError: <b>as asked</b>\nthe function's log has the rest"
        with Stream(node, session) as stream:
            assert stream.until("rights", "snapshot") == ["admin", "deploy", "invoke", "metrics"]
            assert node.admin.end_dashboards() == 1
            while stream.answer.readline():
                pass
        lines = [json.loads(line) for line in (node.state / "logs" / "audit.log").read_text().splitlines()]
        lines = [line for line in lines if line["act"] != "keys create"]
        found = [(line["act"], line["name"][:8], line["outcome"]) for line in lines[-4:]]
        assert found == [
            ("dashboard open", "", "ok"),
            ("session", "session ", "ok"),
            ("session", "", "ticket_used"),
            ("dashboard open", "--end", "ok"),
        ]
        assert lines[-3]["who"].startswith(lines[-3]["name"] + " of ")
        assert lines[-3]["from"].startswith("127.0.0.1:")


def test_the_end_of_the_node_ends_the_stream() -> None:
    with running_node(GPU) as node:
        stream = Stream(node)
        stream.next()
    while stream.answer.readline():  # to its end: else http.client raises
        pass
    stream.close()
