"""The demonstration: more models than the GPUs hold, served over HTTP, every answer compared with native PyTorch's.

    python -m examples.demo [--device auto|host] [--out build/demo.json] [--seed N] [--clients N]

It starts a node on the GPUs that CUDA finds, at most two, else (and with ``--device host``) on two emulated ones;
deploys the functions, sends the requests, and stops the node again, also when it is interrupted. Then it computes the
native answers, with the same function files and nothing of Dormouse (reference.py), and compares. It exits 1 if an
answer was wrong or missing, or if the run did not show what it is for: most requests must find their model asleep.
"""

import argparse
import contextlib
import http.client
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dormouse.core.config import GpuSection, NodeConfig
from dormouse.core.gpus import find
from examples.workload import FUNCTIONS, Function, Request, differs, order, requests

GPUS: Final = 2  # at most
NBYTES: Final = 2_000_000_000
"""Of all GPUs that the node may use, 44 % of the models' bytes; half of it has room for the largest (CLIP, 605 MB) and
its activations.
"""

REFERENCES: Final = 2  # processes that compute native answers, each on one thread as each emulated GPU
READY_S: Final = 120.0  # for the node to start; importing PyTorch from a cold disk is most of it
AGAIN: Final = 2  # times that a request is sent after a 503
ANSWER_S: Final = 180.0  # after which a request counts as unanswered; a queue of slow ones is a matter of seconds
DOWN_S: Final = 60.0
CLI: Final = Path(sys.executable).with_name("dormouse")


class DemoFailed(Exception):
    """The demonstration cannot go on; the text says why."""


@dataclass
class Tally:
    """The outcome of one function's requests."""

    right: int = 0
    wrong: int = 0
    unanswered: int = 0
    latencies_ms: list[float] = field(default_factory=list)  # of answered requests
    wakes: int = 0
    gpus: int = 0
    nbytes: int = 0

    @property
    def requests(self) -> int:
        return self.right + self.wrong + self.unanswered


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed; 0 of none."""
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1) if ordered else 0.0


class Progress:
    """One line on a terminal, rewritten; elsewhere a line at each tenth."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done, self._shown = label, total, 0, -1
        self._lock = threading.Lock()
        self._started_s = time.monotonic()

    def step(self, note: str = "") -> None:
        with self._lock:
            self._done += 1
            share = self._done * 10 // self._total
            took = f"{time.monotonic() - self._started_s:5.1f} s"
            text = f"{self._label:<22} {self._done:>3}/{self._total}  {took}  {note}"
            if sys.stdout.isatty():
                print(f"\r{text:<78}", end="\n" if self._done == self._total else "", flush=True)
            elif share != self._shown:
                self._shown = share
                print(text, flush=True)


# --- native answers


def native_answers(device: str, work: dict[str, list[Request]], folder: Path) -> dict[str, list[Any]]:
    """Run every function file natively on "cpu" or "cuda", in ``REFERENCES`` processes. Raises DemoFailed."""
    progress = Progress("native PyTorch", sum(map(len, work.values())))
    answers: dict[str, list[Any]] = {}
    processes = []
    for number in range(REFERENCES):
        share = [f for index, f in enumerate(FUNCTIONS) if index % REFERENCES == number]
        jobs = [{"name": f.name, "path": str(f.path), "requests": work[f.name]} for f in share]
        (folder / f"work{number}.json").write_text(json.dumps(jobs))
        processes.append(_reference(device, folder, number))
    with ThreadPoolExecutor(REFERENCES) as pool:
        try:
            for lines in [pool.submit(_count, process, progress) for process in processes]:
                lines.result()
        finally:  # before the pool's end waits for threads that wait for these
            for process in processes:
                process.kill()
                process.wait()
    for number in range(REFERENCES):
        out = folder / f"answers{number}.json"
        if not out.exists():
            raise DemoFailed("native PyTorch failed:\n" + (folder / f"reference{number}.err").read_text()[-4000:])
        answers |= json.loads(out.read_text())
    return answers


def _reference(device: str, folder: Path, number: int) -> "subprocess.Popen[str]":
    paths = [str(folder / f"{name}{number}.json") for name in ("work", "answers")]
    with open(folder / f"reference{number}.err", "w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "examples.reference", device, *paths],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[1],
            # One thread, as each emulated GPU. Bytecode is written here whatever the setting, for the sandboxes cannot.
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""},
        )


