"""The allocator's library is built once, also when several executors start at the same moment."""

import subprocess
import sys
from pathlib import Path

import pytest

from dormouse.core import native


def test_concurrent_builds_make_one_library(tmp_path: Path) -> None:
    if native.find_compiler() is None:
        pytest.skip("needs a C++ compiler: g++ or clang++")
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-m", "dormouse.gpuserver.device.allocator"]
    builds = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {build.communicate()[0].strip() for build in builds}
    assert [build.returncode for build in builds] == [0, 0]
    assert len(paths) == 1
    assert [path.suffix for path in (tmp_path / "dormouse").iterdir() if path.suffix != ".lock"] == [".so"]
