"""The one model that a runtime computes: built when an instance has described it completely, bound to its memory in
place. Members share it; each may have an adapter of its own.
"""

from torch import nn
from transformers import PreTrainedModel

from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import Engine, kv_layout
from dormouse.gpuserver.runtime.extents import KvExtents
from dormouse.gpuserver.runtime.mapping import PoolMapping
from dormouse.gpuserver.runtime.members import Member, Places
from dormouse.gpuserver.runtime.weights import SeatWeights
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import DecoderSpec


class ServingModel:
    """``engine``: None before the model is known."""

    def __init__(self, mapping: PoolMapping, bound: SeatWeights, kv: KvExtents) -> None:
        self._mapping, self._bound, self._kv = mapping, bound, kv
        self._spec: DecoderSpec | None = None  # of the model that is built
        self._model: PreTrainedModel | None = None
        self._placed: Places | None = None  # where the model is bound, in this seat
        self.engine: Engine | None = None

    @property
    def placed(self) -> bool:
        """Whether it is bound."""
        return self._placed is not None

    def _waited_s(self) -> float:
        return self._bound.waited_s

    def left(self) -> None:
        """The seat is over."""
        self._placed = None
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        if self.engine is not None and self.engine.graphs is not None:
            self.engine.graphs.forget()

    def build(self, member: Member, alone: bool) -> None:
        """Raises ConfigError if another model than that of other members is asked for."""
        spec = member.spec
        if self.engine is not None and spec != self._spec and not (alone and self._placed is None):
            raise ConfigError("its runtime computes another model")
        if self.engine is None or spec != self._spec:
            layout = kv_layout(spec)
            attention = BlockAttention(layout, self._mapping.elements(layout.dtype))
            self._model = models.build(spec, attention)
            self.engine = self._kv.engine = Engine(self._model, attention, self._kv.grow, self._waited_s)
            self._spec = spec
            config, linears = self._model.config, [each for each in self._model.modules() if type(each) is nn.Linear]
            inputs = {each.in_features for each in linears} if member.adapter is not None else set()
            capped = bool(getattr(config, "attn_logit_softcapping", None))
            attention.backend.warm(config.num_attention_heads, capped, inputs)
        if member.adapter is not None and member.number == NO_ADAPTER:  # it is known to the engine from now on
            member.adapter.check()
            member.number = self.engine.adapters.open()

    def bind(self, member: Member, seat: m.SeatGiven) -> bool:
        """Whether all is here but its adapter. Raises ConfigError for weights that are not there, or not those of other
        members.
        """
        assert self._model is not None
        assert self.engine is not None
        places, dtype = member.places(seat), models.DTYPES[member.spec.dtype]
        if self._placed is None:
            self._bound.bind(self._model, member.base_weights, seat, dtype)
            self._placed = places
            self._forget_graphs()
        elif places != self._placed:
            raise ConfigError("its weights are not where those of its runtime are")
        if member.number == NO_ADAPTER or self.engine.adapters.bound(member.number):
            return False
        parts = self._bound.adapter(member, seat, dtype)
        if parts is not None:
            self.engine.bind(member.number, parts.adds, parts.replaced)
        return parts is None
