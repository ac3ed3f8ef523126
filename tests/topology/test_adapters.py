"""Functions with LoRA adapters over one backbone, on a real node: deployed, listed, computed, and removed."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import needs
import openai
import pytest
from adapter_folders import base_model, save_adapter
from language_models import make_folder
from llm_node import (
    CONFIG,
    MESSAGES,
    ask,
    client,
    deploy,
    expected,
    granules,
    rest,
    runtimes,
    same_texts,
    streaming,
    talk,
)

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import modelfolder
from dormouse.core.folder import FunctionFolder, NoFunction
from dormouse.core.node.refusals import CallRefused

__all__ = ["client"]

PLAIN = "def load(): ...\ndef handle(model, request): ...\n"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def node(folders: Path) -> Iterator[TestNode]:
    with running_node(CONFIG, node='tenants = "many"') as running:
        yield running


@pytest.fixture(scope="module")
def models(folders: Path) -> dict[str, Any]:
    """By name: the base, and PEFT's own models with adapters, unmerged."""
    found: dict[str, Any] = {"chat": make_folder(folders / "chat")}
    configs: dict[str, dict[str, Any]] = {
        "math": {"r": 8, "target_modules": ALL},
        "poem": {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 64},
        "code": {"r": 16, "target_modules": ["down_proj"], "use_rslora": True, "lora_alpha": 32},
    }
    for name, config in configs.items():
        found[name] = save_adapter(folders / name, base_model(), **config)
    return found


def adapt(node: TestNode, name: str, folder: Path, base: str = "chat", **settings: Any) -> dict[str, Any]:
    return node.admin.deploy(name, modelfolder.find_adapter(str(folder)), {"base": base, **settings})


def resting_weights(node: TestNode) -> int:
    """Bytes on the GPU when all KV is given back."""
    node.wait(lambda: node.status()["gpus"]["0"]["seats"] == [], 60, "all leases to end")
    return int(node.status()["gpus"]["0"]["weights_nbytes"])


def check(models: dict[str, Any], answers: dict[tuple[str, str], str], new: int = 40) -> None:
    assert {key: expected(models[key[0]], key[1], new) for key in answers} == answers


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
    node.wait(lambda: runtimes(node) == [], 60, "the runtime to end with the last of its instances")


def test_adapters_of_a_tenant_share_a_runtime_and_each_answers_as_peft_does(
    node: TestNode, deployed: list[str], models: dict[str, Any], client: openai.OpenAI
) -> None:
    answers = talk(client, same_texts(deployed), 40)
    check(models, answers)
    assert len(answers) == 8
    assert len(set(answers.values())) == 8, "each adapter has an effect"
    assert len(runtimes(node)) == 1
    served = {each.id: each.to_dict()["parent"] for each in client.models.list()}
    assert served == {"chat": None, "math": "chat", "poem": "chat", "code": "chat"}
    bases = {row["name"]: row["llm"]["base"] for row in node.admin.functions()}
    assert bases == served


def test_embeddings_biases_and_parameters_of_its_own_are_computed_beside_others(
    node: TestNode, deployed: list[str], models: dict[str, Any], client: openai.OpenAI, tmp_path: Path
) -> None:
    more: dict[str, dict[str, Any]] = {
        "whole": {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head", "model.norm"]},
        "biased": {"target_modules": ["v_proj", "down_proj"], "lora_bias": True},
    }
    judges = {**models, **{name: save_adapter(tmp_path / name, base_model(), **each) for name, each in more.items()}}
    for name in more:
        adapt(node, name, tmp_path / name)
    try:
        answers = talk(client, same_texts(["chat", "math", *more]), 40)
        check(judges, answers)
        assert len(set(answers.values())) == len(answers), "each adapter has an effect"
        assert len(runtimes(node)) == 1
    finally:
        for name in more:
            node.remove(name)


def test_what_is_shared_is_there_once_and_a_wake_copies_an_adapter_alone(
    node: TestNode, deployed: list[str], models: dict[str, Any], client: openai.OpenAI
) -> None:
    """To the byte, on the host and on the GPU; small tensors of an adapter are one storage, each aligned."""
    check(models, {("chat", "first"): ask(client, "first", 40, "chat")})
    base = node.status()["functions"]["chat"]["nbytes"]
    adapters = {}
    for name in deployed[1:]:
        check(models, {(name, "first"): ask(client, "first", 40, name)})
        node.wait(lambda: node.status()["functions"][name]["leases"] == 1, 60, "its lease to end")  # noqa: B023
        told = node.status()["functions"][name]
        tensors = [value for key, value in models[name].named_parameters() if "lora_" in key]
        adapters[name] = sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)
        assert told["nbytes"] == base + adapters[name]
        assert told["wakes"] == 1
        assert told["last_wake"]["copied_nbytes"] == adapters[name]
        assert told["shared_nbytes"] == base
    assert 0 <= resting_weights(node) - base - sum(adapters.values()) < 512, "what aligns the base"
    assert node.status()["store"]["host_nbytes"] == pytest.approx(base + sum(adapters.values()), rel=0.05)


