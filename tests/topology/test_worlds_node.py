"""A whole node with several worlds: what becomes of one costs functions, and the other worlds, nothing."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from worlds_rig import WAIT_S, make_second_python, second_world

from benchmarks.nodes.testnode import TestNode, running_node
from dormouse.core.sandbox.world import World

COLD = True  # as in test_worlds.py
# The supervisor of a whole node, with more worlds than a node file can name.
NODE = """
import sys, msgspec, uvloop
from dormouse.core.node import supervisor
from dormouse.core.links import zmq_link
from dormouse.core.nodefile import load_config
from dormouse.core.config import StartSection
from dormouse.core.gpus import counted
from dormouse.core.sandbox.world import World
start = StartSection(worlds=msgspec.json.decode(sys.argv[1], type=tuple[World, ...]))
uvloop.run(supervisor.serve(counted(msgspec.structs.replace(load_config(sys.argv[-1]), start=start))))
zmq_link.close_context()
"""
ECHO = "import os\ndef load(): ...\ndef handle(state, request): return os.getpid(), request\n"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestNode]:
    second_python = make_second_python(tmp_path_factory.mktemp("second") / "env")
    second = msgspec.structs.replace(second_world(second_python), libraries=("w_raises", "colorsys"))
    worlds = [
        second,
        msgspec.structs.replace(second, name="lost", python="/no/such/python"),
        World(name="poor", python=sys.executable, modules=("world_of_none",), entry="world_of_none:live"),
    ]
    site = Path(second_python).parents[1].glob("lib/python*/site-packages")
    (next(site) / "w_raises.py").write_text("raise OSError('no')")
    launcher = (sys.executable, "-P", "-c", NODE, msgspec.json.encode(worlds).decode())
    with running_node('[gpu]\ncount = 1\nmemory = "64MiB"\n', launcher) as made:
        yield made


def test_a_node_serves_functions_whatever_becomes_of_other_worlds(node: TestNode) -> None:
    ready = json.loads((node.run / "t" / "ready").read_bytes())
    assert {"zygote", "zygote.second"} <= set(ready["up"])
    assert set(ready["down"]) == {"zygote.lost", "zygote.poor"}
    assert ready["down"]["zygote.lost"] == (
        "its interpreter /no/such/python cannot be started (No such file or directory); install it there, or name "
        "another ([sandbox] python is that of functions)"
    )
    says = "it ended with status 1: dormouse: the world 'poor' needs world_of_none, which "
    assert ready["down"]["zygote.poor"].startswith(says)
    assert ready["down"]["zygote.poor"].endswith("install it there, or have that world name another interpreter")
    assert node.status()["node"]["down"].keys() == ready["down"].keys()
    node.deployed("echo", ECHO)
    assert node.result("echo", 1)[1] == 1


def test_a_library_that_one_world_cannot_import_is_left_out_of_that_world(node: TestNode) -> None:
    lines = [json.loads(line) for line in (node.state / "logs" / "supervisor.log").read_text().splitlines()]
    left_out = [(line["child"], line["library"]) for line in lines if line["event"] == "library_left_out"]
    assert left_out == [("zygote.second", "w_raises")]
    assert json.loads((node.run / "t" / "ready").read_bytes())["left_out"] == {}, "nothing of functions'"


def test_a_worlds_zygote_is_replaced_alone_and_outlives_the_router(node: TestNode) -> None:
    node.deployed("echo", ECHO)
    instance = node.result("echo", 1)[0]
    zygotes = {role: pid for role, pid in node.pids().items() if role.startswith("zygote")}
    node.replaced("zygote.second", node.kill("zygote.second"))
    assert node.result("echo", 1)[0] == instance, "no function has noticed"
    assert node.pids()["zygote"] == zygotes["zygote"]
    second = node.pids()["zygote.second"]
    assert second != zygotes["zygote.second"]
    node.replaced("router", node.kill("router"))
    node.wait(lambda: node.invoke("echo", 2).status == 200, WAIT_S, "the function")
    assert node.pids()["zygote"] == zygotes["zygote"]
    assert node.pids()["zygote.second"] == second, "it ends its children and stays"
    assert set(node.status()["node"]["down"]) == {"zygote.lost", "zygote.poor"}


def test_without_the_interpreter_of_functions_a_node_says_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    run = tempfile.mkdtemp(prefix="dm")
    os.rmdir(run)
    file.write_text(f'[node]\nrun = "{run}"\nstate = "{tmp_path}/s"\nport = 0\n[sandbox]\npython = "/no/such/python"\n')
    command = [sys.executable, "-P", "-m", "dormouse.core.node.supervisor", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 1
    (said,) = done.stderr.strip().splitlines()
    assert json.loads(said)["message"] == (
        "zygote did not start: its interpreter /no/such/python cannot be started (No such file or directory); install "
        "it there, or name another ([sandbox] python is that of functions)"
    )
    assert not os.path.exists(run)
