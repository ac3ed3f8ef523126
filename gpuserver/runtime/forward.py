"""One call of a runtime's model: the tokens of a step in, logits out."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from dormouse.core.decisions.batches.batch import NO_ADAPTER
from dormouse.gpuserver.runtime.adapters import Adapters
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.low_rank import AdapterRows
from dormouse.gpuserver.runtime.packing import Pack, packed
from dormouse.gpuserver.runtime.tables import StepPart


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the model, a number for each token of the step: ``kept`` are rows whose logits are wanted."""

    parts: Sequence[StepPart]
    tokens: Sequence[int]
    positions: Sequence[int]
    kept: Sequence[int]

    @property
    def adapters(self) -> frozenset[int]:
        """Numbers of those that have rows here."""
        return frozenset(part.adapter for part in self.parts) - {NO_ADAPTER}

    @property
    def owners(self) -> list[int]:
        """The number of each token's adapter."""
        return [part.adapter for part in self.parts for _ in range(part.tokens)]

    @property
    def owners_kept(self) -> list[int]:
        """Of those that are kept."""
        owners = self.owners
        return [owners[row] for row in self.kept]


class Forward:
    """See the module."""

    def __init__(self, model: PreTrainedModel, attention: BlockAttention, adapters: Adapters) -> None:
        self.attention, self.adapters = attention, adapters
        self.model = model

    def __call__(self, given: StepInputs) -> torch.Tensor:
        """Logits in fp32, a row for each that is kept."""
        numbers = given.adapters
        owners, owners_kept = (given.owners, given.owners_kept) if numbers else ([], [])
        with self.begun(given, packed, owners, owners_kept) as (call, of_adapters):
            if numbers:
                most_rank = self.adapters.most_rank(numbers)
                tokens, kept = of_adapters
                aligned = self.adapters.aligned(numbers)
                self.mix(AdapterRows(tokens, kept, (owners, owners_kept), numbers, most_rank, aligned=aligned))
            return call(None)

    @contextmanager
    def begun(
        self, given: StepInputs, pack: Pack, *more: Sequence[int]
    ) -> Iterator[tuple[Callable[[torch.Tensor | None], torch.Tensor], Sequence[torch.Tensor]]]:
        """A step is under way: a function that computes its logits, into a given tensor if any, and ``more`` numbers on
        the device.
        """
        inputs = given.tokens, given.positions, given.kept, *more
        tokens, positions, kept, *others = self.attention.begin(given.parts, inputs, pack)

        def call(out: torch.Tensor | None) -> torch.Tensor:
            logits: torch.Tensor = self.model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept
            ).logits[0]
            return logits.float() if out is None else out.copy_(logits)

        try:
            yield call, others
        finally:
            self.attention.end()

    def mix(self, rows: AdapterRows) -> None:
        """The step that is under way has rows of these adapters."""
        assert self.attention.step is not None
        self.attention.step.adapters = rows
