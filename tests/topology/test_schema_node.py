"""What functions take, shown and checked by a whole node; and its page, in a real browser."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.node.refusals import CallRefused
from dormouse.schemas.admin import Wish

FUNCTION = """
import msgspec

class Asked(msgspec.Struct):
    text: str
    times: int = 2

def load(): pass
def handle(state, request: Asked) -> list[str]:
    "Says it again."
    print("handled")
    return [request.text] * request.times
"""

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n') as node:
        node.deployed("again", FUNCTION)
        yield node


def test_requests_are_checked_before_the_function_sees_them(node: TestNode) -> None:
    assert node.result("again", {"text": "a"}) == ["a", "a"]
    before = node.log_of("again").count("handled")
    answer = node.invoke("again", {"text": "a", "times": "two"})
    assert (answer.status, answer.code, answer.body["error"]["param"]) == (422, "invalid_request", "$.times")
    assert answer.message == (
        "the request is not what this function takes: Expected `int`, got `str` - at `$.times`; "
        "GET /functions/again/schema says what it takes, and so does `dormouse invoke again --schema`"
    )
    assert node.log_of("again").count("handled") == before
    row = node.status()["functions"]["again"]
    assert row["errors"] == 0


def test_what_it_takes_is_shown(node: TestNode) -> None:
    said = node.http("GET", "/functions/again/schema").body
    assert (said["name"], said["version"], said["description"]) == ("again", 1, "Says it again.")
    assert said["request"]["$defs"]["Asked"]["required"] == ["text"]
    document = node.http("GET", "/openapi.json").body
    schema = document["paths"]["/functions/again/invoke"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert schema == {"$ref": "#/components/schemas/again.Asked"}
    assert node.admin.schema("again") == said
    with pytest.raises(CallRefused, match="no function 'nothing'"):
        node.admin.schema("nothing")
    assert node.http("GET", "/functions/nothing/schema").code == "unknown_function"
    assert node.http("POST", "/openapi.json").code == "method_not_allowed"


def test_models_of_pydantic_are_checked_shown_and_answered(node: TestNode) -> None:
    source = """
        from pydantic import BaseModel, Field
        class Asked(BaseModel):
            text: str
            times: int = Field(2, le=3)
        def load(): pass
        def handle(state, request: Asked) -> Asked:
            return Asked(text=request.text * request.times)
    """
    node.deployed("model", source)
    assert node.result("model", {"text": "a"}) == {"text": "aa", "times": 2}
    answer = node.invoke("model", {"text": "a", "times": 9})
    assert (answer.status, answer.code, answer.body["error"]["param"]) == (422, "invalid_request", "$.times")
    assert "Input should be less than or equal to 3 - at `$.times`" in answer.message
    said = node.http("GET", "/openapi.json").body["paths"]["/functions/model/invoke"]["post"]["requestBody"]
    assert said["content"]["application/json"]["schema"]["properties"]["times"]["maximum"] == 3


def test_hints_that_check_nothing_are_said_at_deploy(node: TestNode) -> None:
    source = "import torch\ndef load(): pass\ndef handle(state, request: torch.dtype): return request\n"
    answer = node.deploy("odd", source)
    assert answer.status == 200
    why = "torch.dtype is a class that cannot be made of JSON"
    assert f"the type of 'request' cannot be checked ({why})" in answer.body["warning"]
    assert node.result("odd", [1]) == [1]


def test_a_new_version_has_its_own_schema(node: TestNode) -> None:
    node.deployed("changes", "def load(): pass\ndef handle(state, request: int): return request\n")
    assert node.http("GET", "/functions/changes/schema").body["request"] == {"type": "integer"}
    node.deployed("changes", "def load(): pass\ndef handle(state, request: str): return request\n")
    assert node.http("GET", "/functions/changes/schema").body["request"] == {"type": "string"}
    node.deployed("changes", "def load(): pass\ndef handle(state, request): return request\n")
    assert "request" not in node.http("GET", "/functions/changes/schema").body


@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's package chromium")
def test_the_page_lists_functions_in_a_browser_under_its_policy(node: TestNode, tmp_path: Path) -> None:
    answer = node.http("GET", "/docs")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.search(r"https?://", answer.body), "it needs no network"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    url = f"http://127.0.0.1:{node.port}/docs"
    command = [str(CHROMIUM), *options, f"--user-data-dir={tmp_path}", url]
    dom = subprocess.run(command, capture_output=True, text=True, check=True, timeout=90).stdout
    assert '<option value="/functions/again/invoke">again</option>' in dom
    assert "Says it again." in dom


def test_a_tenant_sees_its_own_functions(tmp_path: Path) -> None:
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n', node='tenants = "many"') as node:
        for tenant in ("a", "b"):
            node.deployed(f"of-{tenant}", FUNCTION, tenant=tenant)
        key = node.admin.create_key(Wish(tenant="a"))["key"]
        headers = {"Authorization": f"Bearer {key}"}
        assert list(node.http("GET", "/openapi.json", headers=headers).body["paths"]) == ["/functions/of-a/invoke"]
        assert node.http("GET", "/functions/of-a/schema", headers=headers).status == 200
        assert node.http("GET", "/functions/of-b/schema", headers=headers).code == "unknown_function"
        for path in ("/openapi.json", "/functions/of-a/schema"):
            assert node.http("GET", path).code == "unauthorized"
        assert node.http("GET", "/docs").status == 200
        assert json.dumps(node.http("GET", "/openapi.json", headers=headers).body).count("of-b") == 0
