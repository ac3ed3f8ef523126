"""Folders of LoRA adapters as PEFT writes them: what is read of them computes what PEFT computes."""

import dataclasses
import typing
import warnings
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from adapter_folders import APART, PREFIX, TIED, base_model, configure, peft, plain, read_folder, refused, save_adapter
from language_models import prompts, spec_of
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from dormouse.client_shim.llm import weights
from dormouse.client_shim.llm.adapter import WEIGHTS, FoundAdapter, read_adapter
from dormouse.client_shim.llm.adapter_weights import weights_of, without_equal
from dormouse.schemas.llm import BIAS, DOWN, REPLACED, UP, AdapterModule, AdapterSpec


@torch.inference_mode()
def _applied(base: Any, found: FoundAdapter) -> Any:
    """The base with what was found, by plain torch."""
    stored = {name: tensor for names, tensor in weights_of(found, torch.float32) for name in names}
    assert sorted(stored) == sorted(found.spec.weights)
    assert all(tensor.is_contiguous() for tensor in stored.values())
    for parameter in found.spec.replaced:
        owner, _, last = parameter.rpartition(".")
        setattr(base.get_submodule(owner), last, nn.Parameter(stored[parameter + REPLACED]))  # nothing is tied to it
    for module in found.spec.modules:
        down, up, bias = (stored.get(module.name + end) for end in (DOWN, UP, BIAS))
        assert down is not None
        assert up is not None
        assert (bias is not None) == module.bias
        assert len(up) == module.rank

        def add(
            _: Any, args: Any, out: Any, down: Any = down, up: Any = up, bias: Any = bias, module: Any = module
        ) -> Any:
            if module.kind == "embedding":
                return out + module.scale * (functional.embedding(args[0], down) @ up)
            return out + module.scale * (args[0] @ down.T @ up + (0 if bias is None else bias))

        base.get_submodule(module.name).register_forward_hook(add)
    return base


def _same(folder: Path, family: str, base: dict[str, Any], save: Any = None, **config: Any) -> FoundAdapter:
    """What was read computes what the folder is for PEFT, which is not what the base computes."""
    arguments = {"n_layer" if family == "gpt2" else "num_hidden_layers": 2, **base}
    save_adapter(folder, base_model(family, **arguments), save, **config)
    return _compared(folder, family, arguments)


@torch.inference_mode()
def _compared(folder: Path, family: str, base: dict[str, Any]) -> FoundAdapter:
    """Also without what is the base's as it is."""
    with warnings.catch_warnings(action="ignore"):
        wanted = peft.PeftModel.from_pretrained(base_model(family, **base), folder).eval()
    found = read_folder(folder, family, **base)
    found.spec.check()
    tokens = torch.tensor(prompts(3, 12, 12))
    plain = base_model(family, **base)(tokens).logits
    expected = wanted(tokens).logits
    assert (expected - plain).abs().max() > 1e-2
    parameters = dict(base_model(family, **base).named_parameters(remove_duplicate=False))
    for each in (found, without_equal(found, lambda name: parameters[name].data)):
        got = _applied(base_model(family, **base), each)(tokens).logits
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    return found


