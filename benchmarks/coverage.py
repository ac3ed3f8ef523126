"""Which of PyTorch's operators work on cuda:0 of a function: the operator database's forward samples, there and on
the CPU.

A real node is started for it, with one sandboxed function per emulated GPU; `--loopback` runs client and executor in
one process instead, for development. A worker that dies or is silent counts as a crash or hang of the operator it ran.
"""

import json
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report

FUNCTION = Path(__file__).with_name("coverage_function.py")
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
    """One of the deployed functions; its name goes back to the others' when the worker is closed."""

    def __init__(self, node: TestNode, names: "SimpleQueue[str]") -> None:
        self._node, self._names = node, names
        self._name = names.get()

    def ask(self, request: dict[str, Any]) -> Any:
        """The answer; ConnectionError if the instance died, TimeoutError if it was silent."""
        answer = self._node.invoke(self._name, request, timeout_s=SILENCE_S + 30)
        if answer.code == "timed_out":
            raise TimeoutError(answer.message)
        if answer.status != 200:
            raise ConnectionError(f"HTTP {answer.status}: {str(answer.body)[:500]}")
        return answer.body

    def close(self) -> None:
        self._names.put(self._name)


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
    parser.add_argument("--loopback", action="store_true", help="client and executor in one process, without a node")
    parser.add_argument("--only", nargs="*", help="these operators")
    args = parser.parse_args()
    with ExitStack() as stack:
        if args.loopback:
            pool = Pool(LoopbackWorker)
        else:
            node = stack.enter_context(running_node(f'[gpu]\ncount = {WORKERS}\nmemory = "2GiB"\npoison = true\n'))
            names: SimpleQueue[str] = SimpleQueue()
            for number in range(WORKERS):
                node.deployed(f"coverage{number}", FUNCTION.read_text(), timeout=f"{SILENCE_S}s")
                names.put(f"coverage{number}")
            pool = Pool(lambda: NodeWorker(node, names))
        with ThreadPoolExecutor(WORKERS) as threads:
            operators = args.only or threads.submit(pool.ask, {"list": True}).result()
            samples = QUICK_SAMPLES if args.quick else None
            verdicts = [
                row for rows in threads.map(lambda name: pool.verdicts(name, samples), operators) for row in rows
            ]
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
