"""How a model's files say that it is sampled: what stands where a request says nothing, and what is refused or told."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_gguf
from transformers import GenerationConfig

from dormouse.client_shim.llm import sampling
from dormouse.client_shim.llm.folder import BadFolder
from dormouse.client_shim.llm.requests import RANGES, parse
from dormouse.client_shim.llm.sampling import chosen, read_sampling, sampling_of, warning_of
from dormouse.schemas.llm import DefaultSampling

QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, DefaultSampling()),
        ({"temperature": None, "top_k": None, "do_sample": None, "stop_strings": None}, DefaultSampling()),
        (QWEN, DefaultSampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)),
        ({"temperature": 0.6}, DefaultSampling(temperature=0.6)),
        ({"temperature": 0}, DefaultSampling(temperature=0.0)),
        ({"top_k": 20.0, "min_p": 0, "max_new_tokens": 512}, DefaultSampling(top_k=20, max_tokens=512)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, DefaultSampling(temperature=0.0, top_p=0.9)),
        ({"stop_strings": "###"}, DefaultSampling(stop=("###",))),
        ({"stop_strings": ["a", "b"]}, DefaultSampling(stop=("a", "b"))),
    ],
)
def test_what_stands_where_a_request_says_nothing(said: Any, expected: DefaultSampling) -> None:
    assert (sampling_of(said), warning_of(expected)) == (expected, "")


def test_where_it_is_said(tmp_path: Path) -> None:
    """As in transformers, an old config.json says it only as long as there is no generation_config.json."""
    assert read_sampling(str(tmp_path)) == DefaultSampling()
    old = {"model_type": "llama", "nobody_knows": 1, "temperature": 0.3, "do_sample": True, "num_beams": 2}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read_sampling(str(tmp_path)) == DefaultSampling(temperature=0.3, unfollowed=("num_beams",))
    (tmp_path / "config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(BadFolder, match=r"^config\.json has temperature 'hot'"):
        read_sampling(str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')
    assert read_sampling(str(tmp_path)) == DefaultSampling(top_p=0.5)


def test_a_gguf_file_s_sampling(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="needs gguf: make setup")
    said: Any = {
        "temp": 0.7,
        "top_p": 0.9,
        "top_k": 20.0,
        "penalty_repeat": 1.1,
        "mirostat": 0.0,
        "xtc_probability": 0.5,
    }
    write_gguf(tmp_path / "m.gguf", **{f"general__sampling__{name}": value for name, value in said.items()})
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')  # of another model, perhaps
    assert read_sampling(str(tmp_path), "m.gguf") == DefaultSampling(
        temperature=0.7, top_p=0.9, top_k=20, repetition_penalty=1.1, unfollowed=("xtc_probability",)
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"temperature": "0.7"}, "temperature '0.7'; write a number from 0 to 100"),
        ({"temperature": -1}, "temperature -1; write a number from 0 to 100"),
        ({"top_p": True}, "top_p True; write a number from 0 to 1,"),
        ({"top_p": [0.9]}, "top_p [0.9]; write a number from 0 to 1,"),
        ({"temperature": float("inf")}, "temperature inf; write a number"),
        ({"min_p": float("nan")}, "min_p nan; write a number"),
        ({"top_k": 2.5}, "top_k 2.5; write a whole number from -1 to"),
        ({"max_new_tokens": 0}, "max_new_tokens 0; write a whole number from 1 to"),
        ({"do_sample": "no"}, "do_sample 'no'; write true or false"),
        ({"stop_strings": [1]}, "stop_strings [1]; write at most 16 texts of 1 to 1024 characters"),
        ({"stop_strings": [""]}, "stop_strings ['']; write"),
        ({"stop_strings": ["a"] * 17}, "stop_strings ['a', 'a'"),
        ({"stop_strings": {"a": 1}}, "stop_strings {'a': 1}; write"),
    ],
)
def test_a_value_that_no_request_could_have_is_refused(said: Any, why: str) -> None:
    with pytest.raises(BadFolder) as raised:
        sampling_of(said)
    assert f"generation_config.json has {why}" in str(raised.value)
    assert "or deploy with --generation-config none" in str(raised.value)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "min_length": 0},
            "no_repeat_ngram_size, num_beams",
        ),
        ({"suppress_tokens": [], "bad_words_ids": [[5]], "sequence_bias": {}, "guidance_scale": 1}, "bad_words_ids"),
        ({"temprature": 0.5, "chat_format": None}, "temprature"),
        ({"eos_token_id": ["</s>", 2]}, "eos_token_id"),
        ({"eos_token_id": [2, None], "max_length": 20, "length_penalty": 2.0}, ""),
    ],
)
def test_what_is_not_followed_is_told(said: Any, told: str) -> None:
    found = sampling_of(said)
    assert found == DefaultSampling(unfollowed=tuple(told.split(", ")) if told else ())
    assert warning_of(found) == (f"answers here do not keep to what the model's files say of {told}" if told else "")


def test_names_that_are_told_are_bounded() -> None:
    named = sampling_of({f"{number:03}" + "x" * 200: 1 for number in range(100)}).unfollowed
    assert (len(named), {*map(len, named)}) == (sampling.MAX_UNFOLLOWED, {80})


def test_every_field_of_the_installed_transformers_is_followed_told_or_harmless() -> None:
    known = {*sampling._FOLLOWED, *sampling._NEUTRAL, *sampling._HARMLESS, *sampling._OTHERS}
    config: Any = GenerationConfig
    assert set(vars(config())) - known == set()
    assert not set(sampling._NEUTRAL) & {*sampling._FOLLOWED, *sampling._HARMLESS}


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_a_request_wins(kind: Any) -> None:
    model = DefaultSampling(temperature=0.7, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.05)
    prompt: Any = {"messages": []} if kind == "chat" else {"prompt": "x"}

    def of(**fields: Any) -> DefaultSampling:
        return chosen(model, parse(kind, json.dumps(prompt | fields).encode()))

    assert of() == of(temperature=None, top_k=None) == model
    assert of(temperature=0, top_k=0, presence_penalty=1.0) == DefaultSampling(
        temperature=0.0, top_p=0.8, min_p=0.1, repetition_penalty=1.05, presence_penalty=1.0
    )
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"} <= RANGES.keys()
