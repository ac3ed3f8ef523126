"""What a process takes that computes eight adapters over one backbone, in a fresh one of its own.

    python -m benchmarks.lora_memory FOLDER DTYPE ADAPTER ...

Counted from where its modules are there and its weights are not, as a runtime is before its seat. Its memory for KV is
touched as blocks are used. Prints a line of JSON.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file

from benchmarks.llm_alone import BLOCKS, NEW, begin, random_prompt
from benchmarks.lora_adapters import brought
from dormouse.client_shim.llm.folder import read_json, spec_of
from dormouse.gpuserver.runtime import models
from dormouse.gpuserver.runtime.attention import BlockAttention
from dormouse.gpuserver.runtime.engine import Engine, kv_layout
from dormouse.gpuserver.runtime.weights import AdapterParts
from dormouse.schemas.llm import DecoderSpec

CLIENTS: Final = 16
EACH: Final = 5
"""Steps between two looks."""


def resident_nbytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was given back is nobody's
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))


def pooled(parts: AdapterParts) -> AdapterParts:
    """In memory of its own, one storage as a store has it. What was read is mapped from a file, of which a runtime on a
    node has nothing.
    """
    tensors = [each for low in parts.adds.values() for each in low if isinstance(each, torch.Tensor)]
    tensors += parts.replaced.values()
    storage, start = torch.empty(sum(each.numel() for each in tensors), dtype=tensors[0].dtype), 0

    def laid(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal start
        start += tensor.numel()
        return storage[start - tensor.numel() : start].view(tensor.shape).copy_(tensor)

    adds = {
        name: low._replace(
            down=laid(low.down), up=laid(low.up), bias=None if low.bias is None else laid(low.bias)
        )
        for name, low in parts.adds.items()
    }  # fmt: skip
    return AdapterParts(adds, {name: laid(tensor) for name, tensor in parts.replaced.items()})


def nbytes_of(parts: AdapterParts) -> int:
    low = [each for low in parts.adds.values() for each in low if isinstance(each, torch.Tensor)]
    return sum(tensor.nbytes for tensor in (*low, *parts.replaced.values()))


def built(folder: Path, dtype: str) -> tuple[DecoderSpec, Any, BlockAttention]:
    """Without weights."""
    spec = spec_of(read_json(str(folder), "config.json"), dtype, 2048)
    layout = kv_layout(spec)
    attention = BlockAttention(
        layout, torch.empty(BLOCKS * layout.block_nbytes // layout.dtype.itemsize, dtype=layout.dtype)
    )
    return spec, models.build(spec, attention), attention


def bound(folder: Path, model: Any, dtype: torch.dtype) -> int:
    """Bytes."""
    stored = load_file(folder / "model.safetensors")
    models.bind(model, {name: tensor.to(dtype, copy=True) for name, tensor in stored.items()})
    return sum(parameter.nbytes for parameter in model.parameters())


def measure(folder: Path, dtype: str, adapters: list[Path]) -> dict[str, Any]:
    torch.set_num_threads(2)
    spec, model, attention = built(folder, dtype)
    for _, read in brought(folder, adapters[:1], spec):
        pooled(read)  # what reads folders is imported
    del read
    before = resident_nbytes()
    backbone = bound(folder, model, models.DTYPES[dtype])
    made = Engine(model, attention, lambda blocks: False)
    made.add_extent(0, 0, attention.memory.nbytes)
    own = 0
    for _, read in brought(folder, adapters, spec):
        parts = pooled(read)
        made.bind(made.adapters.open(), *parts)
        own += nbytes_of(parts)
    del read
    for client in range(CLIENTS):
        begin(made, client, random_prompt(client), NEW, client % len(adapters))
    worst: dict[str, Any] = {"ratio": 0.0}
    steps = blocks = 0
    while not made.batch.idle:
        made.step()
        blocks = max(blocks, sum(len(sequence.table.blocks) for sequence in made.batch.running))  # they stay touched
        steps += 1
        if steps % EACH:
            continue
        kv = blocks * attention.layout.block_nbytes
        taken = resident_nbytes() - before
        ratio = taken / (backbone + own + kv)
        if ratio > worst["ratio"]:
            worst = {"ratio": ratio, "taken": taken, "backbone": backbone, "adapters": own, "kv": kv, "step": steps}
    return worst


if __name__ == "__main__":
    folder, dtype, *adapters = sys.argv[1:]
    print(json.dumps(measure(Path(folder), dtype, [Path(each) for each in adapters])))
