"""ServerlessLoRA's functions, hardware and arrivals (§6.1) for the simulator: two backbones, four adapters each. Every
constant has its source; those of its figures are nowhere fitted.
"""

import csv
import gzip
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.streams.cost import StepCost
from dormouse.controller.simulator.streams.model import Lengths, LlmSpec
from dormouse.core.decisions.scheduling.topology import Topology

CLASSES: Final = ("Predictable", "Normal", "Bursty")

GPU_NBYTES: Final = 48_000_000_000
BANDWIDTH: Final = 864e9
FLOPS: Final = 362e12
"""An L40S (§6.1): NVIDIA's data sheet, dense FP16 on tensor cores."""

LINK_BPS: Final = 25e9
"""PCIe 4.0 x16 carries 32 GB/s; pinned copies reach about four fifths of that."""

MEMORY_SHARE, COMPUTE_SHARE = 0.7, 0.5
"""Of both that an engine reaches: a decoded token of Llama2-7B takes 22 ms by it, and Table 1 has 24 (2,395 ms for
answers of about 100 tokens by vLLM).
"""

ADAPTER_NBYTES: Final = 80_000_000
"""Rank 16 on all linear layers of Llama2-7B in FP16: 40 M parameters. That of the 13B model is half as large again."""

CONTEXT_NBYTES: Final = 473_000_000
"""A process's CUDA context (§6.9)."""

START_S: Final = 0.77
"""Of a runtime forked from a process with its libraries imported: 0.3 s for a CUDA context; and kernels: the first warm
start without cached kernels takes 500 ms (§6.8), of which 30 ms are the prompt's.
"""


class Backbone(NamedTuple):
    """``kv_nbytes`` of a token: layers x hidden size x 2 x 2 bytes. ``ttft_s``: §6.8. ``tpot_s``: five times a lone
    step, as ``ttft_s`` is five times a lone first token; the paper names none.
    """

    name: str
    parameters: float
    kv_nbytes: int
    ttft_s: float

    @property
    def nbytes(self) -> int:
        return int(2 * self.parameters)

    @property
    def step_s(self) -> float:
        return self.nbytes / BANDWIDTH / MEMORY_SHARE


BACKBONES: Final = (
    Backbone("Llama2-7B", 6.738e9, 32 * 4096 * 4, 2.5),
    Backbone("Llama2-13B", 13.016e9, 40 * 5120 * 4, 4.0),
)

ADAPTERS: Final = 4

Pairs = tuple[tuple[int, int], ...]


def lengths(data: Path) -> Pairs:
    """GSM8K's problems and solutions in Llama-2's tokens."""
    with gzip.open(data / "gsm8k_lengths.csv.gz", "rt", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return tuple((int(row["p_llama2"]), int(row["r_llama2"])) for row in rows if row["id"].startswith("test"))


def models(pairs: Pairs, isolation: str = "function", start_s: float = START_S) -> list[ModelSpec]:
    """Functions 0 to 3 are over the 7B model, 4 to 7 over the 13B."""
    return [_model(backbone, number, pairs, isolation, start_s) for backbone in BACKBONES for number in range(ADAPTERS)]


def _model(backbone: Backbone, number: int, pairs: Pairs, isolation: str, start_s: float) -> ModelSpec:
    prompts, outputs = np.asarray(pairs).T
    spec = LlmSpec(
        kv_nbytes=backbone.kv_nbytes,
        cost=StepCost(
            fixed_s=backbone.step_s,
            per_context_s=backbone.kv_nbytes / BANDWIDTH / MEMORY_SHARE,
            per_prompt_s=2 * backbone.parameters / FLOPS / COMPUTE_SHARE,
        ),
        ttft_s=backbone.ttft_s,
        tpot_s=5 * backbone.step_s,
        prompt=Lengths(mean=float(prompts.mean()), most=int(prompts.max())),
        output=Lengths(mean=float(outputs.mean()), most=int(outputs.max())),
        pairs=pairs,
        adapter_nbytes=int(ADAPTER_NBYTES * backbone.parameters / BACKBONES[0].parameters),
        group=backbone.name if isolation == "tenant" else "",
        context_nbytes=CONTEXT_NBYTES,
        start_s=start_s,
    )
    return ModelSpec(
        name=backbone.name,
        nbytes=backbone.nbytes + spec.adapter_nbytes,
        base=backbone.name,
        base_nbytes=backbone.nbytes,
        segment_nbytes=256_000_000,
        run_s=spec.alone_s,
        llm=spec,
    )


def topology(gpus: int) -> Topology:
    return Topology(host_bps=LINK_BPS)


class Arrivals(NamedTuple):
    times_s: npt.NDArray[np.float64]
    functions: npt.NDArray[np.int64]


def arrivals(data: Path, kind: str, faster: float, most: int = 1 << 30, seed: int = 0) -> Arrivals:
    """Of one class: its eight traces of four hours, to functions in an order drawn by the seed, ``faster`` times."""
    order = np.random.default_rng(seed).permutation(len(BACKBONES) * ADAPTERS)
    with gzip.open(data / "azure_func2019_3x8_4h_arrivals.csv.gz", "rt", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["class"] == kind]
    found = sorted((float(row["t_s"]) / faster, int(order[int(row["idx"])])) for row in rows)[:most]
    return Arrivals(np.array([at_s for at_s, _ in found]), np.array([who for _, who in found], np.int64))
