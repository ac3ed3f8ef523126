"""Loading a language model into an instance: its configuration, words, weights and, if it has one, its adapter, in the
order in which they can fail.

Runs in the sandbox. Cheap checks come first, so that a folder that cannot be served costs little.
"""

import math
import os
from typing import Final, NamedTuple

import torch

from dormouse.client_shim.llm import checkpoint as c
from dormouse.client_shim.llm import gguf_file, weights
from dormouse.client_shim.llm.adapter import FoundAdapter, read_adapter
from dormouse.client_shim.llm.adapter_weights import without_equal
from dormouse.client_shim.llm.folder import BadFolder, read_json, spec_of
from dormouse.client_shim.llm.model import Words
from dormouse.client_shim.llm.sampling import warning_of
from dormouse.core.modelfolder import ADAPTER
from dormouse.core.quantities import size
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DecoderSpec

CONFIG: Final = "config.json"
MIN_TOKENS: Final = 256
"""A model for which a GPU has not even so much room beside its weights serves nobody."""


class LoadedModel(NamedTuple):
    """``kept`` has to stay alive: the store has the weights as long as these tensors are there."""

    spec: DecoderSpec
    words: Words
    weights: list[m.WeightAt]
    kept: list[torch.Tensor]
    adapter: FoundAdapter | None
    warning: str


def load(folder: str, entry: str, settings: m.LlmSettings, gpu_nbytes: int) -> LoadedModel:
    """``entry`` is the folder's configuration, or a GGUF file that is all of it. The adapter is not uploaded. Raises
    BadFolder, ConfigError.
    """
    gguf = "" if entry == CONFIG else entry
    raw = gguf_file.gguf_config(folder, gguf) if gguf else read_json(folder, entry)
    spec = spec_of(raw, settings.dtype, settings.context)
    found = None if gguf else c.find_weights(folder, settings.convert)
    if found is not None:
        check_layers(spec.layers, found)
    model = weights.skeleton(spec)
    checkpoint = found if found is not None else gguf_file.GgufFile(folder, gguf, raw, model)
    wanted = weights.wanted_by(model)
    names = weights.matched(spec.family, wanted, checkpoint.tensors)
    if found is not None and heads_differ(folder, spec, settings.convert, wanted, found):
        spec = weights.untied(spec)
        model = weights.skeleton(spec)
        wanted = weights.wanted_by(model)
        names = weights.matched(spec.family, wanted, checkpoint.tensors)
    adapter = None
    if settings.base:
        adapter = read_adapter(os.path.join(folder, ADAPTER), model, str(raw.get("_name_or_path") or ""))
    if adapter is not None and adapter.replaced:
        stored = {wanted.aliases[parameter]: name for name, parameter in names.items()}
        again = c.find_weights(folder, settings.convert) if found is not None else checkpoint  # is read once
        adapter = without_equal(adapter, lambda name: _read(again, stored[wanted.aliases[name]], spec))
    words = Words(folder, spec, gguf, settings.generation_config == "auto")
    warnings = [check_room(spec, weights.nbytes_of(spec, wanted), gpu_nbytes), warning_of(words.sampling)]
    if adapter is not None:
        warnings.append(adapter.warning)
    places, kept = weights.upload(spec, checkpoint, wanted, names)
    return LoadedModel(spec, words, places, kept, adapter, "; ".join(filter(None, warnings)))


def heads_differ(
    folder: str, spec: DecoderSpec, convert: bool, wanted: weights.WantedWeights, found: c.Checkpoint
) -> bool:
    """Whether the files have two tensors, and not equal ones, where the configuration ties one to the other. Raises
    BadFolder.
    """
    for pair in weights.stored_twice(spec.family, wanted, found.tensors):
        again = c.find_weights(folder, convert)  # is read once
        one, other = (_read(again, name, spec) for name in pair)
        if not torch.equal(one, other):
            return True
    return False


def _read(checkpoint: c.Checkpoint, name: str, spec: DecoderSpec) -> torch.Tensor:
    ((_, tensor),) = checkpoint.read([name])
    return tensor.to(weights.DTYPES[spec.dtype])


def check_layers(layers: int, found: c.Checkpoint) -> None:
    """Raises BadFolder, before modules are made of a number that nothing has confirmed."""
    if layers > len(found.tensors):
        text = f"config.json names {layers:,} layers, and the weights have {len(found.tensors):,} tensors"
        raise BadFolder(f"{text}: they are of two models")


def kv_nbytes(spec: DecoderSpec, tokens: int) -> int:
    """Keys and values of so many tokens."""
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * weights.DTYPES[spec.dtype].itemsize * tokens


def check_room(spec: DecoderSpec, weights_nbytes: int, gpu_nbytes: int) -> str:
    """A warning if the longest sequences have no room; else "". Raises BadFolder if next to none has."""
    room = gpu_nbytes - weights_nbytes
    if gpu_nbytes <= 0 or room < 0:  # not known; too large a model is refused by the node, with its own words
        return ""
    tokens = math.floor(room / kv_nbytes(spec, 1))
    text = (
        f"a GPU of this node has {size(gpu_nbytes)}, the weights {size(weights_nbytes)}, and the KV of a token "
        f"{size(kv_nbytes(spec, 1))}: there is room for {tokens:,} tokens"
    )
    if tokens < min(MIN_TOKENS, spec.context):
        raise BadFolder(f"{text}; use a GPU with more memory, or a smaller model")
    if tokens < spec.context:
        return f"{text}, and sequences of up to {spec.context:,} are allowed; deploy with --context {tokens}"
    return ""
