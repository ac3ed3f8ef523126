"""Engines of runtimes around tiny models, with little memory."""

import torch
from language_models import spec_of
from transformers import PreTrainedModel

from dormouse.core.decisions.batches.batch import NO_ADAPTER, Batch, Sequence
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.backends.oracle import TorchBackend
from dormouse.gpuserver.runtime.engine import Engine, Generation, kv_layout
from dormouse.gpuserver.runtime.sampling import Sampling


def engine(
    model: PreTrainedModel, blocks: int, native: bool = True, step_tokens: int = 256, fused: bool = True
) -> Engine:
    """With so much KV, in extents of two blocks; it never gets more."""
    spec = spec_of(model)
    layout = kv_layout(spec)
    memory = torch.full((blocks * layout.block_nbytes // 4,), float("nan"))  # nobody may read what nobody wrote
    attention = BlockAttention(layout, memory, None if native else TorchBackend(layout, memory))
    built = models.build(spec, attention, fused)
    models.bind(built, {name: parameter.data for name, parameter in model.named_parameters()})
    made = Engine(built, attention, lambda blocks: False)
    made.batch = Batch(made.blocks, step_tokens=step_tokens)
    for extent in range(blocks // 2):
        made.add_extent(extent, 2 * extent * layout.block_nbytes, 2 * layout.block_nbytes)
    return made


def begin(
    made: Engine,
    number: int,
    prompt: list[int],
    new: int,
    sampling: Sampling | None = None,
    adapter: int = NO_ADAPTER,
) -> Sequence:
    sequence = Sequence(number, list(prompt), len(prompt), len(prompt) + new, adapter=adapter)
    made.add(number, Generation(sequence, sampling or Sampling(), frozenset()))
    return sequence
