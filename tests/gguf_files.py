"""Tiny models as GGUF files, written by the package `gguf` as llama.cpp's converter writes them."""

from pathlib import Path
from typing import Any

import torch
from language_models import TEMPLATE, reference, tokenizer
from transformers import PreTrainedModel


def write_gguf(
    path: Path, seed: int = 0, ends: dict[str, int] | None = None, named: dict[int, str] | None = None, **fields: Any
) -> PreTrainedModel:
    """A Llama with its tokenizer and template; ``ends`` are tokens such as `eot`, ``named`` those of others,
    ``fields`` further ones. Returns the model.
    """
    import gguf

    model = reference("llama", seed)
    config: Any = model.config
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, token in (ends or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    for name, value in fields.items():
        add = {float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string}
        add[type(value)](name.replace("__", "."), value)
    _add_tokenizer(writer, config.vocab_size, named or {})
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        known = f"{names.get_name(stem)}.{suffix}"
        count = next((number for part, number in heads.items() if part in known), 0)
        writer.add_tensor(known, (_interleaved(tensor, count) if count else tensor).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbours where `transformers` rotates halves."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add_tokenizer(writer: Any, vocabulary: int, names: dict[int, str]) -> None:
    known = tokenizer().get_vocab()
    tokens = sorted(known, key=lambda name: known[name])
    tokens += [f"<unused{number}>" for number in range(vocabulary - len(tokens) - 1)]
    tokens.append("QZ")  # there must be a merge
    for number, name in names.items():
        tokens[number] = name
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<") and len(token) > 1 else 1 for token in tokens])
    writer.add_token_merges(["Q Z"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
