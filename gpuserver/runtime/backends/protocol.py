"""The duties of each backend in a layer: its attention, and the additions of adapters to products."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from dormouse.gpuserver.runtime.low_rank import AdapterRows, Table
from dormouse.gpuserver.runtime.tables import StepPart, StepTables


class Scores(NamedTuple):
    """The scores of a model: ``window`` tokens are seen at most, 0: all; ``cap`` bends scores, 0: not."""

    scale: float
    window: int
    cap: float


class AttentionBackend(Protocol):
    """Keys, values and queries are ``[heads, tokens, dim]``, a token in a row, as the step's tables have them."""

    def columns(self, parts: Sequence[StepPart]) -> Sequence[Sequence[int]]:
        """Numbers that it wants beside the others in the step's tables, on the device."""

    def write(self, step: StepTables, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """To their blocks."""

    def attend(self, step: StepTables, layer: int, query: torch.Tensor, out: torch.Tensor, scores: Scores) -> None:
        """Attention of each token to its sequence up to itself, to ``out``: ``[tokens, heads, dim]``, contiguous."""

    def add(self, table: Table, given: torch.Tensor, out: torch.Tensor, rows: AdapterRows, head: bool) -> None:
        """To ``out``, a row for each of ``given``: the additions of the table's adapters to the product of these."""

    def warm(self, heads: int, capped: bool, inputs: Collection[int]) -> None:
        """Whatever is done once for a model with so many heads, before anybody waits for a step. ``inputs``: widths of
        the products that adapters add to, if there are any.
        """


@runtime_checkable
class Rotates(Protocol):
    """A backend with rotary position embeddings of its own."""

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys ``[1, heads, tokens, dim]``, halves turned by angles ``[1, tokens, dim]`` of their type."""
