"""Deploying language models on a real node: from a cache, pickled, as GGUF; what is refused; replaced under streams."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from click.testing import CliRunner
from gguf_files import write_gguf
from language_models import make_folder
from llm_node import CONFIG, MESSAGES, ask, client, connected, generated, prompt_tokens, rest, streaming
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import modelfolder
from dormouse.core.cli import main as cli
from dormouse.core.node.refusals import CallRefused

__all__ = ["client"]


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG) as running:
        yield running


def deploy(node: TestNode, name: str, model: Path | str, **settings: Any) -> dict[str, Any]:
    found = modelfolder.find(str(model), bool(settings.get("convert")))
    return node.admin.deploy(name, found, {"llm": True, "dtype": "float32", **settings})


def pickled(folder: Path, **more: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, **more}, folder / "pytorch_model.bin")


def answers(client: openai.OpenAI, name: str, model: PreTrainedModel, new: int = 20) -> None:
    assert ask(client, new=new, name=name) == generated(model, prompt_tokens(), new)


# --- how it is sampled


def test_a_folder_s_sampling_stands_where_a_request_says_nothing(
    node: TestNode, client: openai.OpenAI, tmp_path: Path
) -> None:
    make_folder(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 3.0, "top_k": 40, "num_beams": 2}))
    told = {"temperature": 3.0, "top_k": 40, "unfollowed": ["num_beams"]}
    answer = deploy(node, "wild", tmp_path)
    assert answer["sampling"] == node.status()["functions"]["wild"]["llm"]["sampling"] == told
    assert answer["warning"] == "answers here do not keep to what the model's files say of num_beams"
    shown = CliRunner().invoke(cli.cli, ["--run", str(node.run), "status", "wild"]).output
    assert "temperature 3.0, top_k 40; not followed: num_beams" in shown

    def said(path: str, wanted: dict[str, Any], **fields: Any) -> Any:
        made = node.http("POST", path, {"model": "wild", "seed": 5, "ignore_eos": True, **wanted, **fields}).body
        if "output" in made:
            return made["output"][0]["content"][0]["text"]
        return made["choices"][0].get("text") or made["choices"][0]["message"]["content"]

    chat = {"messages": MESSAGES, "max_tokens": 40}
    faces: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": chat,
        "/functions/wild/invoke": chat,
        "/v1/completions": {"prompt": "one two", "max_tokens": 40},
        "/v1/responses": {"input": "one two", "max_output_tokens": 40},
    }
    by_default = {path: said(path, wanted) for path, wanted in faces.items()}
    for path, wanted in faces.items():
        assert by_default[path] == said(path, wanted, temperature=3.0, top_k=40, top_p=1.0)
        assert by_default[path] != said(path, wanted, temperature=1.0, top_k=0), "a request wins"
    response = client.responses.create(model="wild", input="one", max_output_tokens=1, top_p=0.5)
    assert (response.temperature, response.top_p) == (3.0, 0.5)
    assert "sampling" not in deploy(node, "wild", tmp_path, generation_config="none")
    assert node.status()["functions"]["wild"]["llm"]["sampling"] == {}
    for path, wanted in faces.items():
        assert said(path, wanted) == said(path, wanted, temperature=1.0, top_k=0) != by_default[path]
    file.write_text(json.dumps({"temperature": "wild"}))
    with pytest.raises(CallRefused, match=r"generation_config\.json has temperature 'wild'; write a number"):
        deploy(node, "wild", tmp_path, generation_config="auto")
    command = ["--run", str(node.run), "deploy", "wild", "--llm", str(tmp_path), "--generation-config", "auto"]
    file.write_text('{"top_p": 0.5}')
    shown = CliRunner().invoke(cli.cli, command).output
    assert "sampling, unless a request says otherwise: top_p 0.5\n" in shown
    node.remove("wild")


# --- where it comes from


def test_from_the_caller_s_cache_by_the_command(
    node: TestNode, client: openai.OpenAI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789" * 4
    repository = tmp_path / "hub" / "models--org--small"
    snapshot = repository / "snapshots" / commit
    model = make_folder(repository / "blobs")
    snapshot.mkdir(parents=True)
    for name in os.listdir(repository / "blobs"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def dormouse(*words: str) -> Any:
        return CliRunner().invoke(cli.cli, ["--run", str(node.run), *words])

    result = dormouse("deploy", "hub", "--llm", "hf:org/small", "--dtype", "float32", "--context", "256")
    assert result.exit_code == 0, result.output
    assert "hub version 1 is deployed" in result.output
    answers(client, "hub", model)
    missing = dormouse("deploy", "hub", "--llm", "hf:org/other")
    assert missing.exit_code == 2
    assert "hf download org/other" in missing.output
    node.remove("hub")


def test_pickled_weights_if_asked_for_also_after_a_restart(tmp_path: Path) -> None:
    model = make_folder(tmp_path)
    pickled(tmp_path)
    with running_node(CONFIG) as own:
        found = modelfolder.find(str(tmp_path), True)
        with pytest.raises(CallRefused, match="deploy with --convert"):
            own.admin.deploy("pickled", found, {"llm": True, "dtype": "float32"})
        deploy(own, "pickled", tmp_path, convert=True)
        with connected(own) as client:
            answers(client, "pickled", model)
            own.stop()
            own.start()
            answers(client, "pickled", model)


@pytest.mark.parametrize("convert", [False, True])
def test_a_stored_head_that_differs_though_the_configuration_ties_it(
    node: TestNode, client: openai.OpenAI, tmp_path: Path, convert: bool
) -> None:
    """As `transformers` loads it: with the head that is stored."""
    tied = make_folder(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    stored = load_file(path)
    assert "lm_head.weight" not in stored
    head = torch.randn(stored["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(8))
    save_file({**stored, "lm_head.weight": head * 0.15}, path, {"format": "pt"})
    loaded: Any = AutoModelForCausalLM
    model = loaded.from_pretrained(tmp_path).eval()
    assert generated(model, prompt_tokens(), 20) != generated(tied, prompt_tokens(), 20)
    if convert:
        pickled(tmp_path)
    deploy(node, "heads", tmp_path, convert=convert)
    answers(client, "heads", model)
    node.remove("heads")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo EVIL CODE HAS RUN; kill -9 $PPID",)


def test_a_pickle_with_code_is_refused_and_does_not_run(node: TestNode, tmp_path: Path) -> None:
    make_folder(tmp_path)
    pickled(tmp_path, evil=Evil())
    with pytest.raises(CallRefused, match=r"GLOBAL posix\.system") as raised:
        deploy(node, "evil", tmp_path, convert=True)
    assert raised.value.code == "load_failed"
    logs = b"".join(path.read_bytes() for path in (node.state / "logs").glob("**/*") if path.is_file())
    assert b"GLOBAL posix.system" in logs
    assert b"EVIL CODE HAS RUN" not in logs


# --- what is refused: the rest of it is in tests/unit/test_model_folder.py and test_model_weights.py


def _reheader(folder: Path, **fields: Any) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"].update(fields)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda f: _config(f, num_hidden_layers=10**9), "num_hidden_layers cannot be 1000000000"),
        (lambda f: _config(f, num_hidden_layers=4), "the weights lack model.layers.3"),
        (lambda f: _config(f, num_hidden_layers=2), "which this model does not"),
        (lambda f: _config(f, vocab_size=400), "two models"),
        (lambda f: _config(f, hidden_act="evil"), "hidden_act cannot be 'evil'"),
        (lambda f: _reheader(f, shape=[8, 8]), "its model wants"),
        (lambda f: _reheader(f, data_offsets=[1 << 60, (1 << 60) + 256]), "no safetensors file"),
        (lambda f: (f / "config.json").write_text('{"a":' + "[" * 200_000), "nested too deeply"),
        (lambda f: (f / "tokenizer.json").write_text("[" * 200_000), "no tokenizer that can be used"),
    ],
)
def test_folders_that_are_refused(node: TestNode, tmp_path: Path, spoil: Any, what: str) -> None:
    make_folder(tmp_path)
    spoil(tmp_path)
    with pytest.raises(CallRefused, match=what) as raised:
        deploy(node, "bad", tmp_path)
    assert raised.value.code == "load_failed"


@pytest.mark.parametrize("memory", ["1MiB", "600KiB"])
def test_a_context_that_has_no_room_is_warned_of_and_next_to_none_is_refused(tmp_path: Path, memory: str) -> None:
    """The weights have 0.5 MiB, the KV of 256 tokens 0.2 MiB, that of 2048 tokens 1.5 MiB."""
    make_folder(tmp_path)
    with running_node(CONFIG.replace("64MiB", memory).replace("pages", "regions")) as small:
        if memory == "1MiB":
            assert "deploy with --context" in deploy(small, "long", tmp_path)["warning"]
        else:
            with pytest.raises(CallRefused, match="there is room for"):
                deploy(small, "long", tmp_path)


def test_a_tokenizer_that_panics_harms_its_request_only(node: TestNode, client: openai.OpenAI, tmp_path: Path) -> None:
    model = make_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    panics = {"normalizer": {"type": "Replace", "pattern": {"Regex": "(?=z)"}, "content": "x"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **panics}))
    deploy(node, "panics", tmp_path)
    instances = node.status()["functions"]["panics"]["instances"]
    with pytest.raises(openai.BadRequestError, match="tokenizer fails for this text"):
        client.completions.create(model="panics", prompt="z")
    answers(client, "panics", model)
    assert node.status()["functions"]["panics"]["instances"].keys() == instances.keys()
    node.remove("panics")


# --- GGUF


def test_a_gguf_file(node: TestNode, client: openai.OpenAI, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make setup")
    model = write_gguf(tmp_path / "small.gguf", seed=4)
    deploy(node, "gguf", tmp_path / "small.gguf")
    answers(client, "gguf", model)
    with pytest.raises(openai.BadRequestError, match="no token of this model"):  # one that transformers adds
        ask(client, "<|endoftext|>", name="gguf")
    (tmp_path / "small.gguf").write_bytes(b"GGUF and nothing more")
    with pytest.raises(CallRefused, match=r"small\.gguf is no GGUF file"):
        deploy(node, "gguf", tmp_path)
    answers(client, "gguf", model)
    node.remove("gguf")


# --- other versions under streams


def test_a_version_that_does_not_load_leaves_the_old_one_and_its_streams(
    node: TestNode, client: openai.OpenAI, tmp_path: Path
) -> None:
    old = make_folder(tmp_path / "old", seed=5)
    deploy(node, "turns", tmp_path / "old")
    stream = streaming(client, "who are you", 150, "turns")
    start = next(stream).choices[0].delta.content or ""
    make_folder(tmp_path / "bad", seed=6)
    _reheader(tmp_path / "bad", shape=[8, 8])
    with pytest.raises(CallRefused, match="its model wants"):
        deploy(node, "turns", tmp_path / "bad")
    messages = [{"role": "user", "content": "who are you"}]
    assert start + rest(stream) == generated(old, prompt_tokens(messages), 150)
    answers(client, "turns", old)
    (function,) = (each for each in node.admin.functions() if each["name"] == "turns")
    assert function["version"] == 1
    node.remove("turns")


def test_replaced_by_another_kind_of_model_under_streams(node: TestNode, client: openai.OpenAI, tmp_path: Path) -> None:
    """Open streams go on with the old model, new requests have the new one, and the old one goes when it is done."""
    old, new = make_folder(tmp_path / "old", seed=5), make_folder(tmp_path / "new", "gpt2", seed=6)
    deploy(node, "kinds", tmp_path / "old")
    streams = [streaming(client, f"number {each}", 120, "kinds") for each in range(3)]
    starts = [next(stream).choices[0].delta.content or "" for stream in streams]
    deploy(node, "kinds", tmp_path / "new", context=200)
    answers(client, "kinds", new)
    for each, stream in enumerate(streams):
        prompt = prompt_tokens([{"role": "user", "content": f"number {each}"}])
        assert starts[each] + rest(stream) == generated(old, prompt, 120)
    node.wait(lambda: len(node.status()["functions"]["kinds"]["instances"]) == 1, 60, "the old instance to end")
    node.remove("kinds")
