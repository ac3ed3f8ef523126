"""Tiny language models of each family with random weights, as models and as folders, and the judge of what an engine
makes of them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from dormouse.schemas.llm import FAMILIES, DecoderSpec

VOCABULARY: Final = 320
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


def reference(family: str, seed: int = 0, **config: Any) -> PreTrainedModel:
    """`transformers`' own, with its own attention, in fp32."""
    torch.manual_seed(seed)
    found = AutoConfig.for_model(family, **{**_ENDS, **TINY[family], "vocab_size": VOCABULARY, **config})
    made: Any = AutoModelForCausalLM
    model: PreTrainedModel = made.from_config(found, attn_implementation="eager").eval()
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


TEMPLATE: Final = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant: "


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A token for each byte, and a few special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast: Any = PreTrainedTokenizerFast
    found: PreTrainedTokenizerFast = fast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )
    return found


def make_folder(
    folder: Path, family: str = "llama", seed: int = 0, template: str | None = TEMPLATE, **config: Any
) -> PreTrainedModel:
    """A model's folder as a hub has it, with these changes of its configuration; returns the model."""
    model = reference(family, seed, **config)
    saved: Any = model
    saved.save_pretrained(folder)
    tokenizer(template).save_pretrained(str(folder))
    return model
