"""Processes of the node die: their requests get the right error, all else goes on, and nothing is left behind."""

import itertools
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_start import TITLE

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core import procfs

MODEL = """
    import os
    import torch

    def load():
        torch.manual_seed({seed})
        return torch.nn.Linear(256, 256).to("cuda")

    def handle(model, request):
        x = torch.full((1, 256), float(request["x"]), device="cuda")
        y = model(x)
        if "until" in request:  # this file is there
            y.sum().item()
            print("waits for", request["until"], flush=True)
            while not os.path.exists(request["until"]):
                y.sum().item()
        return y.sum().item()
"""


CONFIG = """
[gpu]
count = 2
memory = "256MiB"
poison = true
[limits]
compute_ms = 600000
[schedule]
turn_ms = 60000 # who computes keeps its turn, however busy the machine is
"""


@pytest.fixture(scope="module")
def kept() -> Iterator[TestNode]:
    with running_node(CONFIG) as running:
        yield running


@pytest.fixture
def node(kept: TestNode) -> TestNode:
    """The module's, when what the test before has killed is there again."""
    kept.wait(lambda: len(kept.status()["gpus"]) == 2, 60, "two GPUs")
    return kept


def deploy_models(node: TestNode, count: int, **settings: Any) -> list[float]:
    """Functions m0, m1, …; returns what each must answer to {"x": 1}, and does."""
    for k in range(count):
        node.deployed(f"m{k}", MODEL.format(seed=k), **settings)
    right = [native(k) for k in range(count)]
    assert [node.result(f"m{k}", {"x": 1}) for k in range(count)] == pytest.approx(right, rel=1e-4)
    return right


def native(seed: int) -> float:
    torch.manual_seed(seed)
    with torch.no_grad():
        return float(torch.nn.Linear(256, 256)(torch.ones(1, 256)).sum())


class Running:
    """A request that holds its lease until it is told to end."""

    _numbers = itertools.count()

    def __init__(self, node: TestNode, name: str) -> None:
        self._go = node.shared / f"go{next(self._numbers)}"
        self._answers: list[HttpAnswer] = []
        request = {"x": 1, "until": str(self._go)}
        self._thread = threading.Thread(target=lambda: self._answers.append(node.invoke(name, request)))
        self._thread.start()
        node.wait(lambda: f"waits for {self._go}\n" in node.log_of(name), 60, f"{name} to hold its lease")
        self.role = gpu_of(node, name)

    def end(self) -> None:
        """Let it end by itself."""
        self._go.touch()

    def answer(self) -> HttpAnswer:
        self._thread.join()
        return self._answers[0]


def gpu_of(node: TestNode, function: str) -> str:
    """Role of the executor that this function's instance now holds a lease on."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [f"gpu{number}" for number, gpu in node.status()["gpus"].items() if gpu["busy_with"] == function]
        return len(found) == 1  # the end of the lease before may not have been heard of yet

    node.wait(look, 60, f"{function} to hold a lease")
    return found[0]


def test_an_executor_killed_mid_request_fails_it_retryably_and_comes_back(node: TestNode) -> None:
    right = deploy_models(node, 3)
    running = Running(node, "m0")
    role = running.role
    pid = node.kill(role)
    running.end()
    answer = running.answer()
    assert (answer.status, answer.code) == (503, "executor_lost"), answer
    assert answer.headers["retry-after"]
    assert [node.result(f"m{k}", {"x": 1}) for k in range(3)] == pytest.approx(right, rel=1e-4)
    node.replaced(role, pid)
    node.wait(lambda: len(node.status()["gpus"]) == 2, 60, "two GPUs")
    assert [node.result(f"m{k}", {"x": 1}) for k in range(3)] == pytest.approx(right, rel=1e-4)


def test_an_idempotent_function_is_run_once_more(node: TestNode) -> None:
    (right,) = deploy_models(node, 1, idempotent=True)
    running = Running(node, "m0")
    node.kill(running.role)
    running.end()
    answer = running.answer()
    assert answer.status == 200, answer
    assert answer.body == pytest.approx(right, rel=1e-4)


def test_requests_that_wait_for_a_dead_executor_are_scheduled_again(node: TestNode) -> None:
    right = deploy_models(node, 4)
    holders = [Running(node, f"m{k}") for k in range(2)]
    waiting: list[HttpAnswer] = []
    threads = [threading.Thread(target=lambda k=k: waiting.append(node.invoke(f"m{k}", {"x": 1}))) for k in (2, 3)]
    for thread in threads:
        thread.start()
    node.wait(lambda: node.status()["waiting"] == 2, 60, "two requests to wait for a GPU")
    node.kill(holders[0].role)
    for thread in threads:
        thread.join()  # by the dead one's successor: the other GPU is still held
    for holder in holders:
        holder.end()
    assert [holder.answer().status for holder in holders] == [503, 200], node.logs()
    assert [answer.status for answer in waiting] == [200, 200], waiting
    assert sorted(answer.body for answer in waiting) == pytest.approx(sorted(right[2:4]), rel=1e-4)


def test_any_other_process_killed_comes_back_with_all_functions(node: TestNode) -> None:
    right, before = deploy_models(node, 2), ended(node)
    for role in ("zygote", "router", "store"):  # the controller: test_durability.py
        pid = node.kill(role)
        node.replaced(role, pid)
        node.wait(lambda: node.http("GET", "/readyz").status == 200, 90, "the node to be ready again")
        assert [node.result(f"m{k}", {"x": 1}) for k in range(2)] == pytest.approx(right, rel=1e-4), role
    assert ended(node) - before == Counter({"zygote": 1, "router": 1, "store": 1}), "and none that ended with them"


def ended(node: TestNode) -> Counter[str]:
    """How often its processes have, unasked."""
    return Counter({role: each["times"] for role, each in node.status()["node"]["ended"].items()})


def test_the_zygote_outlives_a_router_and_no_instance_does(node: TestNode) -> None:
    """Nor what an instance has started: the next router's first instance has its uid."""
    source = """
        import subprocess
        def load():
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        def handle(state, request):
            return request
    """
    node.deployed("starts", source)
    before = node.pids()
    everyone = [pid for pid in node.descendants() if procfs.words(pid)[0] != TITLE]
    assert any(b"sleep" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in everyone)
    node.replaced("router", node.kill("router"))

    def still() -> list[int]:
        return [pid for pid in everyone if procfs.state(pid) not in ("", "Z")]

    node.wait(lambda: len(still()) <= 2, 60, "the zygote alone, and its stub where it has a pid namespace")
    assert before["zygote"] in still()
    assert node.pids()["zygote"] == before["zygote"]
    assert node.result("starts", 1) == 1


