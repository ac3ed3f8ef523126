"""Which of PyTorch's operators work on cuda:0 of a function: the operator database's forward samples, there and on
the CPU.

`--loopback` runs client and executor in one process, for development; else `--url` and `--function` name a node on
which `benchmarks/coverage_function.py` is deployed. A worker that dies or is silent counts as a crash or hang of the
operator it ran.
"""

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import Goal, arguments, report

ROOT = Path(__file__).parents[1]
WORKERS = 2
SILENCE_S = 150  # the function itself gives up on an operator after 60 s for each dtype
QUICK_SAMPLES = 3


class LoopbackWorker:
    """One worker process; replaced after a crash."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.coverage_loopback"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer; ConnectionError if the worker died, TimeoutError if it was silent."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        watchdog = threading.Timer(SILENCE_S, self.process.kill)
        watchdog.start()
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            silent = not watchdog.is_alive()
            watchdog.cancel()
        if not line:
            status = self.process.wait()
            if silent:
                raise TimeoutError(f"silent for {SILENCE_S} s")
            raise ConnectionError(f"the worker died with status {status}")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class NodeWorker:
    """A deployed function, over HTTP."""

    def __init__(self, url: str, function: str) -> None:
        self.url = f"{url.rstrip('/')}/functions/{function}/invoke"

    def ask(self, request: dict[str, Any]) -> Any:
        body = urllib.request.Request(self.url, json.dumps(request).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(body, timeout=SILENCE_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ConnectionError(f"HTTP {error.code}: {error.read().decode(errors='replace')[:500]}") from error

    def close(self) -> None:
        pass


class Pool:
    """Workers, one for each thread that asks."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self._local = threading.local()
        self._all: list[Any] = []

    def ask(self, request: dict[str, Any]) -> Any:
        worker = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = self._make()
            self._all.append(worker)
        try:
            return worker.ask(request)
        except (ConnectionError, TimeoutError):
            worker.close()
            self._local.worker = None
            raise

    def verdicts(self, name: str, samples: int | None) -> list[dict[str, Any]]:
        try:
            answer: list[dict[str, Any]] = self.ask({"names": [name], "samples": samples})
        except (ConnectionError, TimeoutError) as error:
            kind = "hang" if isinstance(error, TimeoutError) else "crash"
            return [{"name": name, "dtype": "?", "verdict": kind, "samples": 0, "text": str(error)}]
        return answer

    def close(self) -> None:
        for worker in self._all:
            worker.close()


def cause(text: str) -> str:
    """Why an operator does not work, from its error."""
    causes = {
        "refused: may not run on a GPU that is shared": "not an operation that a function may run",
        "sparse or other layouts": "only dense ones",
        "custom operator": "custom operator",
        "shape rule": "shape rule is wrong",
        "not implemented by the kernel": "not implemented for",
    }
    return next((name for name, words in causes.items() if words in text), "other")


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--loopback", action="store_true", help="client and executor in one process")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a running node")
    parser.add_argument("--function", default="coverage", help="the name under which coverage_function.py is deployed")
    parser.add_argument("--only", nargs="*", help="these operators")
    args = parser.parse_args()
    pool = Pool(LoopbackWorker if args.loopback else lambda: NodeWorker(args.url, args.function))
    with ThreadPoolExecutor(WORKERS) as threads:
        names = args.only or threads.submit(pool.ask, {"list": True}).result()
        samples = QUICK_SAMPLES if args.quick else None
        verdicts = [row for rows in threads.map(lambda name: pool.verdicts(name, samples), names) for row in rows]
    pool.close()
    by_name: dict[str, set[str]] = {}
    for row in verdicts:
        by_name.setdefault(row["name"], set()).add(row["verdict"])
    tried = {name: kinds - {"skip"} for name, kinds in by_name.items() if kinds != {"skip"}}
    agree = [name for name, kinds in tried.items() if kinds == {"agree"}]
    count = Counter(row["verdict"] for row in verdicts)
    failing = [row | {"cause": cause(row["text"])} for row in verdicts if row["verdict"] not in ("agree", "skip")]
    for row in failing:
        print(f"{row['name']} ({row['dtype']}): {row['verdict']}: {row['text'].splitlines()[0] if row['text'] else ''}")
    share = len(agree) / max(1, len(tried))
    goals = [
        Goal(name="operators that agree on all samples", goal=">= 0.90", measured=round(share, 4), met=share >= 0.9),
        *(
            Goal(name=what, goal="0", measured=count[kind], met=count[kind] == 0)
            for kind, what in (("wrong", "wrong answers"), ("crash", "crashes"), ("hang", "hangs"))
        ),
    ]
    extra = {
        "operators": len(tried),
        "agree": len(agree),
        "not_runnable_on_the_cpu_either": sorted(set(by_name) - set(tried)),
        "samples": sum(row["samples"] for row in verdicts),
        "failing": failing,
        "failing_by_cause": {
            name: sorted({row["name"] for row in failing if row["cause"] == name})
            for name in sorted({row["cause"] for row in failing})
        },
    }
    report(goals, args, extra)


if __name__ == "__main__":
    main()
