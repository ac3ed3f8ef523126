"""Limits and shares of tenants on a real node."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from language_models import make_folder
from llm_node import CONFIG, ORDINARY, ask, connected, deploy

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.node.refusals import CallRefused

TENANTS = """
[tenants.lab]
requests_s = 0.01
[tenants.chat]
tokens_s = 2
share = 3
[tenants.flood]
share = 1
[tenants.greedy]
gpu_memory = "20MiB"
"""
LARGE = """
import torch
def load():
    return torch.full((9 << 19,), NUMBER).to("cuda")
def handle(weights, request):
    return weights[:8].sum().item()
"""


KEEPER = """
from pathlib import Path
from typing import Any
import torch
def load():
    return torch.zeros(1, device="cuda")
def handle(model, until):
    while until and not Path(until).exists():
        model.sum().item()  # it has the GPU, and keeps its turn
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    folder = tmp_path_factory.mktemp("llama")
    make_folder(folder)
    with running_node(CONFIG + "[limits]\ncompute_ms = 600000\n" + TENANTS, node='tenants = "many"') as running:
        deploy(running, "chat", Path(folder), tenant="chat")
        running.deployed("plain", ORDINARY, tenant="lab")
        running.deployed("free", ORDINARY, tenant="other")
        yield running


def test_requests_per_second_whoever_asks(node: TestNode) -> None:
    assert node.invoke("plain", 1.0).status == 200
    refused = node.invoke("plain", 1.0)
    assert (refused.status, refused.body["error"]["code"]) == (429, "rate_limited")
    assert "[tenants.lab] requests_s" in refused.body["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 100
    with pytest.raises(CallRefused, match=r"tenants\.lab") as raised:
        node.admin.invoke("plain", b"1.0")
    assert raised.value.status == 429
    absent = node.http("POST", "/functions/nobody/invoke", {})
    assert absent.status == 404
    text = node.http("GET", "/metrics").body
    for line in (
        'requests_total{function="plain",outcome="rate_limited"} 2.0',
        'refused_total{code="unknown_function"} 1.0',
    ):
        assert f"dormouse_{line}" in text.splitlines()
    assert [row["outcome"] for row in node.admin.requests("plain", "", 9)] == ["rate_limited", "rate_limited", "ok"]
    assert node.admin.requests("plain", "failed", 9)[1]["id"] == refused.headers["x-request-id"]
    row = node.status()["functions"]["plain"]
    assert (row["requests"], row["errors"], row["outcomes"]) == (3, 0, {"ok": 1, "rate_limited": 2})
    assert all(node.invoke("free", 1.0).status == 200 for _ in range(5))


def test_the_node_says_who_has_what(node: TestNode) -> None:
    tenants = node.status()["tenants"]
    assert tenants["chat"] == {
        "functions": 1, "over_share": False, "share": 3.0, "host": "", "gpu_memory": "", "requests_s": None,
        "tokens_s": 2.0,
    }  # fmt: skip
    assert tenants["other"]["functions"] >= 1


def test_who_has_had_its_share_waits_and_is_told_so(node: TestNode) -> None:
    """Though its deadline comes first, and it came first."""
    node.deployed("keeper", KEEPER, tenant="flood")
    node.deployed("more", ORDINARY, tenant="flood", deadline="1ms")
    node.deployed("calm", ORDINARY, tenant="other", deadline="60s")
    go = node.shared / "go"

    def ask(name: str) -> None:
        assert node.invoke(name, 1.0).status == 200

    def reasons() -> dict[str, str]:
        return {each["function"]: f"{each['kind']}: {each['reason']}" for each in node.status()["waits"]["oldest"]}

    def waits(name: str) -> bool:
        return name in reasons()

    with ThreadPoolExecutor(3) as pool:
        asked: list[Future[Any]] = [pool.submit(node.invoke, "keeper", str(go))]
        try:
            node.wait(lambda: node.status()["gpus"]["0"]["busy_with"] == "keeper", 60.0, "a GPU that is used")
            for name in ("more", "calm"):
                asked.append(pool.submit(ask, name))
                node.wait(partial(waits, name), 60.0, "a request that waits")
            node.wait(lambda: reasons()["more"].startswith("share: tenant flood is"), 60.0, "a tenant over its share")
            assert "share" not in reasons()["calm"]
            node.wait(lambda: node.status()["tenants"]["flood"]["over_share"], 60.0, "a router that knows of it")
        finally:
            go.touch()
        for each in asked:
            each.result()
    last = {row["function"]: row for row in node.admin.requests("", "", 2)}
    granted = {name: row["at"] - row["run_ms"] / 1000 for name, row in last.items()}
    assert granted["calm"] < granted["more"], last


HOLDER = """
import time
def load():
    time.sleep(1e6)
def handle(state, request):
    return None
"""


def test_loads_that_do_not_end_hold_up_their_own_tenant_alone_until_they_are_removed(node: TestNode) -> None:
    names = ["holds1", "holds2", "holds3"]
    with ThreadPoolExecutor(3) as pool:
        deploys = [pool.submit(node.deploy, name, HOLDER, tenant="flood", load_timeout="1h") for name in names]

        def listed() -> list[dict[str, Any]]:
            return [each for each in node.status()["loads"] if each["function"] in names]

        node.wait(lambda: len(listed()) == 3, 60, "all three to be on their way")
        assert sorted(each["instance"] is None for each in listed()) == [False, True, True]
        assert {(each["tenant"], each["for"], each["load_timeout_ms"]) for each in listed()} == {
            ("flood", "deploy", 3_600_000)
        }
        assert {each["function"] for each in node.admin.listed()["loads"]} == {*names}
        node.deployed("beside", ORDINARY, tenant="other")
        node.admin.restart("beside")
        assert node.invoke("beside", 1.0).status == 200
        for name in names:
            node.admin.remove(name)
        for deploy_ in deploys:
            assert (deploy_.result().status, deploy_.result().code) == (409, "deploy_ended")
    assert listed() == []


@pytest.mark.parametrize("option", ["timeout", "load_timeout"])
def test_time_limits_beyond_the_nodes_are_refused(node: TestNode, option: str) -> None:
    limit: dict[str, Any] = {option: "61m"}
    answer = node.deploy("patient", ORDINARY, **limit)
    assert (answer.status, answer.code) == (400, "bad_request")
    assert answer.message.startswith(f"{option} is 61 min, but this node allows 60 min (limits.{option}_ms)")


def test_tokens_per_second(node: TestNode) -> None:
    """As the runtime counts them."""
    with connected(node) as client:
        ask(client, new=60)  # more than ten seconds' worth
    body = {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    node.wait(lambda: node.http("POST", "/v1/chat/completions", body).status == 429, 60.0, "a refusal")
    refused = node.http("POST", "/v1/chat/completions", body)
    assert (refused.status, refused.body["error"]["code"]) == (429, "rate_limited")
    assert "[tenants.chat] tokens_s" in refused.body["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1


def test_what_a_tenant_keeps_beyond_its_quota_goes_first(node: TestNode) -> None:
    """Though it is used more often than what stays. Two such models fit, and room for what they compute."""
    for number, (name, tenant) in enumerate((("g1", "greedy"), ("g2", "greedy"), ("calm", "other"))):
        node.deployed(name, LARGE.replace("NUMBER", f"{number}.0"), tenant=tenant)
    assert node.invoke("g1", 1).status == 200
    assert node.invoke("calm", 1).status == 200
    before = node.status()["functions"]["calm"]["evictions"]
    for name in ("g1", "g2") * 5:
        assert node.invoke(name, 1).status == 200
    rows = node.status()["functions"]
    assert rows["calm"]["evictions"] == before
    assert rows["g1"]["evictions"] + rows["g2"]["evictions"] >= 5, "they make room for each other"