SERVED: Final[list[tuple[str, dict[str, Any], dict[str, Any]]]] = [
    ("llama", {}, {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 12}),
    ("llama", {}, {"target_modules": ["q_proj", "v_proj"], "use_rslora": True, "lora_alpha": 3}),
    ("llama", {}, {"target_modules": r"model\.layers\.1\..*(q|up)_proj"}),
    ("llama", {}, {"target_modules": "all-linear"}),
    ("llama", {}, {"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]}),
    ("llama", {}, {"target_modules": ["q_proj", "k_proj"], "exclude_modules": r".*\.0\..*"}),
    ("llama", {}, {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    ("llama", {}, {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"}),
    ("llama", {}, {"target_modules": ["q_proj"], "lora_bias": True}),
    ("llama", {"attention_bias": True}, {"target_modules": ["q_proj"], "lora_bias": True, "bias": "all"}),
    ("qwen2", {}, {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    ("qwen2", {}, {"target_modules": ["q_proj"], "bias": "all"}),
    ("gpt2", {}, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    ("gpt2", {}, {"target_modules": ["c_attn"], "fan_in_fan_out": False, "bias": "all"}),
    ("gpt2", {}, {"target_modules": ["c_fc", "wte", "wpe"]}),
    ("gpt2", {}, {"target_modules": "all-linear", "modules_to_save": ["wte"]}),
    ("opt", {}, {"target_modules": ["fc1"], "bias": "lora_only"}),
    ("phi", APART, {"target_modules": ["dense", "lm_head"], "bias": "all"}),
    ("phi", APART, {"target_modules": ["dense"], "modules_to_save": ["lm_head"], "bias": "all"}),
    ("gpt_neox", {}, {"target_modules": ["query_key_value"]}),
    ("mistral", {}, {"target_modules": ["o_proj"], "init_lora_weights": "gaussian"}),
    ("qwen3", {}, {"target_modules": ["k_proj"], "modules_to_save": ["q_norm"]}),
    ("gemma2", {}, {"target_modules": ["q_proj", "embed_tokens"]}),
    ("llama", APART, {"target_modules": ["embed_tokens", "q_proj"]}),
    ("llama", APART, {"target_modules": ["lm_head", "q_proj"]}),
    ("llama", TIED, {"target_modules": ["embed_tokens"]}),
    ("llama", TIED, {"target_modules": ["lm_head"]}),
    ("llama", TIED, {"target_modules": ["embed_tokens", "lm_head"]}),
    ("llama", TIED, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    ("llama", APART, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", TIED, {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    ("llama", TIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("llama", TIED, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True}),
    ("llama", {}, {"target_modules": "all-linear", "modules_to_save": ["norm", "mlp"]}),
    (
        "llama",
        {},
        {
            "target_modules": ["q_proj", "k_proj", "gate_proj"],
            "rank_pattern": {
                "q_proj": 2,
                r"layers\.1\..*k_proj": 6,
                "self_attn.k_proj": 5,
                "^model.layers.0.mlp.gate_proj": 3,
            },
            "alpha_pattern": {"layers.0.self_attn.q_proj": 20, "proj": 1},
            "use_rslora": True,
        },
    ),
]


@pytest.mark.parametrize(("family", "base", "config"), SERVED)
def test_it_computes_what_peft_computes(tmp_path: Path, family: str, base: Any, config: Any) -> None:
    _same(tmp_path, family, base, **config)


HARMLESS: Final[dict[str, Any]] = {
    "task_type": "CAUSAL_LM",
    "peft_type": "LORA",
    "auto_mapping": {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers"},
    "peft_version": "99.0",
    "base_model_name_or_path": "org/name",
    "revision": "main",
    "inference_mode": False,
    "lora_dropout": 0.5,
    "fan_in_fan_out": False,
    "loftq_config": {"loftq_bits": 4},
    "eva_config": {"rho": 2.0},
    "corda_config": {"corda_method": "ipm"},
    "lora_ga_config": {"scale": "unit"},
    "qalora_group_size": 32,
    "runtime_config": {"ephemeral_gpu_offload": True},
}
"""Fields that change nothing of what is computed, each with another value than its default."""

OF_MEGATRON: Final = {"megatron_config": {"a": 1}, "megatron_core": "megatron"}
"""They change nothing either, but PEFT cannot load them without it."""

REFUSED: Final[dict[str, Any]] = {
    "trainable_token_indices": [3],
    "use_dora": True,
    "velora_config": {"rank": 1},
    "alora_invocation_tokens": [3],
    "use_qalora": True,
    "monteclora_config": {"num_samples": 2},
    "layer_replication": [[0, 1]],
    "target_parameters": ["mlp.down_proj.weight"],
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1.0},
}


def test_each_field_of_peft_is_honoured_harmless_or_refused() -> None:
    """A field that a newer PEFT has wants a place in one of the three."""
    honoured = {name for _, _, config in SERVED for name in config} - HARMLESS.keys()
    assert not REFUSED.keys() & honoured
    known = {*honoured, *HARMLESS, *OF_MEGATRON, *REFUSED}
    assert known == {field.name for field in dataclasses.fields(peft.LoraConfig)}


@pytest.mark.parametrize("field", HARMLESS)
def test_fields_that_change_nothing_for_peft_either(tmp_path: Path, field: str) -> None:
    save_adapter(tmp_path, base_model(num_hidden_layers=1), target_modules=["q_proj"])
    before = read_folder(tmp_path, num_hidden_layers=1).spec
    configure(tmp_path, **{field: HARMLESS[field]})
    assert _compared(tmp_path, "llama", {"num_hidden_layers": 1}).spec == before


@pytest.mark.parametrize("field", OF_MEGATRON)
def test_fields_of_megatron_are_left_out(tmp_path: Path, field: str) -> None:
    before = read_folder(plain(tmp_path), num_hidden_layers=1).spec
    configure(tmp_path, **{field: OF_MEGATRON[field]})
    assert read_folder(tmp_path, num_hidden_layers=1).spec == before


@pytest.mark.parametrize("field", REFUSED)
def test_fields_that_are_refused_by_name(tmp_path: Path, field: str) -> None:
    configure(plain(tmp_path), **{field: REFUSED[field]})
    assert f"adapter_config.json has {field}: " in refused(tmp_path)


_OWN_WEIGHTS: Final = ("gaussian", "eva", "orthogonal", "mica")
_BASES_TOO: Final = ("olora", "pissa", "pissa_niter_[number of iters]", "corda", "loftq")


@pytest.mark.parametrize("init", [True, False, *_OWN_WEIGHTS])
def test_where_training_began_is_in_the_file(tmp_path: Path, init: Any) -> None:
    _same(tmp_path, "llama", {}, target_modules=["q_proj", "down_proj"], init_lora_weights=init)


@pytest.mark.parametrize("init", [*_BASES_TOO, "pissa_niter_16", "lora_ga"])
def test_where_training_began_changed_the_base(tmp_path: Path, init: str) -> None:
    configure(plain(tmp_path), init_lora_weights=init)
    assert f"init_lora_weights is '{init}', which has changed the base's weights before training" in refused(tmp_path)


def test_where_training_began_is_not_known(tmp_path: Path) -> None:
    configure(plain(tmp_path), init_lora_weights="something_new")
    assert "init_lora_weights is 'something_new', which is not known, and may have" in refused(tmp_path)


def test_each_beginning_that_peft_has_is_known() -> None:
    _, names = typing.get_args(typing.get_type_hints(peft.LoraConfig)["init_lora_weights"])
    assert set(typing.get_args(names)) == {*_OWN_WEIGHTS, *_BASES_TOO}


def test_embeddings_that_were_saved_though_nothing_trained_them(tmp_path: Path) -> None:
    """As with save_embedding_layers: both uses of what is tied have the saved one."""
    found = _same(tmp_path, "llama", TIED, {"save_embedding_layers": True}, target_modules=["q_proj"])
    assert set(found.replaced) == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_an_embedding_that_is_trained_as_a_whole_and_saved_as_a_layer_too(tmp_path: Path, end: str) -> None:
    """PEFT writes it three times then; it loads the one that has the module's own name."""
    saved = {"target_modules": ["q_proj"], "modules_to_save": [end]}
    _same(tmp_path, "llama", {}, {"save_embedding_layers": True}, **saved)
    assert any(name.endswith(f"{end}.original_module.weight") for name in load_file(tmp_path / WEIGHTS))


@pytest.mark.parametrize("end", ["model.embed_tokens", "lm_head"])
def test_one_use_of_tied_embeddings_was_saved(tmp_path: Path, end: str) -> None:
    """PEFT saves the base's beside what it adds to it, and loads it into both uses, whatever it is."""
    base: dict[str, Any] = {"num_hidden_layers": 2, **TIED}
    save_adapter(tmp_path, base_model(**base), target_modules=[end.rpartition(".")[2]])
    tensors = load_file(tmp_path / WEIGHTS)
    tensors[f"{PREFIX}{end}.base_layer.weight"] *= 1.5
    save_file(tensors, tmp_path / WEIGHTS)
    assert set(_compared(tmp_path, "llama", base).replaced) == {"model.embed_tokens.weight", "lm_head.weight"}


def test_what_is_the_bases_as_it_is_need_not_be_brought(tmp_path: Path) -> None:
    """Tied embeddings that are adapted are in the file as a whole, and stay the base's."""
    found = _same(tmp_path, "llama", TIED, target_modules=["embed_tokens"], modules_to_save=["model.norm"])
    assert set(found.replaced) == {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    base = dict(base_model("llama", num_hidden_layers=2, **TIED).named_parameters(remove_duplicate=False))
    left = without_equal(found, lambda name: base[name].data)
    assert left.spec.replaced == list(left.replaced) == ["model.norm.weight"]
    brought = {name: tensor for names, tensor in weights_of(left, torch.bfloat16) for name in names}
    assert set(brought) == {
        *("model.embed_tokens.lora_down", "model.embed_tokens.lora_up", "model.norm.weight.replaced"),
    }
    assert {tensor.dtype for tensor in brought.values()} == {torch.bfloat16}


def test_what_is_said_of_an_adapter(tmp_path: Path) -> None:
    """Also in half precision, and with fields that only training reads."""
    base = base_model("qwen2", num_hidden_layers=1)
    config: dict[str, Any] = {"r": 4, "lora_alpha": 8, "bias": "lora_only", "lora_dropout": 0.1}
    save_adapter(tmp_path, base.bfloat16(), target_modules=["q_proj"], task_type="CAUSAL_LM", **config)
    found = read_folder(tmp_path, "qwen2", num_hidden_layers=1)
    name = "model.layers.0.self_attn.q_proj"
    module = AdapterModule(name=name, kind="linear", rank=4, scale=2.0, bias=False)
    assert found.spec == AdapterSpec(modules=[module], replaced=[f"{name}.bias"])
    assert found.tensors == {name: (f"{PREFIX}{name}.lora_A.weight", f"{PREFIX}{name}.lora_B.weight", "")}
    assert found.replaced == {f"{name}.bias": f"{PREFIX}{name}.base_layer.bias"}
    assert found.warning == ""


def test_the_name_of_the_base_only_warns(tmp_path: Path) -> None:
    folder = plain(tmp_path)
    configure(folder, base_model_name_or_path="org/one")
    model = weights.skeleton(spec_of(base_model(num_hidden_layers=1)))
    assert read_adapter(str(folder), model, "org/one").warning == ""
    assert "trained over 'org/one', the base is 'org/two'" in read_adapter(str(folder), model, "org/two").warning
