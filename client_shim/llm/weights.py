"""Uploads a model's weights to the node: exactly those that the model wants, each in its shape.

The wanted parameters are read from the model's modules, which are built without memory. A folder that does not fit is
refused here at deploy; a runtime checks again when it binds the weights.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import torch

from dormouse.client_shim.commands.handles import meta_of, storage_of
from dormouse.client_shim.llm.checkpoint import Checkpoint, StoredTensor
from dormouse.client_shim.llm.folder import BadFolder
from dormouse.client_shim.torch_face.remote_tensor import is_remote
from dormouse.schemas import messages as m
from dormouse.schemas.llm import DecoderSpec

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_NAME: Final = 512

_LEFT_OUT: Final = {
    "": re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
    "gpt2": re.compile(r"(.*\.)?attn\.(masked_)?bias"),
    "gpt_neox": re.compile(r"(.*\.)?attention\.((masked_)?bias|rotary_emb\.inv_freq)"),
}
"""Names that older files have beside the weights, by family, and in all of them: a model computes these itself."""


_NONE: Final = re.compile("(?!)")
_RENAMED: Final = {"gpt_neox": {"embed_out.weight": "lm_head.weight"}}
"""Old names of parameters that `transformers` has renamed, by family."""


class WantedWeights(NamedTuple):
    """The parameters of a model: shapes by name, and which name another one is tied to."""

    shapes: dict[str, tuple[int, ...]]
    aliases: dict[str, str]
    prefix: str


def skeleton(spec: DecoderSpec) -> Any:
    """The model's modules, on ``meta``. Raises BadFolder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = made.from_config(AutoConfig.for_model(spec.family, **spec.config))
        model.tie_weights()
    except Exception as error:  # numbers that do not fit together
        raise BadFolder(f"config.json is not one of a {spec.family}: {error}") from error
    return model


def wanted_by(model: Any) -> WantedWeights:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    aliases = {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    return WantedWeights(shapes, aliases, f"{model.base_model_prefix}.")


def matched(
    family: str, wanted: WantedWeights, stored: Mapping[str, StoredTensor], heads: re.Pattern[str] = _NONE
) -> dict[str, str]:
    """The parameter that each stored tensor is, in the order in which a model needs them; without those that are not
    needed: ``heads`` says which these are besides. Raises BadFolder unless all fit.
    """
    found: dict[str, str] = {}  # name in the files, by parameter
    left_out = (_LEFT_OUT[""], _LEFT_OUT.get(family, _NONE), heads)
    renamed = _RENAMED.get(family, {})
    for name, tensor in stored.items():
        known = _known(wanted, renamed.get(name, name))
        if known is None:
            if any(each.fullmatch(name) for each in left_out):
                continue
            raise BadFolder(f"the weights have {name[:MAX_NAME]!r}, which this model does not: it is another one's")
        parameter = wanted.aliases[known]
        check(name, tensor, wanted.shapes[parameter])
        if known == parameter or parameter not in found:  # of tied ones, the one that others are tied to
            found[parameter] = name
    if missing := sorted(wanted.shapes.keys() - found.keys()):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise BadFolder(f"the weights lack {', '.join(missing[:3])}{more}")
    return {found[parameter]: parameter for parameter in wanted.shapes}


def _known(wanted: WantedWeights, name: str) -> str | None:
    tried = (name, wanted.prefix + name, name.removeprefix(wanted.prefix))
    return next((each for each in tried if each in wanted.aliases), None)


def stored_twice(family: str, wanted: WantedWeights, names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of stored tensors that are one parameter here: whether they are equal, only their bytes say. Raises
    BadFolder if two have one name but for the prefix.
    """
    renamed = _RENAMED.get(family, {})
    by_known: dict[str, str] = {}
    for name in names:
        known = _known(wanted, renamed.get(name, name))
        if known is not None and (other := by_known.setdefault(known, name)) != name:
            raise BadFolder(f"the weights have {known} twice: as {other!r} and as {name!r}")
    first: dict[str, str] = {}
    tied = [(first.setdefault(wanted.aliases[known], name), name) for known, name in by_known.items()]
    return [(one, other) for one, other in tied if one != other]


def untied(spec: DecoderSpec) -> DecoderSpec:
    """Its head is a parameter of its own, whatever its configuration says, as `transformers` has it."""
    return msgspec.structs.replace(spec, config={**spec.config, "tie_word_embeddings": False})


def check(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    """Raises BadFolder."""
    if not tensor.served:
        raise BadFolder(f"the weight {name!r} is of type {tensor.kind}: quantized weights are not served")
    if tensor.shape is not None and tensor.shape != shape:
        what = f"the weight {name!r} is {list(tensor.shape)}, its model wants {list(shape)}"
        raise BadFolder(f"{what}: config.json and weights are of two models")


def nbytes_of(spec: DecoderSpec, wanted: WantedWeights) -> int:
    """Of all weights as they will be."""
    return sum(map(math.prod, wanted.shapes.values())) * DTYPES[spec.dtype].itemsize


def upload(
    spec: DecoderSpec, checkpoint: Checkpoint, wanted: WantedWeights, names: Mapping[str, str]
) -> tuple[list[m.WeightAt], list[torch.Tensor]]:
    """Bring all weights to the node's store, as `load()` of a function does, in the order of ``names``: that in which a
    wake copies them, while the first layers compute. Returns where each is, and the tensors, which keep them there.
    Raises BadFolder.
    """
    dtype = DTYPES[spec.dtype]
    places: dict[str, m.WeightAt] = {}
    kept: list[torch.Tensor] = []
    for name, tensor in checkpoint.read(names):
        parameter = names[name]
        check(name, StoredTensor("F32", tuple(tensor.shape)), wanted.shapes[parameter])
        there = tensor.detach().to(dtype).contiguous().to("cuda")
        assert is_remote(there)
        offset = meta_of(there).offset * dtype.itemsize
        places[parameter] = m.WeightAt(
            name=parameter, storage=storage_of(there).id, offset=offset, shape=list(tensor.shape)
        )
        kept.append(there)
    return list(places.values()), kept
