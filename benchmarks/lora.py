"""Adapters over one backbone: whether they are computed as PEFT does it, and what they cost.

    scripts/llm-peers
    python -m benchmarks.lora [--folder build/smollm2] [--rounds 7] [--parts equal speed memory]

* ``equal``: answers with eight adapters of all kinds, judged by PEFT's models (benchmarks/lora_equal.py). fp32.
* ``speed``: sixteen sequences of eight adapters of rank 8, two of each, which add to all seven products of each layer,
  against as many without any; and both against vLLM with the same folders, if it is there. Each side is a process of
  its own with the same number of threads; they take turns (benchmarks/llm_peers.py). A ratio is the median of the
  rounds' ratios.
* ``memory``: what a process takes with these adapters (benchmarks/lora_memory.py).

It takes about a quarter of an hour, and two minutes with --quick.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from dormouse.core import openmp

if __name__ == "__main__":
    os.environ |= openmp.WAITING  # as runtimes have it

import torch

from benchmarks import lora_equal
from benchmarks.llm_alone import random_prompt
from benchmarks.llm_peers import Engine, until_quiet
from benchmarks.llm_server import THREADS, installed
from benchmarks.lora_adapters import SPEED, save
from benchmarks.report import Goal, arguments, report
from examples import smollm2

CLIENTS: Final = 16
PLACE: Final = Path("build/llm/lora")
DTYPES: Final = ("bfloat16", "float32")
PARTS: Final = ("equal", "speed", "memory")
MIN_MIXED: Final = 0.65
MIN_TO_VLLM: Final = 1.5
MAX_MEMORY: Final = 1.05

Speeds = dict[str, float]


def speed(folder: Path, dtype: str, rounds: int) -> tuple[list[Goal], list[Speeds]]:
    adapters = [each.absolute() for each in save(folder, PLACE, SPEED)]
    names = ["fused", *["vllm"] * installed()]
    every: list[Speeds] = []
    with ExitStack() as running:
        sides = [running.enter_context(closing(Engine(name, folder, dtype, adapters))) for name in names]
        for number in range(rounds + 1):
            asked = [(side, mixed) for side in sides for mixed in (True, False)]
            found = {}
            for side, mixed in asked if number % 2 else asked[::-1]:
                prompts = [random_prompt(1000 * number + client) for client in range(CLIENTS)]
                until_quiet()
                which = [client % len(adapters) if mixed else -1 for client in range(CLIENTS)]
                found[f"{side.name} {'mixed' if mixed else 'base only'}"] = side.tokens_s(prompts, which)
            print(json.dumps({"round": number, **found}), file=sys.stderr, flush=True)
            if number:  # the first warms up
                every.append(found)
    goals = [_ratio(every, "fused mixed", "fused base only", MIN_MIXED)]
    if "vllm" in names:
        goals.append(_ratio(every, "fused mixed", "vllm mixed", MIN_TO_VLLM))
    for name in every[0]:
        median = statistics.median(each[name] for each in every)
        goals.append(Goal(name=f"{name}, {CLIENTS} clients, tokens/s", goal="", measured=median, met=True))
    return goals, every


def _ratio(every: list[Speeds], ours: str, other: str, least: float) -> Goal:
    ratios = [each[ours] / each[other] for each in every]
    name = f"{ours} / {other} ({min(ratios):.2f} to {max(ratios):.2f})"
    ratio = statistics.median(ratios)
    return Goal(name=name, goal=f">= {least}", measured=ratio, met=ratio >= least)


def memory(folder: Path) -> tuple[list[Goal], dict[str, Any]]:
    adapters = save(folder, PLACE, SPEED)
    goals, found = [], {}
    for dtype in DTYPES:
        command = [sys.executable, "-m", "benchmarks.lora_memory", str(folder), dtype, *map(str, adapters)]
        found[dtype] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        ratio = found[dtype]["ratio"]
        name = f"memory / (backbone + {len(adapters)} adapters + KV in use), {dtype}"
        goals.append(Goal(name=name, goal=f"<= {MAX_MEMORY}", measured=ratio, met=ratio <= MAX_MEMORY))
    return goals, found


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(THREADS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sides end with it
    folder = smollm2.build(args.folder).absolute()
    if "speed" in args.parts and not installed():
        print("vLLM is not there (scripts/llm-peers): nothing is compared with it", file=sys.stderr)
    PLACE.mkdir(parents=True, exist_ok=True)
    goals: list[Goal] = []
    extra: dict[str, Any] = {"dtype": args.dtype}
    if "memory" in args.parts:
        made, extra["memory"] = memory(folder)
        goals += made
    if "speed" in args.parts:
        made, extra["tokens/s"] = speed(folder, args.dtype, 1 if args.quick else args.rounds)
        goals += made
    if "equal" in args.parts:
        made, extra["equal"] = lora_equal.measure(folder, PLACE, args.quick)
        goals += made
    report(goals, args, extra)


if __name__ == "__main__":
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.set_defaults(out=Path("build/llm/lora.json"))
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of speed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    main(parser.parse_args())
