"""A real node's recordings: whatever has happened to it, `dormouse replay` says that the scheduler decides the same."""

import contextlib
import http.client
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import asdict

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.controller.recording import Recording
from dormouse.core.decisions.scheduling import events as ev
from dormouse.schemas.policy import EVICTIONS, ORDERS, PLACEMENTS, Policy

CONFIG = '[gpu]\ncount = 2\nmemory = "24MiB"\nlink = "400MB"\npoison = true\n[record]\npath = "events"\n'

MODEL = """
import torch

def load():
    torch.manual_seed({seed})
    return torch.nn.Linear(1536, 1536).to("cuda")

def handle(model, request):
    return model(torch.full((1, 1536), request, device="cuda")).sum().item()
"""

LATE = [name for name in PLACEMENTS if name != "bound"]  # which refuses what does not fit beside all others

FUNCTIONS = 6  # of 9 MiB, of which each GPU holds two: whoever asks for all of them must evict two


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG) as running:
        yield running


def expect_identical(path: Path, status: int = 0) -> str:
    """In a process of its own, whose sets of strings have another order."""
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "replay", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": "77"}
    )
    assert (done.returncode, done.stdout.endswith("\nidentical\n")) == (0, True), f"{done.stdout}{done.stderr}"
    return done.stdout


def ask_all(node: TestNode, expected: list[float], rounds: int) -> None:
    """Three clients, so that requests wait and models are evicted for one another."""
    wrong: list[object] = []

    def client(number: int) -> None:
        for k in range(rounds * FUNCTIONS):
            name = (k * (number + 1)) % FUNCTIONS
            answer = node.invoke(f"m{name}", 1.0)
            if answer.status != 200 or answer.body != expected[name]:
                wrong.append(answer)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_policy_is_changed_under_load(node: TestNode) -> None:
    """No answer is lost or wrong; it is replayed; it outlives the controller."""
    for k in range(FUNCTIONS):
        node.deployed(f"m{k}", MODEL.format(seed=k))
    expected = [node.result(f"m{k}", 1.0) for k in range(FUNCTIONS)]
    done, chosen = threading.Event(), []

    def choose() -> None:
        for number in itertools.count():
            order, placement, eviction = (names[number % len(names)] for names in (ORDERS, LATE, EVICTIONS))
            chosen.append(node.admin.policy({"order": order, "placement": placement, "eviction": eviction}))
            if done.wait(0.02) and len(chosen) >= len(ORDERS):
                return

    choosing = threading.Thread(target=choose)
    choosing.start()
    ask_all(node, expected, 3)
    done.set()
    choosing.join()
    last = node.admin.policy({"order": "edf", "placement": "completion", "passed_over_ms": 1234})
    assert (last["order"], last["passed_over_ms"], last["turn_ms"]) == ("edf", 1234, 20)

    record = node.state / "events"
    node.wait(lambda: policies(record)[-1:] == [msgspec.convert(last, Policy)], 60, "the last to be in the file")
    assert [asdict(policy) for policy in policies(record)] == [*chosen, last]
    expect_identical(record)

    pid = node.kill("controller")
    node.replaced("controller", pid)
    node.wait(lambda: node.http("GET", "/readyz").status == 200, 90, "the node to be ready again")
    assert node.admin.policy({}) == last
    assert [node.result(f"m{k}", 1.0) for k in range(FUNCTIONS)] == expected


def policies(record: Path) -> list[Policy]:
    return [entry.event.policy for entry in Recording(str(record)).events() if isinstance(entry.event, ev.PolicyChosen)]


def test_a_busy_node_that_loses_an_executor_replays_identically(node: TestNode) -> None:
    for k in range(FUNCTIONS):
        node.deployed(f"m{k}", MODEL.format(seed=k))
    expected = [node.result(f"m{k}", 1.0) for k in range(FUNCTIONS)]
    ask_all(node, expected, 3)
    epoch = node.status()["gpus"]["0"]["epoch"]
    asking = threading.Thread(target=_ask_while_dying, args=(node,))
    asking.start()
    node.kill("gpu0")
    asking.join()
    node.wait(lambda: node.status()["gpus"].get("0", {}).get("epoch", 0) > epoch, 60, "another executor")
    ask_all(node, expected, 2)
    assert sum(function["evictions"] for function in node.status()["functions"].values()) > FUNCTIONS
    everyone = node.descendants()
    assert node.process is not None
    node.process.terminate()
    node.process.wait(60)
    node.expect_nothing_left(everyone)
    record = node.state / "events"
    assert record.stat().st_mode & 0o777 == 0o600
    entries = list(Recording(str(record)).events())
    said = {type(action) for entry in entries for action in entry.actions}
    assert {ev.WakeOn, ev.FinishLease} <= said
    assert ev.ExecutorDown in {type(entry.event) for entry in entries}
    assert f"{len(entries):,} whole events" in expect_identical(record)
    node.start()  # the fixture stops it in order; its controller has begun another file
    assert (node.state / "events.1").stat().st_size > 0


def _ask_while_dying(node: TestNode) -> None:
    for k in range(2 * FUNCTIONS):
        with contextlib.suppress(OSError, http.client.HTTPException):
            node.invoke(f"m{k % FUNCTIONS}", 1.0)


def test_a_node_that_is_killed_leaves_what_can_be_replayed(node: TestNode) -> None:
    node.deployed("m0", MODEL.format(seed=0))
    answer = node.result("m0", 1.0)
    record = node.state / "events"
    node.wait(lambda: _asked(record) >= 1, 60, "the request to be in the file")
    node.kill_all()
    assert "cut off" not in expect_identical(record)
    node.start()
    assert node.result("m0", 1.0) == answer
    expect_identical(node.state / "events.1")


def _asked(record: Path) -> int:
    return sum(isinstance(entry.event, ev.LeaseOver) for entry in Recording(str(record)).events())


def test_a_path_where_no_file_can_be_made_is_said_at_the_start(tmp_path: Path) -> None:
    config = CONFIG.replace("events", f"{tmp_path}/none/events")
    said = r"record\.path: .*none/events: No such file or directory; write"
    with pytest.raises(AssertionError, match=said), running_node(config):
        pass
