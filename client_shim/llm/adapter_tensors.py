"""The tensors required in an adapter's file, from its configuration and its base's modules. Runs in the sandbox.

Names are those that PEFT saves. Parameters tied in the base stay apart here: an adapter may change one use and not the
other.
"""

from typing import Any, Final, NamedTuple

from torch import nn

from dormouse.client_shim.llm.adapter_config import CONFIG, AdapterConfig, Scales, Targets
from dormouse.client_shim.llm.folder import BadFolder
from dormouse.schemas.llm import AdapterModule

PREFIX: Final = "base_model.model."
"""Of all names in the file."""

Shape = tuple[int, ...]


class ModuleTensors(NamedTuple):
    """Names in the file. ``bias`` is "" where there is none."""

    a: str
    b: str
    bias: str


class WantedTensors(NamedTuple):
    """``replaced`` are the parameters that a tensor stands for, its own one first; ``optional`` need not be there.
    ``ends`` are the modules with a row for each of the base's ``tokens``.
    """

    modules: list[AdapterModule]
    tensors: dict[str, ModuleTensors]  # by module
    shapes: dict[str, Shape]  # by tensor
    optional: set[str]
    replaced: dict[str, list[str]]  # by tensor
    ends: list[str]
    tokens: int


def wanted_tensors(config: AdapterConfig, model: Any) -> WantedTensors:
    """Raises BadFolder."""
    named = {name: module for name, module in model.named_modules() if name}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    ends = _embeddings(model, named)
    targets = _targets(config, named, ends)
    saved = _saved(config, named)
    if config.ensure_weight_tying and _tied(named, ends):
        for names in (targets, saved):
            names.extend(end for end in ends if ends[0] in names and end not in names)
    wanted = WantedTensors([], {}, {}, set(), {}, ends, model.get_input_embeddings().weight.shape[0])
    scales = Scales(config)
    for name in targets:
        _add_module(wanted, name, named[name], *scales.of(name), config.lora_bias)

    def place(parameter: str) -> str:
        """Its name in PEFT's file."""
        owner, _, last = parameter.rpartition(".")
        return PREFIX + (f"{owner}.base_layer.{last}" if owner in targets else parameter)

    def replace(tensor: str, uses: list[str]) -> None:
        wanted.shapes[tensor] = tuple(parameters[uses[0]].shape)
        wanted.replaced[tensor] = uses

    own = {name: module for name in parameters for module in saved if name.startswith(f"{module}.")}
    for name, module in own.items():
        replace(PREFIX + name, [name])
        if module in ends or (config.bias == "all" and "bias" in name):  # PEFT may have it twice, and the base's too
            for copy in ("modules_to_save", "original_module"):
                tensor = f"{PREFIX}{module}.{copy}{name.removeprefix(module)}"
                wanted.shapes[tensor] = tuple(parameters[name].shape)
                wanted.optional.add(tensor)
    for name in [name for name in parameters if name not in own]:
        owner, _, last = name.rpartition(".")
        adapted = owner in targets and last == "bias"
        if (config.bias == "lora_only" and adapted) or (config.bias == "all" and "bias" in name):
            replace(place(name), [name])
        elif owner in ends:  # saved with save_embedding_layers, and always where embeddings are adapted
            uses = [each for each in parameters if parameters[each] is parameters[name] and each not in (name, *own)]
            replace(place(name), [name, *uses])
            wanted.optional.add(place(name))
    return wanted


def _embeddings(model: Any, named: dict[str, Any]) -> list[str]:
    """Names of the modules for input and output."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [next(name for name, module in named.items() if module is end) for end in ends if end is not None]


def _tied(named: dict[str, Any], ends: list[str]) -> bool:
    return len({id(named[name].weight) for name in ends}) < len(ends)


def _targets(config: AdapterConfig, named: dict[str, Any], ends: list[str]) -> list[str]:
    linears = [name for name, module in named.items() if _is_linear(module) and name not in ends[1:]]
    targets = Targets(config, linears)
    if (unknown := targets.unknown(named)) is not None:
        raise BadFolder(f"{CONFIG}: target_modules has {unknown[:200]!r}, and the base has no such module")
    if not (found := [name for name in named if name in targets]):
        raise BadFolder(f"{CONFIG}: all of target_modules are excluded again: nothing of the base is adapted")
    return found


def _saved(config: AdapterConfig, named: dict[str, Any]) -> list[str]:
    """PEFT takes each module whose name ends so, not only after a dot."""
    found: list[str] = []
    for wanted in config.modules_to_save or []:
        modules = [name for name in named if wanted and name.endswith(wanted)]
        if not modules:
            raise BadFolder(f"{CONFIG}: modules_to_save has {wanted[:200]!r}, and the base has no such module")
        found.extend(name for name in modules if name not in found)
    return found


def _is_linear(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def _add_module(wanted: WantedTensors, name: str, module: Any, rank: int, scale: float, bias: bool) -> None:
    if _is_linear(module):
        linear = isinstance(module, nn.Linear)
        outputs, inputs = module.weight.shape if linear else reversed(module.weight.shape)  # Conv1D has it transposed
        stem = f"{PREFIX}{name}.lora_"
        names = ModuleTensors(f"{stem}A.weight", f"{stem}B.weight", f"{stem}B.bias" if bias else "")
        if bias:
            wanted.shapes[names.bias] = (outputs,)
    elif type(module) is nn.Embedding or hasattr(module, "scalar_embed_scale"):
        inputs, outputs = module.weight.shape
        stem = f"{PREFIX}{name}.lora_embedding_"
        names = ModuleTensors(f"{stem}A", f"{stem}B", "")
        scale *= getattr(module, "scalar_embed_scale", 1.0)  # Gemma's, after which PEFT adds
        if bias:
            raise BadFolder(f"{CONFIG}: lora_bias goes with linear modules, and {name} is an embedding")
    else:
        kind = type(module).__name__
        raise BadFolder(f"{CONFIG}: target_modules has {name}, a {kind}; linear modules and embeddings can be adapted")
    wanted.shapes.update({names.a: (rank, inputs), names.b: (outputs, rank)})
    wanted.tensors[name] = names
    added = AdapterModule(
        name=name, kind="linear" if _is_linear(module) else "embedding", rank=rank, scale=scale, bias=bias
    )
    wanted.modules.append(added)
