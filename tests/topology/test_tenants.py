"""Limits and shares of tenants on a real node."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from language_models import make_folder
from llm_node import CONFIG, ORDINARY, ask, connected, deploy

from dormouse.core.node.refusals import CallRefused
from dormouse.core.node.testing import TestNode, running_node

pytestmark = pytest.mark.timeout(300)

TENANTS = """
[tenants.lab]
requests_s = 0.01
[tenants.chat]
tokens_s = 2
share = 3
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


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    folder = tmp_path_factory.mktemp("llama")
    make_folder(folder)
    with running_node(CONFIG + TENANTS, node='tenants = "many"') as running:
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
    assert all(node.invoke("free", 1.0).status == 200 for _ in range(5))


def test_the_node_says_who_has_what(node: TestNode) -> None:
    tenants = node.status()["tenants"]
    assert tenants["chat"] == {
        "functions": 1, "over_share": False, "share": 3.0, "gpu_memory": "", "requests_s": None, "tokens_s": 2.0,
    }  # fmt: skip
    assert tenants["other"]["functions"] >= 1


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
