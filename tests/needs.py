"""What tests need that a machine may lack: where it is not there they are skipped, and say what would make them run."""

import os
import shutil
from typing import Final

import pytest

from benchmarks.nodes.testnode import TestNode
from dormouse.schemas.errors import ConfigError

CURL: Final = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
ROOT: Final = pytest.mark.skipif(os.getuid() != 0, reason="needs root")
NO_COMPILER: Final = "needs a C++ compiler: g++ or clang++"
COMPILER: Final = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), reason=NO_COMPILER
)
"""Without one, the memory of activations is counted roughly (gpuserver/device/allocator.py), and torch computes what
the kernels of runtimes would (gpuserver/runtime/kernels.py).
"""


def control_groups(node: TestNode) -> None:
    """For limits that only they set."""
    if "cgroup" not in node.status()["node"]["confinement"].split("+"):
        pytest.skip("needs the right to make control groups")


def without_these_rights(error: BaseException) -> str:
    """What this error of a test says that the machine lacks, as a reason to skip; "": nothing, it is the test's."""
    match error:
        case PermissionError(filename=str(path)) if path.startswith("/proc/") and os.getuid() != 0:
            return "needs root: it looks at the node's processes"
        case FileNotFoundError(filename=str(program)) if "/" not in program and shutil.which(program) is None:
            return f"needs {program}"
        case ConfigError() if str(error).startswith("no C++ compiler"):
            return NO_COMPILER
        case ConfigError() if str(error).startswith("no headers of Python"):
            return "needs Python's headers: python3-dev"
    return ""
