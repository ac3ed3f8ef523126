"""Folders of LoRA adapters that are refused, and what is said of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import PREFIX, Q, base_model, configure, plain, refused, save_adapter
from safetensors.torch import load_file, save_file

from dormouse.client_shim.llm.adapter import WEIGHTS
from dormouse.client_shim.llm.adapter_config import CONFIG
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import AdapterModule, AdapterSpec


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plain(tmp_path_factory.mktemp("adapter"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"use_dora": True}, "has use_dora: DoRA"),
        ({"use_qalora": True}, "has use_qalora: QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "has use_bdlora: block-diagonal"),
        ({"alora_invocation_tokens": [3]}, "has alora_invocation_tokens: an activated LoRA"),
        ({"arrow_config": {"top_k": 2}}, "has arrow_config: a router"),
        ({"kasa_config": {"beta": 1}}, "has kasa_config: KaSA"),
        ({"monteclora_config": {"n": 1}}, "has monteclora_config: MonteCLoRA"),
        ({"velora_config": {"n": 1}}, "has velora_config: VeLoRA"),
        ({"layer_replication": [[0, 1]]}, "has layer_replication: layers"),
        ({"trainable_token_indices": [1]}, "put embed_tokens into modules_to_save"),
        ({"target_parameters": ["experts"]}, "has target_parameters: parameters without a module"),
        ({"use_something_new": 1}, "has 'use_something_new', which is not known"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only adapters of type LORA"),
        ({"peft_type": None}, "peft_type is None"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which has changed the base's"),
        ({"init_lora_weights": "olora"}, "save it with path_initial_model_for_weight_conversion"),
        ({"r": 0}, "the rank of model.layers.0.self_attn.q_proj is 0; it has to be 1 or more"),
        ({"r": -4}, "is -4; it has to be 1 or more"),
        ({"r": 512}, "is 512; 1 to 256 are served"),
        ({"r": 10**30}, "adapter_config.json: "),
        ({"rank_pattern": {"v_proj": 512}}, "v_proj is 512; 1 to 256"),
        ({"rank_pattern": {"v_proj": 2}}, r"v_proj.lora_A.weight' is [4, 64], and has to be [2, 64]"),
        ({"rank_pattern": {"v_(": 2}}, "is no regular expression"),
        ({"r": "4"}, "Expected `int`, got `str` - at `$.r`"),
        ({"r": True}, "Expected `int`, got `bool`"),
        ({"lora_alpha": 0}, "the scale of model.layers.0.self_attn.q_proj is 0"),
        ({"lora_alpha": float("nan")}, "the scale of model.layers.0.self_attn.q_proj is nan"),
        ({"bias": "some"}, "Invalid enum value 'some' - at `$.bias`"),
        ({"target_modules": None}, "at `$.target_modules`"),
        ({"target_modules": ["q_proj", "v_proj", "w_proj"]}, "has 'w_proj', and the base has no such module"),
        ({"target_modules": ["q_proj", "v_proj", ""]}, "has '', and the base has no such module"),
        ({"target_modules": r".*w_proj"}, "has '.*w_proj', and the base has no such module"),
        ({"target_modules": ["self_attn"]}, "self_attn, a LlamaAttention; linear modules and embeddings"),
        ({"target_modules": [f"m{n}" for n in range(5000)]}, "target_modules has 5,000 entries, more than 4,096"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "lacks base_model.model.model.layers.0.self_attn.k_proj"),
        ({"target_modules": ["q_proj"]}, "v_proj.lora_A.weight', for which adapter_config.json does not ask"),
        ({"exclude_modules": ["q_proj", "v_proj"]}, "nothing of the base is adapted"),
        ({"layers_to_transform": [7]}, "nothing of the base is adapted"),
        ({"target_modules": ".*q_proj", "layers_to_transform": [0]}, "goes with a list of target_modules"),
        ({"layers_pattern": "layers"}, "layers_pattern is there, and layers_to_transform is not"),
        ({"modules_to_save": ["score"]}, "modules_to_save has 'score', and the base has no such module"),
        ({"modules_to_save": [""]}, "modules_to_save has '', and the base has no such module"),
        ({"modules_to_save": ["lm_head"]}, "lacks base_model.model.lm_head.weight, which adapter_config.json wants"),
        ({"lora_bias": True}, "lora_B.bias"),
        ({"target_modules": ["embed_tokens"], "lora_bias": True}, "lora_bias goes with linear modules"),
    ],
)
def test_configurations_that_are_not_served(folder: Path, fields: Any, what: str) -> None:
    configure(folder, **fields)
    assert what in refused(folder)


def _renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return rename


def _poisoned(value: float) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors[f"{Q}.lora_B.weight"].view(-1)[-1:].fill_(value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_renamed(PREFIX, "other."), "matches nothing in the base"),
        (_renamed(PREFIX, ""), "matches nothing in the base"),
        (
            _renamed("layers.0", "layers.9"),
            "layers.9.self_attn.q_proj.lora_A.weight', which matches nothing in the base",
        ),
        (_renamed("v_proj", "k_proj"), "k_proj.lora_A.weight', for which adapter_config.json does not ask"),
        (lambda t: t.clear(), "lacks base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        (lambda t: t.pop(f"{Q}.lora_A.weight"), "lacks base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(64)}), "it is DoRA's, which is not served"),
        (
            lambda t: t.update({f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 64)}),
            "single rows",
        ),
        (lambda t: t.update({f"{Q}.base_layer.bias": torch.ones(64)}), "matches nothing in the base"),
        (
            lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(320, 32)}),
            "[320, 32], and has to be [320, 64] by adapter_config.json and base: the adapter is another model's",
        ),
        (
            lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(322, 64)}),
            "[322, 64], and has to be [320, 64]: the embeddings were resized to 322 tokens",
        ),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 32)}), "is [4, 32], and has to be [4, 64] by"),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(256)}), "is [256], and has to be [4, 64] by"),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int8)}),
            "is of type I8; adapters of F32",
        ),
        (lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 64).to(torch.float8_e4m3fn)}), "is of type F8_E4M3"),
        (_poisoned(float("nan")), "lora_B.weight' has NaN or infinite values"),
        (_poisoned(float("-inf")), "lora_B.weight' has NaN or infinite values"),
    ],
)
def test_tensors_that_are_not_served(folder: Path, change: Any, what: str) -> None:
    path = folder / WEIGHTS
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    assert what in refused(folder)


@pytest.mark.parametrize(
    ("save", "config"),
    [
        ({}, {"target_modules": ["embed_tokens"]}),
        ({"save_embedding_layers": True}, {"target_modules": ["q_proj"]}),
        ({}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ({"save_embedding_layers": True}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ({"save_embedding_layers": True}, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
        ({}, {"target_modules": ["q_proj", "lm_head"]}),
    ],
)
@pytest.mark.parametrize("tokens", [330, 310])
def test_embeddings_that_were_resized(tmp_path: Path, tokens: int, save: Any, config: Any) -> None:
    """Whichever of their copies comes first in the file."""
    base = base_model(num_hidden_layers=1)
    base.resize_token_embeddings(tokens)
    save_adapter(tmp_path, base, save, **config)
    said = refused(tmp_path)
    assert f"the embeddings were resized to {tokens} tokens, which is not served over a base of 320" in said
    assert f"call resize_token_embeddings({tokens}) on the base" in said
    assert "another" not in said


def test_an_adapter_of_another_base(tmp_path: Path) -> None:
    plain(tmp_path)
    assert "[4, 64], and has to be [4, 48]" in refused(tmp_path, hidden_size=48)
    assert "has 'q_proj', and the base has no such module" in refused(tmp_path, "gpt2")
    save_adapter(tmp_path, base_model(num_hidden_layers=2), target_modules=["q_proj", "v_proj"])
    assert "layers.1.self_attn.q_proj.lora_A.weight', which matches nothing" in refused(tmp_path)


def test_dora_and_positions_as_peft_writes_them(tmp_path: Path) -> None:
    save_adapter(tmp_path, base_model(num_hidden_layers=1), target_modules=["q_proj"], use_dora=True)
    assert "DoRA" in refused(tmp_path)
    configure(plain(tmp_path), target_modules=["embed_positions"])
    assert "a OPTLearnedPositionalEmbedding" in refused(tmp_path, "opt")


def test_folders_without_what_has_to_be_there(tmp_path: Path) -> None:
    plain(tmp_path)
    weights_path, config_path = tmp_path / WEIGHTS, tmp_path / CONFIG
    data = weights_path.read_bytes()
    weights_path.write_bytes(data[:-4])
    assert "adapter_model.safetensors is truncated" in refused(tmp_path)
    weights_path.unlink()
    assert refused(tmp_path) == "the folder has no adapter_model.safetensors"
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert "pickled (adapter_model.bin), which can run code; save it as adapter_model.safetensors" in refused(tmp_path)
    config_path.write_text(" " * (2 << 20))
    assert "has more than 1,048,576 bytes" in refused(tmp_path)
    config_path.unlink()
    assert refused(tmp_path) == "the folder has no adapter_config.json"


@pytest.mark.parametrize(
    ("field", "value"),
    [("name", ""), ("name", "x" * 513), ("rank", 0), ("rank", 257), ("scale", float("inf")), ("scale", 0.0)],
)
def test_a_module_that_no_adapter_has(field: str, value: Any) -> None:
    module = AdapterModule(**{"name": "a", "kind": "linear", "rank": 8, "scale": 1.0, "bias": False, field: value})
    with pytest.raises(ConfigError):
        AdapterSpec(modules=[module], replaced=[]).check()


def test_a_spec_that_no_adapter_has() -> None:
    module = AdapterModule(name="a", kind="linear", rank=8, scale=1.0, bias=False)
    biased = AdapterModule(name="a", kind="embedding", rank=8, scale=1.0, bias=True)
    AdapterSpec(modules=[module], replaced=["a.weight"]).check()
    for modules, replaced in (
        ([], ["a"]),
        ([module] * 2, []),
        ([module], ["a", "a"]),
        ([module], [""]),
        ([biased], []),
    ):
        with pytest.raises(ConfigError):
            AdapterSpec(modules=modules, replaced=replaced).check()
