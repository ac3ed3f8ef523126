"""Builds a language model without weights, from known fields, and binds it to weights that lie elsewhere.

The modules are those of ``transformers``; their attention is ours (attention.py). Nothing copies or rewrites a weight:
it may be another process's, and read-only.
"""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dormouse.gpuserver.runtime import layers
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import DecoderSpec

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}

_numbers = itertools.count(1)


def build(spec: DecoderSpec, attention: BlockAttention, fused: bool = True) -> PreTrainedModel:
    """Its parameters are on ``meta``; its buffers are real, on the device of the attention's memory. ``fused``: see
    layers.py. Raises ConfigError.
    """
    spec.check()
    name = f"dormouse-{next(_numbers)}"
    AttentionInterface.register(name, attention)  # one without a mask: visibility is in the block tables
    config = AutoConfig.for_model(spec.family, **spec.config)
    with parameters_on_meta():
        made: Any = AutoModelForCausalLM
        model: PreTrainedModel = made.from_config(config, attn_implementation=name, dtype=DTYPES[spec.dtype])
    model.tie_weights()  # tied parameters were put to meta apart
    for module in model.modules():
        module.training = False
        for each, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, each, buffer.to(attention.memory.device))
    layers.install(model, attention, fused)
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Only parameters: buffers are computed from the configuration, and small."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    with patch.object(nn.Module, "register_parameter", on_meta):
        yield


def bind(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Give each parameter its tensor, by the names of the model's files. Raises ConfigError unless all fit."""
    wanted = dict(model.named_parameters())  # one that is tied to another is named once
    tied = {id(parameter): name for name, parameter in wanted.items()}
    aliases = {name: tied[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}
    prefix = f"{model.base_model_prefix}."
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        known = next((each for each in (name, prefix + name, name.removeprefix(prefix)) if each in aliases), None)
        if known is None:
            raise ConfigError(f"the weights have {name!r}, which this model does not")
        found.setdefault(aliases[known], tensor)
    if missing := sorted(wanted.keys() - found.keys()):
        raise ConfigError(f"the weights lack {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}")
    owners = {name: _owner(model, name) for name in aliases}
    made = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in found.items()}
    for alias, name in aliases.items():
        tensor, parameter = found[name], wanted[name]
        if tensor.shape != parameter.shape or tensor.dtype is not parameter.dtype:
            has, wants = (f"{each.dtype} {list(each.shape)}" for each in (tensor, parameter))
            raise ConfigError(f"the weight {name!r} is {has}, its model wants {wants}")
        module, last = owners[alias]
        module._parameters[last] = made[name]  # the same object for all that are tied, as it was
    layers.bound(model)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return model.get_submodule(path), last
