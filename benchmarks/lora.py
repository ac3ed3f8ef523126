"""Adapters over one backbone: what steps with rows of many of them cost.

    python -m benchmarks.lora [--folder build/smollm2] [--rounds 7]

``mixed``: sixteen sequences of eight adapters, two of each, against as many without any, on the engine alone. Adapters
of rank 8 add to all seven products of each layer, with random weights. Sides alternate; a ratio is the median of the
rounds' ratios.
"""

import argparse
import os
import statistics
import time
from pathlib import Path
from typing import Final

from dormouse.core import openmp

if __name__ == "__main__":
    os.environ |= openmp.WAITING  # as runtimes have it

import torch
from torch import nn

from benchmarks.llm_alone import NEW, Alone, begin, random_prompt
from benchmarks.report import Goal, arguments, report
from dormouse.gpuserver.runtime.batch import NO_ADAPTER
from dormouse.gpuserver.runtime.low_rank import LowRank
from examples import smollm2

CLIENTS: Final = 16
ADAPTERS: Final = 8
RANK: Final = 8
LEAST_MIXED: Final = 0.65


def random_adapter(model: nn.Module, seed: int, rank: int = RANK) -> dict[str, LowRank]:
    """To every product of its layers."""
    generator = torch.Generator().manual_seed(seed)

    def random(outer: int, inner: int, like: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = torch.randn(outer, inner, generator=generator) / inner**0.5
        return made.to(like.dtype)

    return {
        name: LowRank(random(rank, each.in_features, each.weight), random(rank, each.out_features, each.weight), 2.0)
        for name, each in model.named_modules()
        if type(each) is nn.Linear and ".layers." in name
    }


def tokens_s(alone: Alone, adapters: int, first: int) -> float:
    """With sequences of so many adapters; 0: without."""
    engine = alone.engine()
    for number in range(adapters):
        assert engine.adapters.open() == number
        engine.bind(number, random_adapter(alone.model, number))
    for client in range(CLIENTS):
        adapter = client % adapters if adapters else NO_ADAPTER
        begin(engine, client, random_prompt(first + client), NEW, adapter)
    began_s = time.perf_counter()
    while not engine.batch.idle:
        engine.step()
    took_s = time.perf_counter() - began_s
    for number in range(adapters):
        engine.adapters.close(number)
    return CLIENTS * NEW / took_s


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(2)
    alone = Alone(smollm2.build(args.folder), args.dtype)
    ratios, speeds = [], []
    for number in range(1 + (1 if args.quick else args.rounds)):
        counts = (0, ADAPTERS) if number % 2 else (ADAPTERS, 0)
        found = {count: tokens_s(alone, count, 1000 * number) for count in counts}
        if number:  # the first warms up
            ratios.append(found[ADAPTERS] / found[0])
            speeds.append(found)
    ratio = statistics.median(ratios)
    name = f"{ADAPTERS} adapters mixed / base only ({min(ratios):.2f} to {max(ratios):.2f})"
    mixed = statistics.median(each[ADAPTERS] for each in speeds)
    goals = [
        Goal(name=name, goal=f">= {LEAST_MIXED}", measured=ratio, met=ratio >= LEAST_MIXED),
        Goal(name=f"{ADAPTERS} adapters mixed, {CLIENTS} clients, tokens/s", goal="", measured=mixed, met=True),
    ]
    report(goals, args, {"dtype": args.dtype, "tokens/s": speeds})


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.set_defaults(out=Path("build/llm/lora.json"))
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    main(parser.parse_args())