@needs.ROOT
def test_in_isolation_each_function_has_a_runtime_and_the_weights_are_there_once(
    node: TestNode, folders: Path, models: dict[str, Any], client: openai.OpenAI
) -> None:
    deploy(node, "chat", folders / "chat", isolation="function")
    for name in ("math", "poem"):
        adapt(node, name, folders / name, isolation="function")
    names = ["chat", "math", "poem"]
    check(models, talk(client, same_texts(names), 40))
    assert len(runtimes(node)) == 3
    functions = node.status()["functions"]
    pids = [{each["pid"] for each in functions[name]["runtimes"]} for name in names]
    assert len(set.union(*pids)) == 3
    total = functions["chat"]["nbytes"] + sum(functions[name]["nbytes"] - functions["chat"]["nbytes"] for name in names)
    assert 0 <= resting_weights(node) - total < 512
    for name in ("math", "poem", "chat"):
        node.remove(name)


@needs.ROOT
def test_of_two_tenants_each_has_a_runtime_and_weights_as_the_node_shares_them(
    node: TestNode, folders: Path, models: dict[str, Any], client: openai.OpenAI
) -> None:
    deploy(node, "chat", folders / "chat")
    adapt(node, "math", folders / "math", tenant="other")
    check(models, talk(client, same_texts(["chat", "math"]), 40))
    streams = [streaming(client, "while both are there", 150, name) for name in ("chat", "math")]
    for stream in streams:
        next(stream)
    one, other = runtimes(node)
    assert granules(one)
    assert granules(other)
    assert granules(one).isdisjoint(granules(other)), "memory of another tenant can be read"
    for stream in streams:
        rest(stream)
    total = sum(row["nbytes"] for row in node.status()["functions"].values())  # sharing = "tenant" is what nodes have
    assert 0 <= resting_weights(node) - total < 1024
    for name in ("math", "chat"):
        node.remove(name)


def test_adapters_come_and_go_under_load(
    node: TestNode, deployed: list[str], models: dict[str, Any], folders: Path, client: openai.OpenAI
) -> None:
    """Of four streams, one function is removed, one deployed anew with another adapter; none of them errs."""
    streams = {name: streaming(client, "a long one", 150, name) for name in deployed}
    parts = {name: [next(stream).choices[0].delta.content or "" for _ in range(3)] for name, stream in streams.items()}
    node.remove("math")
    assert adapt(node, "poem", folders / "code")["version"] == 2
    ended = {(name, "a long one"): "".join(parts[name]) + rest(stream) for name, stream in streams.items()}
    check(models, ended, 150)
    assert ask(client, "again", 40, "poem") == expected(models["code"], "again", 40)
    with pytest.raises(openai.NotFoundError):
        ask(client, "again", 40, "math")
    adapt(node, "math", folders / "math")
    check(models, {("math", "again"): ask(client, "again", 40, "math")})


def test_a_base_stays_what_its_adapters_name(
    node: TestNode, deployed: list[str], models: dict[str, Any], folders: Path, client: openai.OpenAI
) -> None:
    answer = node.remove("chat")
    assert (answer.status, answer.code) == (409, "has_adapters")
    assert "base of code, math, poem" in answer.message
    assert "dormouse rm code math poem" in answer.message
    answer = node.deploy("chat", PLAIN)
    assert (answer.status, answer.code) == (409, "has_adapters")
    assert "become something else" in answer.message
    other = make_folder(folders / "other", seed=1)
    deploy(node, "chat", folders / "other")  # anew: adapters go on over what they have
    check({**models, "chat": other}, talk(client, same_texts(deployed), 40))
    with pytest.raises(CallRefused, match="cannot be its own base"):
        adapt(node, "chat", folders / "poem")
    with pytest.raises(CallRefused, match="is an adapter itself") as refused:
        adapt(node, "more", folders / "poem", base="math")
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("base", "settings", "status", "says"),
    [
        ("nobody", {}, 404, "no function 'nobody' to be the adapter's base"),
        ("plain", {}, 400, "no language model"),
        ("more", {}, 404, "no function 'more' to be the adapter's base"),
        ("chat", {"dtype": "bfloat16"}, 400, "no dtype of its own"),
        ("chat", {"context": 64}, 400, "no context of its own"),
        ("chat", {"generation_config": "none"}, 400, "no generation_config of its own"),
        ("chat", {"llm": True}, 400, "no llm of its own"),
        ("chat", {"isolation": "none"}, 400, "isolation is 'none'"),
    ],
)
def test_what_cannot_be_is_refused_before_a_file_is_sent(
    node: TestNode,
    deployed: list[str],
    folders: Path,
    base: str,
    settings: dict[str, Any],
    status: int,
    says: str,
) -> None:
    if base == "plain":
        node.deployed("plain", PLAIN)
    with pytest.raises(CallRefused, match=says) as refused:
        adapt(node, "more", folders / "math", base, **settings)
    assert refused.value.status == status
    if base == "plain":
        node.remove("plain")