def _count(process: "subprocess.Popen[str]", progress: Progress) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == ".":
            progress.step()
    process.wait()


# --- the node


@dataclass(frozen=True)
class Gpus:
    """On which the node runs; ``names`` of real ones, none if they are emulated."""

    names: tuple[str, ...]

    @classmethod
    def find(cls, device: str) -> "Gpus":
        """Real ones, if there are any and ``device`` is not "host"."""
        return cls(find(NodeConfig(gpu=GpuSection(device=device))).gpus[:GPUS])

    @property
    def count(self) -> int:
        return len(self.names) or GPUS

    @property
    def nbytes(self) -> int:
        return NBYTES // self.count

    def section(self) -> str:
        device = "cuda" if self.names else "host"
        return (
            f'[gpu]\ndevice = "{device}"\ncount = {self.count}\nmemory = "{self.nbytes}B"\nthreads = 1\npoison = true\n'
        )

    def __str__(self) -> str:
        kind = f"GPUs ({self.names[0]}), taking" if self.names else "emulated GPUs of"
        return f"{self.count} {kind} {self.nbytes / 1e9:.1f} GB"


@dataclass(frozen=True)
class Node:
    """A running node, as its users see it."""

    port: int
    run: Path
    state: Path

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)

    def status(self) -> dict[str, Any]:
        """The node's status. Raises DemoFailed."""
        known: dict[str, Any] = json.loads(_cli("--run", str(self.run), "status", "--json", timeout_s=ANSWER_S))
        return known


def invoke(connection: http.client.HTTPConnection, name: str, request: Request) -> tuple[int, Any]:
    """One request over an open connection: status and decoded JSON. Raises OSError, HTTPException or ValueError."""
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"/functions/{name}/invoke", json.dumps(request).encode(), headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read() or b"null")


@contextlib.contextmanager
def running_node(folder: Path, gpus: Gpus) -> Iterator[Node]:
    """Start a node with the command line, and stop it with the command line whatever happens. Raises DemoFailed."""
    file, run, state = folder / "node.toml", folder / "r", folder / "s"
    file.write_text(f'[node]\nname = "demo"\nport = 0\nrun = "{run}"\nstate = "{state}"\n{gpus.section()}')
    try:
        ready = json.loads(_cli("up", str(file), "--json", timeout_s=READY_S))
        yield Node(ready["port"], run, state)
    except DemoFailed:
        print_logs(state)
        raise
    finally:
        _cli("--run", str(run), "down", timeout_s=DOWN_S, check=False)


def print_logs(state: Path) -> None:
    """The ends of the node's logs, which are gone with its directory."""
    for log in sorted(state.glob("logs/*")):
        if lines := log.read_text(errors="replace").splitlines()[-15:]:
            print(f"--- {log.name}", *lines, sep="\n", file=sys.stderr)


def _cli(*arguments: str, timeout_s: float, check: bool = True) -> str:
    """Run the ``dormouse`` command. Raises DemoFailed with its output."""
    try:
        # In a session of its own, Ctrl-C reaches this process alone, which then stops the node in order.
        done = subprocess.run(
            [CLI, *arguments], capture_output=True, text=True, timeout=timeout_s, start_new_session=True
        )
    except subprocess.TimeoutExpired as error:
        raise DemoFailed(f"dormouse {' '.join(arguments)}: nothing within {timeout_s:.0f} s") from error
    if check and done.returncode:
        raise DemoFailed(f"dormouse {' '.join(arguments)} failed:\n{done.stderr or done.stdout}")
    return done.stdout


def deploy(node: Node, function: Function) -> None:
    """Returns when its load() has ended. Raises DemoFailed."""
    _cli(
        *("--run", str(node.run), "deploy", function.name, str(function.path)),
        *("--deadline", "2s", "--percentile", "98", "--timeout", "120s"),
        timeout_s=ANSWER_S,
    )


def deploy_all(node: Node, functions: tuple[Function, ...]) -> None:
    """Two at a time. Raises DemoFailed."""
    progress = Progress("deploying", len(functions))

    def one(function: Function) -> None:
        deploy(node, function)
        progress.step(function.name)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, functions))


