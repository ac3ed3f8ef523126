"""What KV memory on demand costs, in one process, with a model's real weights.

    python -m benchmarks.llm_kv [--folder build/smollm2] [--dtype bfloat16] [--rounds 7]

* *On demand*: tokens per second of 16 clients when KV comes in small extents, against all of it reserved before.
* *Scattered*: a decode step of 16 sequences over blocks that lie anywhere, against blocks that lie one behind the other
  (Tangram, Figure 11b).
* *Join*: the longest and the median step of 8 sequences while a prompt of 2,000 tokens joins, against their median
  without it; and the same without a pace.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.llm import NEW, PROMPT, Alone, random_prompt
from dormouse.gpuserver.runtime.batch import Sequence
from dormouse.gpuserver.runtime.engine import Engine, Generation
from dormouse.gpuserver.runtime.sampling import Sampling
from examples import smollm2

CLIENTS: Final = 16
EXTENT: Final = 4  # blocks
EXTENTS: Final = 100
LONG: Final = 2000


def never(made: Engine, blocks: int) -> bool:
    return False


def engine(alone: Alone, extents: range, grow: Callable[[Engine, int], bool] = never) -> Engine:
    """With these parts of its memory."""
    made = Engine(alone.model, alone.attention, lambda blocks: grow(made, blocks))
    for extent in extents:
        add(made, extent)
    return made


def add(made: Engine, extent: int) -> None:
    nbytes = EXTENT * made.layout.block_nbytes
    made.add_extent(extent, extent * nbytes, nbytes)


def begin(made: Engine, number: int, prompt: list[int], new: int) -> None:
    sequence = Sequence(number, list(prompt), len(prompt), len(prompt) + new)
    made.add(number, Generation(sequence, Sampling(), frozenset()))


def step_ms(made: Engine) -> float:
    began_s = time.perf_counter()
    assert made.step() is not None
    return (time.perf_counter() - began_s) * 1000


def answers_s(alone: Alone, demand: bool) -> float:
    left = iter(range(EXTENTS))

    def grow(made: Engine, blocks: int) -> bool:
        for _ in range(-(-blocks // EXTENT)):
            add(made, next(left))
        return True

    made = engine(alone, range(0) if demand else range(EXTENTS), grow)
    for number in range(CLIENTS):
        begin(made, number, random_prompt(number), NEW)
    began_s = time.perf_counter()
    while not made.batch.idle:
        made.step()
    return time.perf_counter() - began_s


def decode_pairs(alone: Alone) -> list[tuple[float, float]]:
    """Of steps over scattered and contiguous blocks, each side in a half of the memory, as far as the prompts' last
    blocks go.
    """
    sides = [engine(alone, range(EXTENTS // 2)), engine(alone, range(EXTENTS // 2, EXTENTS))]
    random.Random(1).shuffle(sides[0].blocks._free)
    for made in sides:
        for number in range(CLIENTS):
            begin(made, number, random_prompt(number), NEW)
        while made.batch.waiting or any(sequence.left > 1 for sequence in made.batch.running):
            made.step()
    left = -PROMPT % made.layout.block_tokens - len(sides[0].batch.running[0].tokens) + PROMPT
    return [(step_ms(sides[0]), step_ms(sides[1])) for _ in range(left)]


def join(alone: Alone, paced: bool) -> tuple[float, float]:
    """The longest and the median step while the prompt joins, ÷ the median before."""
    made = engine(alone, range(EXTENTS))
    if not paced:
        made.batch._pace = None
    for number in range(8):
        begin(made, number, random_prompt(number), 200)
    while made.batch.waiting or any(sequence.left > 1 for sequence in made.batch.running):
        made.step()
    before = statistics.median(step_ms(made) for _ in range(15))
    prompt = (random_prompt(1) * (LONG // PROMPT + 1))[:LONG]
    begin(made, 99, prompt, 2)
    during = []
    while made.batch.waiting or any(sequence.left > 1 for sequence in made.batch.running):
        during.append(step_ms(made))
    return max(during) / before, statistics.median(during) / before


def middle(numbers: list[float]) -> list[float]:
    numbers = sorted(numbers)
    return [round(each, 3) for each in (numbers[0], statistics.median(numbers), numbers[-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(2)
    alone = Alone(smollm2.build(options.folder), options.dtype)
    answers_s(alone, True)
    shares = [answers_s(alone, False) / answers_s(alone, True) for _ in range(options.rounds)]
    pairs = [pair for _ in range(options.rounds) for pair in decode_pairs(alone)]
    found: dict[str, Any] = {
        "dtype": options.dtype,
        "ratios": "least, median, most",
        "speed on demand / reserved": middle(shares),
        "scattered / contiguous, a step of 16": middle([one / other for one, other in pairs]),
    }
    for name, paced in (("paced", True), ("not paced", False)):
        longest, usual = zip(*(join(alone, paced) for _ in range(3)), strict=True)
        found[f"longest step of a join, {name}"] = middle(list(longest))
        found[f"median step of a join, {name}"] = middle(list(usual))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
