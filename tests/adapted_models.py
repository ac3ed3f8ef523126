"""Adapters with random weights for tiny models, and the models as they are with one."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from dormouse.gpuserver.runtime.low_rank import LowRank


def linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    return {name: module for name, module in model.named_modules() if type(module) is nn.Linear}


def adapter(model: PreTrainedModel, seed: int, rank: int = 8, only: str = "") -> dict[str, LowRank]:
    """Random, and strong enough to change what a model says; to all linear layers whose name has ``only``."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    chosen = {name: linear for name, linear in linears(model).items() if only in name}
    assert chosen
    return {
        name: LowRank(random(rank, linear.in_features), random(rank, linear.out_features), 0.5 + seed % 3)
        for name, linear in chosen.items()
    }


@contextmanager
def adapted(model: PreTrainedModel, added: Mapping[str, LowRank]) -> Iterator[PreTrainedModel]:
    """The reference, with hooks that add."""

    def hook(low: LowRank) -> Any:
        return lambda _, given, out: out + low.scale * (given[0] @ low.down.T @ low.up)

    handles = [linears(model)[name].register_forward_hook(hook(low)) for name, low in added.items()]
    try:
        yield model
    finally:
        for handle in handles:
            handle.remove()
