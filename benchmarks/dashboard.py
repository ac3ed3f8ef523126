"""What watching a node costs: processor time of its router and controller, watched less not watched.

    python -m benchmarks.dashboard [--functions 500] [--rate 50] [--watchers 1]

A real node on two emulated GPUs, functions of which each has a small model, requests to any of them at a rate. Windows
with and without readers of `GET /admin/watch` take turns. Of each process, the mean of its windows.
"""

import argparse
import http.client
import os
import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report

GOAL: Final = 0.03
ROLES: Final = ("router", "controller", "store")
NODE: Final = '[gpu]\ncount = 2\nmemory = "64MiB"\nactivations = "16MiB"\nthreads = 1\n[limits]\nloads = 4\n'
FUNCTION: Final = """
import torch

def load():
    return torch.full((1 << 16,), float(NUMBER)).to("cuda")

def handle(weights, request):
    return weights[:8].sum().item()
"""


def spent_s(pid: int) -> float:
    """Processor time since its start."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class Watching:
    """Readers of the stream, and what they have read."""

    def __init__(self, node: TestNode) -> None:
        self._connection = node.connect(60)
        self._connection.request("GET", "/admin/watch")
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self.nbytes = self.samples = 0
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := self._answer.read1(1 << 16):
                self.nbytes += len(data)
                self.samples += data.count(b"event: change\n")
        except (OSError, http.client.HTTPException):
            pass  # it was closed

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._connection.sock is None or self._connection.sock.shutdown(2) is None
        self._thread.join()
        self._connection.close()


def asking(node: TestNode, names: list[str], rate: float, stop: threading.Event) -> None:
    """Open loop: requests leave at their times, whatever became of those before."""
    chance, due_s = random.Random(1), time.monotonic()
    with ThreadPoolExecutor(16) as pool:
        while not stop.is_set():
            due_s += chance.expovariate(rate)
            time.sleep(max(0.0, due_s - time.monotonic()))
            pool.submit(node.invoke, chance.choice(names), 1)


def main(args: argparse.Namespace) -> None:
    window_s, rounds = (5.0, 1) if args.quick else (15.0, 3)
    with running_node(NODE) as node:
        names = [f"function-{number:04}" for number in range(args.functions)]
        with ThreadPoolExecutor(4) as pool:
            sources = [FUNCTION.replace("NUMBER", str(number)) for number in range(args.functions)]
            list(pool.map(node.deployed, names, sources))
        pids, stop = node.pids(), threading.Event()
        asker = threading.Thread(target=asking, args=(node, names, args.rate, stop))
        asker.start()
        shares: dict[tuple[str, bool], list[float]] = {
            (role, watched): [] for role in ROLES for watched in (False, True)
        }
        nbytes = samples = 0
        for watched in [False, True] * rounds:
            with ExitStack() as stack:
                readers = [stack.enter_context(Watching(node)) for _ in range(args.watchers * watched)]
                time.sleep(2.0)  # the snapshots are no part of it
                before, began_s = {role: spent_s(pids[role]) for role in ROLES}, time.monotonic()
                read, heard = (sum(getattr(each, what) for each in readers) for what in ("nbytes", "samples"))
                time.sleep(window_s)
                took_s = time.monotonic() - began_s
                for role in ROLES:
                    shares[role, watched].append((spent_s(pids[role]) - before[role]) / took_s)
                nbytes += sum(each.nbytes for each in readers) - read
                samples += sum(each.samples for each in readers) - heard
        stop.set()
        asker.join()
    cost = {role: statistics.mean(shares[role, True]) - statistics.mean(shares[role, False]) for role in ROLES}
    for role in ROLES:
        without, with_ = (" ".join(f"{share:.1%}" for share in shares[role, watched]) for watched in (False, True))
        print(f"{role}: {cost[role]:+.2%} of a core (not watched {without}; watched {with_})")
    all_s = rounds * window_s * max(1, args.watchers)
    print(f"a second, for each watcher: {nbytes / all_s:,.0f} bytes, {samples / all_s:.2f} samples")
    what = f"router, watched by {args.watchers}, {args.functions} functions, {args.rate:g} requests/s"
    goals = [
        Goal(name=what, goal=f"<= {GOAL:.0%} of a core", measured=f"{cost['router']:.2%}", met=cost["router"] <= GOAL)
    ]
    report(goals, args, {"cost": cost, "nbytes": nbytes})


if __name__ == "__main__":
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--functions", type=int, default=500)
    parser.add_argument("--rate", type=float, default=50.0)
    parser.add_argument("--watchers", type=int, default=1)
    main(parser.parse_args())
