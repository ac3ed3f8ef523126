"""Triton's kernels against the oracle, in Triton's interpreter."""

from collections.abc import Sequence

import pytest
import torch
import triton_here

from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.backends.oracle import TorchBackend
from dormouse.gpuserver.runtime.tables import KvLayout, StepPart

if not triton_here.HERE:
    pytest.skip("make setup puts Triton beside the environment", allow_module_level=True)

from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend, splits_of

BLOCK = 16


class Layer(torch.nn.Module):
    layer_idx = 1


class World:
    """Sequences of these ``(tokens, context)`` in scattered blocks. What nobody wrote is NaN; what is before the step's
    tokens is there.
    """

    def __init__(
        self,
        parts: Sequence[tuple[int, int]],
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.layout = KvLayout(layers=2, kv_heads=kv_heads, head_dim=dim, block_tokens=BLOCK, dtype=dtype)
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-context // BLOCK) for _, context in parts]
        numel = self.layout.block_nbytes // dtype.itemsize
        order = torch.randperm(sum(counts) + 3, generator=generator).tolist()  # of some, nobody has any
        self.memory = torch.full(((sum(counts) + 3) * numel,), float("nan"), dtype=dtype)
        self.parts: list[StepPart] = []
        row = 0
        for (tokens, context), count in zip(parts, counts, strict=True):
            blocks = [order.pop() * numel for _ in range(count)]
            self.parts.append(StepPart(row, tokens, context, blocks))
            row += tokens
            if context > tokens:
                self._write_earlier(StepPart(0, context - tokens, context - tokens, blocks), generator)

        def rows(count: int) -> torch.Tensor:
            """As a model has them: a token's heads beside each other."""
            return torch.randn(1, row, count, dim, generator=generator).to(dtype).transpose(1, 2)

        self.query, self.key, self.value = rows(heads), rows(kv_heads), rows(kv_heads)

    def _write_earlier(self, part: StepPart, generator: torch.Generator) -> None:
        backend = TorchBackend(self.layout, self.memory)
        attention = BlockAttention(self.layout, self.memory, backend)
        attention.begin([part])
        shape = (self.layout.kv_heads, part.tokens, self.layout.head_dim)
        both = (torch.randn(shape, generator=generator).to(self.layout.dtype) for _ in range(2))
        assert attention.step is not None
        backend.write(attention.step, Layer.layer_idx, *both)

    def compute(
        self, triton: bool, window: int = 0, cap: float = 0.0, processors: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out, and what the memory holds then."""
        memory = self.memory.clone()
        backend = TritonBackend(self.layout, memory, processors) if triton else TorchBackend(self.layout, memory)
        attention = BlockAttention(self.layout, memory, backend)
        attention.begin(self.parts)
        out, _ = attention(
            Layer(), self.query, self.key, self.value, None, sliding_window=window or None, softcap=cap or None
        )
        return out, memory


def agree(world: World, window: int = 0, cap: float = 0.0, processors: int = 1, tolerance: float = 0.0) -> None:
    expected, written = world.compute(False, window, cap)
    found, memory = world.compute(True, window, cap, processors)
    assert torch.equal(memory.nan_to_num(7.0), written.nan_to_num(7.0)), "another byte was written"
    assert not expected.isnan().any()
    tolerance = tolerance or (2e-6 if world.layout.dtype is torch.float32 else 1.6e-2)  # two units of bf16 at 1
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


AROUND_A_BLOCK = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1]
AROUND_A_TILE = [63, 64, 65, 130]


@pytest.mark.parametrize("context", AROUND_A_BLOCK + AROUND_A_TILE)
def test_a_token_sees_its_context_at_each_border(context: int) -> None:
    agree(World([(1, context)], seed=context))


@pytest.mark.parametrize("tokens", AROUND_A_BLOCK[1:] + AROUND_A_TILE)
def test_a_prompt_of_each_length_and_one_that_goes_on(tokens: int) -> None:
    agree(World([(tokens, tokens), (tokens, tokens + 19)], seed=tokens))


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
    assert splits_of([part.context for part in world.parts], 3, 132) > 1
    agree(world, window, processors=132)
    agree(world, window, cap=2.0, processors=132)


def test_how_often_contexts_are_split() -> None:
    assert splits_of([], 8, 132) == 1
    assert splits_of([100], 8, 132) == 1  # too short
    assert splits_of([4096] * 64, 8, 132) == 1  # there are programs enough
    assert splits_of([4096], 8, 132) == 16  # as many as leave 256 tokens to each
    assert splits_of([1 << 20], 1, 132) == 32
    assert splits_of([4096] * 4, 8, 132) == 9  # two programs for each processor


def test_scores_that_are_far_apart_do_not_overflow() -> None:
    world = World([(1, 90), (70, 90)])
    world.query *= 1000.0
    agree(world, tolerance=1e-3)
    agree(world, cap=50.0, tolerance=1e-3)
