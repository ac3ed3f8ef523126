"""Checks of indices on a GPU, where a kernel's assertion on one out of range ends the context with all its models.

An operation that only reads gets 0 in place of such an index, and the fault stays recorded on the GPU until the next
command that waits, so that nobody waits for it alone. An operation that writes is checked first: it could spoil the
model. On the CPU the kernels check themselves, and raise.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch

OUT_OF_RANGE: Final = "index out of range in self"
"""As PyTorch's CPU kernels say it."""

_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8)


class Range(NamedTuple):
    """The argument ``name`` (its item ``item``, if it is a list) has to lie in ``[low, high)``, or be ``other``."""

    name: str
    low: int
    high: int
    item: int | None = None
    other: int | None = None


Rule = Callable[[dict[str, Any]], Iterator[Range]]
"""Of the arguments by name."""


def _rows(values: dict[str, Any]) -> Iterator[Range]:
    yield Range("indices", 0, values["weight"].size(0))


def _along(values: dict[str, Any]) -> Iterator[Range]:
    data = values["self"]
    yield Range("index", 0, data.size(values["dim"]) if data.dim() else 1)


def _flat(values: dict[str, Any]) -> Iterator[Range]:
    count = values["self"].numel()
    yield Range("index", -count, count)


def _each(values: dict[str, Any]) -> Iterator[Range]:
    """One list of indices for each dimension; where a mask is among them, the kernel makes its own."""
    data, indices = values["self"], values["indices"]
    if all(index is None or index.dtype in _INTEGERS for index in indices) and len(indices) <= data.dim():
        for dim, index in enumerate(indices):
            if index is not None:
                yield Range("indices", -data.size(dim), data.size(dim), dim)


def _classes(values: dict[str, Any]) -> Iterator[Range]:
    data = values["self"]
    yield Range("target", 0, data.size(1 if data.dim() > 1 else 0), other=values["ignore_index"])


def _one_hot(values: dict[str, Any]) -> Iterator[Range]:
    classes = values["num_classes"]
    yield Range("self", 0, classes if classes > 0 else 1 << 31)


RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys(("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), _rows),
    **dict.fromkeys(("index_select", "gather"), _along),
    **{
        f"{name}{suffix}": _along
        for name in (
            *("scatter", "scatter_add", "scatter_reduce"),
            *(f"index_{kind}" for kind in ("add", "copy", "fill", "reduce")),
        )
        for suffix in ("", "_")
    },
    **dict.fromkeys(("take", "put", "put_"), _flat),
    **dict.fromkeys(("index", "index_put", "index_put_", "_index_put_impl_"), _each),
    **dict.fromkeys(("nll_loss", "nll_loss_nd", "nll_loss2d", "cross_entropy_loss"), _classes),
    "one_hot": _one_hot,
}
"""By an operation's name without overload."""


class IndexGuard:
    """The index checks of one instance on one GPU."""

    def __init__(self) -> None:
        self.found: torch.Tensor | None = None  # one bool on the GPU: whether any index since the last look was wrong

    def checked(self, rule: Rule, values: dict[str, Any], at_once: bool) -> dict[str, Any]:
        """The arguments, with indices that can be used. Raises IndexError if it is known now that one cannot."""
        try:
            ranges = list(rule(values))
        except (IndexError, KeyError, TypeError, AttributeError):
            return values  # the operation says what is wrong with them
        for found in ranges:
            index = values[found.name] if found.item is None else values[found.name][found.item]
            if isinstance(index, torch.Tensor) and index.dtype in _INTEGERS and index.numel():
                if found.high <= found.low:
                    raise IndexError(OUT_OF_RANGE)
                usable = self._usable(index, found, at_once)
                if found.item is None:
                    values[found.name] = usable
                else:
                    values[found.name] = [*values[found.name]]
                    values[found.name][found.item] = usable
        return values

    def _usable(self, index: torch.Tensor, found: Range, at_once: bool) -> torch.Tensor:
        inside = (index >= found.low) & (index < found.high)
        if found.other is not None:
            inside |= index == found.other
        bad = ~inside.all()
        if at_once:
            if bad.item():
                raise IndexError(OUT_OF_RANGE)
            return index
        self.note(bad)
        return torch.where(inside, index, 0)

    def note(self, bad: torch.Tensor) -> None:
        """One bool on the GPU: whether an index was wrong."""
        self.found = bad if self.found is None else self.found | bad

    def forget(self) -> None:
        """Nobody will ask any more."""
        self.found = None

    def fault(self) -> bool:
        """Whether any index since the last look was wrong; waits for the GPU if there was one to look at."""
        bad, self.found = self.found, None
        return bad is not None and bool(bad.item())
