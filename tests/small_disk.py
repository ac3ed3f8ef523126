"""File systems of their own, which can be full to the last byte."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.nodes.testnode import TestNode, kept_running


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    """One of ``size`` in this directory."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount file systems: root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def node_on_small_disk(config: str, size: str) -> Iterator[TestNode]:
    """A node whose state is on one."""
    with tempfile.TemporaryDirectory(prefix="dm") as directory:
        os.chmod(directory, 0o755)
        state = Path(directory, "s")
        state.mkdir()
        with small_disk(state, size), kept_running(node := TestNode(Path(directory), config)):
            assert node.state == state
            yield node


def fill(directory: Path) -> Path:
    """All of it; once this file is gone, there is room again."""
    path = directory / "filler"
    with path.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return path
