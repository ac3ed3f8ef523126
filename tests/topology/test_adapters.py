"""Functions with LoRA adapters over one backbone, on a real node: deployed, listed, computed, and removed."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from adapter_folders import base_model, save_adapter
from language_models import make_folder
from llm_node import CONFIG, ask, connected, deploy, expected, rest, runtimes, streaming

from dormouse.core import modelfolder
from dormouse.core.folder import NoFunction
from dormouse.core.node.refusals import CallRefused
from dormouse.core.node.testing import TestNode, running_node

pytestmark = pytest.mark.timeout(300)

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG, node='tenants = "many"') as running:
        yield running


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    """By name: the base, and PEFT's own models with adapters, unmerged."""
    found: dict[str, Any] = {"chat": make_folder(folders / "chat")}
    for name, config in {
        "math": {"r": 8, "target_modules": ALL},
        "poem": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 64},
        "code": {"r": 16, "target_modules": ["down_proj"], "use_rslora": True, "lora_alpha": 32},
    }.items():
        found[name] = save_adapter(folders / name, base_model(), **config)
    return found


@pytest.fixture
def client(node: TestNode) -> Iterator[openai.OpenAI]:
    with connected(node) as found:
        yield found


def adapt(node: TestNode, name: str, folder: Path, base: str = "chat", **settings: Any) -> dict[str, Any]:
    return node.admin.deploy(name, modelfolder.find_adapter(str(folder)), {"base": base, **settings})


def talk(client: openai.OpenAI, names: list[str], new: int = 40) -> dict[tuple[str, str], str]:
    """All of them at the same time, each with two texts."""
    answers: dict[tuple[str, str], str] = {}

    def say(name: str, text: str) -> None:
        answers[name, text] = ask(client, text, new, name)

    threads = [threading.Thread(target=say, args=(name, f"say {n}")) for name in names for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.fixture
def deployed(node: TestNode, folders: Path, models: dict[str, Any]) -> Iterator[list[str]]:
    deploy(node, "chat", folders / "chat")
    names = list(models)
    for name in names[1:]:
        adapt(node, name, folders / name)
    yield names
    left = {row["name"] for row in node.admin.functions()}
    for name in [name for name in [*names[1:], "chat"] if name in left]:
        node.remove(name)
    node.wait(lambda: runtimes(node) == [], 30, "the runtime to end with the last of its instances")


def test_adapters_of_a_tenant_share_a_runtime_and_each_answers_as_peft_does(
    node: TestNode, deployed: list[str], models: dict[str, Any], client: openai.OpenAI
) -> None:
    answers = talk(client, deployed)
    assert {key: expected(models[key[0]], key[1], 40) for key in answers} == answers
    assert len(answers) == 8
    assert len(set(answers.values())) == 8, "each adapter has an effect"
    assert len(runtimes(node)) == 1
    served = {each.id: each.to_dict()["parent"] for each in client.models.list()}
    assert served == {"chat": None, "math": "chat", "poem": "chat", "code": "chat"}
    bases = {row["name"]: row["llm"]["base"] for row in node.admin.functions()}
    assert bases == served
