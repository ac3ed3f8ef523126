"""Checks the configuration of a model's folder as it comes from a hub. Runs in the sandbox.

Models that cannot be served are refused here by name, before any of the untrusted numbers is used.
"""

import json
import os
from collections.abc import Iterable
from copy import deepcopy
from typing import Any, Final

from dormouse.client_shim.llm import firstbytes
from dormouse.schemas import rope
from dormouse.schemas.llm import FAMILIES, MAX_LAYERS, DecoderSpec, Dtype

MAX_JSON_NBYTES: Final = 1 << 20
"""Of a configuration: hundreds of times as long as any."""

_DTYPES: Final[dict[Any, Dtype]] = {"float32": "float32", "bfloat16": "bfloat16", "float16": "bfloat16"}
_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""Families' names for the number of their layers."""

_QUANTIZED: Final = ("quantization_config", "compression_config", "quantization")

_UNREAD: Final = """
    add_cross_attention alibi attention_chunk_size attention_multiplier attention_scale attn_logit_softcapping clip_qkv
    embedding_multiplier embedding_scale final_logit_softcapping is_causal is_encoder_decoder layer_types logit_scale
    logits_scaling no_rope_layers qk_layernorm qk_norm query_pre_attn_scalar residual_multiplier residual_scale
    rope_interleave rope_interleaved rotary_pct scale_attn_by_inverse_layer_idx scale_depth scale_emb sliding_window
    use_alibi use_bidirectional_attention use_qk_norm
"""
"""They change the computation of some family, or of another program, and have no tensor that would be missed. Where a
family's code does not read them, `transformers` silently leaves them out.
"""


class BadFolder(Exception):
    """It cannot be served; the text says what to do."""


def read_json(folder: str, name: str, most_nbytes: int = MAX_JSON_NBYTES) -> dict[str, Any]:
    """Raises BadFolder."""
    value = read_any(folder, name, most_nbytes)
    if not isinstance(value, dict):
        raise BadFolder(f"{name} is not a JSON object")
    return value


def read_any(folder: str, name: str, most_nbytes: int = MAX_JSON_NBYTES) -> Any:
    """Whatever JSON it has. Raises BadFolder."""
    try:
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read(most_nbytes + 1)
    except FileNotFoundError:
        raise BadFolder(f"the folder has no {name}") from None
    except OSError as error:
        raise BadFolder(f"{name} cannot be read: {error}") from error
    if len(data) > most_nbytes:
        raise BadFolder(f"{name} has more than {most_nbytes:,} bytes")
    if what := firstbytes.mistaken(data[: firstbytes.LOOKED_AT], len(data)):
        raise BadFolder(f"{name} {what}")
    try:
        return json.loads(data)
    except RecursionError:
        raise BadFolder(f"{name} cannot be read: it is nested too deeply") from None
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated"):
            raise BadFolder(f"{name} cannot be read: it ends in the middle; download it again") from error
        raise BadFolder(f"{name} cannot be read: {error}; it begins with {error.doc.strip()[:40]!r}") from error
    except ValueError as error:
        raise BadFolder(f"{name} cannot be read: {error}") from error


def first_bytes(folder: str, name: str) -> tuple[bytes, int]:
    """And how many there are. Raises OSError."""
    with open(os.path.join(folder, name), "rb") as file:
        return file.read(firstbytes.LOOKED_AT), os.fstat(file.fileno()).st_size


def family_of(raw: dict[str, Any], families: Iterable[str]) -> str:
    """The family in ``config.json``, after a check for fields that are refused anyway. Raises BadFolder."""
    if raw.get("auto_map"):
        raise BadFolder("config.json has auto_map: it brings code of its own, which is not run")
    for name in _QUANTIZED:
        if raw.get(name) is not None:  # transformers takes null alone for none
            raise BadFolder(f"config.json has {name}: it is quantized; convert it to bf16 or fp32")
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in families:
        raise BadFolder(f"the family {family!r} is not served; these are: {', '.join(families)}")
    for name in _LAYERS:
        layers = raw.get(name, 1)
        if type(layers) is not int or not 0 < layers <= MAX_LAYERS:  # transformers makes a list that is so long
            raise BadFolder(f"config.json: {name} cannot be {layers!r}; a model has 1 to {MAX_LAYERS} layers")
    return family


def spec_of(raw: dict[str, Any], dtype: str, context: int) -> DecoderSpec:
    """From ``config.json``. ``dtype`` "auto" is the one that it names. Raises BadFolder, ConfigError."""
    family = family_of(raw, FAMILIES)
    _check_rope(raw)
    _check_unread(family, raw)
    made = config_of(family, raw)
    if "rope_parameters" in FAMILIES[family]:
        made.standardize_rope_params()  # as its modules do once more, with the fields beside them in the file
    config = made.to_dict()
    known = {name: config[name] for name in FAMILIES[family] if name in config}
    chosen = dtype_of(raw, dtype)
    spec = DecoderSpec(family=family, config=known, dtype=chosen, context=1)
    spec.check()
    longest = spec.positions
    if context > longest:
        raise BadFolder(f"the context is {context} tokens, the model has {longest}; deploy it with --context {longest}")
    spec = DecoderSpec(family=family, config=known, dtype=chosen, context=context or longest)
    spec.check()
    return spec


def _check_rope(raw: dict[str, Any]) -> None:
    """Raises BadFolder for values that would fail without a name, or be taken for something else."""
    for name in ("rope_scaling", "rope_parameters"):
        if raw.get(name) and (why := rope.why_odd(raw[name], rope.GIVEN)):
            raise BadFolder(f"config.json: {name}: {why}")


def _check_unread(family: str, raw: dict[str, Any]) -> None:
    """Raises BadFolder."""
    read = {*FAMILIES[family], *(["rotary_pct"] if family == "gpt_neox" else [])}
    for name in _UNREAD.split():
        if name in raw and name not in read and not _is_off(name, raw[name]):
            raise BadFolder(
                f"config.json has {name}: {raw[name]!r:.80}, which a {family} of transformers does not compute: its "
                "answers would be another model's"
            )


def _is_off(name: str, value: Any) -> bool:
    if name == "is_causal":
        return value is not False
    if isinstance(value, list):
        return all(each == "full_attention" for each in value)
    return value in (None, False, "") or (type(value) in (int, float) and value == 1)


def dtype_of(raw: dict[str, Any], wanted: str) -> Dtype:
    if wanted != "auto":
        if wanted not in ("float32", "bfloat16"):
            raise BadFolder(f"dtype is {wanted!r}; write auto, bfloat16 or float32")
        return _DTYPES[wanted]
    said = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if not isinstance(said, str) or said not in _DTYPES:
        raise BadFolder(f"config.json: the dtype is {said!r}; deploy with --dtype bfloat16 or --dtype float32")
    return _DTYPES[said]


def config_of(family: str, raw: dict[str, Any]) -> Any:
    """The configuration as `transformers` reads it: with defaults, and fields that have changed their names. Raises
    BadFolder.
    """
    from transformers import AutoConfig

    without = ("model_type", "transformers_version")
    given = {name: deepcopy(value) for name, value in raw.items() if name not in without}  # it changes its argument
    try:
        return AutoConfig.for_model(family, **given)
    except Exception as error:  # an untrusted file may make it raise anything
        raise BadFolder(f"config.json is not one of {family}: {error}") from error
