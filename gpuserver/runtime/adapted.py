"""Modules that adapters change, where the C++ kernels do not do it: they add to embeddings, to GPT-2's products and,
without the kernels, to all; and they have parameters of their own in place of the base's.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn

from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.groups import Rows, by_group, concerned, rows_of
from dormouse.gpuserver.runtime.low_rank import add_each, table_of

Own = Mapping[tuple[nn.Module, str], nn.Parameter]
"""Parameters in place of those that these modules have by these names."""

T = TypeVar("T")

_POSITIONS: Final = "position_ids"
"""OPT's embeddings of positions are given them so."""


@contextmanager
def swapped(own: Own) -> Iterator[None]:
    """The model has these parameters."""
    base = {(module, name): module._parameters[name] for module, name in own}
    try:
        for (module, name), parameter in own.items():
            module._parameters[name] = parameter
        yield
    finally:
        for (module, name), mine in base.items():
            module._parameters[name] = mine


class Places(Generic[T]):
    """The parameters of modules that the kernels compute as a whole: the base's, and by number those of adapters that
    have some of their own there.
    """

    def __init__(self, found: Callable[[], T]) -> None:
        self._found = found
        self._base: T | None = None
        self.own: dict[int, tuple[Own, T]] = {}

    def bind(self) -> None:
        """The base's are in place, and so are adapters' changes to products."""
        self._base = self._found()
        for number, (own, _) in list(self.own.items()):
            self.put(number, own)

    def put(self, number: int, own: Own) -> None:
        with swapped(own):
            self.own[number] = own, self._found()

    def of(self, number: int) -> T:
        assert self._base is not None, "its weights are bound"
        return self.own[number][1] if number in self.own else self._base


class AdaptedModule:
    """``forward`` of one module, which was ``plain``. ``head``: it is asked for the tokens whose logits are wanted
    only. ``adds``: ``plain`` does not do the additions of adapters. ``own``: by number.
    """

    def __init__(
        self, module: nn.Module, plain: Callable[..., Any], attention: BlockAttention, head: bool, heads_first: bool
    ) -> None:
        self._module, self._plain, self._attention, self._head = module, plain, attention, head
        self._heads_first = heads_first  # in four dimensions: tokens are the third, else the second
        self.adds = False
        self.own: dict[int, Own] = {}

    def __call__(self, *args: Any, **named: Any) -> torch.Tensor:
        if not (own := concerned(self._attention, self.own)):
            return self._added(*args, **named)

        def compute(number: int, rows: Rows) -> torch.Tensor:
            with swapped(self.own.get(number, {})):
                if _POSITIONS in named:
                    return self._added(*args, **{**named, _POSITIONS: rows(named[_POSITIONS])})
                return self._added(rows(args[0]), *args[1:], **named)

        axis = self._axis(named.get(_POSITIONS, args[0]))
        return by_group(self._attention, own, self._head, axis, compute)

    def put(self, number: int, own: Own) -> None:
        self.own[number] = own

    def _axis(self, given: torch.Tensor) -> int:
        """That which has a row for each token."""
        if given.dim() == 4 and self._heads_first:
            return 2
        return 0 if given.dim() == 2 and given.is_floating_point() else 1

    def _added(self, *args: Any, **named: Any) -> torch.Tensor:
        out: torch.Tensor = self._plain(*args, **named)
        table = table_of(self._module)
        if not self.adds or table is None or not concerned(self._attention, table.by_number):
            return out
        (given,) = args
        flat = given.reshape(-1, given.shape[-1]) if given.is_floating_point() else given.flatten()
        rows = rows_of(self._attention)
        assert rows is not None
        add = self._attention.backend.add if given.is_floating_point() else add_each
        add(table, flat, out.view(-1, out.shape[-1]), rows, self._head)
        return out


def adapted(module: nn.Module, model: Any, attention: BlockAttention) -> AdaptedModule:
    """Its ``forward``, from now on."""
    if not isinstance(module.forward, AdaptedModule):
        head, heads_first = module is model.get_output_embeddings(), model.config.model_type == "phi"
        module.forward = AdaptedModule(module, module.forward, attention, head, heads_first)
    found: AdaptedModule = module.forward
    return found