def test_an_adapter_of_another_model_is_refused_with_the_reason(
    node: TestNode, deployed: list[str], folders: Path
) -> None:
    save_adapter(folders / "wide", base_model(hidden_size=128), r=4, target_modules=["q_proj"])
    with pytest.raises(CallRefused, match="has to be"):
        adapt(node, "more", folders / "wide")
    with pytest.raises(NoFunction, match="no adapter's folder"):
        adapt(node, "more", folders / "chat")


def test_each_adapter_pays_for_what_it_uses(
    node: TestNode, client: openai.OpenAI, models: dict[str, Any], folders: Path
) -> None:
    """The base is split among all, the adapter's bytes are its own, and a step is split by tokens. Nobody else has had
    these names: what was used by then may be told late.
    """
    names = ["paying", "paid-math", "paid-poem"]
    deploy(node, names[0], folders / "chat")
    for name in names[1:]:
        adapt(node, name, folders / name.removeprefix("paid-"), names[0])
    talk(client, same_texts(names), 40)
    node.wait(lambda: made(node, names) == [80, 80, 80], 60.0, "usage that tells of all tokens")
    rows = used(node)
    for name in names:
        assert rows[name]["gpu_s"] > 0
        assert rows[name]["weights_nbyte_s"] > 0
        assert (rows[name]["adapter_nbyte_s"] > 0) == (name != names[0])
    for name in names[::-1]:
        node.remove(name)


def used(node: TestNode) -> dict[str, dict[str, Any]]:
    return {row["function"]: row for row in node.admin.usage(time.time() - 3600, "")["functions"]}


def made(node: TestNode, names: list[str]) -> list[int]:
    """Tokens of answers."""
    rows = used(node)
    return [rows.get(name, {}).get("made_tokens", 0) for name in names]


def test_two_versions_of_an_adapter_and_of_a_model_share_requests(
    node: TestNode, folders: Path, client: openai.OpenAI, models: dict[str, Any]
) -> None:
    """Over one base, which a version beside another cannot be."""
    deploy(node, "both", folders / "chat")
    adapt(node, "turns", folders / "math", "both")
    poem = modelfolder.find_adapter(str(folders / "poem"))
    beside = node.admin.deploy("turns", poem, {"base": "both"}, traffic=50)
    assert beside["traffic"] == {"1": 50, "2": 50}
    math, poem_said = (expected(models[name], "say", 10) for name in ("math", "poem"))
    assert math != poem_said
    assert [ask(client, "say", 10, "turns") for _ in range(4)] == [math, poem_said, math, poem_said]
    assert [ask(client, "say", 10, f"turns@{version}") for version in (2, 1)] == [poem_said, math]
    chat = FunctionFolder(folders / "chat", "config.json", False)
    model = {"llm": True, "dtype": "float32"}
    assert node.admin.deploy("both", chat, model, traffic=50)["traffic"] == {"1": 50, "2": 50}
    raw = client.chat.completions.with_raw_response
    answers = [raw.create(model="both", messages=MESSAGES, max_tokens=1) for _ in range(2)]
    assert [answer.headers["x-dormouse-version"] for answer in answers] == ["1", "2"]
    refusals: list[tuple[Callable[[], Any], str]] = [
        (lambda: adapt(node, "over", folders / "math", "both@2"), "unknown_base"),
        (lambda: node.admin.deploy("turns", chat, model, traffic=10), "bad_request"),
        (lambda: node.admin.deploy("turns", chat, model), "bad_request"),
    ]
    for refused, code in refusals:
        with pytest.raises(CallRefused) as caught:
            refused()
        assert caught.value.code == code, caught.value
    assert node.admin.traffic("turns", {2: 100})["traffic"] == {"2": 100}
    assert ask(client, "say", 10, "turns") == poem_said
    for name in ("turns", "both"):
        assert node.remove(name).status == 200
