"""A run directory without room: no node and no instance starts, and what is there serves. With room all goes on."""

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from small_disk import fill, small_disk

from benchmarks.nodes.testnode import TestNode, kept_running
from dormouse.core.paths import RunPaths

pytestmark = pytest.mark.timeout(600)

CONFIG = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n'
FUNCTION = """
import os
import torch

def load():
    return torch.ones(1000).to("cuda")

def handle(state, request):
    print("said", len(request))
    if request == "die":
        os._exit(1)
    return state.sum().item()
"""


@contextmanager
def node_in(size: str) -> Iterator[TestNode]:
    """It does not run; its run directory is in a file system of its own."""
    with tempfile.TemporaryDirectory(prefix="dm") as directory:
        os.chmod(directory, 0o755)
        node, disk = TestNode(Path(directory), CONFIG), Path(directory) / "d"
        disk.mkdir()
        text, run = node.file.read_text(), disk / "r"
        node.file.write_text(text.replace(f'run = "{node.run}"', f'run = "{run}"'))
        node.run = run
        try:
            with small_disk(disk, size):
                disk.chmod(0o755)
                yield node
        finally:
            node.close()


def fill_names(directory: Path) -> list[Path]:
    """No file can be made any more."""
    made = list[Path]()
    with suppress(OSError):
        while True:
            made.append(directory / f"filler{len(made)}")
            made[-1].touch()
    return made[:-1]


@pytest.mark.parametrize("size", ["4k,nr_inodes=200", "1m,nr_inodes=4", "1m,nr_inodes=12"])
def test_a_node_that_has_no_room_to_start_says_where(size: str) -> None:
    with node_in(size) as node:
        with pytest.raises(AssertionError, match=r"exited with 1: .*No space left on device") as raised:
            node.start()
        said = str(raised.value)
        assert str(node.run) in said
        assert "Traceback" not in said
        assert node.process is not None
        node.process.wait(60)


def test_a_node_whose_run_directory_is_full_serves_and_goes_on_when_there_is_room() -> None:
    with node_in("1m,nr_inodes=200") as node, kept_running(node):
        node.deployed("f", FUNCTION)
        trusted = RunPaths(node.run).trusted
        in_the_way = [fill(trusted), *fill_names(trusted)]
        for body in ("a", "x" * (8 << 20)):
            assert node.result("f", body) == 1000.0
        assert f"said {8 << 20}\n" in node.log_of("f")
        refused = node.deploy("g", FUNCTION)
        assert "could not be started" in refused.message
        assert f"No space left on device: '{node.run}'; free space, and inodes, in [node] run" in refused.message
        assert node.deploy("g", FUNCTION).code == refused.code, "the first one is over"
        assert node.result("f", "a") == 1000.0
        assert node.invoke("f", "die").status >= 500
        assert node.invoke("f", "a").status >= 500, "it has no instance"
        os.kill(node.pids()["gpu0"], signal.SIGKILL)
        node.wait(lambda: "gpu0" in node.status()["node"]["ended"], 60, "the executor's end")
        for each in in_the_way:
            each.unlink()
        node.wait(lambda: node.invoke("f", "a").body == 1000.0, 240, "answers")
        node.deployed("g", FUNCTION)
        assert node.result("g", "a") == 1000.0
