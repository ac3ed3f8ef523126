"""The adapters of a runtime (LoRA). Nothing is merged into weights, which others share.

An adapter has a number, and a step says of each of its tokens whose number it is. The products of its row get what that
adapter adds: in the C++ kernels (lora.h), or by torch where modules are computed by it.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from dormouse.gpuserver.runtime import layers
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.low_rank import MOST, LowRank, made_table, table_of
from dormouse.schemas.errors import ConfigError
from dormouse.schemas.llm import MOST_RANK


class Adapters:
    """Of one model. Each has a number as long as somebody may ask for it, and is bound while its tensors are here."""

    def __init__(self, model: Any, attention: BlockAttention) -> None:
        self._model, self._attention = model, attention
        self._linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        self._salts: dict[int, bytes] = {}  # by number
        self._bound: dict[int, Mapping[str, LowRank]] = {}
        self._serials = itertools.count()

    def open(self) -> int:
        """The number of a new one. Raises ConfigError if there are too many."""
        number = next((number for number in range(MOST) if number not in self._salts), None)
        if number is None:
            raise ConfigError(f"a runtime computes {MOST} adapters at most")
        self._salts[number] = b"adapter %d" % next(self._serials)
        return number

    def bind(self, number: int, adapter: Mapping[str, LowRank]) -> None:
        """It adds this, by names of linear layers. Raises ConfigError unless all of it fits."""
        assert number in self._salts
        assert number not in self._bound
        if not adapter:
            raise ConfigError("the adapter adds to nothing")
        for name, low in adapter.items():
            self._check(name, low)
        fresh = any(table_of(self._linears[name]) is None for name in adapter)
        self._bound[number] = adapter
        for name, low in adapter.items():
            made_table(self._linears[name]).put(number, low)
        if fresh:
            layers.adapted(self._model, self._attention)

    def unbind(self, number: int) -> None:
        """Its tensors leave; no sequence that has it is in a step until it is bound again."""
        for name in self._bound.pop(number, {}):
            made_table(self._linears[name]).drop(number)

    def close(self, number: int) -> None:
        """No sequence has it any more."""
        self.unbind(number)
        del self._salts[number]

    def bound(self, number: int) -> bool:
        return number in self._bound

    def salt(self, number: int) -> bytes:
        """Of the KV that it makes: nobody else's is like it."""
        return self._salts[number]

    def most_rank(self, numbers: Iterable[int]) -> int:
        """Of these adapters."""
        held = (self._bound[number].values() for number in numbers)
        return max((len(low.down) for lows in held for low in lows), default=0)

    def _check(self, name: str, low: LowRank) -> None:
        linear = self._linears.get(name)
        if linear is None:
            raise ConfigError(f"the adapter adds to {name!r}, which is no linear layer of this model")
        rank, dtype = len(low.down), linear.weight.dtype
        if not 0 < rank <= MOST_RANK:
            raise ConfigError(f"the adapter's rank at {name!r} is {rank}; it can be 1 to {MOST_RANK}")
        found = list(low.down.shape), list(low.up.shape)
        wanted = [rank, linear.in_features], [rank, linear.out_features]
        if found != wanted:
            raise ConfigError(f"the adapter's shapes at {name!r} are {found}, its model wants {wanted}")
        if {low.down.dtype, low.up.dtype} != {dtype}:
            raise ConfigError(f"the adapter at {name!r} is not of its model's {dtype}")
        if not low.down.is_contiguous() or not low.up.is_contiguous():
            raise ConfigError(f"the adapter at {name!r} is not contiguous")
