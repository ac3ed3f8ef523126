"""What KV memory on demand costs, in one process, with a model's real weights.

* *On demand*: output tokens per second of 16 clients whose KV comes in small extents, against all of it there before.
  Extents are asked for, mapped and cut into blocks by the code of a runtime; a thread answers in place of its executor,
  with memory files that are laid out as a pool's granules.
* *Allocation*: which part of a decode step of 16 sequences goes into getting blocks, by block size (Tangram, Fig. 11b).
* *Scattered*: the same step over blocks that lie anywhere, against blocks that lie one behind the other.
* *Join*: the steps of 8 sequences while a prompt of 2,000 tokens joins, against their median before; and the same
  without a pace.

Sides alternate. Ratios are the medians of the pairs' ratios. Processor time is told beside the time that passes: on a
machine with other work it alone says something.
"""

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dormouse.core import openmp

if __name__ == "__main__":
    os.environ |= openmp.WAITING  # as runtimes have it

import torch

from benchmarks.llm_alone import NEW, Alone, begin, random_prompt
from benchmarks.llm_extents import Pool
from benchmarks.report import Goal, arguments, report
from dormouse.core.decisions.batches.batch import Batch
from dormouse.core.decisions.batches.blocks import Blocks, BlockTable
from dormouse.gpuserver.runtime.engine import BLOCK_TOKENS, Engine
from examples import smollm2

CLIENTS: Final = 16
JOINED: Final = 8
LONG: Final = 2000
FULL: Final = 7 * BLOCK_TOKENS + 1
"""Tokens of a prompt that has just begun a block: it has room for fifteen steps."""

SIZES: Final = (16, 32, 64)
"""Tokens of a block. Figure 11b has 8, 16 and 32; the kernels for the CPU take multiples of 16."""


def decode(engine: Engine) -> None:
    """Until all prompts are computed."""
    while engine.batch.waiting or any(sequence.left > 1 for sequence in engine.batch.running):
        engine.step()


def step_ms(engine: Engine) -> float:
    began_s = time.perf_counter()
    assert engine.step() is not None
    return (time.perf_counter() - began_s) * 1e3


class Spent:
    """Time that passes, and of the processors."""

    def __init__(self, work: Callable[[], None]) -> None:
        wall_s, processor_s = time.perf_counter(), time.process_time()
        work()
        self.processor_s, self.wall_s = time.process_time() - processor_s, time.perf_counter() - wall_s


def answered(pool: Pool, reserved: bool, new: int) -> Spent:
    """Sixteen clients from their first prompt token to their last answer."""
    engine = pool.engine(reserved)
    for number in range(CLIENTS):
        begin(engine, number, random_prompt(number), new)

    def work() -> None:
        while not engine.batch.idle:
            engine.step()

    asked = pool.asked
    spent = Spent(work)
    assert (pool.asked > asked) is not reserved
    return spent


def on_demand(pool: Pool, rounds: int, new: int) -> dict[str, Any]:
    answered(pool, False, 1)
    walls, processors = [], []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        sides = {reserved: answered(pool, reserved, new) for reserved in order}
        walls.append(sides[True].wall_s / sides[False].wall_s)
        processors.append(sides[True].processor_s / sides[False].processor_s)
    return {"speed": spread(walls), "processor": spread(processors)}


class TimedBlocks(Blocks):
    """What is spent on giving sequences their blocks, asking for memory left out."""

    spent_s = 0.0

    def extend(self, table: BlockTable, tokens: int) -> bool:
        began_s = time.perf_counter()
        found = super().extend(table, tokens)
        self.spent_s += time.perf_counter() - began_s
        return found


