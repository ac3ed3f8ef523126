"""Reads the PEFT folder of a LoRA adapter: its changes to a base, and the role of each tensor. Runs in the sandbox.

The configuration and the base determine the required tensors, by name and shape. The file must have exactly these, so
an adapter of another base is refused, and no adapter is served as the plain base.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from dormouse.client_shim.llm.adapter_config import CONFIG, AdapterConfig, read_config
from dormouse.client_shim.llm.adapter_tensors import PREFIX, ModuleTensors, WantedTensors, wanted_tensors
from dormouse.client_shim.llm.checkpoint import Checkpoint, SafetensorsFiles, StoredTensor
from dormouse.client_shim.llm.folder import BadFolder
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import AdapterSpec

WEIGHTS: Final = "adapter_model.safetensors"
_PICKLED: Final = "adapter_model.bin"
_LORA: Final = re.compile(r"\.lora_[A-Za-z_]+(\.weight|\.bias)?$")
_SHOWN: Final = 200
"""Characters of an untrusted name in a message."""


class FoundAdapter(NamedTuple):
    """``tensors`` are by module, ``replaced`` by parameter; both name tensors of the ``checkpoint``."""

    spec: AdapterSpec
    tensors: dict[str, ModuleTensors]
    replaced: dict[str, str]
    checkpoint: Checkpoint
    warning: str


def read_adapter(folder: str, model: Any, base_name: str = "") -> FoundAdapter:
    """``model`` is the base's modules, on ``meta``; ``base_name`` the name under which it was published, if it is
    known. Raises BadFolder.
    """
    config = read_config(folder)
    checkpoint = _find_weights(folder)
    stored = checkpoint.tensors
    wanted = wanted_tensors(config, model)
    spec = AdapterSpec(modules=wanted.modules, replaced=list(replaced := _replaced(wanted, stored)))
    try:
        spec.check()
    except ConfigError as error:
        raise BadFolder(f"{CONFIG}: {error}") from error
    _check_names(stored, wanted, {name for name, _ in model.named_modules()})
    for name, tensor in stored.items():
        _check(name, tensor, wanted)
    for name, value in checkpoint.read(stored):
        if not value.isfinite().all():
            raise BadFolder(f"{WEIGHTS}: {_short(name)!r} has NaN or infinite values: its training has diverged")
    return FoundAdapter(spec, wanted.tensors, replaced, checkpoint, _warning(config, base_name))


def _find_weights(folder: str) -> Checkpoint:
    if os.path.isfile(os.path.join(folder, WEIGHTS)):
        return SafetensorsFiles(folder, [WEIGHTS])
    if os.path.exists(os.path.join(folder, _PICKLED)):
        raise BadFolder(f"the adapter is pickled ({_PICKLED}), which can run code; save it as {WEIGHTS}")
    raise BadFolder(f"the folder has no {WEIGHTS}")


def _replaced(wanted: WantedTensors, stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Tensors by parameter. Of a tied one, each use has that which was saved for it, where there is one."""
    there = {name: uses for name, uses in wanted.replaced.items() if name in stored}
    own = {uses[0]: name for name, uses in there.items()}
    return {use: name for name, uses in there.items() for use in uses[1:]} | own


def _check_names(stored: Mapping[str, StoredTensor], wanted: WantedTensors, modules: set[str]) -> None:
    """Raises BadFolder unless the file has the wanted names, and no more."""
    for name in stored:
        if name not in wanted.shapes:
            raise BadFolder(f"{WEIGHTS} has {_short(name)!r}{_stranger(name, modules)}")
    if missing := sorted(wanted.shapes.keys() - stored.keys() - wanted.optional):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadFolder(f"{WEIGHTS} lacks {', '.join(missing[:3])}{more}, which {CONFIG} wants")


def _stranger(name: str, modules: set[str]) -> str:
    """The error text for a tensor that is not wanted."""
    if "lora_magnitude_vector" in name:
        return ": it is DoRA's, which is not served"
    if "trainable_tokens" in name:
        return ": single rows of the embeddings are trained, which is not served"
    if name.startswith(PREFIX) and _LORA.sub("", name.removeprefix(PREFIX)) in modules:
        return f", for which {CONFIG} does not ask: the two are of different adapters"
    return ", which matches nothing in the base: the adapter is another model's"


def _check(name: str, tensor: StoredTensor, wanted: WantedTensors) -> None:
    if not tensor.served:
        raise BadFolder(f"{WEIGHTS}: {name!r} is of type {tensor.kind}; adapters of F32, F16 and BF16 are served")
    has, shape = tensor.shape or (), wanted.shapes[name]
    if has == shape:
        return
    what = f"{WEIGHTS}: {name!r} is {list(has)}, and has to be {list(shape)}"
    differing = [pair for pair in zip(has, shape, strict=False) if pair[0] != pair[1]]
    of_tokens = any(name.startswith(f"{PREFIX}{end}.") for end in wanted.ends)
    if of_tokens and len(has) == len(shape) and [base for _, base in differing] == [wanted.tokens]:
        tokens = differing[0][0]
        raise BadFolder(
            f"{what}: the embeddings were resized to {tokens:,} tokens, which is not served over a base of "
            f"{wanted.tokens:,}; call resize_token_embeddings({tokens}) on the base, save it, and deploy over that"
        )
    raise BadFolder(f"{what} by {CONFIG} and base: the adapter is another model's, or its rank another one")


def _warning(config: AdapterConfig, base_name: str) -> str:
    said = config.base_model_name_or_path
    if not said or not base_name or said == base_name:
        return ""
    return f"the adapter was trained over {_short(said)!r}, the base is {_short(base_name)!r}; their shapes are equal"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
