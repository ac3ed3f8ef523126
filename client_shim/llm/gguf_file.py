"""A model in one file of llama.cpp's format GGUF: read with the package `gguf`, and computed in full precision.

Runs in the sandbox. `transformers` knows the meaning of its names and numbers; anything that it does not know, or
silently leaves out, is refused here by name. Tensors are made one at a time, as they are asked for.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch

from dormouse.client_shim.llm.checkpoint import StoredTensor
from dormouse.client_shim.llm.firstbytes import weights_mistaken
from dormouse.client_shim.llm.folder import BadFolder, first_bytes
from dormouse.client_shim.llm.gguf_fields import settled
from dormouse.client_shim.llm.gguf_header import check_header
from dormouse.schemas.llm import FAMILIES

_SCALED: Final = "the positions of its tokens are scaled, which is not read from GGUF: deploy it from its folder"
_ARCHITECTURES: Final = {"mistral": "llama"}
"""Names of families in `gguf`, where they differ from the ``model_type``."""


def gguf_config(folder: str, name: str) -> dict[str, Any]:
    """As ``config.json`` would say it. Raises BadFolder."""
    path = os.path.join(folder, name)
    try:
        if what := weights_mistaken(*first_bytes(folder, name), "GGUF file"):
            raise BadFolder(f"{name} is no GGUF file: it {what}")
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
            memoryview(mapped) as data,
        ):
            check_header(data)
    except (OSError, ValueError) as error:
        raise BadFolder(f"{name} is no GGUF file: {error}") from error
    try:
        import gguf
    except ImportError:
        raise BadFolder(
            f"{name} needs the package gguf, which the node's environment lacks: pip install gguf"
        ) from None
    known = _transformers()
    try:
        config: dict[str, Any] = known.load_gguf_checkpoint(path)["config"]
        reader = gguf.GGUFReader(path)
        architecture = str(known.read_field(reader, "general.architecture")[0])
        parts, start = reader.fields.get("split.count"), f"{architecture}."
        fields = {
            key.removeprefix(start): each.contents() for key, each in reader.fields.items() if key.startswith(start)
        }
    except Exception as error:  # an untrusted file may make it raise anything
        text = f"{name} cannot be read: {type(error).__name__}: {error}"
        raise BadFolder(f"{text}; it may be truncated: download it again") from error
    config = {key: value.item() if isinstance(value, np.generic) else value for key, value in config.items()}
    if parts is not None and parts.contents() > 1:
        text = "join them with llama.cpp's llama-gguf-split --merge"
        raise BadFolder(f"{name} is one of {parts.contents()} parts of a model: {text}")
    if config.get("model_type") not in FAMILIES:
        return config  # is refused for that
    if any(key.startswith("rope.scaling.") and fields[key] not in ("none", "", 0) for key in fields):
        raise BadFolder(f"{name}: {_SCALED}")
    read = known.GGUF_TO_TRANSFORMERS_MAPPING["config"].get(architecture, {})
    try:
        return settled(architecture, read, fields, config)
    except BadFolder as error:
        raise BadFolder(f"{name}: {error}") from None


def gguf_ends(folder: str, name: str) -> list[Any]:
    """The tokens that it names as ends: of a text, a turn, a message. Of one that was read before."""
    from gguf import GGUFReader

    fields = GGUFReader(os.path.join(folder, name)).fields
    ends = [fields.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    return [int(field.contents()) for field in ends if field is not None and np.ndim(field.contents()) == 0]


_SAMPLING: Final = "general.sampling."
_SAMPLED: Final = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
"""Fields with another name in generation_config.json."""


def gguf_sampling(folder: str, name: str) -> dict[str, Any]:
    """Its sampling settings, as ``generation_config.json`` would have them. Of one that was read before."""
    from gguf import GGUFReader

    fields = GGUFReader(os.path.join(folder, name)).fields
    said = {key.removeprefix(_SAMPLING): field.contents() for key, field in fields.items() if key.startswith(_SAMPLING)}
    return {  # of single precision: 0.7 is meant, not 0.699999988
        _SAMPLED.get(key, key): float(f"{value:.7g}") if isinstance(value, float) else value
        for key, value in said.items()
    }


class GgufFile:
    """Its weights. ``model`` has the modules that they are for. Raises BadFolder."""

    def __init__(self, folder: str, name: str, config: dict[str, Any], model: Any) -> None:
        from gguf import GGUFReader

        known = _transformers()
        try:
            reader: Any = GGUFReader(os.path.join(folder, name))
            architecture = str(known.read_field(reader, "general.architecture")[0])
            self._processor: Any = known.TENSOR_PROCESSORS.get(architecture, known.TensorProcessor)(config=config)
            family = str(config.get("model_type"))
            self._names: dict[str, str] = known.get_gguf_hf_weights_map(
                model, self._processor, model_type=_ARCHITECTURES.get(family, family)
            )
        except Exception as error:  # an untrusted file may make it raise anything
            raise BadFolder(f"{name} cannot be read: {type(error).__name__}: {error}") from error
        tensors = list(reader.tensors)
        self._names.setdefault("output.weight", "lm_head.weight")
        for tensor in tensors:
            if tensor.name not in self._names:
                what = _SCALED if tensor.name.startswith("rope_") else f"{tensor.name[:80]!r} is not known"
                raise BadFolder(f"{name}: {what}")
        self._tensors = by_parameter(name, self._names, tensors)
        self.tensors = dict.fromkeys(self._tensors, StoredTensor("F32", None))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        from gguf import dequantize

        for name in names:
            tensor = self._tensors[name]
            aside: dict[str, torch.Tensor] = {}  # where transformers puts some instead of returning them
            try:
                made = self._processor.process(
                    weights=dequantize(tensor.data, tensor.tensor_type),
                    name=tensor.name,
                    tensor_key_mapping=self._names,
                    parsed_parameters={"tensors": aside},
                )
                weights = aside.get(name) if made.name is None else torch.from_numpy(np.copy(made.weights))
            except Exception as error:  # an unknown quantization, or a shape that does not fit
                raise BadFolder(f"{tensor.name!r} cannot be made: {type(error).__name__}: {error}") from error
            if weights is None:
                raise BadFolder(f"{tensor.name!r} cannot be made: it is not known")
            yield name, weights


def by_parameter(name: str, names: Mapping[str, str], tensors: Iterable[Any]) -> dict[str, Any]:
    """The file's tensors by their names in `transformers`. Raises BadFolder for two that are one."""
    found: dict[str, Any] = {}
    for tensor in tensors:
        if (other := found.setdefault(names[tensor.name], tensor)) is not tensor:
            raise BadFolder(f"{name} has {names[tensor.name]} twice: as {other.name!r} and as {tensor.name!r}")
    return found


def _transformers() -> Any:
    from transformers import modeling_gguf_pytorch_utils

    return modeling_gguf_pytorch_utils
