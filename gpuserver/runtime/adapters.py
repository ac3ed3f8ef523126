"""The adapters of a runtime (LoRA). Nothing is merged into weights, which others share.

An adapter has a number, and a step says of each of its tokens whose number it is. The products of its row get what that
adapter adds: in the C++ kernels (lora.h), or by torch where modules are computed by it.
"""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import nn

from dormouse.gpuserver.runtime import layers
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.low_rank import MOST, LowRank, made_table, table_of
from dormouse.schemas.errors import ConfigError

MOST_RANK: Final = 256


class Adapters:
    """Of one model."""

    def __init__(self, model: Any, attention: BlockAttention) -> None:
        self._model, self._attention = model, attention
        self._linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
        self._held: dict[int, Mapping[str, LowRank]] = {}  # by number
        self._salts: dict[int, bytes] = {}
        self._serials = itertools.count()

    def put(self, number: int, adapter: Mapping[str, LowRank]) -> None:
        """This adapter has this number, by names of linear layers. Raises ConfigError unless all of it fits."""
        if not 0 <= number < MOST or number in self._held:
            raise ConfigError(f"an adapter cannot have the number {number}")
        if not adapter:
            raise ConfigError("the adapter adds to nothing")
        for name, low in adapter.items():
            self._check(name, low)
        fresh = any(table_of(self._linears[name]) is None for name in adapter)
        self._held[number] = adapter
        self._salts[number] = b"adapter %d" % next(self._serials)
        for name, low in adapter.items():
            made_table(self._linears[name]).put(number, low)
        if fresh:
            layers.adapted(self._model, self._attention)

    def drop(self, number: int) -> None:
        """No sequence has it any more."""
        for name in self._held.pop(number):
            made_table(self._linears[name]).drop(number)
        del self._salts[number]

    def salt(self, number: int) -> bytes:
        """Of the KV that it makes: nobody else's is like it. Raises ConfigError."""
        if number not in self._salts:
            raise ConfigError(f"there is no adapter {number}")
        return self._salts[number]

    def most_rank(self, numbers: Iterable[int]) -> int:
        """Of these adapters."""
        held = (self._held[number].values() for number in numbers)
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
