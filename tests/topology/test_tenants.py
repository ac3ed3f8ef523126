"""Limits and shares of tenants on a real node."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from language_models import make_folder
from llm_node import CONFIG, ORDINARY, ask, connected, deploy

from dormouse.core.node.refusals import CallRefused
from dormouse.core.node.testing import TestNode, running_node

pytestmark = pytest.mark.timeout(300)

TENANTS = "[tenants.lab]\nrequests_s = 0.01\nshare = 1\n[tenants.chat]\ntokens_s = 2\nshare = 3\n"


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
