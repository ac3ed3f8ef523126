"""Output tokens per second beside vLLM and transformers' continuous batching, on the same token ids.

    scripts/llm-peers
    python -m benchmarks.llm_peers [--folder build/smollm2] [--rounds 5] [--clients 1 16] [--sides fused vllm ...]

Each side is a process of its own with the same number of threads, and has the same prompts. They take turns, and only
one computes at a time: each begins when the machine is quiet. A ratio is the median of the rounds' ratios, of which the
goals are.

* ``fused``, ``modules``: our engine, with our own layers and with transformers' (benchmarks/llm_peer.py).
* ``vllm``, ``transformers``: their engines in the same way.
* ``node``, ``server``: a whole node and vLLM's server, both asked through HTTP.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.llm_alone import NEW, random_prompt
from benchmarks.llm_server import PEER, THREADS, VllmServer, installed, tokens_s
from benchmarks.nodes.testnode import running_node
from benchmarks.report import Goal, arguments, report
from dormouse.core import openmp
from dormouse.core.folder import FunctionFolder
from examples import smollm2

SIDES: Final = ("fused", "modules", "vllm", "transformers", "node", "server")
LOGS: Final = Path("build/llm")
GOALS: Final = {
    ("fused", "vllm"): {1: 0.9, 16: 1.1},
    ("modules", "vllm"): {1: 0.75, 16: 0.95},
    ("fused", "transformers"): {16: 2.2},
    ("modules", "transformers"): {16: 1.9},
    ("node", "server"): {},
}
"""Least ratios, by the number of clients."""


class Side(Protocol):
    name: str

    def tokens_s(self, prompts: list[list[int]]) -> float:
        """Output tokens per second, each prompt a client's."""


class Engine:
    """A process that answers one line with one line."""

    def __init__(self, name: str, folder: Path, dtype: str, adapters: Sequence[Path] = ()) -> None:
        python = str(PEER / "bin/python") if name == "vllm" else sys.executable
        command = [python, "benchmarks/llm_peer.py", name, str(folder), dtype, str(THREADS), *map(str, adapters)]
        # The same for all: threads that spin while others compute on the same cores would measure the waiting.
        ours = {"OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": "" if name == "vllm" else "."}
        environment = {**os.environ, **openmp.WAITING, **ours}
        self._log = open(LOGS / f"{name}.log", "w")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        self.name = name
        self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: see {self._log.name}")
        found: dict[str, Any] = json.loads(line)
        return found

    def tokens_s(self, prompts: list[list[int]], adapters: Sequence[int] = ()) -> float:
        assert self._process.stdin is not None
        asked = {"prompts": prompts, "new": NEW, "adapters": list(adapters)}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        heard = self._heard()
        assert heard["tokens"] == NEW * len(prompts), heard
        return float(heard["tokens"] / heard["s"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Http:
    """A server that is there."""

    def __init__(self, name: str, port: int) -> None:
        self.name, self._port = name, port

    def tokens_s(self, prompts: list[list[int]]) -> float:
        return tokens_s(self._port, "chat", prompts, NEW)


@contextmanager
def side(name: str, folder: Path, dtype: str) -> Iterator[Side]:
    """Running."""
    if name == "node":
        with running_node(f'[gpu]\ncount = 1\nmemory = "1GiB"\nthreads = {THREADS}\npool = "pages"\n') as node:
            settings = {"llm": True, "dtype": dtype, "context": 2048}
            node.admin.deploy("chat", FunctionFolder(folder, "config.json", False), settings)
            yield Http(name, node.port)
        return
    if name == "server":
        server = VllmServer(folder, dtype, LOGS / "server.log")
        try:
            yield Http(name, server.ready().port)
        finally:
            server.close()
        return
    engine = Engine(name, folder, dtype)
    try:
        yield engine
    finally:
        engine.close()


def busy(interval_s: float) -> float:
    """The part of all cores' time that was used."""

    def times() -> tuple[int, int]:
        first = Path("/proc/stat").read_text().splitlines()[0]
        user, nice, system, idle, waiting, *others = map(int, first.split()[1:8])
        return user + nice + system + sum(others), idle + waiting

    before = times()
    time.sleep(interval_s)
    used, idle = (now - then for now, then in zip(times(), before, strict=True))
    return used / max(1, used + idle)


def until_quiet() -> None:
    """A server goes on a while after its last answer, and would be measured with the next side. Ten seconds at most."""
    ends_s = time.monotonic() + 10
    while time.monotonic() < ends_s and busy(0.3) > 0.1:
        pass


def measured(sides: list[Side], clients: int, rounds: int) -> list[dict[str, float]]:
    """Tokens per second in each round."""
    per_round: list[dict[str, float]] = []
    for number in range(rounds + 1):
        prompts = [random_prompt(10_000 + 100 * (100 * clients + number) + client) for client in range(clients)]
        order = sides if number % 2 else sides[::-1]
        speeds = {}
        for each in order:
            until_quiet()
            speeds[each.name] = each.tokens_s(prompts)
        print(json.dumps({"clients": clients, "round": number, **speeds}), file=sys.stderr, flush=True)
        if number:  # the first warms up
            per_round.append(speeds)
    return per_round


def goals(results: dict[int, list[dict[str, float]]]) -> list[Goal]:
    made = []
    for clients, rounds in results.items():
        for name in rounds[0]:
            speed = statistics.median(each[name] for each in rounds)
            made.append(Goal(name=f"{name}, {clients} clients, tokens/s", goal="", measured=speed, met=True))
        for (ours, peer), least in GOALS.items():
            if {ours, peer} <= rounds[0].keys():
                ratios = [each[ours] / each[peer] for each in rounds]
                text = f"{ours} / {peer}, {clients} clients ({min(ratios):.2f} to {max(ratios):.2f})"
                ratio, wanted = statistics.median(ratios), least.get(clients, 0.0)
                goal = f">= {wanted}" if wanted else ""
                made.append(Goal(name=text, goal=goal, measured=ratio, met=ratio >= wanted))
    return made


def main(args: argparse.Namespace) -> None:
    folder = smollm2.build(args.folder).absolute()
    if {"vllm", "server"} & set(args.sides) and not installed():
        sys.exit(f"{PEER} is not there: run scripts/llm-peers, or leave out the sides vllm and server")
    LOGS.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sides end with it
    with ExitStack() as running:
        sides = [running.enter_context(side(name, folder, args.dtype)) for name in args.sides]
        rounds = 1 if args.quick else args.rounds
        results = {clients: measured(sides, clients, rounds) for clients in args.clients}
    report(goals(results), args, {"dtype": args.dtype, "tokens/s": {str(key): each for key, each in results.items()}})


if __name__ == "__main__":
    parser = arguments((__doc__ or "").splitlines()[0])
    parser.set_defaults(out=LOGS / "peers.json")
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    main(parser.parse_args())
