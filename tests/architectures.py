"""Architectures from `transformers`, unmodified: tiny configurations, seeded random weights, seeded inputs.

Also deployed as it is, as the first part of a function (test_node.py), so it imports nothing of this repository.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers


def _ids(*shape: int, low: int = 3, high: int = 90) -> torch.Tensor:
    return torch.randint(low, high, shape)


def _text(**extra: Any) -> dict[str, Any]:
    ids = _ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    return {"input_ids": ids, "attention_mask": mask, **extra}


_SMALL = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
}
_LLAMA = _SMALL | {"num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}


def _vision(size: int = 32) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


_SEQ2SEQ = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}

_AUDIO = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
}

t: Any = transformers
CASES: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "bert": (lambda: t.BertForQuestionAnswering(t.BertConfig(**_SMALL)), _text),
    "roberta": (lambda: t.RobertaForSequenceClassification(t.RobertaConfig(**_SMALL)), _text),
    "distilbert": (
        lambda: t.DistilBertModel(t.DistilBertConfig(vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=48)),
        _text,
    ),
    "albert": (lambda: t.AlbertModel(t.AlbertConfig(**_SMALL, embedding_size=16)), _text),
    "electra": (lambda: t.ElectraModel(t.ElectraConfig(**_SMALL, embedding_size=16)), _text),
    "deberta-v2": (
        lambda: t.DebertaV2Model(t.DebertaV2Config(**_SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"])),
        _text,
    ),
    "mpnet": (lambda: t.MPNetModel(t.MPNetConfig(**_SMALL)), _text),
    "gpt2": (
        lambda: t.GPT2LMHeadModel(t.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
        _text,
    ),
    "llama": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**_LLAMA)), _text),
    "mistral": (lambda: t.MistralForCausalLM(t.MistralConfig(**_LLAMA, sliding_window=4)), _text),
    "qwen2": (lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**_LLAMA)), _text),
    "mixtral": (lambda: t.MixtralForCausalLM(t.MixtralConfig(**_LLAMA, num_local_experts=3)), _text),
    "opt": (
        lambda: t.OPTForCausalLM(
            t.OPTConfig(
                vocab_size=99,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=48,
                word_embed_proj_dim=32,
            )
        ),
        _text,
    ),
    "bloom": (lambda: t.BloomForCausalLM(t.BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4)), _text),
    "t5": (
        lambda: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
        ),
        lambda: _text(decoder_input_ids=_ids(2, 5)),
    ),
    "bart": (
        lambda: t.BartForConditionalGeneration(t.BartConfig(**_SEQ2SEQ)),
        lambda: _text(decoder_input_ids=_ids(2, 5)),
    ),
    "vit": (lambda: t.ViTForImageClassification(t.ViTConfig(**_SMALL, image_size=32, patch_size=8)), _vision),
    "deit": (lambda: t.DeiTModel(t.DeiTConfig(**_SMALL, image_size=32, patch_size=8)), _vision),
    "swin": (
        lambda: t.SwinModel(
            t.SwinConfig(image_size=32, patch_size=2, embed_dim=8, depths=[1, 2], num_heads=[2, 2], window_size=4)
        ),
        _vision,
    ),
    "convnext": (
        lambda: t.ConvNextModel(t.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1])),
        lambda: _vision(64),
    ),
    "resnet": (
        lambda: t.ResNetForImageClassification(
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1])
        ),
        lambda: _vision(64),
    ),
    "mobilenet-v2": (lambda: t.MobileNetV2Model(t.MobileNetV2Config(depth_multiplier=0.25)), lambda: _vision(64)),
    "clip": (
        lambda: t.CLIPModel(
            t.CLIPConfig(
                text_config=_SMALL | {"max_position_embeddings": 32, "eos_token_id": 2},
                vision_config=_SMALL | {"image_size": 32, "patch_size": 8},
                projection_dim=16,
            )
        ),
        lambda: _text() | _vision(),
    ),
    "whisper": (
        lambda: t.WhisperForConditionalGeneration(
            t.WhisperConfig(**_SEQ2SEQ, num_mel_bins=8, max_source_positions=20, max_target_positions=20)
        ),
        lambda: {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": _ids(2, 4)},
    ),
    "wav2vec2": (lambda: t.Wav2Vec2ForCTC(t.Wav2Vec2Config(**_AUDIO)), lambda: {"input_values": torch.randn(2, 400)}),
    "hubert": (lambda: t.HubertModel(t.HubertConfig(**_AUDIO)), lambda: {"input_values": torch.randn(2, 400)}),
}


def build(name: str) -> tuple[Any, dict[str, Any]]:
    """A model on the CPU and its inputs, the same in every process."""
    torch.manual_seed(7)
    make, inputs = CASES[name]
    return make().eval(), inputs()


def tensors(output: Any) -> list[torch.Tensor]:
    """What of a model's output is compared."""
    values = list(output.values()) if hasattr(output, "values") else output
    return [value for value in values if isinstance(value, torch.Tensor)]
