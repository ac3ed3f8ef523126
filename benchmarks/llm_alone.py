"""The engine of a language model in the process of a benchmark: no node, no runtime, nobody else."""

import gc
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file

from dormouse.client_shim.llm.folder import read_json, spec_of
from dormouse.core.decisions.batches.batch import NO_ADAPTER, Sequence
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import BLOCK_TOKENS, Engine, Generation, kv_layout
from dormouse.gpuserver.runtime.sampling import Sampling
from dormouse.gpuserver.runtime.tables import KvLayout
from dormouse.gpuserver.runtime.weights import AdapterParts

NEW: Final = 48
PROMPT: Final = 66
"""Tokens of output and prompt where throughput is measured, as in what others report of this model."""

BLOCKS: Final = 400
"""Of KV: 6,400 tokens."""


def random_prompt(seed: int, length: int = PROMPT, vocabulary: int = 40_000) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(100, vocabulary, (length,), generator=generator).tolist()
    return tokens


def begin(engine: Engine, number: int, prompt: list[int], new: int, adapter: int = NO_ADAPTER) -> Sequence:
    """Greedy, and so many tokens whatever they are."""
    sequence = Sequence(number, list(prompt), len(prompt), len(prompt) + new, adapter=adapter)
    engine.add(number, Generation(sequence, Sampling(), frozenset()))
    return sequence


class Alone:
    """A model of a folder. ``memory``: where KV lies; without it, room for BLOCKS. ``fused``: with our own layers."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        fused: bool = True,
        block_tokens: int = BLOCK_TOKENS,
        memory: Callable[[KvLayout], torch.Tensor] | None = None,
    ) -> None:
        self.spec = spec_of(read_json(str(folder), "config.json"), dtype, 2048)
        whole = kv_layout(self.spec)
        layout = KvLayout(
            layers=whole.layers, kv_heads=whole.kv_heads, head_dim=whole.head_dim,
            block_tokens=block_tokens, dtype=whole.dtype,
        )  # fmt: skip
        self.attention = BlockAttention(layout, (memory or _own)(layout))
        self.model = models.build(self.spec, self.attention, fused)
        weights = load_file(folder / "model.safetensors")
        models.bind(self.model, {name: tensor.to(models.DTYPES[dtype]) for name, tensor in weights.items()})
        gc.collect()
        gc.freeze()  # as the process that forks runtimes does

    def engine(self) -> Engine:
        """With all of the memory; what was computed before is forgotten."""
        engine = Engine(self.model, self.attention, lambda blocks: False)
        engine.add_extent(0, 0, self.attention.memory.nbytes)
        return engine

    def answers(
        self, prompts: list[list[int]], new: int, adapters: SequenceOf[AdapterParts] = (), which: SequenceOf[int] = ()
    ) -> list[list[int]]:
        """Tokens, of each prompt, with ``which`` of these adapters, NO_ADAPTER: without any."""
        engine = self.engine()
        bound = [engine.adapters.open() for _ in adapters]
        for number, parts in zip(bound, adapters, strict=True):
            engine.bind(number, *parts)
        of = which or [NO_ADAPTER] * len(prompts)
        sequences = [begin(engine, number, prompt, new, of[number]) for number, prompt in enumerate(prompts)]
        while not engine.batch.idle:
            engine.step()
        for number in bound:
            engine.adapters.close(number)
        return [sequence.tokens[sequence.prompt :] for sequence in sequences]

    def generate(self, prompts: list[list[int]], new: int) -> int:
        """How many tokens were made."""
        return sum(len(each) for each in self.answers(prompts, new))

    def tokens_s(self, clients: int) -> float:
        began_s = time.perf_counter()
        made = self.generate([random_prompt(number) for number in range(clients)], NEW)
        return made / (time.perf_counter() - began_s)

    def prefill_ms(self, prompt: list[int]) -> float:
        engine = self.engine()
        begin(engine, 0, prompt, 1)
        began_s = time.perf_counter()
        while not engine.batch.idle:
            engine.step()
        return (time.perf_counter() - began_s) * 1e3


def _own(layout: KvLayout) -> torch.Tensor:
    return torch.zeros(
        BLOCKS * layout.block_nbytes // layout.dtype.itemsize * BLOCK_TOKENS // layout.block_tokens, dtype=layout.dtype
    )
