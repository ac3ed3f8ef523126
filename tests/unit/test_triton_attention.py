"""Triton's kernels against the oracle, in Triton's interpreter."""

import pytest
import torch
import triton_here
from language_models import TINY, prompts, reference, spec_of, wrong_tokens
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dormouse.core.decisions.batches.batch import Batch, Sequence
from dormouse.gpuserver.runtime import layers, leaves, models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import Engine, Generation, kv_layout
from dormouse.gpuserver.runtime.sampling import Sampling

if not triton_here.HERE:
    pytest.skip("needs Triton, which make setup puts beside the environment", allow_module_level=True)

from attention_world import BLOCK, World, agree

from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend, splits_of

AROUND_A_BLOCK = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1]
AROUND_A_TILE = [63, 64, 65, 130]


@pytest.mark.parametrize("context", AROUND_A_BLOCK + AROUND_A_TILE)
def test_a_token_sees_its_context_at_each_border(context: int) -> None:
    agree(World([(1, context)], seed=context))


@pytest.mark.parametrize("tokens", AROUND_A_BLOCK[1:] + AROUND_A_TILE)
def test_a_prompt_of_each_length_and_one_that_goes_on(tokens: int) -> None:
    agree(World([(tokens, tokens), (tokens, tokens + 19)], seed=tokens))


def test_kernels_are_given_memory_that_is_there() -> None:
    """Triton asks the driver about each pointer, and of an address space most has nothing behind it."""
    world = World([(1, 40), (3, 20)])
    attention = BlockAttention(world.layout, world.memory, backend := TritonBackend(world.layout, world.memory, 1))
    for parts in (world.parts, world.parts[1:]):
        attention.begin(parts)
        assert attention.step is not None
        found = backend._of(attention.step)
        own = parts[0].blocks[0]
        assert (found.anchor, found.memory.data_ptr()) == (own, world.memory[own:].data_ptr())
    assert own > 0


HEADS = [(4, 4), (4, 2), (9, 3), (8, 1), (12, 2), (40, 2)]
"""Query heads and key heads: of their own, in groups of two (Llama's kind), three (SmolLM2), eight, six, twenty."""

KINDS = [
    *((heads, 0, 0.0) for heads in HEADS),
    *((heads, 5 + heads[0], 3.0) for heads in HEADS),
    *(((4, 2), window, 0.0) for window in (1, 15, 16, 17, 20, 200)),
    ((4, 2), 0, 50.0),
]


@pytest.mark.parametrize(("heads", "window", "cap"), KINDS, ids=str)
def test_each_kind_of_head_window_and_cap(heads: tuple[int, int], window: int, cap: float) -> None:
    """A ragged step: decoding, a short and a long part, one that goes on in a block."""
    parts = [(1, 1), (1, 40), (3, 21), (33, 33), (17, 50), (1, 16)]
    agree(World(parts, *heads, seed=heads[0]), window, cap)


@pytest.mark.parametrize("dim", [8, 16, 24, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_width_of_a_head_and_type(dim: int, dtype: torch.dtype) -> None:
    """Also those that are no power of two: qwen3 here has 24, Phi-2 has 80."""
    parts = [(1, 70), (21, 30), (1, 7)]
    agree(World(parts, dim=dim, dtype=dtype, seed=dim), window=20 if dim in (24, 128) else 0)
    agree(World(parts, dim=dim, dtype=dtype, seed=dim), cap=5.0 if dim == 256 else 0.0, processors=64)


@pytest.mark.parametrize(("context", "window"), [(511, 0), (512, 0), (513, 0), (513, 300), (1200, 0), (1200, 900)])
def test_long_contexts_are_split_and_merged(context: int, window: int) -> None:
    world = World([(1, context), (1, 3), (1, 600)], 9, 3, 16, seed=context)
    assert splits_of(3 * len(world.parts), max(context, 600), 132) > 1
    agree(world, window, cap=2.0 if context % 2 else 0.0, processors=132)


def test_how_often_contexts_are_split() -> None:
    assert splits_of(0, 0, 132) == 1
    assert splits_of(8, 100, 132) == 1  # too short
    assert splits_of(64 * 8, 4096, 132) == 1  # there are programs enough
    assert splits_of(8, 4096, 132) == 16  # as many as leave 256 tokens to each
    assert splits_of(1, 1 << 20, 132) == 32
    assert splits_of(4 * 8, 4096, 132) == 8  # about two programs for each processor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 24, 6])
def test_heads_are_turned_as_transformers_does(dtype: torch.dtype, dim: int) -> None:
    torch.manual_seed(3)
    q, k = (torch.randn(1, 7, heads, dim).to(dtype).transpose(1, 2) for heads in (6, 2))
    cos, sin = torch.randn(2, 1, 7, dim).to(dtype)
    exact = apply_rotary_pos_emb(q.double(), k.double(), cos.double(), sin.double())
    world = World([(1, 1)], dim=dim)
    rotate = TritonBackend(world.layout, world.memory, processors=1).rotate
    rotary = leaves.OwnRotary(rotate, lambda *given, **_: (given[0], given[1]))
    for found, each in zip(rotary(q, k, cos, sin), exact, strict=True):
        assert found.dtype is dtype
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(found.double(), each, rtol=tolerance, atol=tolerance)
    assert rotary(q, k, cos[..., :4], sin)[0] is q  # the function does what the kernel does not
    assert rotary(q, k, cos, sin, unsqueeze_dim=2)[0] is q


def test_scores_that_are_far_apart_do_not_overflow() -> None:
    world = World([(1, 90), (70, 90)])
    world.query *= 1000.0
    agree(world, tolerance=1e-3)
    agree(world, cap=50.0, tolerance=1e-3)


@pytest.mark.parametrize("family", TINY)
def test_each_family_says_what_transformers_says_through_the_kernels(family: str) -> None:
    """A prompt that is computed in pieces, and single tokens, beside each other."""
    model = reference(family)
    spec = spec_of(model)
    layout = kv_layout(spec)
    memory = torch.full((10 * layout.block_nbytes // 4,), float("nan"))
    attention = BlockAttention(layout, memory, backend := TritonBackend(layout, memory, processors=1))
    built = models.build(spec, attention)
    layers.install_on_gpu(built, backend.rotate)
    models.bind(built, {name: parameter.data for name, parameter in model.named_parameters()})
    engine = Engine(built, attention, lambda blocks: False)
    engine.batch = Batch(engine.blocks, step_tokens=24)
    engine.add_extent(0, 0, 10 * layout.block_nbytes)
    sequences = [
        Sequence(number, prompt, len(prompt), len(prompt) + 5) for number, prompt in enumerate(prompts(1, 3, 33))
    ]
    for sequence in sequences:
        engine.add(sequence.number, Generation(sequence, Sampling(), frozenset()))
    while not engine.batch.idle:
        assert engine.step() is not None
    for sequence in sequences:
        assert len(sequence.tokens) == sequence.limit
        assert wrong_tokens(model, sequence.tokens, sequence.prompt) == []
