"""Steps of sequences in scattered blocks, for comparing Triton's kernels with the oracle: in Triton's interpreter or on
a GPU. Import only where there is Triton.
"""

from collections.abc import Sequence

import torch
import triton_here

from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend
from dormouse.gpuserver.runtime.backends.oracle import TorchBackend
from dormouse.gpuserver.runtime.tables import KvLayout, StepPart

DEVICE = torch.device("cuda" if triton_here.CUDA else "cpu")
PROCESSORS = 0 if DEVICE.type == "cuda" else 1  # the GPU's own, or as if it had one
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
        self.memory = torch.full(((sum(counts) + 3) * numel,), float("nan"), dtype=dtype, device=DEVICE)
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
            return torch.randn(1, row, count, dim, generator=generator).to(DEVICE, dtype).transpose(1, 2)

        self.query, self.key, self.value = rows(heads), rows(kv_heads), rows(kv_heads)

    def _write_earlier(self, part: StepPart, generator: torch.Generator) -> None:
        backend = TorchBackend(self.layout, self.memory)
        attention = BlockAttention(self.layout, self.memory, backend)
        attention.begin([part])
        shape = (self.layout.kv_heads, part.tokens, self.layout.head_dim)
        both = (torch.randn(shape, generator=generator).to(DEVICE, self.layout.dtype) for _ in range(2))
        assert attention.step is not None
        backend.write(attention.step, Layer.layer_idx, *both)

    def compute(
        self, triton: bool, window: int = 0, cap: float = 0.0, processors: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What comes out, and what the memory holds then."""
        memory = self.memory.clone()
        backend = (
            TritonBackend(self.layout, memory, processors or PROCESSORS)
            if triton
            else TorchBackend(self.layout, memory)
        )
        attention = BlockAttention(self.layout, memory, backend)
        attention.begin(self.parts)
        out, _ = attention(
            Layer(), self.query, self.key, self.value, None, sliding_window=window or None, softcap=cap or None
        )
        return out, memory


def agree(world: World, window: int = 0, cap: float = 0.0, processors: int = 0, tolerance: float = 0.0) -> None:
    expected, written = world.compute(False, window, cap)
    found, memory = world.compute(True, window, cap, processors)
    assert torch.equal(memory.nan_to_num(7.0), written.nan_to_num(7.0)), "another byte was written"
    assert not expected.isnan().any()
    tolerance = tolerance or (2e-6 if world.layout.dtype is torch.float32 else 1.6e-2)  # two units of bf16 at 1
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
