"""vLLM's routes for adapters, on a real node."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from adapter_folders import base_model, save_adapter
from language_models import make_folder
from llm_node import CONFIG, ask, deploy, expected

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.schemas.admin import Wish


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    make_folder(folders / "chat")
    return {
        name: save_adapter(folders / name, base_model(), r=rank, target_modules=["q_proj", "v_proj"], lora_alpha=64)
        for name, rank in (("math", 8), ("poem", 4))
    }


@pytest.fixture(scope="module")
def node(folders: Path) -> Iterator[TestNode]:
    with running_node(CONFIG, node=f'tenants = "many"\nadapters = "{folders}"') as running:
        yield running


def post(node: TestNode, path: str, body: dict[str, Any], key: str) -> tuple[int, str]:
    connection = node.connect(60.0)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_vllms_routes_load_and_unload_adapters_below_the_nodes_folder(
    node: TestNode, folders: Path, tmp_path: Path, models: dict[str, Any]
) -> None:
    deploy(node, "chat", folders / "chat")
    node.deployed("plain", "def load(): ...\ndef handle(model, request): ...\n")
    key = str(node.admin.create_key(Wish(scopes=("invoke", "deploy")))["key"])
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    (folders / "link").symlink_to(tmp_path)
    save_adapter(tmp_path, base_model(), r=4, target_modules=["q_proj"])
    refusals: list[tuple[dict[str, Any], int, str]] = [
        ({"lora_name": "math"}, 400, "lora_path"),
        ({"lora_name": "math", "lora_path": "math", "more": 1}, 400, "unknown field"),
        ({"lora_name": "math", "lora_path": "/etc"}, 404, "lies outside of"),
        ({"lora_name": "math", "lora_path": "../"}, 404, "lies outside of"),
        ({"lora_name": "math", "lora_path": "link"}, 404, "lies outside of"),
        ({"lora_name": "math", "lora_path": "nothing"}, 404, "is no folder"),
        ({"lora_name": "math", "lora_path": "chat"}, 404, "no adapter's folder"),
        ({"lora_name": "math", "lora_path": "math", "base_model_name": "nobody"}, 404, "no function 'nobody'"),
        ({"lora_name": "math", "lora_path": "a\0b"}, 404, "null byte"),
        ({"lora_name": "chat", "lora_path": "math"}, 400, "is deployed already"),
        ({"lora_name": "chat", "lora_path": "math", "load_inplace": True}, 400, "is deployed already"),
        ({"lora_name": "plain", "lora_path": "math", "load_inplace": True}, 400, "is deployed already"),
    ]
    for body, status, says in refusals:
        answer = post(node, load, body, key)
        assert (answer[0], says in answer[1]) == (status, True), answer
    other = str(node.admin.create_key(Wish(scopes=("invoke", "deploy"), tenant="other"))["key"])
    body = {"lora_name": "math", "lora_path": "math"}
    status, text = post(node, load, body | {"base_model_name": "chat"}, other)
    assert (status, "no function 'chat'" in text) == (404, True), (
        "another tenant's base is to be had with its right only"
    )
    body = {"lora_name": "math", "lora_path": str(folders / "math")}
    assert post(node, load, body, "")[0] == 401
    assert post(node, load, body, key)[0] == 200
    assert post(node, load, body, key)[0] == 400
    assert post(node, load, body | {"lora_path": "poem", "load_inplace": True}, key)[0] == 200
    with openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key=key, max_retries=0) as client:
        assert ask(client, "again", 40, "math") == expected(models["poem"], "again", 40)
    assert post(node, unload, {"lora_name": "chat"}, key)[0] == 404
    assert post(node, unload, {"lora_name": "math"}, key)[0] == 200
    assert post(node, unload, {"lora_name": "math"}, key)[0] == 404
    for name in ("plain", "chat"):
        node.remove(name)
