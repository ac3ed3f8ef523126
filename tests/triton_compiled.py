"""Compiles the kernels of attention and adapters for a GPU that is not here, and says of each what it needs.

    python tests/triton_compiled.py CAPABILITY DTYPE WIDTH ...

Run as a process of its own, without Triton's interpreter. What is launched is not run.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton_here

if __name__ == "__main__":
    assert triton_here.HERE
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    from dormouse.gpuserver.runtime.attention import BlockAttention
    from dormouse.gpuserver.runtime.backends.low_rank_on_triton import TritonLowRank
    from dormouse.gpuserver.runtime.backends.on_triton import TritonBackend
    from dormouse.gpuserver.runtime.low_rank import AdapterRows, LowRank, Table
    from dormouse.gpuserver.runtime.tables import KvLayout, StepPart

MODELS = {  # by width of a head: query heads, key heads, whether scores are capped
    64: (9, 3, False),  # SmolLM2
    128: (32, 8, False),  # Llama 3
    80: (32, 32, False),  # Phi 2
    256: (8, 4, True),  # Gemma 2
}


class Layer(torch.nn.Module):
    layer_idx = 1


class AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.capability, 32)


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack: what registers were spilled to."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said.stdout)
    assert found is not None, said.stdout
    return {"registers": int(found[1]), "stack_nbytes": int(found[2])}


def compile_all(capability: int, dtype: torch.dtype, widths: list[int]) -> list[dict[str, Any]]:
    triton.runtime.driver.set_active(AbsentGpu(capability))
    made: list[dict[str, Any]] = []
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **settings)
        code = kernel.asm["ptx"]
        made.append(
            {
                "kernel": self.__name__,
                "hash": kernel.hash,
                "shared_nbytes": kernel.metadata.shared,
                "tensor_cores": "mma" in code,
                "wide_copies": "cp.async.cg" in code,
                **resources(kernel.asm["cubin"]),
            }
        )
        return kernel

    JITFunction.run = compiled
    for dim in widths:
        heads, kv_heads, capped = MODELS[dim]
        layout = KvLayout(layers=2, kv_heads=kv_heads, head_dim=dim, block_tokens=16, dtype=dtype)
        numel = layout.block_nbytes // dtype.itemsize
        blocks = [numel * number for number in range(64)]
        memory = torch.zeros(64 * numel, dtype=dtype)
        attention = BlockAttention(layout, memory, TritonBackend(layout, memory, processors=132))
        before = len(made)
        mixed = [[StepPart(0, 1, 10, some), StepPart(1, 70, 80, blocks)] for some in (blocks, blocks[:-1])]
        for parts in ([StepPart(0, 1, 1000, blocks)], *mixed):  # of one block less, tables are aligned otherwise
            attention.begin(parts)
            tokens = sum(part.tokens for part in parts)
            rows = [torch.zeros(1, tokens, each, dim, dtype=dtype) for each in (heads, kv_heads, kv_heads)]
            q, k, v = (each.transpose(1, 2) for each in rows)
            attention(Layer(), q, k, v, None, softcap=50.0 if capped else None)
        _add(memory, heads * dim)
        for each in made[before:]:
            each.update(width=dim)
    return made


def _add(memory: torch.Tensor, hidden: int) -> None:
    """What an adapter adds to a product of so many inputs."""
    table, given = Table(1), memory.new_zeros(20, hidden)
    table.put(0, LowRank(memory.new_zeros(16, hidden), memory.new_zeros(16, hidden), 1.0, memory.new_zeros(hidden)))
    rows = torch.zeros(20, dtype=torch.int64)
    TritonLowRank().add(table, given, given.clone(), AdapterRows(rows, rows, ([0] * 20, [0] * 20), [0], 16), False)


if __name__ == "__main__":
    json.dump(
        compile_all(int(sys.argv[1]), getattr(torch, sys.argv[2]), [int(word) for word in sys.argv[3:]]), sys.stdout
    )
