"""A folder's generation_config.json: what of it stands where a request says nothing, and what is refused or told."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from dormouse.client_shim.llm import sampling
from dormouse.client_shim.llm.folder import BadFolder
from dormouse.client_shim.llm.requests import RANGES, parse
from dormouse.client_shim.llm.sampling import chosen, sampling_of
from dormouse.schemas.llm import DefaultSampling


def found(folder: Path, said: Any) -> sampling.FoundSampling:
    (folder / "generation_config.json").write_text(json.dumps(said))
    return sampling_of(str(folder))


QWEN = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, DefaultSampling()),
        ({"temperature": None, "top_k": None, "do_sample": None, "stop_strings": None}, DefaultSampling()),
        (QWEN, DefaultSampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)),
        ({"top_k": 20.0, "min_p": 0, "max_new_tokens": 512}, DefaultSampling(top_k=20, max_tokens=512)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, DefaultSampling(temperature=0.0, top_p=0.9)),
        ({"stop_strings": "###"}, DefaultSampling(stop=("###",))),
        ({"stop_strings": ["a", "b"]}, DefaultSampling(stop=("a", "b"))),
    ],
)
def test_what_stands_where_a_request_says_nothing(tmp_path: Path, said: Any, expected: DefaultSampling) -> None:
    assert found(tmp_path, said) == (expected, "")


def test_a_folder_without_the_file_says_nothing(tmp_path: Path) -> None:
    assert sampling_of(str(tmp_path)) == (DefaultSampling(), "")


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
        ({"stop_strings": [1]}, "stop_strings that are not"),
        ({"stop_strings": [""]}, "stop_strings that are not"),
        ({"stop_strings": ["a"] * 17}, "stop_strings that are not 16 texts"),
        ({"stop_strings": {"a": 1}}, "stop_strings that are not"),
    ],
)
def test_a_value_that_no_request_could_have_is_refused(tmp_path: Path, said: Any, why: str) -> None:
    with pytest.raises(BadFolder) as raised:
        found(tmp_path, said)
    assert f"generation_config.json has {why}" in str(raised.value)


def test_what_is_not_followed_is_told(tmp_path: Path) -> None:
    said = {"num_beams": 4, "no_repeat_ngram_size": 3, "typical_p": 1.0, "suppress_tokens": [], "min_length": 0}
    text = "generation_config.json has no_repeat_ngram_size, num_beams, which answers here do not keep to"
    assert found(tmp_path, said) == (DefaultSampling(), text)


HARMLESS = [
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
    "bos_token_id", "cache_config", "cache_implementation", "compile_config", "continuous_batching_config",
    "decoder_start_token_id", "disable_compile", "early_stopping", "eos_token_id", "is_assistant", "length_penalty",
    "low_memory", "max_cache_len", "max_length", "max_matching_ngram_size", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "pad_token_id", "prefill_chunk_size", "prompt_lookup_num_tokens", "return_dict_in_generate", "speculation_type",
    "target_lookbehind", "transformers_version", "use_cache", "use_mtp", "_from_model_config",
]  # fmt: skip
"""What changes no answer of a decoder that samples: speed, memory, results beside the tokens, ends (model.py), and what
matters with beams or an encoder only. ``max_length`` counts the prompt, too, and old files have it from the defaults of
their day: the limit is the model's context, as in vLLM.
"""


def test_every_field_of_the_installed_transformers_is_followed_told_or_harmless() -> None:
    known = {*sampling._FOLLOWED, *sampling._NEUTRAL, *HARMLESS, "do_sample", "stop_strings"}
    config: Any = GenerationConfig
    assert set(vars(config())) - known == set()
    assert not set(sampling._NEUTRAL) & {*sampling._FOLLOWED, *HARMLESS}


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
