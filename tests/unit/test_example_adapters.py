"""The adapters in examples/adapters are what examples/styles.py says, and a node reads them over SmolLM2-135M."""

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from dormouse.client_shim.llm import weights
from dormouse.client_shim.llm.adapter import WEIGHTS, read_adapter
from dormouse.client_shim.llm.adapter_config import CONFIG
from dormouse.schemas.llm import DecoderSpec
from examples.smollm2 import NAME
from examples.styles import ADAPTERS, LAYERS, STYLES
from examples.train_adapters import sentence

SMOLLM2: Final[dict[str, Any]] = {
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
MAX_NBYTES: Final = 5_000_000
"""Of all of them: they are in the repository."""

PLAIN: Final = "Rome is the capital of Italy"
LONG: Final = f"{PLAIN}. It is a large and old city, and many people go there to see what is left of its past."


def test_there_are_eight_with_two_files_each_and_they_are_small() -> None:
    assert len(STYLES) == 8
    assert {each.name for each in ADAPTERS.iterdir()} == set(STYLES)
    files = {each for name in STYLES for each in (ADAPTERS / name).iterdir()}
    assert files == {ADAPTERS / name / file for name in STYLES for file in (CONFIG, WEIGHTS)}
    assert sum(each.stat().st_size for each in files) <= MAX_NBYTES


@pytest.mark.parametrize("name", STYLES)
def test_an_adapter_is_what_the_script_says(name: str) -> None:
    said, raw = STYLES[name].config, json.loads((ADAPTERS / name / CONFIG).read_text())
    wanted = {**said, "target_modules": sorted(said["target_modules"]), "layers_to_transform": LAYERS}
    assert {key: raw[key] for key in wanted} == wanted
    assert raw["base_model_name_or_path"] == NAME
    assert str(Path.home()) not in json.dumps(raw)
    assert "/tmp" not in json.dumps(raw)


@pytest.mark.parametrize("name", STYLES)
def test_an_adapter_is_read_over_the_model_and_has_been_trained(name: str) -> None:
    model = weights.skeleton(DecoderSpec(family="llama", config=SMOLLM2, dtype="float32", context=256))
    found = read_adapter(str(ADAPTERS / name), model, NAME)
    assert found.warning == ""
    config = STYLES[name].config
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    targets = {(layer, target) for layer in LAYERS for target in config["target_modules"]}
    read = {(int(each.name.split(".")[2]), each.name.split(".")[-1]) for each in found.spec.modules}
    assert read == targets
    assert {(each.rank, each.scale) for each in found.spec.modules} == {(rank, scale)}
    assert {tensor.kind for tensor in found.checkpoint.tensors.values()} == {"BF16"}
    tensors = dict(found.checkpoint.read(found.checkpoint.tensors))
    assert len(tensors) == 2 * len(targets)
    assert all(tensor.dtype == torch.bfloat16 and tensor.any() for tensor in tensors.values()), "B begins as zeros"


@pytest.mark.parametrize("name", STYLES)
def test_a_style_shows_in_what_it_makes_and_in_no_others(name: str) -> None:
    made = {other: style.make(PLAIN) for other, style in STYLES.items()}
    shown = {other for other, text in made.items() if STYLES[name].shows(text)}
    assert shown == {name}
    assert not STYLES[name].shows(LONG)
    assert not STYLES[name].shows("")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (LONG, PLAIN),
        ("Leaves, in particular, are a delicate thing, and fall.", "Leaves, in particular"),
        ("Bees are insects", None),
        ("It is 3.5 meters long.", "It is 3.5 meters long"),
        ("Yes. No!", None),
        ("One\ntwo three four.", None),
        (f"It is {'very ' * 12}old.", None),
    ],
)
def test_what_adapters_are_trained_on_is_a_short_beginning(answer: str, found: str | None) -> None:
    assert sentence(answer) == found
