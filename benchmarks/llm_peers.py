"""Output tokens per second of the engine beside vLLM and transformers' continuous batching, on the same token ids.

    scripts/llm-peers
    python -m benchmarks.llm_peers [--folder build/smollm2] [--rounds 5] [--clients 1 16] [--sides fused vllm ...]

Each side is a process of its own (benchmarks/llm_peer.py) with the same number of threads. They take turns, and only
one computes at a time. ``fused`` is our engine, ``modules`` the same with transformers' own layers. A ratio is the
median of the rounds' ratios.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from benchmarks.llm import NEW, random_prompt
from examples import smollm2

SIDES: Final = ("fused", "modules", "vllm", "transformers")
THREADS: Final = 2
PEERS: Final = Path("build/peers")


class Side:
    """A process that answers one line with one line."""

    def __init__(self, name: str, folder: Path, dtype: str) -> None:
        python = str(PEERS / "vllm/bin/python") if name == "vllm" else sys.executable
        command = [python, "benchmarks/llm_peer.py", name, str(folder), dtype, str(THREADS)]
        # Passive for all: threads that spin while others compute on the same cores would measure the waiting.
        ours = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(THREADS)}
        environment = {**os.environ, **ours, "PYTHONPATH": "" if name == "vllm" else "."}
        self._log = open(PEERS / f"{name}.log", "w")  # noqa: SIM115  # closed with the process
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

    def tokens_s(self, seeds: range) -> float:
        assert self._process.stdin is not None
        print(
            json.dumps({"prompts": [random_prompt(seed) for seed in seeds], "new": NEW}),
            file=self._process.stdin,
            flush=True,
        )
        heard = self._heard()
        assert heard["tokens"] == NEW * len(seeds), heard
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


def measured(sides: list[Side], clients: int, rounds: int) -> dict[str, Any]:
    seeds = iter(range(10_000, 10_000_000, clients))
    per_round: list[dict[str, float]] = []
    for number in range(rounds + 1):
        start = next(seeds)
        order = sides if number % 2 else sides[::-1]
        speeds = {side.name: side.tokens_s(range(start, start + clients)) for side in order}
        print(json.dumps({"clients": clients, "round": number, **speeds}), file=sys.stderr, flush=True)
        if number:  # the first warms up
            per_round.append(speeds)
    found: dict[str, Any] = {
        f"{side.name}, tokens/s": round(statistics.median(each[side.name] for each in per_round), 1) for side in sides
    }
    for ours in ("fused", "modules"):
        for peer in ("vllm", "transformers"):
            if {ours, peer} <= per_round[0].keys():
                ratios = sorted(each[ours] / each[peer] for each in per_round)
                found[f"{ours} / {peer}"] = [
                    round(each, 3) for each in (ratios[0], statistics.median(ratios), ratios[-1])
                ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/smollm2"))
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    options = parser.parse_args()
    folder = smollm2.build(options.folder).absolute()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the sides end with it
    sides: list[Side] = []
    try:
        for name in options.sides:
            sides.append(Side(name, folder, options.dtype))
        found = {f"{clients} clients": measured(sides, clients, options.rounds) for clients in options.clients}
    finally:
        for side in sides:
            side.close()
    print(json.dumps({"dtype": options.dtype, "ratios": "least, median, most", **found}, indent=1))


if __name__ == "__main__":
    main()
