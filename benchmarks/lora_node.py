"""Adapters on a node: what is shared, what isolation costs, two runtimes side by side, and kills under load.

    python -m benchmarks.lora_node [--folder build/smollm2] [--parts memory isolation turns kills many]

* ``memory``: bytes on the GPU and on the host with a base and eight adapters in one batch, against what these have;
  and what waking each adapter copies.
* ``isolation``: sixteen streams of eight adapters in one runtime (``tenant``) and in eight (``function``), in turn.
* ``turns``: two backbones that compute at the same time on one GPU, against one of them alone.
* ``kills``: three runtimes that compute all the time; one of them is killed a hundred times.
* ``many``: three hundred adapters over room for twenty (lora_many.py).

Twenty minutes; four with --quick.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from dormouse.core import openmp

if __name__ == "__main__":
    os.environ |= openmp.WAITING

import openai
import torch

from benchmarks.llm import at_once
from benchmarks.llm_alone import random_prompt
from benchmarks.llm_client import deploy
from benchmarks.lora_adapters import SPEED, save
from benchmarks.lora_many import many
from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report
from dormouse.core import modelfolder, procfs
from examples import smollm2

PLACE: Final = Path("build/llm/lora")
PARTS: Final = ("memory", "isolation", "turns", "kills", "many")
NEW: Final = 48
PROMPT: Final = 64
CLIENTS: Final = 16


class Streams:
    """A client of a node's completions, and what it has seen."""

    def __init__(self, node: TestNode) -> None:
        self.openai = openai.OpenAI(base_url=f"http://127.0.0.1:{node.port}/v1", api_key="none", max_retries=0)
        self.first_ms: list[float] = []

    def tokens(self, name: str, seed: int, new: int = NEW) -> str:
        """The text of a whole stream. Raises openai.APIError."""
        began_s = time.perf_counter()
        stream = self.openai.completions.create(
            model=name, prompt=random_prompt(seed, PROMPT), max_tokens=new, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        text = ""
        for number, part in enumerate(stream):
            if not number:
                self.first_ms.append((time.perf_counter() - began_s) * 1e3)
            text += part.choices[0].text if part.choices else ""
        return text

    def stream(self, name: str, seed: int, new: int = NEW) -> None:
        self.tokens(name, seed, new)


@contextmanager
def node_of(folder: Path, dtype: str, more: str = "", **settings: Any) -> Iterator[tuple[TestNode, list[str]]]:
    """With a base and eight adapters over it."""
    gpu = f'[gpu]\ncount = 1\nthreads = 2\npool = "pages"\nmemory = "2GiB"\nseat_idle_ms = 2000\n{more}\n'
    with running_node(gpu) as node:
        deploy(node, "base", folder, dtype)
        names = []
        for place in save(folder, PLACE, SPEED):
            names.append(place.name)
            node.admin.deploy(place.name, modelfolder.find_adapter(str(place)), {"base": "base", **settings})
        yield node, names


def memory(folder: Path, dtype: str) -> tuple[list[Goal], dict[str, Any]]:
    with node_of(folder, dtype) as (node, names):
        streams, kv = Streams(node), [0]
        streams.tokens("base", 1, 4)
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                kv[0] = max([kv[0], *(each["kv_nbytes"] for each in node.status()["functions"]["base"]["runtimes"])])

        watching = threading.Thread(target=watch)
        watching.start()
        at_once(lambda number: streams.stream(names[number % 8], number, 4 * NEW), range(CLIENTS), CLIENTS)
        done.set()
        watching.join()
        node.wait(lambda: node.status()["gpus"]["0"]["seats"] == [], 60, "all leases to end")
        status = node.status()
        functions, told = status["functions"], status["gpus"]["0"]  # KV is gone, and weights are there
        base = functions["base"]["nbytes"]
        own = {name: functions[name]["nbytes"] - base for name in names}
        ideal = base + sum(own.values())
        gpu = (told["capacity_nbytes"] - told["free_nbytes"] + kv[0]) / (ideal + kv[0])
        host = status["store"]["host_nbytes"] / ideal
        copied = {name: functions[name]["last_wake"]["copied_nbytes"] for name in names}
    goals = [
        Goal(name="GPU bytes / (backbone + 8 adapters + KV)", goal="<= 1.05", measured=gpu, met=gpu <= 1.05),
        Goal(name="host bytes / (backbone + 8 adapters)", goal="<= 1.05", measured=host, met=host <= 1.05),
        Goal(
            name="bytes that waking an adapter copies, beside its own",
            goal="0",
            measured=sum(abs(copied[name] - own[name]) for name in names),
            met=copied == own,
        ),
    ]
    return goals, {"backbone": base, "adapters": own, "copied": copied, "KV": kv[0]}


def isolation(folder: Path, dtype: str, quick: bool) -> tuple[list[Goal], dict[str, Any]]:
    """Both nodes are there all the time, and are asked in turn."""
    sides = ("tenant", "function")
    tokens_s: dict[str, list[float]] = {side: [] for side in sides}
    first_ms: dict[str, list[float]] = {side: [] for side in sides}
    private: dict[str, float] = {}
    with ExitStack() as running:
        nodes = {side: running.enter_context(node_of(folder, dtype, isolation=side)) for side in sides}
        for number in range(2 if quick else 6):
            for side in sides if number % 2 else sides[::-1]:
                node, names = nodes[side]
                streams = Streams(node)
                began_s = time.perf_counter()
                asked = [(names[each % 8], 100 * number + each) for each in range(CLIENTS)]
                at_once(lambda each: streams.stream(*each), asked, CLIENTS)  # noqa: B023 (it is over by then)
                if number:  # the first starts processes
                    tokens_s[side].append(CLIENTS * NEW / (time.perf_counter() - began_s))
                    first_ms[side] += streams.first_ms
                private[side] = sum(_private_nbytes(pid) for pid in _runtimes(node)) / (1 << 20)
    ratio = statistics.median(a / b for a, b in zip(tokens_s["tenant"], tokens_s["function"], strict=True))
    goals = [_told("throughput of one batch / of a runtime per function", ratio)]
    for side in sides:
        goals.append(_told(f"{side}: tokens/s", statistics.median(tokens_s[side])))
        goals.append(_told(f"{side}: first token, median ms", statistics.median(first_ms[side])))
        goals.append(_told(f"{side}: first token, p99 ms", statistics.quantiles(first_ms[side], n=100)[98]))
        goals.append(_told(f"{side}: private memory of its runtimes, MiB", private[side]))
    return goals, {"tokens/s": tokens_s, "first_ms": first_ms, "private MiB": private}


def turns(folder: Path, quick: bool, threads: int) -> tuple[list[Goal], dict[str, Any]]:
    """One stream of each; the two backbones are the same model in two types, which share nothing. With two threads, one
    alone has both cores.
    """
    gpu = f'[gpu]\ncount = 1\nthreads = {threads}\npool = "pages"\nmemory = "2GiB"\nseat_idle_ms = 20000\n'
    gpu += "[schedule]\nturns = 2\n"
    names = ("bfloat16", "float32")
    ratios = []
    with running_node(gpu) as node:
        for name in names:
            deploy(node, name, folder, name)
        streams = Streams(node)
        for name in names:
            streams.tokens(name, 1)

        def seconds(asked: tuple[str, ...], seed: int) -> dict[str, float]:
            took: dict[str, float] = {}

            def one(name: str) -> None:
                began_s = time.perf_counter()
                streams.tokens(name, seed, 3 * NEW)
                took[name] = time.perf_counter() - began_s

            at_once(one, asked, len(asked))
            return took

        for number in range(2 if quick else 7):
            alone = {name: seconds((name,), 10 * number + 2)[name] for name in names}
            together = seconds(names, 10 * number + 3)
            ratios.append(sum(alone[name] / together[name] for name in names))
    ratio = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    name = f"turns = 2, threads = {threads}: two backbones together / one alone ({spread})"
    return [Goal(name=name, goal=">= 1.3", measured=ratio, met=ratio >= 1.3)], {"ratios": ratios}


def kills(folder: Path, quick: bool) -> tuple[list[Goal], dict[str, Any]]:
    """Streams of the runtime that is killed go on in the next one, once: none is to meet two kills. fp32, so that no
    text depends on where it went on.
    """
    seeds, times, rng = range(4), 10 if quick else 100, random.Random(1)
    with node_of(folder, "float32", isolation="function") as (node, names):
        names, streams = names[:3], Streams(node)
        for name in names:
            streams.tokens(name, 0, 4)
        node.wait(lambda: node.status()["gpus"]["0"]["seats"] == [], 60, "all leases to end")
        before = node.status()["gpus"]["0"]["free_nbytes"]
        right = {(name, seed): streams.tokens(name, seed, 32) for name in names for seed in seeds}
        wrong: list[tuple[str, int]] = []
        errors: list[tuple[str, str]] = []
        whole, stop = dict.fromkeys(names, 0), threading.Event()

        def talk(name: str) -> None:
            own = random.Random(name)
            while not stop.is_set():
                seed = own.choice(seeds)
                try:
                    text = streams.tokens(name, seed, 32)
                except openai.APIError as error:
                    errors.append((name, str(error)))
                else:
                    whole[name] += 1
                    if text != right[name, seed]:
                        wrong.append((name, seed))

        talking = [threading.Thread(target=talk, args=(name,)) for name in names]
        for thread in talking:
            thread.start()
        killed, last = 0, dict.fromkeys(names, -1)
        while killed < times:
            time.sleep(rng.uniform(0.05, 0.3))
            name = rng.choice(names)
            pids = [each["pid"] for each in node.status()["functions"][name]["runtimes"]]
            if pids and whole[name] > last[name] + 1:  # no stream of it is left that has met the last kill
                last[name] = whole[name]
                os.kill(pids[0], signal.SIGKILL)
                killed += 1
        stop.set()
        for thread in talking:
            thread.join()
        node.wait(lambda: node.status()["gpus"]["0"]["seats"] == [], 60, "all leases to end")
        after = node.status()["gpus"]["0"]["free_nbytes"]
    goals = [
        Goal(name=f"{killed} kills of runtimes: streams that err", goal="0", measured=len(errors), met=not errors),
        Goal(name="wrong texts", goal="0", measured=len(wrong), met=not wrong),
        Goal(name="free bytes that are lost", goal="0", measured=before - after, met=before == after),
        _told("whole streams", sum(whole.values())),
    ]
    return goals, {"errors": errors, "wrong": wrong}


def both(one: tuple[list[Goal], Any], other: tuple[list[Goal], Any]) -> tuple[list[Goal], list[Any]]:
    return one[0] + other[0], [one[1], other[1]]


def _told(name: str, measured: float) -> Goal:
    return Goal(name=name, goal="", measured=measured, met=True)


def _runtimes(node: TestNode) -> list[int]:
    zygotes = [pid for pid in node.descendants() if "dormouse.gpuserver.runtime.zygote" in procfs.words(pid)]
    return [pid for pid in zygotes if any(pid in procfs.children(other) for other in zygotes)]


def _private_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(2)
    folder = smollm2.build(args.folder).absolute()
    PLACE.mkdir(parents=True, exist_ok=True)
    work: dict[str, Callable[[], tuple[list[Goal], Any]]] = {
        "memory": lambda: memory(folder, args.dtype),
        "isolation": lambda: isolation(folder, args.dtype, args.quick),
        "turns": lambda: both(turns(folder, args.quick, 1), turns(folder, args.quick, 2)),
        "kills": lambda: kills(folder, args.quick),
        "many": lambda: many(args.quick),
    }
    goals: list[Goal] = []
    extra: dict[str, Any] = {"dtype": args.dtype}
    for part in args.parts:
        made, extra[part] = work[part]()
        goals += made
        print(*(f"{goal.name}: {goal.measured}" for goal in made), sep="\n", file=sys.stderr, flush=True)
    report(goals, args, extra)


if __name__ == "__main__":
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.set_defaults(out=Path("build/llm/lora-node.json"))
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="of memory and isolation")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    main(parser.parse_args())
