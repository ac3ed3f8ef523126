"""ServerlessLoRA's Figures 10a and 11 and its Table 2: full batches on a GPU, and more GPUs for the same requests or
for as many more.
"""

from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from benchmarks.serverless_lora_published import BATCHES, THROUGHPUT
from benchmarks.serverless_lora_systems import ABLATIONS, SYSTEMS, Run, System, run
from benchmarks.serverless_lora_workload import BACKBONES, GPU_NBYTES, Arrivals, Pairs, arrivals

UNKNOWN_NBYTES: Final = 10_500_000_000
"""Of a GPU, beside weights and KV: the one constant that is fitted, to the ratio of the peak batches of Table 2."""

FULL: Final = 200
"""Requests at once, of two 7B functions in turn: some batches of each. The paper has twice of all that."""

STRONG: Final = (4, 8, 16)
WEAK: Final = ((4, 1.0), (8, 2.0), (16, 4.0))
"""GPUs; and GPUs with how many times the rates. Four of 48 GB have room for all eight with a backbone each, 158 GB."""

SCALED: Final = ("ServerlessLLM-like", "InstaInfer-like", "ServerlessLoRA-like", "Dormouse")


class Scaled(NamedTuple):
    system: str
    gpus: int
    faster: float
    ttft_ms: float
    e2e_ms: float
    cost_cny: float


def table_2() -> dict[str, float]:
    """Peak batches on a GPU with two of four 7B functions, in bytes: with one backbone, with two, and their ratio."""
    one, two = (GPU_NBYTES - count * BACKBONES[0].nbytes - UNKNOWN_NBYTES for count in (1, 2))
    tokens = one / BATCHES[0] / BACKBONES[0].kv_nbytes
    return {"ratio": one / two, "tokens of a sequence at a batch of 73": tokens, "batch of two": two / one * BATCHES[0]}


def full_batches(pairs: Pairs, count: int = FULL) -> dict[str, dict[str, float]]:
    """All asked at once on one of the two GPUs, with the peak batches of Table 2 for both functions: Fig. 10a."""
    asked = Arrivals(np.zeros(count), np.arange(count) % 2)
    shared, own = (System(batch=batch // 2) for batch in BATCHES)
    systems = {
        "one backbone a GPU, batches of 73": shared,
        "a backbone each, batches of 32": own._replace(shared=False),
        "Dormouse": System(),
        "Dormouse, one runtime a tenant": System(isolation="tenant"),
    }
    found = {}
    for name, system in systems.items():
        done = run(system, asked, pairs, gpus=1, gpu_nbytes=GPU_NBYTES - UNKNOWN_NBYTES, functions=2)
        found[name] = {"completed_s": done.ended_s, "requests_s": count / done.ended_s, "e2e_ms": done.by["all"].e2e_ms}
    return found


def show_full(found: dict[str, dict[str, float]]) -> str:
    base = found["a backbone each, batches of 32"]["completed_s"]
    lines = ["| Fig. 10a: all requests at once | completed s | requests/s | faster | paper |", "| --- " * 5 + "|"]
    for name, each in found.items():
        paper = f"{THROUGHPUT:.2f} (tokens/s)" if name.startswith("one backbone") else ""
        completed_s, requests_s = each["completed_s"], each["requests_s"]
        lines.append(f"| {name} | {completed_s:.1f} | {requests_s:.2f} | {base / completed_s:.2f} | {paper} |")
    return "\n".join(lines)


def scaled(data: Path, pairs: Pairs, most: int, quick: bool = False) -> dict[str, list[Scaled]]:
    """The first ``most`` requests of "Normal"; with twice the rates twice as many."""
    systems = SYSTEMS | ABLATIONS
    found: dict[str, list[Scaled]] = {"strong": [], "weak": []}
    points = [("strong", gpus, 1.0) for gpus in STRONG] + [("weak", gpus, faster) for gpus, faster in WEAK]
    for kind, gpus, faster in points[:: 3 if quick else 1]:
        asked = arrivals(data, "Normal", faster, most)
        if kind == "weak":
            asked = repeated(data, round(faster), most)
        for name in SCALED:
            done: Run = run(systems[name], asked, pairs, gpus=gpus)
            each = done.by["all"]
            found[kind].append(Scaled(name, gpus, faster, each.ttft_ms, each.e2e_ms, done.cost_cny(1.0)))
    return found


def repeated(data: Path, times: int, most: int) -> Arrivals:
    """So many times as many requests in the same time: the class's traces to the functions in so many other orders."""
    parts = [arrivals(data, "Normal", 1.0, most, seed) for seed in range(times)]
    times_s, functions = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.argsort(times_s, kind="stable")
    return Arrivals(times_s[order], functions[order])


def show_scaled(found: dict[str, list[Scaled]]) -> str:
    lines = ["| Fig. 11 | GPUs, rates | " + " | ".join(SCALED) + " |", "| --- " * (2 + len(SCALED)) + "|"]
    for kind, points in found.items():
        for gpus, faster in dict.fromkeys((each.gpus, each.faster) for each in points):
            mine = [each for each in points if (each.gpus, each.faster) == (gpus, faster)]
            cells = [f"{each.ttft_ms:,.0f}; {each.e2e_ms:,.0f}; {each.cost_cny:,.0f}" for each in mine]
            lines.append(f"| {kind}: TTFT ms; E2E ms; cost | {gpus}, {faster:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
