"""How functions come and go on a real node: without load(), with unload(), with their own time to load, and seen."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.nodes.testnode import TestNode, running_node

CONFIG = '[gpu]\ncount = 1\nmemory = "64MiB"\n'


@pytest.fixture(scope="module")
def node() -> Iterator[TestNode]:
    with running_node(CONFIG) as node:
        yield node


def test_load_may_be_left_out(node: TestNode) -> None:
    node.deployed(
        "plain", "import torch\ndef handle(state, n): return [state, torch.ones(n).to('cuda').sum().item()]\n"
    )
    assert node.result("plain", 3) == [None, 3.0]


UNLOAD = """
def load():
    return {"version": VERSION, "served": 0}
def handle(state, request):
    state["served"] += 1
    return state["version"]
def unload(state):
    print("unloads", state)
    FAIL
"""


def test_unload_is_called_with_the_state_before_an_instance_goes(node: TestNode) -> None:
    node.deployed("leaves", UNLOAD.replace("VERSION", "1").replace("FAIL", "raise ValueError('at the end')"))
    assert node.result("leaves", 0) == 1
    processes = len(node.descendants())
    node.deployed("leaves", UNLOAD.replace("VERSION", "2").replace("FAIL", "import time; time.sleep(3600)"))
    assert node.result("leaves", 0) == 2
    node.wait(lambda: "unloads {'version': 1, 'served': 1}" in node.log_of("leaves"), 60, "unload() to print")
    node.wait(lambda: "ValueError: at the end" in node.log_of("leaves"), 60, "its error to be in the log")
    node.deployed("leaves", UNLOAD.replace("VERSION", "3").replace("FAIL", "pass"))
    node.wait(lambda: "unloads {'version': 2, 'served': 1}" in node.log_of("leaves"), 60, "unload() to print")
    node.wait(lambda: len(node.descendants()) == processes, 60, "the one that does not come to an end to be ended")


SLOW = """
import time
def load():
    for step in range(65):
        time.sleep(1)
        print("step", step)
def handle(state, request): return "there"
"""
UPLOADS = """
import time, torch
def load():
    kept = []
    for step in range(65):
        time.sleep(1)
        kept.append(torch.full((1000,), float(step)).to("cuda"))
    return kept
def handle(state, request): return sum(each[0].item() for each in state)
"""


def test_a_load_that_prints_or_uploads_has_time(node: TestNode) -> None:
    """Longer than its limit in all; a step of a second has a minute, on however slow a machine."""
    with ThreadPoolExecutor(2) as pool:
        prints = pool.submit(node.deployed, "prints", SLOW, load_timeout="60s")
        uploads = pool.submit(node.deployed, "uploads", UPLOADS, load_timeout="60s")
        prints.result()
        uploads.result()
    assert node.result("prints", 0) == "there"
    assert node.result("uploads", 0) == sum(range(65))


def test_a_load_that_does_not_go_on_is_ended(node: TestNode) -> None:
    source = "import time\ndef load(): time.sleep(3600)\ndef handle(state, request): return 1\n"
    answer = node.deploy("silent", source, load_timeout="5s")
    assert (answer.status, answer.code) == (422, "load_timeout")
    assert "--load-timeout" in answer.message


GATED = """
import os, time
def load():
    print("loading 10%", flush=True)
    while not os.path.exists({gate!r}):
        time.sleep(0.02)
    print("loading 100%")
def handle(state, request): return 1
"""


def test_what_load_prints_is_seen_while_it_runs(node: TestNode) -> None:
    gate = node.shared / "gate"
    folder = node.folder("gated")
    (folder / "gated.py").write_text(GATED.format(gate=str(gate)))
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "deploy", "gated"]
    with subprocess.Popen([*command, str(folder / "gated.py")], stderr=subprocess.PIPE, stdout=subprocess.PIPE) as said:
        assert said.stderr is not None
        seen = b""
        while b"loading 10%\n" not in seen:
            line = said.stderr.readline()
            assert line, seen
            seen += line
        assert b"100%" not in seen
        gate.touch()
        out, err = said.communicate(timeout=60)
    assert b"loading 100%" in err
    assert out == b"gated version 1 is deployed\n"


def test_a_deploy_goes_on_when_who_asked_for_it_has_left(node: TestNode) -> None:
    gate = node.shared / "other-gate"
    folder = node.folder("left")
    (folder / "left.py").write_text(GATED.format(gate=str(gate)))
    command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "--run", str(node.run), "deploy", "left"]
    with subprocess.Popen([*command, str(folder / "left.py")], stderr=subprocess.PIPE) as said:
        assert said.stderr is not None
        while b"loading 10%\n" not in said.stderr.readline():
            pass
        said.kill()
    gate.touch()
    node.wait(lambda: node.invoke("left", 0).status == 200, 60, "it to be deployed")
