"""Batches of requests on a real node whose scheduler is recorded: the core decides the same when it is told the same
again, and the simulator tells it the same as the node.
"""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.controller.recording import Recording
from dormouse.controller.simulator.devices import ModelSpec
from dormouse.controller.simulator.engine import Simulation
from dormouse.core.decisions.scheduling import events as ev
from dormouse.core.decisions.scheduling.topology import Topology
from dormouse.schemas.policy import Policy

CONFIG = '[gpu]\ncount = 1\nmemory = "64MiB"\n[record]\npath = "events"\n'

FUNCTION = """
import os, time
import torch

def load():
    return torch.ones(4).to("cuda")

def handle_batch(weights, requests):
    for each in requests:
        if isinstance(each, str):
            print("at", each, flush=True)
            while not os.path.exists(each):
                time.sleep(0.01)
    numbers = torch.tensor([0.0 if isinstance(each, str) else each for each in requests])
    return (numbers.to("cuda")[:, None] * weights).sum(1).tolist()
"""

Served = list[tuple[int, int, int]]
"""Of each batch which of its function's instances has it, counted as they came, its GPU, and how many are in it."""

HOUR_S = 3600.0
"""A deadline that no batch is made smaller for."""

Decided = list[tuple[int, int]]
"""Of each batch how many requests the core had heard of last, and how many it gave the lease to."""


def decided(heard: list[tuple[ev.Event, list[ev.Action]]], instances: set[str]) -> Decided:
    waiting: dict[int, int] = {}
    found: Decided = []
    for event, actions in heard:
        if isinstance(event, ev.Asked) and event.batch is not None and event.instance in instances:
            waiting[event.request] = len(event.batch.requests)
        elif isinstance(event, ev.BatchChanged) and event.request in waiting:
            waiting[event.request] += len(event.came) - len(event.left)
        for each in actions:
            if isinstance(each, ev.WakeOn) and each.request in waiting:
                found.append((waiting.pop(each.request), each.requests))
    return found


def events(path: Path) -> list[tuple[ev.Event, list[ev.Action]]]:
    return [(entry.event, list(entry.actions)) for entry in Recording(str(path)).events()]


def recorded(path: Path, function: str) -> Decided:
    heard = events(path)
    known = {event.instance for event, _ in heard if isinstance(event, ev.InstanceKnown) and event.function == function}
    return decided(heard, known)


def served(heard: list[tuple[ev.Event, list[ev.Action]]], function: str) -> Served:
    known = (event for event, _ in heard if isinstance(event, ev.InstanceKnown) and event.function == function)
    names = list(dict.fromkeys(event.instance for event in known))
    woken = [each for _, actions in heard for each in actions if isinstance(each, ev.WakeOn) and each.requests]
    return [(names.index(each.instance), each.lease.gpu, each.requests) for each in woken if each.instance in names]


def ended(path: Path) -> bool:
    """Whether all leases in the file are over."""
    actions = [action for entry in Recording(str(path)).events() for action in entry.actions]
    woken = {each.request for each in actions if isinstance(each, ev.WakeOn)}
    return woken == {each.request for each in actions if isinstance(each, ev.FinishLease)}


def simulated(more: int) -> Decided:
    """One request runs for a second, in which the others come."""
    spec = ModelSpec(name="m", nbytes=1 << 20, run_s=1.0, batch=8, per_request_s=0.1)
    return decided(told(spec, 1, HOUR_S, np.linspace(0.0, 0.5, more + 1)), {"f0"})


def told(
    spec: ModelSpec, gpus: int, deadline_s: float, times_s: npt.NDArray[np.float64]
) -> list[tuple[ev.Event, list[ev.Action]]]:
    """What a simulation tells its core, and what that answers, but for what it knows before."""
    simulation = Simulation(Policy(), Topology(host_bps=1e9), gpus, 64 << 20, [spec], [deadline_s], 0.98)
    heard: list[tuple[ev.Event, list[ev.Action]]] = [(ev.InstanceKnown("f0", "f0"), [])]
    handle = simulation.core.handle

    def watched(event: ev.Event, now_s: float) -> list[ev.Action]:
        actions = handle(event, now_s)
        heard.append((event, actions))
        return actions

    with patch.object(simulation.core, "handle", watched):
        simulation.run(times_s, np.zeros(len(times_s), dtype=np.int64))
    return heard


