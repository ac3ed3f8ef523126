"""Model settings in a GGUF file's own fields, beyond those that `transformers` has read. Pure.

`transformers` leaves out fields that it does not know, and takes its family's default where a file says something else.
Here each field of the architecture is read, known to change nothing, or refused by name.
"""

from collections.abc import Mapping
from typing import Any, Final

from dormouse.client_shim.llm.folder import BadFolder

_NOTHING: Final = ("vocab_size", "tensor_data_layout", "pooling_type", "rope.scaling.type")
"""They change nothing of the next token; the last one is looked at beside its numbers."""

_OFF: Final = (None, 0, False, "", "none")
_ONE: Final = ("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale", "attention.output_scale")
"""Of these 1 is no reason, either."""

_SMALL_GEMMA_HEADS: Final = 46
"""Layers of the one Gemma 2 whose scores are divided by the root of another number than its heads have."""


def settled(architecture: str, read: Mapping[str, str | None], fields: Mapping[str, Any], raw: Any) -> dict[str, Any]:
    """The equivalent of ``config.json``. ``read``: the fields that `transformers` has read, and its names for them;
    ``fields``: all of the file's, without the architecture; ``raw``: the values that it made of them. Raises BadFolder.
    """
    config: dict[str, Any] = dict(raw)
    heads, hidden = (config.get(name) for name in _sizes(architecture))
    if type(heads) is not int or type(hidden) is not int or heads < 1:
        return config  # is refused for that
    head_dim = fields.get("attention.key_length") or config.get("head_dim") or hidden // heads
    taken = {name for name, known in read.items() if known is not None}
    wanted = {"attention.key_length": head_dim, "attention.value_length": head_dim, "rope.dimension_count": head_dim}
    if architecture == "gemma2":
        config["query_pre_attn_scalar"] = head_dim
        if config.get("num_hidden_layers") == _SMALL_GEMMA_HEADS:
            config["query_pre_attn_scalar"] = hidden // heads
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if name in fields:
                config[name] = fields[name]
                taken.add(name)
    if architecture == "gpt2":
        config |= {"n_positions": config.get("n_ctx"), "n_inner": config.get("feed_forward_length")}
    else:
        config |= {"head_dim": head_dim, "num_key_value_heads": config.get("num_key_value_heads", heads)}
    if config.get("model_type") == "mistral":
        config["sliding_window"] = None  # it has that of the first one by default, which no such file means
    for name, value in fields.items():
        if name in wanted and value != wanted[name]:
            raise BadFolder(f"{architecture}.{name} is {value}, and {wanted[name]} numbers of a head are served")
        if name in taken or name in wanted or name in _NOTHING or _is_off(name, value):
            continue
        raise BadFolder(
            f"{architecture}.{name} is {value!r:.80}, which is not read from GGUF: deploy the model from its folder"
        )
    return config


def _sizes(architecture: str) -> tuple[str, str]:
    return ("n_head", "n_embd") if architecture == "gpt2" else ("num_attention_heads", "hidden_size")


def _is_off(name: str, value: Any) -> bool:
    if name == "attention.causal":
        return value is True
    return value in _OFF or (name in _ONE and value == 1)
