"""The engine of one runtime: sequences in, tokens out, one step at a time. Knows no process and no socket."""

import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from transformers import PreTrainedModel

from dormouse.core.decisions.batches.batch import GPU_STEP_TOKENS, NO_ADAPTER, STEP_TOKENS, Batch, Part, Sequence
from dormouse.core.decisions.batches.blocks import Blocks
from dormouse.core.decisions.rules.pace import Pace
from dormouse.gpuserver.runtime import kernels
from dormouse.gpuserver.runtime.adapters import Adapters
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.forward import Forward, StepInputs
from dormouse.gpuserver.runtime.low_rank import LowRank
from dormouse.gpuserver.runtime.models import DTYPES
from dormouse.gpuserver.runtime.sampling import Chosen, Sampling, allowed, choose, sampled_rows
from dormouse.gpuserver.runtime.step_graphs import graphs_for
from dormouse.gpuserver.runtime.tables import KvLayout, StepPart
from dormouse.gpuserver.runtime.work import StepWork, step_work, work_of_nothing
from dormouse.schemas.llm import DecoderSpec

BLOCK_TOKENS: Final = 16


class BadLogits(Exception):
    """The model computed NaN or infinity for these sequences: its weights are damaged, or too large for their type."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__("the model computed NaN or infinity")
        self.numbers = numbers


def kv_layout(spec: DecoderSpec) -> KvLayout:
    return KvLayout(
        layers=spec.layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        block_tokens=BLOCK_TOKENS,
        dtype=DTYPES[spec.dtype],
    )


@dataclass(slots=True, eq=False)
class Generation:
    """A sequence and how its tokens are chosen. ``stops``: tokens that end it. If it is ``masked``, each needs a mask
    (``Engine.allow``) and the sequence is held until that is there.
    """

    sequence: Sequence
    sampling: Sampling
    stops: frozenset[int]
    masked: bool = False
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """The result of a step for a sequence. ``finish``: "stop" or "length" with its last token, else ""."""

    number: int
    chosen: Chosen
    finish: str


class Engine:
    """See the module. ``grow(blocks)`` asks for memory for so many blocks: whether some has come. ``waited_s()``: how
    long steps have waited for weights, in all.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        attention: BlockAttention,
        grow: Callable[[int], bool],
        waited_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.model, self.attention = model, attention
        self.layout = attention.layout
        self.blocks = Blocks(self.layout.block_tokens)
        self.pace = Pace()
        step_tokens = GPU_STEP_TOKENS if attention.memory.device.type == "cuda" else STEP_TOKENS
        self.batch = Batch(self.blocks, step_tokens, pace=self.pace)
        self.generations: dict[int, Generation] = {}  # by number
        self.step_tokens = 0, 0  # of the last step: of prompts, and of all others
        self.step_work: dict[int, StepWork] = {}  # of the last step, by owner
        self.adapters = Adapters(model, attention)
        self.forward = Forward(model, attention, self.adapters)
        self.graphs = graphs_for(self.forward)
        self._grow, self._waited_s = grow, waited_s
        self._vocabulary = int(model.config.vocab_size)
        self._offsets: dict[int, int] = {}  # of blocks, in elements of the attention's memory
        self._extents: dict[int, range] = {}

    # --- memory

    def add_extent(self, extent: int, offset_nbytes: int, nbytes: int) -> None:
        """Memory for KV lies here: ``offset_nbytes`` into the attention's memory."""
        numbers = self.blocks.grow(extent, nbytes // self.layout.block_nbytes)
        self._extents[extent] = numbers
        size, numel = self.layout.dtype.itemsize, self.layout.block_nbytes // self.layout.dtype.itemsize
        for index, number in enumerate(numbers):
            self._offsets[number] = offset_nbytes // size + index * numel

    def drop_extent(self, extent: int) -> None:
        """One that nobody uses."""
        self.blocks.shrink(extent)
        for number in self._extents.pop(extent):
            del self._offsets[number]

    # --- sequences

    def add(self, number: int, generation: Generation) -> None:
        sequence = generation.sequence
        sequence.held = generation.masked
        if sequence.adapter != NO_ADAPTER:
            sequence.salt = self.adapters.salt(sequence.adapter)
            sequence.parked = not self.adapters.bound(sequence.adapter)
        self.generations[number] = generation
        self.batch.add(sequence)

    def remove(self, number: int) -> None:
        """Its client has left."""
        if (generation := self.generations.pop(number, None)) is not None:
            self.batch.remove(generation.sequence)

    def sequences(self, numbers: Iterable[int]) -> list[Sequence]:
        """Those of these that it has."""
        return [found.sequence for number in numbers if (found := self.generations.get(number)) is not None]

    def join(self, number: int) -> None:
        """It waits for others of its function no more."""
        self.batch.join(self.generations[number].sequence)

    def allow(self, number: int, position: int, bits: bytes) -> None:
        """The mask for the token at ``position``, unless nobody waits for it. Raises BadMask."""
        generation = self.generations.get(number)
        if generation is not None and generation.sequence.held and position == len(generation.sequence.tokens):
            generation.mask = allowed(bits, self._vocabulary)
            self.batch.release(generation.sequence)

    # --- adapters

    def bind(
        self, number: int, adds: Mapping[str, LowRank], replaced: Mapping[str, torch.Tensor] = MappingProxyType({})
    ) -> None:
        """The tensors of this adapter have come: its additions, by module, and its own parameters, by name. Raises
        ConfigError.
        """
        self.adapters.bind(number, adds, replaced)
        for sequence in self._sequences_of(number):
            self.batch.unpark(sequence)

    def unbind(self, number: int) -> None:
        """They leave: its sequences wait until they are here again."""
        for sequence in self._sequences_of(number):
            self.batch.park(sequence)
        self.adapters.unbind(number)

    def _sequences_of(self, number: int) -> list[Sequence]:
        sequences = (generation.sequence for generation in self.generations.values())
        return [sequence for sequence in sequences if sequence.adapter == number]

    # --- steps

    @torch.inference_mode()
    def step(self) -> list[Made] | None:
        """Compute one; None if nothing could be. If it raises, BadLogits or errors of modules, nothing has changed but
        ``step_work``.
        """
        parts = self.batch.plan(self._grow, time.perf_counter())
        if not parts:
            return None
        parts.sort(key=lambda part: part.sequence.adapter)  # rows of one lie beside each other (lora.h)
        prompts = [part.tokens for part in parts if part.tokens > 1]
        self.step_tokens = sum(prompts), len(parts) - len(prompts)
        self.step_work = work_of_nothing(parts)  # unless it is done
        sampling = [part for part in parts if part.samples]
        began_s, waited_s = time.perf_counter(), self._waited_s()
        logits = self._forward(parts)
        greedy = kernels.largest(logits)[: len(sampling)]
        if bad := [part.sequence.number for part, token in zip(sampling, greedy, strict=True) if token < 0]:
            raise BadLogits(bad)
        if self._waited_s() == waited_s:  # else it took as long as copies
            self.pace.learn(self.step_tokens[0], (time.perf_counter() - began_s) * 1000)
        made: list[Made] = []
        self.step_work = step_work(parts)
        for part in parts:
            self.batch.computed(part)
        found = self._found(sampling, logits)
        for row, part in enumerate(sampling):
            made.append(self._choose(part, found.get(row, greedy[row]), greedy[row]))
        return made

    def _found(self, sampling: SequenceOf[Part], logits: torch.Tensor) -> dict[int, torch.Tensor | int]:
        """Of a part its logits on the host, where penalties and masks are; or its token, if a GPU has chosen it: the
        host would sort a vocabulary in milliseconds.
        """
        if logits.device.type == "cpu":
            return dict(enumerate(logits))
        found: dict[int, torch.Tensor | int] = {}
        generations = [self.generations[part.sequence.number] for part in sampling]
        there = [row for row, each in enumerate(generations) if each.sampling.only_samples and each.mask is None]
        here = [row for row, part in enumerate(sampling) if row not in there and not self._plain(part)]
        if there:
            positions = [len(generations[row].sequence.tokens) for row in there]
            tokens = sampled_rows(logits[there], [generations[row].sampling for row in there], positions)
            found.update(zip(there, tokens, strict=True))
        if here:
            found.update(zip(here, logits[here].cpu(), strict=True))
        return found

    def _forward(self, parts: SequenceOf[Part]) -> torch.Tensor:
        """Logits in fp32, a row for each part that samples; one row if none does."""
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        tables: list[StepPart] = []
        for part in parts:
            sequence, end = part.sequence, part.start + part.tokens
            offsets = [self._offsets[number] for number in sequence.table.blocks]
            tables.append(StepPart(len(tokens), part.tokens, end, offsets, sequence.adapter))
            tokens += sequence.tokens[part.start : end]
            positions += range(part.start, end)
            if part.samples:
                last.append(len(tokens) - 1)
        given = StepInputs(tables, tokens, positions, last or [0])
        try:
            return self._computed(given)
        except torch.OutOfMemoryError as error:
            if self.graphs is None or not self.graphs.stop(str(error)):
                raise
        return self._computed(given)

    def _computed(self, given: StepInputs) -> torch.Tensor:
        found = None if self.graphs is None else self.graphs.logits(given)
        return self.forward(given) if found is None else found

    def _plain(self, part: Part) -> bool:
        generation = self.generations[part.sequence.number]
        return generation.sampling.plain and generation.sampling.logprobs < 0 and generation.mask is None

    def _choose(self, part: Part, found: torch.Tensor | int, greedy: int) -> Made:
        sequence = part.sequence
        generation = self.generations[sequence.number]
        if isinstance(found, int):
            chosen = Chosen(found)
        else:
            chosen = choose(found, generation.sampling, sequence.tokens, sequence.prompt, greedy, generation.mask)
        generation.mask, sequence.held = None, generation.masked
        sequence.tokens.append(chosen.token)
        finish = "stop" if chosen.token in generation.stops else ""
        if not finish and len(sequence.tokens) >= sequence.limit:
            finish = "length"
        if finish:
            self.remove(sequence.number)
        return Made(sequence.number, chosen, finish)
