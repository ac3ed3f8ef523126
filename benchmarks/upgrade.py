"""What requests meet while `dormouse up --replace` puts a new node in the place of the one that serves them.

A real node with one emulated GPU and three functions. Fifty requests a second for two of them arrive by the clock,
half of them on connections that are kept open, the others on new ones, and beside them one stream after another of the
third is read: it keeps its instance busy, so of one that has requests too they would wait for it, upgrade or not. A
request's time is counted from when it was to be sent. Each answer is compared with the right one.
"""

import argparse
import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.nodes.testnode import TestNode, running_node
from benchmarks.report import Goal, arguments, report

RATE_S: Final = 50.0
LANES: Final = 20  # requests at a time, at most
LONGEST_GOAL_S: Final = 5.0
CALM_S: Final = 5.0  # before and after
STEPS: Final = 20
STEP_S: Final = 0.05

CONFIG: Final = '[gpu]\ncount = 1\nmemory = "256MiB"\nthreads = 1\n'

FUNCTION: Final = """
import time
import torch

def load():
    torch.manual_seed(SEED)
    return torch.randint(0, 100, (NUMBERS,)).to("cuda")

def parts(weights, request):
    for step in range(request["steps"]):
        time.sleep(request["step_s"])
        yield {"step": step, "sum": (weights.sum() + step).item()}

def handle(weights, request):
    if "steps" in request:
        return parts(weights, request)
    return {"sum": (weights.sum() + request["x"]).item()}
"""


def source(seed: int, numbers: int) -> str:
    return FUNCTION.replace("SEED", str(seed)).replace("NUMBERS", str(numbers))


@dataclass
class Load:
    """What was sent, and what came of it."""

    node: TestNode
    sums: dict[str, int]  # by function: what it answers to 0
    streamed: tuple[str, int]  # the same of the one that is asked for streams
    took_s: list[float] = field(default_factory=list)
    streams: int = 0
    failed: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def lane(self, number: int, lanes: int, rate_s: float) -> None:
        """Every so manieth request, by the clock; one that is late is sent at once."""
        name, kept = list(self.sums)[number % len(self.sums)], number % 4 < 2
        connection, due_s, x = self.node.connect(120), time.monotonic() + number / rate_s, number
        while not self.over.wait(max(0.0, due_s - time.monotonic())):
            try:
                connection.request("POST", f"/functions/{name}/invoke", json.dumps({"x": x}), _HEADERS)
                answer = connection.getresponse()
                body = answer.read()
                if (answer.status, body) != (200, b'{"sum":%d}' % (self.sums[name] + x)):
                    self.failed.append(f"{name} {x}: {answer.status} {body[:300]!r}")
            except (OSError, http.client.HTTPException) as error:
                self.failed.append(f"{name} {x} on a {'kept' if kept else 'new'} connection: {error!r}")
                connection.close()
            self.took_s.append(time.monotonic() - due_s)
            if not kept:
                connection.close()
            due_s, x = due_s + lanes / rate_s, x + lanes
        connection.close()

    def stream(self) -> None:
        """One after the other."""
        name, zero = self.streamed
        right = [{"step": step, "sum": zero + step} for step in range(STEPS)]
        while not self.over.is_set():
            connection = self.node.connect(120)
            try:
                asked = json.dumps({"steps": STEPS, "step_s": STEP_S})
                connection.request("POST", f"/functions/{name}/invoke", asked, _HEADERS)
                answer = connection.getresponse()
                text = answer.read().decode()
                parts = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line[:6] == "data: "]
                if (answer.status, parts) != (200, right):
                    self.failed.append(f"stream {self.streams}: {answer.status} {text[-300:]!r}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.failed.append(f"stream {self.streams}: {error!r}")
            connection.close()
            self.streams += 1


_HEADERS: Final = {"Content-Type": "application/json"}


@contextmanager
def loaded(
    node: TestNode,
    sums: dict[str, int],
    streamed: tuple[str, int],
    rate_s: float = RATE_S,
    lanes: int = LANES,
) -> Iterator[Load]:
    """While it is open, requests are sent; what came of all of them is known when it is closed."""
    load = Load(node, sums, streamed)
    threads = [threading.Thread(target=load.lane, args=(number, lanes, rate_s)) for number in range(lanes)]
    threads.append(threading.Thread(target=load.stream))
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.over.set()
        for thread in threads:
            thread.join()


def main(args: argparse.Namespace) -> None:
    results: list[dict[str, Any]] = []
    with running_node(CONFIG) as node:
        sums = {}
        for seed, name in enumerate(("f", "g", "s")):
            node.deployed(name, source(seed, 1 << 20))
            sums[name] = node.result(name, {"x": 0})["sum"]
        streamed = ("s", sums.pop("s"))
        for number in range(1 if args.quick else 3):
            with loaded(node, sums, streamed) as load:
                time.sleep(CALM_S)
                before = len(load.took_s)
                begun_s = time.monotonic()
                node.replace()
                replaced_s = time.monotonic() - begun_s
                node.wait(lambda: node.http("GET", "/readyz").status == 200, 120, "functions to be loaded")
                time.sleep(CALM_S)
            found = {
                "requests": len(load.took_s),
                "streams": load.streams,
                "failed": load.failed,
                "replaced_s": replaced_s,
                "before_p50_ms": statistics.median(load.took_s[:before]) * 1000,
                "before_longest_s": max(load.took_s[:before]),
                "longest_s": max(load.took_s),
            }
            print(f"upgrade {number}: {found}", flush=True)
            results.append(found)
    failed = sum(len(found["failed"]) for found in results)
    longest_s = max(found["longest_s"] for found in results)
    goals = [
        Goal(name="upgrade under load: failed requests and streams", goal="0", measured=failed, met=failed == 0),
        Goal(
            name="upgrade under load: longest request, s",
            goal=f"<= {LONGEST_GOAL_S:g}",
            measured=longest_s,
            met=longest_s <= LONGEST_GOAL_S,
        ),
    ]
    report(goals, args, {"upgrades": results})


if __name__ == "__main__":
    main(arguments(__doc__.splitlines()[0] if __doc__ else "").parse_args())
