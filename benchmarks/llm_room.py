"""Tangram's Fig. 11a: memory that KV leaves for other models' weights, on demand against reserved for the longest.

For each of the paper's eight models, on a GPU of 45 GB (its weights and KV are there, the rest is free), and for
batches of 1 to 64 requests with published lengths: the batch that serves decides, step by step, and KV comes in extents
as a runtime asks for it. *On demand* is the memory that the batch has, over all its steps; *reserved* is 2,048 tokens
for each request, or all that the weights leave. Nothing computes.

``--data`` is a folder with the lengths: gsm8k_lengths.csv.gz, humaneval_lengths.csv.gz, alpaca_en_demo_lengths.csv.gz
(columns p_llama2 and r_llama2: Llama's tokens of prompt and answer) and sharegpt_lengths.csv.gz (subset, input_tokens,
output_tokens; of natural_llama3).
"""

import argparse
import csv
import gzip
import itertools
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.papers_parameters import L40_NBYTES, MAX_TOKENS
from benchmarks.papers_tangram import BATCHES
from benchmarks.pool_models import Model, language_models
from benchmarks.report import Goal, arguments, report
from dormouse.core.decisions.batches.batch import Batch
from dormouse.core.decisions.batches.batch import Sequence as Tokens
from dormouse.core.decisions.batches.blocks import Blocks
from dormouse.gpuserver.runtime.engine import BLOCK_TOKENS
from dormouse.gpuserver.runtime.extents import EXTENT_NBYTES, EXTENTS

SETS: Final = ("gsm8k", "humaneval", "alpaca_en_demo")
GB: Final = 1e9

Lengths = list[tuple[int, int]]


def published(folder: Path) -> list[Lengths]:
    """Prompts and answers of the four data sets; no request is longer than MAX_TOKENS."""
    found = []
    for name in SETS:
        rows = _rows(folder / f"{name}_lengths.csv.gz")
        found.append([(int(row["p_llama2"]), max(1, int(row["r_llama2"]))) for row in rows])
    rows = _rows(folder / "sharegpt_lengths.csv.gz")
    natural = [row for row in rows if row["subset"] == "natural_llama3"]
    found.append([(int(row["input_tokens"]), int(row["output_tokens"])) for row in natural])
    return [[(max(1, prompt), answer) for prompt, answer in some if prompt + answer <= MAX_TOKENS] for some in found]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    if not path.is_file():
        sys.exit(f"{path}: the lengths are not there; give their folder with --data")
    with gzip.open(path, "rt") as file:
        yield from csv.DictReader(file)


def steps(lengths: Sequence[tuple[int, int]], blocks_of_extent: int, most_blocks: int) -> list[int]:
    """Blocks that a batch has after each step. The requests begin at once; ``most_blocks`` is all that there is."""
    blocks = Blocks(BLOCK_TOKENS)
    numbers = itertools.count()

    def grow(lacking: int) -> bool:
        wanted = -(-lacking // blocks_of_extent)
        for count in (max(wanted, EXTENTS), wanted):
            if blocks.count + count * blocks_of_extent <= most_blocks:
                for _ in range(count):
                    blocks.grow(next(numbers), blocks_of_extent)
                return True
        return False

    batch = Batch(blocks)
    tokens = itertools.count(3)  # no two prompts have a beginning in common
    for number, (prompt, answer) in enumerate(lengths):
        batch.add(Tokens(number, [next(tokens) for _ in range(prompt)], prompt, prompt + answer))
    found = []
    while not batch.idle:
        parts = batch.plan(grow)
        assert parts, "one request alone has room"
        for part in parts:
            batch.computed(part)
            if part.samples:
                part.sequence.tokens.append(next(tokens))
                if len(part.sequence.tokens) >= part.sequence.limit:
                    batch.remove(part.sequence)
        found.append(blocks.count)
    return found


def free(model: Model, size: int, sets: Sequence[Lengths], rng: random.Random, draws: int) -> dict[str, float]:
    """Bytes that are left: reserved, on demand on average and at the worst moment."""
    block_nbytes = BLOCK_TOKENS * model.kv_nbytes
    extent = max(1, EXTENT_NBYTES // block_nbytes)
    room = L40_NBYTES - model.nbytes
    means, worst = [], []
    for _ in range(draws):
        had = steps([rng.choice(rng.choice(sets)) for _ in range(size)], extent, room // block_nbytes)
        means.append(statistics.mean(had))
        worst.append(max(had))
    return {
        "reserved": max(0, room - size * MAX_TOKENS * model.kv_nbytes),
        "on demand": room - statistics.mean(means) * block_nbytes,
        "on demand, at worst": room - max(worst) * block_nbytes,
        "room": room,
    }


def main(args: argparse.Namespace) -> None:
    sets, rng = published(args.data), random.Random(args.seed)
    results: dict[str, dict[int, dict[str, float]]] = {}
    for model in language_models():
        results[model.name] = {size: free(model, size, sets, rng, 1 if args.quick else 10) for size in BATCHES}
        shown = {size: (each["reserved"] / GB, each["on demand"] / GB) for size, each in results[model.name].items()}
        print(model.name, {size: f"{one:.1f} -> {other:.1f} GB" for size, (one, other) in shown.items()}, flush=True)
    report(goals(results), args, {"free, bytes": results, "gpu": L40_NBYTES})


def goals(results: dict[str, dict[int, dict[str, float]]]) -> list[Goal]:
    """The paper's text has one range, over batch sizes it does not name."""
    made = []
    for size in BATCHES:
        reserved = sum(each[size]["reserved"] for each in results.values())
        demand = sum(each[size]["on demand"] for each in results.values())
        worst = sum(each[size]["on demand, at worst"] for each in results.values())
        room = sum(each[size]["room"] for each in results.values())
        measured: list[tuple[str, Any]] = [
            ("free of what weights leave, reserved, %", reserved / room * 100),
            ("on demand, %", demand / room * 100),
            ("on demand at the worst moment, %", worst / room * 100),
        ]
        made += [Goal(name=f"batch {size}: {what}", goal="", measured=value, met=True) for what, value in measured]
        gains = [
            each[size]["on demand"] / each[size]["reserved"] - 1 for each in results.values() if each[size]["reserved"]
        ]
        text = f"{min(gains):.1%} to {max(gains):.1%}" if gains else ""
        without = sum(not each[size]["reserved"] for each in results.values())
        text += f"; {without} models had nothing" if without else ""
        name = f"batch {size}: more free than reserved, over the models"
        made.append(Goal(name=name, goal="paper: 2.3 % to 41 %", measured=text, met=True))
    return made


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.set_defaults(out=Path("build/llm/room.json"))
    parser.add_argument("--data", type=Path, default=Path("build/papers"))
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