def test_a_killed_supervisor_takes_everything_with_it() -> None:
    """And a stop right after a process was killed leaves nothing either."""
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n') as node:
        deploy_models(node, 1)
        everyone = node.descendants()
        assert node.process is not None
        node.process.kill()
        node.process.wait()
        node.expect_nothing_left(everyone)
        node.start()  # the same directories again: the catalogue brings the function back
        assert isinstance(node.result("m0", {"x": 1}), float)
        node.kill("zygote")
        node.stop()
        node.start()
        node.kill("controller")  # running_node stops the node at once and checks processes and the run directory


def test_a_process_whose_log_has_no_place_serves_all_the_same() -> None:
    """On a full disk the first scrape, which starts a process, ended the node."""
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n', node="open_loopback = true") as node:
        for place in (
            *(node.state / "logs" / name for name in ("metrics.err", "metrics.log")),
            node.run / "t/ready.new",
        ):
            place.mkdir()
        before = node.pids()
        node.wait(lambda: node.http("GET", "/metrics").status == 200, 120, "a scrape")  # its process starts slowly
        assert {role: pid for role, pid in node.pids().items() if role != "metrics"} == before
        said = node.state / "logs" / "supervisor.log"
        node.wait(lambda: "ready_not_written" in said.read_text(), 60, "the supervisor to say what it cannot write")


def test_an_executor_that_does_not_give_a_lease_back_is_killed() -> None:
    """It computes on for a function that has run out of time. Its heart beats: only the lease tells."""
    source = """
        import torch
        def load():
            return torch.full((2000, 2000), 1 / 2000).to("cuda")
        def handle(state, request):
            x = state
            for _ in range(request):
                x = x @ state
            return round(x.sum().item())
    """
    with running_node('[gpu]\ncount = 2\nthreads = 1\nmemory = "256MiB"\n[limits]\nlease_ms = 500\n') as node:
        node.deployed("long", source, timeout="8s")  # on a busy machine too
        before = node.pids()
        answer = node.invoke("long", 100_000)
        assert (answer.status, answer.code) == (504, "timed_out"), answer
        node.wait(lambda: node.pids() not in (before, {}), 60, "the executor to be killed")
        log = (node.state / "logs" / "supervisor.log").read_text()
        assert log.count('"event": "process_killed"') + log.count('"event":"process_killed"') == 1, log
        assert "was not given back within 0.5 s of being revoked" in log
        node.wait(lambda: node.invoke("long", 1).status == 200, 60, "an answer within its time limit")
        assert node.result("long", 1) == 2000


def supervisor(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "dormouse.core.node.supervisor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_node_started_twice_says_so_and_the_first_goes_on(node: TestNode) -> None:
    outcome = supervisor(str(node.file))
    assert outcome.returncode == 2
    assert "in use by a running node" in outcome.stderr
    assert node.http("GET", "/healthz").status == 200


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        file = tmp_path / "node.toml"
        run = f"/tmp/dm-port-{os.getpid()}"
        file.write_text(
            f'[node]\nport = {port}\nrun = "{run}"\nstate = "{tmp_path}/s"\n[gpu]\ncount = 1\nmemory = "64MiB"\n'
        )
        outcome = supervisor(str(file))
    assert outcome.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in outcome.stderr
    assert not Path(run).exists()


def test_an_unknown_key_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[node]\nname = "x"\n\n[gpu]\ncuont = 2\n')
    outcome = supervisor(str(file))
    assert outcome.returncode == 2
    assert "cuont" in outcome.stderr
    assert "node.toml:5" in outcome.stderr


def test_a_model_moves_between_gpus_and_answers_the_same(node: TestNode) -> None:
    """It is made to, by another function that holds the GPU on which it is; four models lie on both."""
    right = deploy_models(node, 4)

    def moved() -> bool:
        return set(node.status()["functions"]["m0"]["gpus"]) == {"0", "1"}

    for holder in (1, 2, 3):
        running = Running(node, f"m{holder}")
        assert node.result("m0", {"x": 1}) == pytest.approx(right[0], rel=1e-4)
        running.end()
        assert running.answer().body == pytest.approx(right[holder], rel=1e-4)
    node.wait(moved, 60, "m0 to have been on both GPUs")
    assert [node.result(f"m{k}", {"x": 1}) for k in range(4)] == pytest.approx(right, rel=1e-4)
