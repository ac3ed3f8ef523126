"""Executors that die in a function's command: whose fault it is, on a real node; and processes that are stopped."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nodes.testnode import HttpAnswer, TestNode, running_node
from dormouse.core.evidence import COMMAND, read_page
from dormouse.core.node.children import RunningRole
from dormouse.core.sandbox import cgroups

pytestmark = pytest.mark.timeout(400)

LONG = """
    import torch

    def load():
        return torch.full((2000, 2000), 1 / 2000).to("cuda")

    def handle(state, request):
        x = state
        if request > 1:
            print("goes on and on", flush=True)
        for _ in range(request):  # a second or so each, in the executor
            x = x @ state
        return round(x.sum().item())
"""


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node('[gpu]\ncount = 1\nthreads = 1\nmemory = "256MiB"\n') as running:
        yield running


def events(node: TestNode, name: str) -> list[dict[str, Any]]:
    """What the supervisor has logged under this name."""
    lines = (node.state / "logs" / "supervisor.log").read_text().splitlines()
    return [said for line in lines if (said := json.loads(line))["event"] == name]


def killed_in_a_command(node: TestNode, function: str, number: int) -> HttpAnswer:
    """Signal the executor while it computes for ``function``, as its own fault would; what the request gets."""
    answers: list[HttpAnswer] = []
    before = node.log_of(function).count("goes on and on")
    request = threading.Thread(target=lambda: answers.append(node.invoke(function, 10_000)))
    request.start()
    node.wait(lambda: node.log_of(function).count("goes on and on") > before, 60, "the request to run")
    node.wait(lambda: in_command(node, function), 60, "a command of it to run")  # and none of the one before
    pid = node.kill("gpu0", number)
    request.join()
    node.replaced("gpu0", pid)
    return answers[0]


def in_command(node: TestNode, function: str) -> bool:
    """By the page that the supervisor reads."""
    assert node.process is not None
    for link in Path(f"/proc/{node.process.pid}/fd").iterdir():
        if "dormouse-evidence" in os.readlink(link):
            fd = os.open(link, os.O_RDONLY)
            try:
                found = read_page(fd)
            finally:
                os.close(fd)
            return found.state == COMMAND and found.instance in node.status()["functions"][function]["instances"]
    return False


def test_d4_whose_commands_end_executors_is_quarantined_and_nobody_else(node: TestNode) -> None:
    node.deployed("bad", LONG)
    node.deployed("good", LONG)
    assert node.process is not None
    supervisor = node.process.pid

    # Somebody outside, or the kernel that lacks memory: nobody's fault, however often.
    for _ in range(2):
        assert killed_in_a_command(node, "good", signal.SIGKILL).code == "executor_lost"
    assert events(node, "executor_died_of") == []
    assert node.result("good", 1) == 2000

    assert killed_in_a_command(node, "bad", signal.SIGSEGV).code == "executor_lost"
    assert node.result("bad", 1) == 2000, "once may be the machine's fault"
    assert killed_in_a_command(node, "bad", signal.SIGABRT).code in ("executor_lost", "quarantined")
    answer = node.invoke("bad", 1)
    assert (answer.status, answer.code) == (503, "quarantined"), answer
    assert "SIGABRT" in answer.message
    assert "dormouse restart bad" in answer.message
    row = node.status()["functions"]["bad"]
    assert row["state"] == "quarantined"
    assert "SIGABRT" in row["error"]
    assert "quarantined: it ended a GPU's process" in node.log_of("bad")
    assert [said["child"] for said in events(node, "executor_died_of")] == ["gpu0", "gpu0"]
    assert node.result("good", 1) == 2000
    assert node.http("GET", "/readyz").status == 200

    # It would otherwise be loaded, and kill, at each start.
    node.kill_all()
    node.start()
    assert node.invoke("bad", 1).code == "quarantined"
    assert node.restart("bad").status == 200
    assert node.result("bad", 1) == 2000
    assert node.process.pid != supervisor


@pytest.mark.parametrize("which", ["gpu0", "stub", "zygote"])
def test_stopped_processes_are_noticed_by_their_state(node: TestNode, which: str) -> None:
    """Not by their silence, which takes 30 s; a stub is never silent, because the zygote behind it speaks."""
    node.deployed("good", LONG)
    role = "gpu0" if which == "gpu0" else "zygote"
    pid = node.pids()[role]
    behind = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    if which == "zygote" and len(behind) != 1:
        pytest.skip("needs a host that gives the zygote a pid namespace, and so a stub")
    before = len(events(node, "process_stopped"))
    os.kill(behind[0] if which == "zygote" else pid, signal.SIGSTOP)
    node.replaced(role, pid)
    said = events(node, "process_stopped")[before:]
    assert [(each["child"], each["for_s"] < 30) for each in said] == [(role, True)]
    assert events(node, "process_silent") == []
    node.wait(lambda: node.http("GET", "/readyz").status == 200, 60, "the node to be ready again")
    assert node.result("good", 1) == 2000


def test_stopped_and_continued_is_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            child = RunningRole.__new__(RunningRole)  # no link, no loop: what it sees in /proc
            child.role, child.stopped_s, child._process = "gpu0", None, process
            assert child.look(1.0) == 0.0
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert [child.look(2.0), child.look(4.0)] == [0.0, 2.0]
            process.send_signal(signal.SIGCONT)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
            assert child.look(5.0) == 0.0
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert child.look(6.0) == 0.0, "it counts from anew"
        finally:
            process.kill()


def test_d18_a_removed_function_leaves_no_folder_and_no_log(node: TestNode) -> None:
    node.deployed("passing", LONG.replace("1 / 2000", "1 / 1999"))  # a model that nobody else has
    node.wait(lambda: node.status()["functions"]["passing"]["file_nbytes"] > 0, 60, "the model to be in a file")
    assert (node.state / "functions" / "passing").is_dir()
    segments = node.state / "store" / "segments"
    before = set(segments.iterdir())
    assert node.remove("passing").status == 200

    def gone() -> bool:
        left = set(segments.iterdir())
        return left < before and all(any(path.iterdir()) for path in left)

    node.wait(gone, 60, "the folders of its files to be gone")
    node.wait(lambda: not (node.state / "functions" / "passing").exists(), 60, "its snapshot to be gone")
    node.wait(lambda: not list((node.state / "logs").glob("*passing*")), 60, "its log to be gone")


def groups(node: TestNode) -> set[str]:
    """The instances that have control groups."""
    own = cgroups.folder_name(str(node.run))
    return {Path(place).name for place, _, _ in os.walk("/sys/fs/cgroup") if Path(place).parent.name == own}


def start(node: TestNode, *options: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-P", "-m", "dormouse.core.node.supervisor", str(node.file), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_d15_what_is_lost_or_damaged_is_said_before_anything_is_given_up(node: TestNode) -> None:
    for name in ("good", "bad"):
        node.deployed(name, LONG)
    node.wait(lambda: node.status()["functions"]["good"]["file_nbytes"] >= 16_000_000, 60, "the model to be in a file")
    expected = 2 if "cgroup" in node.status()["node"]["confinement"] else 0
    node.wait(lambda: len(groups(node)) == expected, 60, "a group for each function, and none of instances before")
    before = groups(node)
    node.kill_all()
    assert groups(node) == before, "nobody is left to remove them"
    catalogue, index = node.state / "catalogue.sqlite3", node.state / "store" / "index.sqlite3"
    segments = sorted(path.name for path in (node.state / "store" / "segments").glob("*/*"))
    for path in (catalogue, index):  # what is in their logs too
        db = sqlite3.connect(path)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
    kept = {path: path.read_bytes() for path in (catalogue, index)}

    catalogue.write_bytes(b"")
    refused = start(node)
    assert refused.returncode == 1, refused.stderr
    assert "has no functions, but" in refused.stderr
    assert "Restore it from a copy" in refused.stderr
    assert "`dormouse up --forget-models`" in refused.stderr
    catalogue.write_bytes(kept[catalogue])

    index.unlink()
    refused = start(node)
    assert refused.returncode == 1, refused.stderr
    assert "index.sqlite3 is lost or empty, but" in refused.stderr
    assert "`dormouse up --forget-models`" in refused.stderr
    assert sorted(path.name for path in (node.state / "store" / "segments").glob("*/*")) == segments, "all is there"

    node.start("--forget-models", "--without", "bad")
    assert len(groups(node)) == len(before) // 2, "those of the killed node are gone"
    assert node.result("good", 1) == 2000, "its load() has made it anew"
    answer = node.invoke("bad", 1)
    assert (answer.code, "--without" in answer.message) == ("quarantined", True), answer