def running(node: TestNode, name: str = "batched") -> int:
    return int(node.status()["functions"][name]["running"])


def test_a_recorded_node_a_replay_and_the_simulator_decide_the_same() -> None:
    with running_node(CONFIG) as node:
        node.deployed("batched", FUNCTION, batch=8, deadline="1h", timeout="100s")
        node.deployed("patient", FUNCTION, batch=4, batch_wait="20ms")
        gate, record = node.shared / "gate", node.state / "events"
        with ThreadPoolExecutor(16) as pool:
            first = pool.submit(node.result, "batched", str(gate))
            node.wait(lambda: f"at {gate}" in node.log_of("batched"), 60, "the first to run")
            others = []
            for number in range(1, 12):
                others.append(pool.submit(node.result, "batched", number))
                node.wait(lambda: running(node) == len(others) + 1, 60, "it to come")
            gate.touch()
            assert first.result() == 0.0
            assert [each.result() for each in others] == [4.0 * number for number in range(1, 12)]
            answers = list(pool.map(lambda number: node.result("patient", number), range(64)))
            assert answers == [4.0 * number for number in range(64)]
        node.wait(
            lambda: sum(size for _, size in recorded(record, "patient")) == 64 and ended(record), 60, "all in the file"
        )
        assert recorded(record, "batched") == simulated(11) == [(1, 1), (11, 8), (3, 3)]
        expect_identical(record)
        expect_times_kept(node)


def expect_identical(record: Path) -> None:
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "replay", str(record)]
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout.endswith("\nidentical\n")) == (0, True), f"{done.stdout}{done.stderr}"


def batch_ms(node: TestNode) -> dict[str, dict[str, float]]:
    return {name: each["service"]["batch_ms"] for name, each in node.status()["functions"].items()}


def expect_times_kept(node: TestNode) -> None:
    """The next controller knows what batches took."""
    before = batch_ms(node)
    assert set(before["batched"]) >= {"3", "8"}, "the first may have waited for the copy of its model"
    assert node.process is not None
    node.process.terminate()
    node.process.wait(60)
    node.start()
    node.wait(lambda: node.http("GET", "/readyz").status == 200, 90, "the node to be ready again")
    assert batch_ms(node) == before


def gated(node: TestNode, pool: ThreadPoolExecutor, gate: Path) -> Future[Any]:
    """A request that runs until the gate is there."""
    asked = pool.submit(node.result, "several", str(gate))
    node.wait(lambda: f"at {gate}" in node.log_of("several"), 60, "it to run")
    return asked


def test_a_node_and_the_simulator_with_two_instances_of_a_function_decide_the_same() -> None:
    """One runs, three are beside it in its instance, and one has no room there: an instance comes for it."""
    with running_node(CONFIG.replace("count = 1", "count = 2")) as node, ThreadPoolExecutor(8) as pool:
        settings: dict[str, Any] = {"batch": 2, "stateless": True, "max_instances": 2}
        node.deployed("several", FUNCTION, deadline="1ms", timeout="100s", **settings)
        first = gated(node, pool, node.shared / "measured")  # a request takes some time
        (node.shared / "measured").touch()
        assert first.result() == 0.0
        second, others = gated(node, pool, node.shared / "gate"), []
        for number in range(1, 4):
            others.append(pool.submit(node.result, "several", number))
            node.wait(lambda: running(node, "several") == len(others) + 1, 60, "it to come")
        assert node.result("several", 4) == 16.0, "the other instance has it"
        (node.shared / "gate").touch()
        assert [second.result(), *(each.result() for each in others)] == [0.0, 4.0, 8.0, 12.0]
        record = node.state / "events"
        node.wait(lambda: len(served(events(record), "several")) == 5 and ended(record), 60, "all in the file")
        spec = ModelSpec(name="m", nbytes=1 << 20, run_s=1.0, batch=2, per_request_s=0.1, max_instances=2, load_s=0.1)
        simulated = told(spec, 2, 0.001, np.array([0.0, 5.0, 5.1, 5.2, 5.3, 5.4]))
        wanted = [(0, 0, 1), (0, 0, 1), (1, 1, 1), (0, 0, 2), (0, 0, 1)]
        assert served(events(record), "several") == served(simulated, "f0") == wanted
        expect_identical(record)
