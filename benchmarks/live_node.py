"""The real half of benchmarks/live.py: 64 functions of four shapes, open-loop clients, and what a recording says
of the leases.
"""

import contextlib
import http.client
import json
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import models
from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.controller.recording import Recording
from dormouse.core.decisions.scheduling import events as ev

FUNCTIONS: Final = 64
LINK_BPS: Final = 0.7e9
CLIENTS: Final = 48
"""Connections; the load has not that many requests open, or the last of them would wait for a connection."""

CLOCK_S: Final = 0.002
"""The controller's loop has a clock of milliseconds."""

DEPLOYS: Final = 4
"""At the same time."""

REQUESTS: Final = 4
"""Different inputs of each function."""


def shape(function: int) -> str:
    return models.SHAPES[function % len(models.SHAPES)]


def native() -> list[list[list[float]]]:
    """PyTorch's own answers, by function and input."""
    return models.native([shape(function) for function in range(FUNCTIONS)], REQUESTS)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One as its client saw it; times of the monotonic clock. ``answered_s`` is inf if there was no right answer."""

    function: int
    arrived_s: float
    answered_s: float


@dataclass(frozen=True, kw_only=True)
class Lease:
    """One as the controller saw it."""

    function: int
    asked_s: float
    granted_s: float
    over_s: float
    copied_nbytes: int
    wake_s: float


class Load:
    """Asks at given times, whatever has been answered by then. Every answer is compared with PyTorch's."""

    def __init__(self, node: TestNode, expected: list[list[list[float]]]) -> None:
        self._port = node.port
        self._expected = expected
        self._todo: queue.SimpleQueue[tuple[int, int, float] | None] = queue.SimpleQueue()
        self._done: list[Request] = []
        self.wrong: list[str] = []

    def ask(self, times_s: npt.NDArray[np.float64], functions: npt.NDArray[np.int64]) -> list[Request]:
        clients = [threading.Thread(target=self._client) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        began_s = time.monotonic() + 0.1
        for number, (at_s, function) in enumerate(zip(times_s.tolist(), functions.tolist(), strict=True)):
            due_s = began_s + at_s
            time.sleep(max(0.0, due_s - time.monotonic()))
            self._todo.put((function, number % REQUESTS, due_s))
        for _ in clients:
            self._todo.put(None)
        for client in clients:
            client.join()
        done, self._done = self._done, []
        return sorted(done, key=lambda request: request.arrived_s)

    def one(self, function: int) -> Request:
        """Ask, and wait for the answer."""
        (request,) = self.ask(np.zeros(1), np.array([function]))
        return request

    def _client(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while (todo := self._todo.get()) is not None:
            function, number, due_s = todo
            answered_s = float("inf")
            with contextlib.suppress(OSError, http.client.HTTPException):
                path, kind = f"/functions/f{function}/invoke", {"Content-Type": "application/json"}
                connection.request("POST", path, str(number), kind)
                response = connection.getresponse()
                body = response.read()
                if response.status == 200 and self._right(function, number, json.loads(body)):
                    answered_s = time.monotonic()
                else:
                    self.wrong.append(f"f{function}: {response.status} {body[:300]!r}")
            self._done.append(Request(function=function, arrived_s=due_s, answered_s=answered_s))
        connection.close()

    def _right(self, function: int, number: int, answer: list[float]) -> bool:
        return torch.allclose(torch.tensor(answer), torch.tensor(self._expected[function][number]), atol=1e-4)


@contextlib.contextmanager
def node(record: Path, gpu_mib: int, deadlines_s: list[float], percentile: float) -> Iterator[TestNode]:
    """A node with all functions, which records."""
    config = f"""
        [gpu]
        count = 2
        memory = "{gpu_mib}MiB"
        link = "{LINK_BPS / 1e6:.0f}MB"
        threads = 1
        poison = true
        [limits]
        disk = "0"
        [record]
        path = "{record}"
    """
    with running_node(config) as running:

        def deploy(function: int) -> None:
            source, deadline = models.function(shape(function), function), f"{deadlines_s[function] * 1000:.0f}ms"
            running.deployed(f"f{function}", source, deadline=deadline, percentile=percentile)

        with ThreadPoolExecutor(DEPLOYS) as pool:
            list(pool.map(deploy, range(FUNCTIONS)))
        yield running
        running.wait(lambda: _idle(running), 10, "the last lease to be over, and recorded")


def _idle(node: TestNode) -> bool:
    return all(gpu["busy_with"] is None for gpu in node.status()["gpus"].values())


def leases(recording: Recording) -> list[Lease]:
    """All that ended, in order of their ends, of functions f0, f1, ..."""
    functions: dict[str, int] = {}  # by instance
    asked: dict[int, float] = {}  # by request
    granted: dict[tuple[int, int], tuple[ev.WakeOn, float]] = {}  # by GPU and serial
    woken: dict[tuple[int, int], float] = {}
    found: list[Lease] = []
    for entry in recording.events():
        match entry.event:
            case ev.InstanceKnown(instance=instance, function=function) if function.startswith("f"):
                functions[instance] = int(function[1:])
            case ev.Asked(request=request):
                asked[request] = entry.now_s
            case ev.Woken(gpu=gpu, serial=serial, wake_us=wake_us):
                woken[gpu, serial] = wake_us / 1e6
            case ev.LeaseOver(gpu=gpu, done=done):
                wake, granted_s = granted.pop((gpu, done.serial))
                found.append(
                    Lease(
                        function=functions[wake.instance],
                        asked_s=asked.pop(wake.request),
                        granted_s=granted_s,
                        over_s=entry.now_s,
                        copied_nbytes=done.copied_nbytes,
                        wake_s=woken.pop((gpu, done.serial), 0.0),
                    )
                )
        for action in entry.actions:
            if isinstance(action, ev.WakeOn):
                granted[action.lease.gpu, action.lease.serial] = action, entry.now_s
    return found


def sizes(recording: Recording) -> tuple[list[int], int]:
    """Bytes of each function's model, and of what models can have of a GPU: activations have their part of it."""
    functions: dict[str, int] = {}
    nbytes = [0] * FUNCTIONS
    capacity, room = 0, 0
    for entry in recording.events():
        match entry.event:
            case ev.InstanceKnown(instance=instance, function=function) if function.startswith("f"):
                functions[instance] = int(function[1:])
            case ev.ModelSized(instance=instance, nbytes=size) if instance in functions:
                nbytes[functions[instance]] = size
            case ev.ExecutorUp(stats=stats):
                capacity = stats.free_nbytes + stats.weights_nbytes + stats.kv_nbytes + stats.lost_nbytes
        room = max([room, *(action.activation_nbytes for action in entry.actions if isinstance(action, ev.WakeOn))])
    return nbytes, capacity - room


def matched(requests: list[Request], held: list[Lease]) -> list[tuple[Request, Lease]]:
    """Each request with its lease: a function's are served in order. ``held`` may begin with leases of requests before
    these.
    """
    by_function: dict[int, list[Lease]] = defaultdict(list)
    for lease in held:
        by_function[lease.function].append(lease)
    pairs: list[tuple[Request, Lease]] = []
    for function, theirs in by_function.items():
        mine = [request for request in requests if request.function == function]
        pairs += zip(mine, theirs[len(theirs) - len(mine) :], strict=True)
    assert all(request.arrived_s < lease.over_s + CLOCK_S for request, lease in pairs), "a request has another's lease"
    return sorted(pairs, key=lambda pair: pair[0].arrived_s)
