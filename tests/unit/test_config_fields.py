"""Every field of a family's configuration: what it changes is computed as `transformers` does, or refused."""

from typing import Any, Final

import pytest
import torch
from language_models import TINY, prompts, reference, spec_of, wrong_tokens
from runtime_engines import begin, engine
from transformers import AutoConfig, PreTrainedConfig

from dormouse.client_shim.llm import folder
from dormouse.client_shim.llm.folder import BadFolder

SIZES: Final = """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads ffn_dim
    max_position_embeddings n_embd n_layer n_head n_positions
"""
"""All tiny models have others than the defaults."""

HARMLESS: Final[dict[str, Any]] = {
    "use_cache": False,
    "bos_token_id": 5,
    "eos_token_id": 6,
    "pad_token_id": 7,
    "initializer_range": 0.5,
    "init_std": 0.5,
    "attention_dropout": 0.5,
    "hidden_dropout": 0.5,
    "classifier_dropout": 0.5,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
    "attn_pdrop": 0.5,
    "dropout": 0.5,
    "layerdrop": 0.5,
    "summary_type": "last",
    "summary_use_proj": False,
    "summary_activation": "tanh",
    "summary_proj_to_labels": False,
    "summary_first_dropout": 0.5,
    "reorder_and_upcast_attn": True,
    "pretraining_tp": 4,
    "is_decoder": True,
}
_GATED: Final[list[dict[str, Any]]] = [
    {"rms_norm_eps": 0.5},
    {"hidden_act": "gelu"},
    {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}},
]
_WINDOWS: Final[list[dict[str, Any]]] = [
    {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    {"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
]
_TIED: Final[dict[str, Any]] = {"tie_word_embeddings": True}
_APART: Final[dict[str, Any]] = {"tie_word_embeddings": False}
HONOURED: Final[dict[str, list[dict[str, Any]]]] = {
    "llama": [*_GATED, _TIED, {"head_dim": 24}, {"attention_bias": True}, {"mlp_bias": True}],
    "qwen2": [*_GATED, _TIED, *_WINDOWS],
    "qwen3": [*_GATED, _TIED, *_WINDOWS, {"head_dim": 16}, {"attention_bias": True}],
    "mistral": [*_GATED, _TIED, {"head_dim": 24}, {"sliding_window": None}, {"sliding_window": 3}],
    "gemma2": [
        *_GATED[::2],
        _APART,
        {"hidden_activation": "gelu"},
        {"head_dim": 24},
        {"attention_bias": True},
        {"query_pre_attn_scalar": 300},
        {"sliding_window": 3},
        {"layer_types": ["full_attention"] * 4},
        {"final_logit_softcapping": None},
        {"final_logit_softcapping": 2.0},
        {"attn_logit_softcapping": None},
        {"attn_logit_softcapping": 0.5},
    ],
    "phi": [
        _TIED,
        {"hidden_act": "relu"},
        {"layer_norm_eps": 0.5},
        {"qk_layernorm": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0, "partial_rotary_factor": 1.0}},
    ],
    "gpt2": [
        _APART,
        {"n_inner": 80},
        {"activation_function": "relu"},
        {"layer_norm_epsilon": 0.5},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
    ],
    "opt": [
        _APART,
        {"activation_function": "gelu"},
        {"do_layer_norm_before": False},
        {"_remove_final_layer_norm": True},
        {"word_embed_proj_dim": 32},
        {"enable_bias": False},
        {"layer_norm_elementwise_affine": False},
    ],
    "gpt_neox": [
        _TIED,
        {"hidden_act": "relu"},
        {"layer_norm_eps": 0.5},
        {"use_parallel_residual": False},
        {"attention_bias": False},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0, "partial_rotary_factor": 1.0}},
    ],
}
REFUSED: Final[dict[str, list[dict[str, Any]]]] = {
    "gemma2": [{"use_bidirectional_attention": True}],
    "gpt2": [{"add_cross_attention": True}],
    # these are other families' and other programs', and nothing of what serves this family reads them
    "llama": [
        {"attention_multiplier": 0.0125},
        {"embedding_multiplier": 12},
        {"residual_multiplier": 0.22},
        {"logits_scaling": 8.0},
        {"logit_scale": 0.0625},
        {"scale_emb": 12},
        {"clip_qkv": 8.0},
        {"use_qk_norm": True},
        {"qk_layernorm": True},
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"query_pre_attn_scalar": 144},
        {"sliding_window": 4096},
        {"layer_types": ["sliding_attention"] * 3},
        {"attention_chunk_size": 128},
        {"no_rope_layers": [1, 1, 0]},
        {"rope_interleaved": True},
        {"is_causal": False},
        {"rotary_pct": 0.25},
        {"alibi": True},
        {"scale_attn_by_inverse_layer_idx": True},
        {"use_bidirectional_attention": True},
        {"is_encoder_decoder": True},
    ],
}
OFF: Final[dict[str, Any]] = {
    "attention_multiplier": 1.0,
    "logit_scale": 1,
    "clip_qkv": None,
    "use_qk_norm": False,
    "sliding_window": None,
    "layer_types": ["full_attention"] * 3,
    "rope_interleaved": False,
    "is_causal": True,
    "no_rope_layers": [],
    "rotary_pct": 1.0,
    "is_encoder_decoder": False,
}


