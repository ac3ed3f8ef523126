"""More adapters than a GPU holds, and kills, on a real node: every answer is right, and all memory comes back."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from adapter_folders import base_model, save_adapter
from language_models import make_folder
from llm_node import ask, client, connected, deploy, expected, granules, rest, runtimes, same_texts, streaming, talk

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import modelfolder

__all__ = ["client"]

MANY: Final = 9
ALL: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIG: Final = '[sandbox]\n[gpu]\ncount = 1\nmemory = "24MiB"\nthreads = 1\npool = "pages"\nseat_idle_ms = 2000\n'


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def models(node: TestNode, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A base and adapters of nearly 2.8 MB each, all different."""
    folder = tmp_path_factory.mktemp("folders")
    found: dict[str, Any] = {"chat": make_folder(folder / "chat")}
    deploy(node, "chat", folder / "chat")
    for number in range(MANY):
        name = f"a{number}"
        found[name] = save_adapter(folder / name, base_model(), r=256 - number, target_modules=ALL, lora_alpha=64)
        node.admin.deploy(name, modelfolder.find_adapter(str(folder / name)), {"base": "chat"})
    return found


def test_more_adapters_than_the_gpu_holds(node: TestNode, models: dict[str, Any], client: openai.OpenAI) -> None:
    told = node.status()["functions"]
    base = told["chat"]["nbytes"]
    assert base + sum(row["nbytes"] - base for row in told.values()) > 24 << 20, "else they fit"
    answers = talk(client, same_texts(models), 12)
    assert {key: expected(models[key[0]], key[1], 12) for key in answers} == answers
    assert len(answers) == 2 * (MANY + 1)
    assert sum(row["evictions"] for row in node.status()["functions"].values()) > 0


def test_an_adapter_that_is_removed_is_not_mapped_any_more_where_others_are_computed(tmp_path: Path) -> None:
    """On a node of its own, where nobody else comes and goes meanwhile."""
    make_folder(tmp_path / "chat")
    save_adapter(tmp_path / "gone", base_model(), r=240, target_modules=ALL)
    with running_node(CONFIG.replace("2000", "600000")) as node, connected(node) as client:
        deploy(node, "chat", tmp_path / "chat")
        node.admin.deploy("gone", modelfolder.find_adapter(str(tmp_path / "gone")), {"base": "chat"})
        stream = streaming(client, "a long one", 150)
        next(stream)
        (pid,) = runtimes(node)
        before = granules(pid, "r--s")
        assert before
        ask(client, "something", 4, "gone")
        assert granules(pid, "r--s") > before
        node.remove("gone")
        node.wait(lambda: granules(pid, "r--s") == before, 60, "the adapter to be unmapped")
        assert runtimes(node) == [pid]
        rest(stream)


def test_kills_of_the_runtime_under_load(node: TestNode, models: dict[str, Any], client: openai.OpenAI) -> None:
    """Each stream goes on with the next runtime, and memory comes back."""
    names = list(models)[:4]
    right = {(name, "say 0"): expected(models[name], "say 0", 30) for name in names}
    for _ in range(3):
        answers: dict[tuple[str, str], str] = {}
        talking = threading.Thread(target=lambda found=answers: found.update(talk(client, same_texts(names, 1), 30)))
        talking.start()
        node.wait(lambda: any(runtimes(node)), 60, "a runtime")
        for pid in runtimes(node):
            os.kill(pid, signal.SIGKILL)
        talking.join()
        assert answers == right
    node.wait(lambda: node.status()["gpus"]["0"]["seats"] == [], 60, "all leases to end")
    gpu = node.status()["gpus"]["0"]
    assert gpu["free_nbytes"] + gpu["weights_nbytes"] + gpu["lost_nbytes"] == gpu["capacity_nbytes"]
    assert gpu["kv_nbytes"] == 0
