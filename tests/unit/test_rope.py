"""Rotary embeddings as configurations have them: what `transformers` makes of the same file, or refused by name."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from language_models import TINY, VOCABULARY, prompts, reference, wrong_tokens
from runtime_engines import begin, engine
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from dormouse.client_shim.llm.folder import BadFolder, spec_of
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import kv_layout
from dormouse.schemas import rope
from dormouse.schemas.errors import ConfigError

FAMILIES: Final = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi", "gpt_neox")
_LLAMA3: Final = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_FOUR: Final = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 4.0, 5.0]}  # of a head of 8 numbers


def _raw(family: str, **fields: Any) -> dict[str, Any]:
    return {"model_type": family, **TINY[family], "vocab_size": VOCABULARY, "max_position_embeddings": 256, **fields}


def _theirs(folder: Path, raw: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(raw))
    made: Any = AutoModelForCausalLM
    return made.from_config(AutoConfig.from_pretrained(folder))


def _ours(raw: dict[str, Any], context: int = 0) -> Any:
    spec = spec_of(raw, "float32", context)
    layout = kv_layout(spec)
    return models.build(spec, BlockAttention(layout, torch.zeros(2 * layout.block_nbytes // 4)))


def _turns(model: Any) -> Any:
    (found,) = [module for name, module in model.named_modules() if name.rpartition(".")[2] == "rotary_emb"]
    return found


SCALED: Final[list[dict[str, Any]]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2},
    {"type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", **_LLAMA3, "original_max_position_embeddings": 64},
    {"rope_type": "llama3", **_LLAMA3},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"type": "yarn", "factor": 4.0},
    {"type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": None, "attention_factor": 0.5},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "finetuned": True},
    # the two disagree: the newer one counts
    {"rope_type": "default", "type": "linear", "factor": 2.0},
    {"rope_type": "linear", "type": "yarn", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
]
CASES: Final[list[dict[str, Any]]] = [
    {},
    {"rope_scaling": None},
    {"rope_scaling": {}},
    {"rope_theta": 500.0},
    {"rope_theta": 500.0, "rope_scaling": None},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}, "rope_theta": 70.0},
    {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32},
    *({"rope_scaling": scaled} for scaled in SCALED),
    *({"rope_parameters": scaled} for scaled in SCALED),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_frequencies_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    for fields in CASES:
        raw = _raw(family, **fields)
        wanted, got = _turns(_theirs(tmp_path, raw)), _turns(_ours(raw))
        assert torch.equal(got.inv_freq, wanted.inv_freq), fields
        assert got.attention_scaling == wanted.attention_scaling, fields


@pytest.mark.parametrize("family", ["phi", "gpt_neox"])
@pytest.mark.parametrize(
    "fields",
    [
        {"partial_rotary_factor": 0.25},
        {"rotary_pct": 1.0, "rotary_emb_base": 500},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.75}},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "partial_rotary_factor": 0.75},
    ],
)
def test_parts_of_heads_are_those_of_transformers(tmp_path: Path, family: str, fields: Any) -> None:
    raw = _raw(family, **fields)
    assert torch.equal(_turns(_ours(raw)).inv_freq, _turns(_theirs(tmp_path, raw)).inv_freq)


def _longrope(**fields: Any) -> dict[str, Any]:
    scaled = {"type": "longrope", **_FOUR, "original_max_position_embeddings": 64, **fields}
    return _raw("llama", num_attention_heads=8, num_key_value_heads=8, rope_scaling=scaled)


def test_a_longrope_is_served_as_long_as_its_frequencies_are_known(tmp_path: Path) -> None:
    raw = _longrope()
    wanted, got = _turns(_theirs(tmp_path, raw)), _turns(_ours(raw, 64))
    assert torch.equal(got.inv_freq, wanted.inv_freq)
    assert got.attention_scaling == wanted.attention_scaling > 1
    for context in (0, 65):
        with pytest.raises(ConfigError, match=r"longer than 64 tokens .*; deploy with --context 64"):
            spec_of(raw, "float32", context)


def test_a_longrope_of_a_runtime_is_looked_at_again() -> None:
    """By whichever name it has."""
    whole = spec_of(_longrope(), "float32", 64).config["rope_parameters"]
    assert isinstance(whole, dict)
    assert rope.why_not(whole, "llama", 8, 64) == ""
    assert "deploy with --context 64" in rope.why_not(whole, "llama", 8, 65)
    old = {name: value for name, value in whole.items() if name != "rope_type"}
    assert "deploy with --context 64" in rope.why_not(old, "llama", 8, 65)
    del old["original_max_position_embeddings"]
    assert "original_max_position_embeddings is missing" in rope.why_not(old, "llama", 8, 65)


@pytest.mark.parametrize("scaled", [None, *SCALED[2:6]])
def test_answers_are_those_of_transformers(scaled: Any) -> None:
    """Beside a longer sequence, too."""
    model: Any = reference("llama", rope_scaling=scaled, max_position_embeddings=256)
    made = engine(model, 32)
    asked = {number: begin(made, number, prompt, 8) for number, prompt in enumerate(prompts(1, 20, 200))}
    while not made.batch.idle:
        assert made.step() is not None
    for sequence in asked.values():
        assert wrong_tokens(model, sequence.tokens, sequence.prompt) == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (
            {"rope_scaling": {"type": "su", "factor": 2.0}},
            "rope_scaling: the rope_type 'su' is not served; these are",
        ),
        ({"rope_scaling": {"rope_type": None, "type": "linear", "factor": 2.0}}, "the rope_type None is not served"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 4]}}, "the rope_type 'mrope' is not served"),
        ({"rope_scaling": {"rope_type": 1, "factor": 2.0}}, "the rope_type 1 is not served"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing, which a rope of type linear wants"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "factor is missing, which a rope of type linear wants"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor cannot be '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor cannot be 0"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor cannot be True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "how": "so"}}, "how cannot be 'so'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "how": {"a": 1}}}, "how cannot be .'a': 1."),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": None}}, "is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}}, "cannot be 0"),
        ({"rope_scaling": {"rope_type": "llama3", **_LLAMA3, "low_freq_factor": None}}, "low_freq_factor is missing"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_theta": 0}, "rope_theta cannot be 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor cannot be 0.5: llama rotates all of each head"),
        ({"head_dim": 3}, "3 of the 3 numbers of a head are rotated"),
        ({"rope_scaling": "linear"}, "rope_scaling: it cannot be 'linear'"),
        ({"rope_scaling": _longrope(short_factor=[1.0])["rope_scaling"]}, "short_factor has 1 numbers, and 8 are"),
        ({"rope_scaling": _longrope(long_factor=[0.0] * 8)["rope_scaling"]}, "long_factor cannot be"),
        ({"rope_scaling": _longrope(long_factor=3)["rope_scaling"]}, "long_factor cannot be 3"),
    ],
)
def test_what_is_refused(fields: Any, what: str) -> None:
    with pytest.raises((BadFolder, ConfigError), match=what):
        spec_of(_raw("llama", **fields), "float32", 0)


def test_each_type_and_key_that_transformers_has_is_tried_here() -> None:
    """One that a newer version has wants a decision."""
    tried = [*SCALED, *CASES, _longrope()["rope_scaling"], {"partial_rotary_factor": 1.0}]
    kinds = {kind for each in tried for kind in (each.get("rope_type"), each.get("type")) if kind is not None}
    assert kinds == rope.KINDS.keys() == {"default", *ROPE_INIT_FUNCTIONS} - {"proportional"}
    assert {key for each in tried for key in each} >= RopeParameters.__annotations__.keys() - {"mrope_section"}
