"""Binds a runtime's model to its weights in the pool, and lets each layer wait for its own."""

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from dormouse.gpuserver.runtime import layers, models
from dormouse.gpuserver.runtime.executor_link import SOON_S, ExecutorLink, WeightsLost
from dormouse.gpuserver.runtime.low_rank import LowRank
from dormouse.gpuserver.runtime.mapping import PoolMapping
from dormouse.gpuserver.runtime.members import Member
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import BIAS, DOWN, REPLACED, UP, AdapterSpec


class StepCut(Exception):
    """The seat ends in the middle of a step that waits for weights; nothing that it has computed is kept."""


class AdapterParts(NamedTuple):
    """The additions of an adapter, by module, and its own parameters in place of the base's, by their names."""

    adds: dict[str, LowRank]
    replaced: dict[str, torch.Tensor]


def adapter_parts(spec: AdapterSpec, tensors: Mapping[str, torch.Tensor]) -> AdapterParts:
    """Of all of its tensors. Raises ConfigError."""
    adds: dict[str, LowRank] = {}
    for module in spec.modules:
        down, up, bias = (tensors.get(module.name + end) for end in (DOWN, UP, BIAS))
        assert down is not None
        assert up is not None
        if up.shape[:1] != (module.rank,):
            raise ConfigError(f"the adapter's rank at {module.name!r} is not {module.rank}")
        adds[module.name] = LowRank(down, up, module.scale, bias)
    return AdapterParts(adds, {name: tensors[name + REPLACED] for name in spec.replaced})


class SeatWeights:
    """The weights of a model in the seat that its runtime has. ``missing``: segments that are on their way."""

    def __init__(self, link: ExecutorLink, mapping: PoolMapping) -> None:
        self._link, self._mapping = link, mapping
        self.missing: set[int] = set()
        self.waited_s = 0.0  # for them, in all
        self.offered_s = 0.0  # of that, since others were offered the GPU
        self._segments: dict[int, int] = {}  # by address of a parameter
        self._hooks: list[RemovableHandle] = []  # of modules that wait for theirs

    def bind(
        self, model: PreTrainedModel, weights: dict[str, m.WeightAt], seat: m.SeatGiven, dtype: torch.dtype
    ) -> None:
        """Raises ConfigError."""
        tensors = self._tensors(weights, seat, dtype)
        self._segments = {tensor.data_ptr(): segment for tensor, segment in tensors.values()}
        models.bind(model, {name: tensor for name, (tensor, _) in tensors.items()})
        self._wait_by_layer(model)

    def adapter(self, member: Member, seat: m.SeatGiven, dtype: torch.dtype) -> AdapterParts | None:
        """A member's; None while some of it is on its way. Raises ConfigError."""
        assert member.adapter is not None
        own = member.adapters_weights
        if lacking := sorted(own - member.weights.keys()):
            raise ConfigError(f"the adapter lacks {lacking[0]!r}")
        storages = {member.weights[name].storage for name in own}
        if self.missing.intersection(each.segment for each in seat.storages if each.storage in storages):
            return None
        tensors = {
            name: tensor
            for name, (tensor, _) in self._tensors({name: member.weights[name] for name in own}, seat, dtype).items()
        }
        return adapter_parts(member.adapter, tensors)

    def _tensors(
        self, weights: dict[str, m.WeightAt], seat: m.SeatGiven, dtype: torch.dtype
    ) -> dict[str, tuple[torch.Tensor, int]]:
        """Each with its segment. Raises ConfigError."""
        storages = {storage.storage: storage for storage in seat.storages}
        tensors: dict[str, tuple[torch.Tensor, int]] = {}
        for weight in weights.values():
            if min(weight.shape, default=0) < 0:
                raise ConfigError(f"the weight {weight.name!r} has the shape {weight.shape}")
            storage, numel = storages.get(weight.storage), math.prod(weight.shape)
            if storage is None or weight.offset < 0 or weight.offset + numel * dtype.itemsize > storage.nbytes:
                raise ConfigError(f"the weight {weight.name!r} lies outside of what is here")
            tensor = self._mapping.tensor(storage.offset + weight.offset, numel, dtype).view(weight.shape)
            tensors[weight.name] = tensor, storage.segment
        return tensors

    def came(self, came: m.SegmentsCame) -> None:
        """Raises WeightsLost."""
        if came.lost and self.missing.intersection(came.segments):
            raise WeightsLost("some of the model's memory will not come")
        self.missing.difference_update(came.segments)

    def _wait_by_layer(self, model: PreTrainedModel) -> None:
        """Each module waits for its own parameters before it computes: a wake and a prefill run beside each other."""
        self._unhook()
        for module, parameters in layers.waiting(model):
            own = [parameter.data_ptr() for parameter in parameters]
            segments = {self._segments[pointer] for pointer in own if pointer in self._segments}
            if segments & self.missing:
                handle = module.register_forward_pre_hook(lambda *_, wanted=segments: self._wait_for(wanted))
                self._hooks.append(handle)

    def _wait_for(self, segments: set[int]) -> None:
        began_s = time.perf_counter()
        while segments & self.missing:
            asked_s = time.perf_counter()
            message: m.SegmentsCame | m.SeatEnds = self._link.wait_for(m.SegmentsCame, m.SeatEnds, late=m.StepWaits())
            self.offered_s += max(0.0, time.perf_counter() - asked_s - SOON_S)
            if isinstance(message, m.SeatEnds):
                self._link.heard.appendleft(message)
                raise StepCut
            self.came(message)
        self.waited_s += time.perf_counter() - began_s
        if not self.missing:
            self._unhook()

    def _unhook(self) -> None:
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
