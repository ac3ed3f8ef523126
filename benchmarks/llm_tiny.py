"""Tiny language models of each family with random weights, and folders of them whose every token is one sign."""

from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY: Final = 320

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
"""By family. Windows are shorter than the sequences; Gemma2's caps are those of its configuration."""

SPECIAL: Final = 3
"""Tokens that an answer's text leaves out: families have classes of tokenizers, which want them."""

_FIRST_SIGN: Final = 0x4E00


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


def prompts(seed: int, *lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def sign(token: int) -> str:
    return chr(_FIRST_SIGN + token)


def tokens_of(text: str) -> list[int]:
    """Of an answer of a model of :func:`make_folder`: no token is without a sign, and none has two."""
    return [ord(each) - _FIRST_SIGN for each in text]


def never_special(model: PreTrainedModel) -> PreTrainedModel:
    """With logits of 0 for special tokens: among random ones some are larger."""
    made: Any = model
    for embeddings in (made.get_input_embeddings(), made.get_output_embeddings()):
        embeddings.weight.data[:SPECIAL] = 0
    return model


def make_folder(folder: Path, model: PreTrainedModel) -> None:
    """As a hub has it."""
    saved: Any = model
    saved.save_pretrained(folder)
    made = Tokenizer(models.WordLevel(vocab={sign(token): token for token in range(VOCABULARY)}, unk_token=sign(0)))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    names = {"pad_token": sign(0), "unk_token": sign(0), "bos_token": sign(1), "eos_token": sign(2)}
    fast(tokenizer_object=made, **names).save_pretrained(str(folder))
