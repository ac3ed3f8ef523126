"""A model's folder as it comes from a hub: configuration, safetensors, tokenizer. Runs in the sandbox.

Whatever cannot be served is refused here, by name.
"""

import json
import os
import struct
from typing import Any, Final

from dormouse.schemas.llm import FAMILIES, DecoderSpec, Dtype

MAX_HEADER_NBYTES: Final = 100 << 20
_DTYPES: Final[dict[str, Dtype]] = {"BF16": "bfloat16", "F32": "float32", "F16": "bfloat16"}


class BadFolder(Exception):
    """It cannot be served; the text says what to do."""


def read_json(folder: str, name: str) -> dict[str, Any]:
    """Raises BadFolder."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            value = json.load(file)
    except FileNotFoundError:
        raise BadFolder(f"the folder has no {name}") from None
    except (OSError, ValueError) as error:
        raise BadFolder(f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadFolder(f"{name} is not a JSON object")
    return value


def spec_of(folder: str, dtype: str, context: int) -> DecoderSpec:
    """From its ``config.json``; ``dtype`` "auto" is that of the weights. Raises BadFolder, ConfigError."""
    raw = read_json(folder, "config.json")
    for name, why in (
        ("auto_map", "it brings code of its own, which is not run"),
        ("quantization_config", "it is quantized; convert it to bf16 or fp32"),
    ):
        if raw.get(name):
            raise BadFolder(f"config.json has {name}: {why}")
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise BadFolder(f"the family {family!r} is not served; these are: {', '.join(FAMILIES)}")
    config = normalised(family, raw)
    known = {name: config[name] for name in FAMILIES[family] if name in config}
    if dtype == "auto":
        dtype = {"float32": "float32"}.get(str(raw.get("dtype") or raw.get("torch_dtype")), "bfloat16")
    if dtype not in ("float32", "bfloat16"):
        raise BadFolder(f"dtype is {dtype!r}; write auto, bfloat16 or float32")
    spec = DecoderSpec(family=family, config=known, dtype="float32" if dtype == "float32" else "bfloat16", context=1)
    longest = spec.positions
    if context > longest:
        raise BadFolder(f"the context is {context} tokens, the model has {longest}; deploy it with --context {longest}")
    spec = DecoderSpec(family=family, config=known, dtype=spec.dtype, context=context or longest)
    spec.check()
    return spec


def normalised(family: str, raw: dict[str, Any]) -> dict[str, Any]:
    """What `transformers` makes of it: defaults, and fields that have changed their names."""
    from transformers import AutoConfig

    given = {name: value for name, value in raw.items() if name not in ("model_type", "transformers_version")}
    try:
        found: dict[str, Any] = AutoConfig.for_model(family, **given).to_dict()
    except Exception as error:  # whatever a stranger's file makes it raise
        raise BadFolder(f"config.json is not one of {family}: {error}") from error
    return found


def shards(folder: str) -> list[str]:
    """Its safetensors files. Raises BadFolder."""
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        weights = read_json(folder, "model.safetensors.index.json").get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            raise BadFolder("model.safetensors.index.json has no weight_map")
        names = sorted(set(weights.values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        path = os.path.join(folder, name)
        if os.path.basename(name) != name or not os.path.isfile(path):
            pickled = [each for each in os.listdir(folder) if each.endswith((".bin", ".pt", ".pth", ".ckpt"))]
            if pickled and names == ["model.safetensors"]:
                raise BadFolder(f"the weights are pickled ({pickled[0]}), which can run code: convert to safetensors")
            raise BadFolder(f"the folder has no {name}")
        _check_whole(path, name)
    return [os.path.join(folder, name) for name in names]


def _check_whole(path: str, name: str) -> None:
    """Its header says how long it is."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= min(size, MAX_HEADER_NBYTES):
            raise BadFolder(f"{name} is no safetensors file")
        try:
            header = json.loads(file.read(length))
            ends = [each["data_offsets"][1] for key, each in header.items() if key != "__metadata__"]
        except (ValueError, LookupError, TypeError) as error:
            raise BadFolder(f"{name} is no safetensors file: {error}") from error
    if 8 + length + max(ends, default=0) != size:
        raise BadFolder(f"{name} is truncated: it has {size:,} of {8 + length + max(ends, default=0):,} bytes")
