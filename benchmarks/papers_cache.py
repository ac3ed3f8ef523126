"""What ``benchmarks.papers`` remembers of its runs, and how it makes many: several at a time, resumable."""

import json
import sys
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.papers_runs import Run, simulated


class Remembered:
    """Results by key, in a file of JSON lines. A line that an interruption has cut off is left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, dict[str, Any]] = {}
        read = path.read_bytes() if path.exists() else b""
        if read and not read.endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")
        for line in read.splitlines():
            try:
                one = json.loads(line)
            except ValueError:
                continue
            self.found[one["key"]] = one["result"]

    def __getitem__(self, run: Run) -> dict[str, Any]:
        return self.found[run.key]

    def __contains__(self, run: Run) -> bool:
        return run.key in self.found

    def add(self, run: Run, result: dict[str, Any]) -> None:
        self.found[run.key] = result
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": run.key, "result": result}) + "\n")


def make(runs: Iterable[Run], known: Remembered, jobs: int, until_s: float = float("inf")) -> bool:
    """Simulate what is not known yet, in the order of ``runs``, and say how far it is; none is begun after ``until_s``
    of the monotonic clock. Whether all are known then.
    """
    missing = list({run.key: run for run in runs if run not in known}.values())
    if not missing:
        return True
    began, done, cpu_s = time.monotonic(), 0, 0.0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = iter(missing)
        futures = {pool.submit(simulated, run): run for run in islice(waiting, jobs + 1)}
        while futures:
            for future in wait(futures, return_when=FIRST_COMPLETED).done:
                result = future.result()
                known.add(futures.pop(future), result)
                done, cpu_s = done + 1, cpu_s + result["cpu_s"]
                if time.monotonic() < until_s:
                    futures.update({pool.submit(simulated, more): more for more in islice(waiting, 1)})
            left_s = (time.monotonic() - began) / done * (len(missing) - done)
            text = f"\r{done} of {len(missing)} runs, {cpu_s:.0f} s of processor time, {left_s / 60:.0f} min left   "
            print(text, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return done == len(missing)
