"""Tiny language models of each family with random weights, and the judge of what an engine makes of them."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dormouse.schemas.llm import FAMILIES, DecoderSpec

VOCABULARY: Final = 200
GAP: Final = 1e-4
"""Two tokens whose logits are so close may change places by rounding."""

_GATED: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_ENDS: Final[dict[str, Any]] = {"bos_token_id": 1, "eos_token_id": 2}
TINY: Final[dict[str, dict[str, Any]]] = {
    "llama": _GATED,
    "qwen2": _GATED,
    "qwen3": {**_GATED, "head_dim": 24},
    "mistral": {**_GATED, "head_dim": 16, "sliding_window": 20},
    "gemma2": {**_GATED, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 20, "query_pre_attn_scalar": 16},
    "phi": {**_GATED, "num_key_value_heads": 4},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "opt": {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 64,
        "max_position_embeddings": 256,
    },
    "gpt_neox": {name: value for name, value in _GATED.items() if name != "num_key_value_heads"},
}


def reference(family: str, seed: int = 0) -> PreTrainedModel:
    """`transformers`' own, with its own attention, in fp32."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_ENDS, **TINY[family], "vocab_size": VOCABULARY})
    made: Any = AutoModelForCausalLM
    model: PreTrainedModel = made.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    return model


def spec_of(model: PreTrainedModel, context: int = 256) -> DecoderSpec:
    config = model.config.to_dict()
    family = config["model_type"]
    known = {name: config[name] for name in FAMILIES[family] if name in config}
    return DecoderSpec(family=family, config=known, dtype="float32", context=context)


@torch.inference_mode()
def wrong_tokens(model: PreTrainedModel, tokens: Sequence[int], prompt: int) -> list[tuple[int, float]]:
    """Those after the prompt that are neither the reference's choice nor within GAP of it: ``(index, gap)``."""
    logits = model(torch.tensor([list(tokens)])).logits[0].float()
    wrong = []
    for index in range(prompt, len(tokens)):
        row = logits[index - 1]
        gap = float(row.max() - row[tokens[index]])
        if gap > GAP:
            wrong.append((index, gap))
    return wrong


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
