"""What a language model's folder must be: each way to be wrong is refused by name, and costs neither memory nor
time. Its weights: test_model_weights.py.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from language_models import TINY, make_folder
from model_folders import change_config, examine, little_memory, refused
from safetensors.torch import load_file

from dormouse.client_shim.llm import loading, weights
from dormouse.client_shim.llm.folder import BadFolder, read_json, spec_of
from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.requests import RefusedRequest
from dormouse.schemas.errors import ConfigError


@pytest.fixture
def small() -> Iterator[None]:
    with little_memory():
        yield


@pytest.mark.parametrize("family", TINY)
def test_folders_of_every_family_fit(tmp_path: Path, family: str) -> None:
    make_folder(tmp_path, family)
    _, names = examine(tmp_path)
    assert len(names) == len(load_file(tmp_path / "model.safetensors"))


# --- configurations


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"model_type": "bloom"}, "'bloom' is not served"),
        ({"model_type": ["llama"]}, "is not served"),
        ({"model_type": None}, "None is not served"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"auto_map": {"AutoModel": "evil.Model"}}, "code of its own"),
        ({"dtype": "float8_e4m3fn"}, "the dtype is 'float8_e4m3fn'"),
        ({"dtype": 7}, "the dtype is 7"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers cannot be 1000000000"),
        ({"num_hidden_layers": 1000}, "1,000 layers"),
        ({"num_hidden_layers": -1}, "num_hidden_layers cannot be -1"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers cannot be '3'"),
        ({"hidden_size": 10**12}, "hidden_size"),
        ({"hidden_size": 1 << 24, "head_dim": None}, "two models"),
        ({"vocab_size": 1 << 23}, "'lm_head.weight' is \\[320, 64\\], its model wants \\[8388608, 64\\]"),
        ({"intermediate_size": 1 << 24}, "two models"),
        ({"num_attention_heads": 1 << 20, "num_key_value_heads": 1, "head_dim": None}, "not a multiple"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "not a multiple"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"max_position_embeddings": 10**10}, "max_position_embeddings"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"hidden_act": "os.system"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "evil"}}, "rope"),
    ],
)
def test_configurations(tmp_path: Path, small: None, fields: dict[str, Any], what: str) -> None:
    make_folder(tmp_path)
    change_config(tmp_path, **fields)
    with pytest.raises((BadFolder, ConfigError), match=what):
        examine(tmp_path)


def test_a_context_that_is_longer_than_the_models(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert "deploy it with --context 2048" in refused(tmp_path, context=2049)
    assert examine(tmp_path, context=2048)[0].context == 2048


def test_the_dtype_of_the_folder_or_the_one_that_is_asked_for(tmp_path: Path) -> None:
    make_folder(tmp_path)
    assert examine(tmp_path)[0].dtype == "float32"
    assert examine(tmp_path, dtype="bfloat16")[0].dtype == "bfloat16"
    change_config(tmp_path, dtype="float16")
    assert examine(tmp_path)[0].dtype == "bfloat16"
    assert "write auto, bfloat16 or float32" in refused(tmp_path, dtype="int8")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{", "cannot be read"),
        (b"[]", "not a JSON object"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"a": "' + b"x" * (100 << 20) + b'"}', "more than 1,048,576 bytes"),
    ],
)
def test_json_that_is_none_or_too_much_of_it(tmp_path: Path, small: None, content: bytes, what: str) -> None:
    make_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    assert what in refused(tmp_path)


# --- tokenizers


def _words(folder: Path) -> Words:
    return Words(str(folder), spec_of(read_json(str(folder), "config.json"), "auto", 0))


def test_tokenizers_that_are_none(tmp_path: Path) -> None:
    make_folder(tmp_path)
    _words(tmp_path)
    path = tmp_path / "tokenizer.json"
    good = json.loads(path.read_text())
    for content in (
        b"{",
        b"[" * 100_000,
        b"{}",
        json.dumps({**good, "model": {**good["model"], "type": "Unigram", "vocab": [["a", 0]], "unk_id": 9}}).encode(),
        json.dumps({**good, "model": {"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []}}).encode(),
        json.dumps({**good, "added_tokens": [{"id": -1, "content": "x"}]}).encode(),
    ):
        path.write_bytes(content)
        with pytest.raises(BadFolder, match="no tokenizer that can be used"):
            _words(tmp_path)


def _replacing(pattern: dict[str, str]) -> dict[str, Any]:
    return {"normalizer": {"type": "Replace", "pattern": pattern, "content": "x"}}


@pytest.mark.parametrize(
    "change",
    [
        _replacing({"String": ""}),
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "X", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
)
def test_tokenizers_that_panic(tmp_path: Path, change: dict[str, Any]) -> None:
    """The library in Rust raises what is no Exception."""
    make_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(BadFolder, match="no tokenizer that can be used"):
        _words(tmp_path)


def test_a_tokenizer_that_panics_at_some_texts_fails_these_requests(tmp_path: Path) -> None:
    make_folder(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **_replacing({"Regex": "(?=z)"})}))
    words = _words(tmp_path)
    assert words.encode("a")
    with pytest.raises(RefusedRequest, match="tokenizer fails for this text"):
        words.encode("z")
    assert words.encode("a")


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    make_folder(tmp_path)
    change_config(tmp_path, vocab_size=100)
    with pytest.raises(BadFolder, match="the tokenizer has 259 tokens, the model 100"):
        _words(tmp_path)


# --- room on a GPU


def test_kv_that_has_no_room(tmp_path: Path) -> None:
    make_folder(tmp_path)
    spec = spec_of(read_json(str(tmp_path), "config.json"), "auto", 0)
    token = loading.kv_nbytes(spec, 1)
    assert token == 2 * 3 * 2 * 16 * 4
    weights_nbytes = 1 << 20
    assert loading.check_room(spec, weights_nbytes, 0) == ""
    assert loading.check_room(spec, weights_nbytes, weights_nbytes + 2048 * token) == ""
    warned = loading.check_room(spec, weights_nbytes, weights_nbytes + 2047 * token)
    assert "deploy with --context 2047" in warned
    with pytest.raises(BadFolder, match="there is room for 255 tokens"):
        loading.check_room(spec, weights_nbytes, weights_nbytes + 255 * token)
    short = spec_of(read_json(str(tmp_path), "config.json"), "auto", 20)
    assert loading.check_room(short, weights_nbytes, weights_nbytes + 20 * token) == ""


def test_what_the_weights_will_have(tmp_path: Path) -> None:
    make_folder(tmp_path)
    spec, _ = examine(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert weights.nbytes_of(spec, weights.wanted_by(weights.skeleton(spec))) == sum(
        4 * math.prod(tensor.shape) for tensor in stored.values()
    )