def show_one(node: Node, function: Function, request: Request) -> None:
    """A question and its answer, as any client has it. Raises DemoFailed."""
    with contextlib.closing(node.connection()) as connection:
        code, answer = invoke(connection, function.name, request)
    if code != 200:
        raise DemoFailed(f"{function.name} did not answer: {code} {answer}")
    print(f"  POST /functions/{function.name}/invoke  {json.dumps(request)[:100]}")
    print(f"  -> {json.dumps(answer)[:110]}", flush=True)


# --- the requests


class Clients:
    """Threads that take requests in order and send them."""

    def __init__(self, node: Node, work: dict[str, list[Request]], seed: int) -> None:
        self.answers: dict[tuple[str, int], tuple[int, Any]] = {}  # (status, answer) by function and request; 0: none
        self.tallies = {f.name: Tally() for f in FUNCTIONS}
        self.sent_again = 0
        self._node, self._work = node, work
        self._waiting: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        sequence = order(FUNCTIONS, seed)
        self._progress = Progress("requests", len(sequence))
        for item in sequence:
            self._waiting.put(item)

    def run(self, clients: int) -> None:
        threads = [threading.Thread(target=self._client, daemon=True) for _ in range(clients)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            with contextlib.suppress(queue.Empty):  # interrupted: let the threads find nothing more to do
                while True:
                    self._waiting.get_nowait()

    def _client(self) -> None:
        connection = self._node.connection()
        with contextlib.closing(connection), contextlib.suppress(queue.Empty):
            while True:
                self._one(connection, *self._waiting.get_nowait())

    def _one(self, connection: http.client.HTTPConnection, name: str, index: int) -> None:
        started_s = time.monotonic()
        again = 0
        while True:
            try:
                code, answer = invoke(connection, name, self._work[name][index])
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()  # it opens again at the next request
                code, answer = 0, f"{type(error).__name__}: {error}"
            if code != 503 or again == AGAIN:  # 503 says that it may be sent again
                break
            again += 1
        took_ms = (time.monotonic() - started_s) * 1000
        with self._lock:
            self.answers[name, index] = code, answer
            self.sent_again += again
            if code == 200:
                self.tallies[name].latencies_ms.append(took_ms)
        self._progress.step(name)

    def compare(self, native: dict[str, list[Any]]) -> list[str]:
        """Count right and wrong answers; returns the errors in words."""
        tolerances = {f.name: f.tolerance for f in FUNCTIONS}
        problems = []
        for (name, index), (code, answer) in self.answers.items():
            tally = self.tallies[name]
            problem = differs(answer, native[name][index], tolerances[name]) if code == 200 else f"{code}: {answer}"
            tally.unanswered += code != 200
            tally.right += code == 200 and problem is None
            tally.wrong += code == 200 and problem is not None
            if problem is not None:
                problems.append(f"{name} #{index}: {problem}")
        return problems


def read_counters(tallies: dict[str, Tally], before: dict[str, Any], after: dict[str, Any]) -> None:
    """Fill in the controller's counters from while the requests ran."""
    for name, tally in tallies.items():
        old, new = before["functions"].get(name, {}), after["functions"].get(name, {})
        tally.wakes = new.get("wakes", 0) - old.get("wakes", 0)
        tally.nbytes = new.get("nbytes", 0)
        used, ended = old.get("gpus", {}), new.get("gpus", {})
        tally.gpus = sum(count > used.get(gpu, 0) for gpu, count in ended.items())


# --- the report


def summary(tallies: dict[str, Tally], gpus: Gpus, pool_nbytes: int) -> dict[str, Any]:
    """The content of ``build/demo.json``."""
    latencies = [value for tally in tallies.values() for value in tally.latencies_ms]
    return {
        "functions": len(tallies),
        "gpus": gpus.count,
        "emulated": not gpus.names,
        "requests": sum(t.requests for t in tallies.values()),
        "right": sum(t.right for t in tallies.values()),
        "wrong": sum(t.wrong for t in tallies.values()),
        "unanswered": sum(t.unanswered for t in tallies.values()),
        "wakes": sum(t.wakes for t in tallies.values()),
        "model_nbytes": sum(t.nbytes for t in tallies.values()),
        "pool_nbytes": pool_nbytes,
        "p50_ms": quantile(latencies, 0.5),
        "p99_ms": quantile(latencies, 0.99),
        "per_function": {
            name: {
                "requests": t.requests,
                "right": t.right,
                "wrong": t.wrong,
                "unanswered": t.unanswered,
                "wakes": t.wakes,
                "gpus": t.gpus,
                "nbytes": t.nbytes,
                "p50_ms": quantile(t.latencies_ms, 0.5),
                "p99_ms": quantile(t.latencies_ms, 0.99),
            }
            for name, t in tallies.items()
        },
    }


def print_table(report: dict[str, Any]) -> None:
    architectures = {f.name: f.architecture for f in FUNCTIONS}
    head = (
        f"{'function':<16} {'model':<24} {'MB':>5} {'requests':>8} {'right':>6} {'p50 ms':>7} {'p99 ms':>7} "
        f"{'wakes':>6} {'GPUs':>5}"
    )
    print(f"\n{head}\n{'-' * len(head)}")
    for name, row in report["per_function"].items():
        print(
            f"{name:<16} {architectures[name]:<24} {row['nbytes'] / 1e6:>5.0f} {row['requests']:>8} {row['right']:>6} "
            f"{row['p50_ms']:>7.0f} {row['p99_ms']:>7.0f} {row['wakes']:>6} {row['gpus']:>5}"
        )
    print("-" * len(head))


def verdict(report: dict[str, Any]) -> list[str]:
    """The reasons why the run is not a good one."""
    complaints = []
    if report["wrong"] or report["unanswered"]:
        complaints.append(f"{report['wrong']} answers were wrong and {report['unanswered']} requests were not answered")
    if 2 * report["pool_nbytes"] >= report["model_nbytes"]:
        complaints.append("the GPUs held half of the models or more, so the run shows little")
    if 2 * report["wakes"] <= report["requests"]:
        complaints.append("most requests found their model awake, so the run shows little")
    return complaints


def run(device: str, out: Path, seed: int, clients: int) -> int:
    started_s = time.monotonic()
    gpus = Gpus.find(device)
    folder = Path(tempfile.mkdtemp(prefix="dormouse-demo-"))
    folder.chmod(0o711)  # instances with a uid of their own pass through it to their directories
    try:
        work = requests(FUNCTIONS, seed)
        first = FUNCTIONS[0]
        print(f"starting a node with {gpus}", flush=True)
        with running_node(folder, gpus) as node:
            print(f"it is ready after {time.monotonic() - started_s:.1f} s at http://127.0.0.1:{node.port}", flush=True)
            deploy(node, first)
            show_one(node, first, work[first.name][0])
            print(f"it has served its first request after {time.monotonic() - started_s:.1f} s", flush=True)
            deploy_all(node, FUNCTIONS[1:])
            before = node.status()
            load = Clients(node, work, seed)
            load.run(clients)
            if any(code != 200 for code, _ in load.answers.values()):
                print_logs(node.state)
            after = node.status()
        print("the node is stopped; now the same by native PyTorch, to compare", flush=True)
        problems = load.compare(native_answers("cuda" if gpus.names else "cpu", work, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    read_counters(load.tallies, before, after)
    report = summary(load.tallies, gpus, sum(gpu["total_nbytes"] for gpu in after["gpus"].values()))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print_table(report)
    for problem in problems[:10]:
        print(f"  {problem[:400]}")
    complaints = verdict(report)
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    print(
        f"{report['right']} of {report['requests']} answers equal native PyTorch's; {report['functions']} functions, "
        f"{report['model_nbytes'] / 1e9:.1f} GB of models on {gpus.count} GPUs with "
        f"{report['pool_nbytes'] / 1e9:.1f} GB, {report['wakes']} wakes, p50 {report['p50_ms']:.0f} ms, "
        f"p99 {report['p99_ms']:.0f} ms, {load.sent_again} sent again after a 503, "
        f"{time.monotonic() - started_s:.0f} s in all"
    )
    return 1 if complaints else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    for again in (signal.SIGINT, signal.SIGTERM):  # once is enough: stopping is not to be interrupted
        signal.signal(again, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "host"), default="auto")
    parser.add_argument("--out", type=Path, default=Path("build/demo.json"))
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--clients", type=int, default=6)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        return run(options.device, options.out, options.seed, options.clients)
    except KeyboardInterrupt:
        print("\ninterrupted; everything was stopped", file=sys.stderr)
        return 130
    except DemoFailed as error:
        print(f"\n{error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