def allocation(pool: Pool, rounds: int) -> float:
    """Getting blocks, and memory for them, of all decode steps from one full block to the second next."""
    share = []
    for _ in range(rounds):
        engine = pool.engine(reserved=False)
        engine.blocks = blocks = TimedBlocks(engine.layout.block_tokens)
        engine.batch = Batch(blocks)
        size = engine.layout.block_tokens
        for number in range(CLIENTS):
            begin(engine, number, random_prompt(number, max(size, FULL // size * size)), 2 * size + 2)
        decode(engine)
        blocks.spent_s = pool.waited_s = 0.0
        took_s = sum(step_ms(engine) for _ in range(2 * size)) / 1e3
        share.append((blocks.spent_s + pool.waited_s) / took_s)
    return statistics.median(share)


def scattered(alone: Alone, rounds: int) -> list[float]:
    """Steps over scattered ÷ contiguous blocks, each side in a half of the memory, as far as the prompts' last blocks
    go.
    """
    nbytes = alone.attention.layout.block_nbytes
    half = alone.attention.memory.nbytes // nbytes // 2
    found = []
    for seed in range(rounds):
        sides = [Engine(alone.model, alone.attention, lambda blocks: False) for _ in range(2)]
        places = list(range(half))
        random.Random(seed).shuffle(places)
        for number, place in enumerate(places):
            sides[0].add_extent(number, place * nbytes, nbytes)
        sides[1].add_extent(0, half * nbytes, half * nbytes)
        for engine in sides:
            for number in range(CLIENTS):
                begin(engine, number, random_prompt(number, FULL), BLOCK_TOKENS)
            decode(engine)
        for number in range(BLOCK_TOKENS - 2):
            order = sides if number % 2 else sides[::-1]
            one, other = (step_ms(engine) for engine in order)
            found.append(one / other if number % 2 else other / one)
    return found


def join(alone: Alone, paced: bool) -> dict[str, float]:
    """Steps while the prompt joins ÷ the median before."""
    engine = alone.engine()
    if not paced:
        engine.batch = Batch(engine.blocks)
    for number in range(JOINED):
        begin(engine, number, random_prompt(number), 900)
    decode(engine)
    before = statistics.median(step_ms(engine) for _ in range(15))
    begin(engine, 99, random_prompt(99, LONG), 2)
    during = []
    while engine.batch.waiting or any(sequence.left > 1 for sequence in engine.batch.running):
        during.append(step_ms(engine) / before)
    assert len(engine.batch.running) > JOINED - 1, "the others have gone on"
    return {
        "steps": len(during),
        "median": statistics.median(during),
        "p90": statistics.quantiles(during, n=10)[-1] if len(during) > 1 else during[0],
        "longest": max(during),
    }


def spread(numbers: list[float]) -> list[float]:
    """Least, median, most."""
    return [min(numbers), statistics.median(numbers), max(numbers)]


def tell(found: dict[str, Any], name: str) -> None:
    print(f"{name}: {found[name]}", file=sys.stderr, flush=True)


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(2)
    folder = smollm2.build(args.folder)
    rounds, sizes, new = (1, SIZES[:1], 8) if args.quick else (args.rounds, SIZES, NEW)
    found: dict[str, Any] = {"dtype": args.dtype, "ratios": "least, median, most", "allocation": {}}
    for size in sizes:
        with Pool(folder, args.dtype, size) as pool:
            if size == BLOCK_TOKENS:
                found["on demand / reserved"] = on_demand(pool, rounds, new)
                tell(found, "on demand / reserved")
            found["allocation"][size] = allocation(pool, min(rounds, 2))
            tell(found, "allocation")
    alone = Alone(folder, args.dtype)
    found["scattered / contiguous"] = spread(scattered(alone, rounds))
    tell(found, "scattered / contiguous")
    for name, paced in (("paced", True), ("not paced", False)):
        runs = [join(alone, paced) for _ in range(1 if args.quick else 3)]
        found[f"join, {name}"] = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        tell(found, f"join, {name}")
    report(goals(found), args, found)


def goals(found: dict[str, Any]) -> list[Goal]:
    made = []

    def goal(name: str, wanted: str, measured: float, met: bool = True) -> None:
        made.append(Goal(name=name, goal=wanted, measured=measured, met=met or not wanted))

    demand = found["on demand / reserved"]
    goal("output tokens/s, KV on demand / reserved", ">= 0.98", demand["speed"][1], demand["speed"][1] >= 0.98)
    goal("the same by processor time", "", demand["processor"][1])
    for size, share in found["allocation"].items():
        wanted = "<= 4 %" if size == BLOCK_TOKENS else ""
        goal(f"part of a step that gets KV, batch 16, blocks of {size}, %", wanted, share * 100, share <= 0.04)
    added = found["scattered / contiguous"][1] - 1
    goal("what scattered blocks add to a step, batch 16, %", "<= 4 %", added * 100, added <= 0.04)
    for name in ("paced", "not paced"):
        each = found[f"join, {name}"]
        for key in ("longest", "p90", "median"):
            wanted = "<= 2" if (name, key) == ("paced", "median") else ""
            goal(f"{key} step while a prompt of {LONG} joins / median, {name}", wanted, each[key], each[key] <= 2)
    return made


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.set_defaults(out=Path("build/llm/kv.json"))
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args())
