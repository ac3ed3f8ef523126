"""Equal language models of a tenant share one runtime on a GPU, and no others do; on a real node."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import needs
import openai
import pytest
from language_models import make_folder
from llm_node import CONFIG, ask, client, connected, deploy, expected, rest, runtimes, sandboxed, streaming, talk
from transformers import PreTrainedModel

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.node.refusals import CallRefused

__all__ = ["client"]

ASKED = [(name, f"{name} {n}") for name in ("one", "two") for n in range(2)]
TENANTS = 'tenants = "many"'


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG, node=TENANTS) as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return make_folder(folder)


def pids(node: TestNode, *names: str) -> list[set[int]]:
    """The runtimes of each, as the node's status has them."""
    functions = node.status()["functions"]
    return [{each["pid"] for each in functions[name]["runtimes"]} for name in names]


def check(model: PreTrainedModel, answers: dict[tuple[str, str], str], new: int = 60) -> None:
    assert {key: expected(model, key[1], new) for key in answers} == answers


def test_two_functions_of_a_tenant_share_a_runtime(
    node: TestNode, folder: Path, model: PreTrainedModel, client: openai.OpenAI
) -> None:
    """One is removed under a stream of the other, and an instance of one is killed: the other hears of neither."""
    before = sandboxed(node)
    deploy(node, "one", folder)
    instances = sandboxed(node) - before  # of "one"
    deploy(node, "two", folder)
    answers = talk(client, ASKED, 60)
    check(model, answers)
    assert len(answers) == 4
    (pid,) = runtimes(node)
    assert pids(node, "one", "two") == [{pid}, {pid}]
    assert node.status()["functions"]["one"]["runtimes"][0]["functions"] == ["one", "two"]
    assert [row["llm"]["isolation"] for row in node.admin.functions()] == ["tenant", "tenant"]

    stream, killed = streaming(client, "a long one", 150, "two"), streaming(client, "resumes", 1900, "one")
    parts = [next(stream).choices[0].delta.content or "" for _ in range(3)]
    assert next(killed).choices
    os.kill(pid, signal.SIGSTOP)  # so that it has not said all before its instance is found
    (instance,) = node.status()["functions"]["one"]["instances"]
    for each in instances:
        with suppress(ProcessLookupError):  # a process that was there for a moment only, beside the instance
            os.kill(each, signal.SIGKILL)
    with pytest.raises(openai.APIError):  # its instance was what knew of the stream
        rest(killed)
    os.kill(pid, signal.SIGCONT)
    assert "".join(parts) + rest(stream) == expected(model, "a long one", 150)
    node.wait(lambda: instance not in node.status()["functions"]["one"]["instances"], 60, "another instance")
    assert ask(client, "again", 40, "one") == expected(model, "again", 40)
    assert runtimes(node) == [pid]

    stream = streaming(client, "goes on", 150, "two")
    parts = [next(stream).choices[0].delta.content or "" for _ in range(3)]
    node.remove("one")
    assert "".join(parts) + rest(stream) == expected(model, "goes on", 150)
    assert runtimes(node) == [pid]
    node.remove("two")
    node.wait(lambda: runtimes(node) == [], 60, "the runtime to end with the last of its instances")


@pytest.mark.parametrize("settings", [{"isolation": "function"}, {"tenant": "other"}, {"context": 128}])
@needs.ROOT
def test_others_have_runtimes_of_their_own(
    node: TestNode, folder: Path, model: PreTrainedModel, client: openai.OpenAI, settings: dict[str, str]
) -> None:
    """Of another tenant, in isolation, or with another context: both compute at the same time, in two processes."""
    deploy(node, "one", folder)
    deploy(node, "two", folder, **settings)
    answers = talk(client, ASKED, 60)
    check(model, answers)
    one, two = pids(node, "one", "two")
    assert len(one) == len(two) == 1
    assert one.isdisjoint(two)
    uids = {os.stat(f"/proc/{pid}").st_uid for pid in one | two} if os.getuid() == 0 else {1, 2}
    assert len(uids) == 2
    for name in ("one", "two"):
        node.remove(name)


def test_while_the_weights_of_one_come_others_that_are_there_compute(tmp_path: Path) -> None:
    """Over a link that takes seconds for half a megabyte. All that is said of one meanwhile is whole and right."""
    config = CONFIG.replace('pool = "pages"\n', 'pool = "pages"\nlink = "60KB"\n') + "[limits]\nheartbeat_ms = 60000\n"
    here, there = make_folder(tmp_path / "here"), make_folder(tmp_path / "there", seed=1)
    with running_node(config) as slow, connected(slow) as client, ThreadPoolExecutor() as pool:
        for name in ("here", "there"):
            deploy(slow, name, tmp_path / name, ttft="10s", tpot="10s", percentile=50.0)
        assert ask(client, "first", 20, "here") == expected(here, "first", 20)
        late = pool.submit(ask, client, "waits", 20, "there")
        slow.wait(lambda: slow.status()["gpus"]["0"]["busy_with"] == "there", 60, "the wake of the other one")
        answers: list[str] = []
        while len(answers) < 2 and not late.done():
            answers.append(ask(client, f"number {len(answers)}", 5, "here"))
        assert not late.done(), f"{len(answers)} answers in all of the copy's time"
        assert answers == [expected(here, f"number {number}", 5) for number in range(2)]
        assert late.result() == expected(there, "waits", 20)


@pytest.mark.usefixtures("model")  # its files are in the folder
def test_functions_in_isolation_are_refused_where_a_runtime_could_read_the_others(folder: Path) -> None:
    with running_node(CONFIG.replace("pages", "regions"), node='isolation = "function"') as node:
        deploy(node, "one", folder)
        with pytest.raises(CallRefused, match=r'another function already.*pool = "pages"') as refused:
            deploy(node, "two", folder)
        assert refused.value.code == "tenant_refused"
        deploy(node, "one", folder)
