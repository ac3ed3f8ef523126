"""The front door beside others: requests per second, latency, and whose processor time a request takes.

    scripts/front-peers                       installs LitServe and Ray Serve, each in an environment of its own
    python -m benchmarks.front [--sides dormouse,bare,litserve,ray] [--rounds 3] [--seconds 8] [--parts rate,cpu,busy]

``rate``: sixteen functions that return a constant, by wrk with 32 connections and with one; the sides take turns.
``cpu``: processor milliseconds of each of the node's processes per request, of a constant and of one ``relu`` on a
resident tensor. ``busy``: two functions that loop and six that sleep for 12 s on two GPUs, and what a ninth's requests
take beside them; ``loops``: eight that loop. Every side's answers are compared with what they have to be before
anything is timed.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.nodes.ports import free_port
from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report

ROOT: Final = Path(__file__).resolve().parents[1]
PEERS: Final = ROOT / "build" / "front"
NAMES: Final = [f"f{number}" for number in range(16)]
BODY: Final = {"text": "a request of the usual size", "numbers": [1, 2, 3]}
START_S: Final = 180.0
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")

CONSTANT: Final = """
def load():
    return None

def handle(model, request):
    return {"length": len(request["text"])}
"""
RELU: Final = """
import torch

def load():
    return torch.full((1024,), -1.0, device="cuda")

def handle(model, request):
    return {"length": len(request["text"]), "zero": model.relu().sum().item()}
"""
BUSY: Final = """
import time
import torch

def load():
    return torch.ones(1 << 18, device="cuda")

def handle(model, request):
    end_s = time.monotonic() + request["seconds"]
    {held}
    return float(model.sum().item())
"""
LOOPS: Final = """while time.monotonic() < end_s:
        pass"""
SLEEPS: Final = "time.sleep(request['seconds'])"
QUICK: Final = """
import torch

def load():
    return torch.ones(1 << 18, device="cuda")

def handle(model, request):
    return float(model.sum().item())
"""

WRK: Final = """
wrk.method = "POST"
wrk.body = [[{body}]]
wrk.headers["Content-Type"] = "application/json"
local number = 0
request = function()
  number = (number + 1) % {count}
  return wrk.format(nil, "/functions/f" .. number .. "/invoke")
end
"""


@dataclass(frozen=True)
class Load:
    """What wrk saw."""

    rate: float  # per second
    p50_ms: float
    p99_ms: float


def load(port: int, connections: int, spend_s: float, count: int = len(NAMES)) -> Load:
    """Raises RuntimeError if any answer was no success."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(WRK.format(body=json.dumps(BODY), count=count))
        script.flush()
        command = ["wrk", "-t1", f"-c{connections}", f"-d{spend_s:g}s", "--latency", "-s", script.name]
        done = subprocess.run([*command, f"http://127.0.0.1:{port}"], capture_output=True, text=True)
    if "Non-2xx" in done.stdout or "Socket errors" in done.stdout or done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    rate = re.search(r"Requests/sec:\s+([0-9.]+)", done.stdout)
    assert rate is not None, done.stdout
    return Load(float(rate[1]), _percentile_ms(done.stdout, "50%"), _percentile_ms(done.stdout, "99%"))


def _percentile_ms(text: str, name: str) -> float:
    found = re.search(rf"{name}\s+([0-9.]+)(us|ms|s)\s", text)
    assert found is not None, text
    return float(found[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[found[2]]


def answer(port: int, name: str) -> Any:
    url = f"http://127.0.0.1:{port}/functions/{name}/invoke"
    asked = urllib.request.Request(url, json.dumps(BODY).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=30) as response:
        return json.loads(response.read())


def expect_right(port: int) -> None:
    for name in NAMES:
        found = answer(port, name)
        assert found == {"length": len(BODY["text"])}, (name, found)


# --- sides


@contextmanager
def dormouse() -> Iterator[int]:
    with running_node('[gpu]\ncount = 2\nmemory = "256MiB"\n') as node:
        for name in NAMES:
            node.deployed(name, CONSTANT)
        yield node.port


@contextmanager
def peer(name: str) -> Iterator[int]:
    """A server of benchmarks/front_peers in its own environment, or ours."""
    python = PEERS / name / "bin" / "python"
    port = free_port()
    command = [str(python if name != "bare" else sys.executable), str(ROOT / "benchmarks/front_peers" / f"{name}.py")]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, str(port)], stdout=log, stderr=log, start_new_session=True)
        try:
            end_s = time.monotonic() + START_S
            while True:
                try:
                    answer(port, NAMES[-1])
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > end_s:
                        log.seek(0)
                        raise RuntimeError(f"{name} does not answer: {log.read()[-2000:].decode()}") from None
                    time.sleep(0.2)
            yield port
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def rates(sides: list[str], rounds: int, spend_s: float) -> dict[str, Any]:
    """The sides one after the other, so many times; each is started anew."""
    found: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for _ in range(rounds):
        for side in sides:
            with dormouse() if side == "dormouse" else peer(side) as port:
                expect_right(port)
                load(port, 8, 1.0)
                one = load(port, 1, spend_s)
                many = load(port, 32, spend_s)
            for name, value in (
                ("requests/s", many.rate),
                ("p50 ms of 32", many.p50_ms),
                ("p99 ms of 32", many.p99_ms),
                ("p50 ms of one", one.p50_ms),
            ):
                found[side].setdefault(name, []).append(value)
            print(side, f"{many.rate:.0f} requests/s, p50 of one client {one.p50_ms:.2f} ms", flush=True)
    return {
        side: {name: {"median": statistics.median(values), "all": values} for name, values in each.items()}
        for side, each in found.items()
    }


# --- processor time