def _model(family: str, fields: Any) -> Any:
    """With nothing that is zero or one by chance."""
    model = reference(family, **fields)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


@torch.inference_mode()
def _logits(family: str, fields: Any) -> torch.Tensor:
    logits: torch.Tensor = _model(family, fields)(torch.tensor(prompts(3, 40))).logits
    return logits


def _raw(family: str, **fields: Any) -> dict[str, Any]:
    raw: dict[str, Any] = {**reference(family).config.to_dict(), **fields}
    return raw


@pytest.mark.parametrize("family", TINY)
def test_each_field_has_its_place(family: str) -> None:
    """One that a newer `transformers` has wants a decision."""
    of_all = PreTrainedConfig().to_dict()
    tried = {name for fields in HONOURED[family] + REFUSED.get(family, []) for name in fields}
    fields = AutoConfig.for_model(family).to_dict().keys() - of_all.keys()
    assert fields - set(SIZES.split()) - HARMLESS.keys() - tried == set()


@pytest.mark.parametrize("family", TINY)
def test_what_changes_nothing(family: str) -> None:
    fields = {name: HARMLESS[name] for name in HARMLESS.keys() & AutoConfig.for_model(family).to_dict().keys()}
    assert torch.equal(_logits(family, fields), _logits(family, {}))


@pytest.mark.parametrize(("family", "fields"), [(family, each) for family in HONOURED for each in HONOURED[family]])
def test_what_changes_something_is_computed(family: str, fields: Any) -> None:
    plain = _logits(family, {})
    changed = _logits(family, fields)
    assert changed.shape != plain.shape or (changed - plain).abs().max() > 1e-3
    model = _model(family, fields)
    spec = folder.spec_of(model.config.to_dict(), "float32", 0)
    assert spec.config == spec_of(model).config
    made = engine(model, 32)
    sequence = begin(made, 1, prompts(3, 40)[0], 8)
    while not made.batch.idle:
        assert made.step() is not None
    assert wrong_tokens(model, sequence.tokens, sequence.prompt) == []


@pytest.mark.parametrize(("family", "fields"), [(family, each) for family in REFUSED for each in REFUSED[family]])
def test_what_is_not_computed_is_refused(family: str, fields: Any) -> None:
    ((name, value),) = fields.items()
    with pytest.raises(BadFolder, match=f"config.json has {name}: ") as raised:
        folder.spec_of(_raw(family, **fields), "float32", 0)
    assert repr(value) in str(raised.value)


@pytest.mark.parametrize("name", OFF)
def test_what_is_off_is_no_reason(name: str) -> None:
    assert folder.spec_of(_raw("llama", **{name: OFF[name]}), "float32", 0) == folder.spec_of(
        _raw("llama"), "float32", 0
    )


@pytest.mark.parametrize("name", ["quantization_config", "compression_config", "quantization"])
@pytest.mark.parametrize("value", [{}, [], "", False, {"quant_method": "awq"}, {"bits": 4}])
def test_quantized_as_transformers_has_it(name: str, value: Any) -> None:
    """It loads what says null, and fails for all else that is no method."""
    folder.spec_of(_raw("llama", **{name: None}), "float32", 0)
    with pytest.raises(BadFolder, match=f"config.json has {name}: it is quantized"):
        folder.spec_of(_raw("llama", **{name: value}), "float32", 0)