def spent_s(pids: list[int]) -> float:
    """User and system time, of threads that have ended too."""
    total = 0.0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) * TICK_S
    return total


def processors(spend_s: float) -> dict[str, Any]:
    """Milliseconds of a request by role; "instances" are all that is none of the node's own processes."""
    result: dict[str, Any] = {}
    for label, source, expected in (("constant", CONSTANT, {}), ("relu", RELU, {"zero": 0.0})):
        with running_node('[gpu]\ncount = 2\nmemory = "256MiB"\n') as node:
            for name in NAMES:
                node.deployed(name, source)
            for name in NAMES:
                assert answer(node.port, name) == {"length": len(BODY["text"]), **expected}
            load(node.port, 32, 1.0)
            groups = _groups(node)
            before = {group: spent_s(pids) for group, pids in groups.items()}
            seen = load(node.port, 32, spend_s)
            count = seen.rate * spend_s
            result[label] = {group: (spent_s(pids) - before[group]) / count * 1e3 for group, pids in groups.items()}
            result[label]["all"] = sum(result[label].values())
            result[label]["requests/s"] = seen.rate
    return result


def _groups(node: TestNode) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    own = node.pids()
    for role, pid in own.items():
        groups.setdefault("executors" if role.startswith("gpu") else role, []).append(pid)
    groups["instances"] = [pid for pid in node.descendants() if pid not in own.values()]
    return groups


# --- others that hold GPUs without using them


def busy(held_s: float, loops: int) -> dict[str, Any]:
    """Milliseconds of a ninth function's requests, alone and beside eight that hold GPUs, so many of them looping."""
    with running_node('[gpu]\ncount = 2\nmemory = "256MiB"\n') as node:
        holders = [(f"f{n}", LOOPS if n < loops else SLEEPS) for n in range(8)]
        for name, held in holders:
            node.deployed(name, BUSY.format(held=held))
        node.deployed("ninth", QUICK)
        alone = asked_for(node, 5.0, None)
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda name=name: answers.append(node.result(name, {"seconds": held_s})))
            for name, _ in holders
        ]
        for thread in threads:
            thread.start()
        beside = asked_for(node, held_s, threads)
        for thread in threads:
            thread.join()
        assert answers == [float(1 << 18)] * len(holders)
    return {
        "alone": summary(alone),
        f"beside {loops} that loop and {8 - loops} that sleep for {held_s:g} s": summary(beside),
    }


def asked_for(node: TestNode, spend_s: float, until: list[threading.Thread] | None) -> list[float]:
    """Milliseconds of requests one after the other, for that long or until those threads are done."""
    times: list[float] = []
    end_s = time.monotonic() + spend_s
    while any(thread.is_alive() for thread in until) if until is not None else time.monotonic() < end_s:
        began = time.perf_counter()
        assert node.result("ninth", {}) == float(1 << 18)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def summary(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "requests": len(ordered),
        "p50 ms": statistics.median(ordered),
        "p99 ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "most ms": ordered[-1],
    }


# --- all


def goals(results: dict[str, Any]) -> list[Goal]:
    found = []
    rate = results.get("rate", {})
    if "dormouse" in rate:
        ours = rate["dormouse"]["requests/s"]
        found.append(
            _goal(
                "requests/s, constant, 16 functions, 32 connections", ">= 2000", ours["median"], ours["median"] >= 2000
            )
        )
        if "bare" in rate:
            over = rate["dormouse"]["p50 ms of one"]["median"] - rate["bare"]["p50 ms of one"]["median"]
            found.append(_goal("p50 of one client over bare uvicorn, ms", "<= 0.7", over, over <= 0.7))
        if "litserve" in rate:
            theirs = rate["litserve"]["requests/s"]["all"]
            least = min(mine / other for mine, other in zip(ours["all"], theirs, strict=True))
            found.append(_goal("requests/s, Dormouse / LitServe, least of the rounds", "> 1", least, least > 1))
    for label, executors_ms, all_ms in (("constant", 0.15, 0.8), ("relu", 0.3, 1.0)):
        if (each := results.get("cpu", {}).get(label)) is not None:
            for name, most in (("executors", executors_ms), ("all", all_ms)):
                text = f"processor ms of a request, {label}, {name}"
                found.append(_goal(text, f"<= {most:g}", each[name], each[name] <= most))
    if "busy" in results:
        alone, beside = results["busy"].values()
        over = beside["p99 ms"] - alone["p99 ms"]
        found.append(
            _goal("p99 of a ninth function beside eight that hold GPUs, over alone, ms", "<= 60", over, over <= 60)
        )
    return found


def _goal(name: str, wanted: str, measured: float, met: bool) -> Goal:
    return Goal(name=name, goal=wanted, measured=measured, met=met)


def main(args: argparse.Namespace) -> None:
    if shutil.which("wrk") is None:
        print("wrk is not installed; it is in Debian's packages: apt install wrk", file=sys.stderr)
        sys.exit(1)
    spend_s = 2.0 if args.quick else args.seconds
    results: dict[str, Any] = {}
    for part in args.parts.split(","):
        match part:
            case "rate":
                results[part] = rates(args.sides.split(","), 1 if args.quick else args.rounds, spend_s)
            case "cpu":
                results[part] = processors(spend_s)
            case "busy":
                results[part] = busy(3.0 if args.quick else 12.0, loops=2)
            case "loops":
                results[part] = busy(3.0 if args.quick else 12.0, loops=8)
            case _:
                sys.exit(f"there is no part {part!r}")
        print(json.dumps({part: results[part]}, indent=1), flush=True)
    report(goals(results), args, {"results": results})


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--sides", default="dormouse,bare", help="of dormouse, bare, litserve, ray")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--parts", default="rate,cpu,busy,loops")
    main(parser.parse_args())
