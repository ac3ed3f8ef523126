"""Builds of PyTorch that a node's two interpreters have, and of libraries beside it, by their own files: nothing
imports them.

Executors and sandboxes need one version; the builds may differ (docs/gpu.md).
"""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dormouse.core.config import NodeConfig

ASK_S: Final = 60.0

ASK: Final = """
import importlib.util, json, os, runpy
spec = importlib.util.find_spec("torch")
found = runpy.run_path(os.path.join(os.path.dirname(spec.origin), "version.py")) if spec else {}
print(json.dumps({"version": str(found.get("__version__", "")), "cuda": found.get("cuda") or ""}))
"""
COMPANIONS: Final = ("torchvision", "torchaudio", "torchcodec", "xformers")
"""Libraries with compiled parts that fit one build of torch."""

KERNELS: Final = "import json, torch; print(json.dumps((torch._C._cuda_getArchFlags() or '').split()))"


@dataclass(frozen=True)
class Build:
    """``version`` is "" without torch, ``cuda`` "" for a build without CUDA."""

    version: str = ""
    cuda: str = ""

    def __str__(self) -> str:
        return f"torch {self.version} {f'for CUDA {self.cuda}' if self.cuda else 'without CUDA'}"


def builds(config: NodeConfig) -> dict[str, Build]:
    """The builds of torch of "node" (this interpreter) and of "sandbox"."""
    pythons = {"node": sys.executable, "sandbox": config.sandbox.python or sys.executable}
    found = {python: _asked(python, ASK) or {} for python in set(pythons.values())}
    return {name: Build(**found[python]) for name, python in pythons.items()}


def kernels() -> list[str]:
    """The GPUs for which this interpreter's torch has code, "sm_90" or "compute_90"; takes as long as its import."""
    found: list[str] = _asked(sys.executable, KERNELS) or []
    return found


def covers(kernels: Sequence[str], capability: tuple[int, int]) -> bool:
    """Whether a GPU can run one of these kernels: one for its own architecture with the same or an earlier minor
    version, or one that a driver compiles for every later GPU.
    """
    for kernel in kernels:
        what, _, digits = kernel.partition("_")
        number = int("".join(digit for digit in digits if digit.isdigit()) or 0)
        major, minor = divmod(number, 10)
        if what == "sm" and major == capability[0] and minor <= capability[1]:
            return True
        if what == "compute" and (major, minor) <= capability:
            return True
    return False


def mismatches() -> list[str]:
    """Companions of this interpreter's torch that were built for another kind of GPU than torch, which they often
    cannot be imported beside.
    """
    torch = _own_build("torch")
    found = []
    for name in COMPANIONS:
        build = _own_build(name)
        if torch is not None and build is not None and build.cuda != torch.cuda:
            theirs, ours = (f"CUDA {kind}" if kind else "the CPU" for kind in (build.cuda, torch.cuda))
            found.append(
                f"{name} {build.version} is built for {theirs} and torch {torch.version} for {ours}: install both from "
                "one index (https://pytorch.org/get-started)"
            )
    return found


def _own_build(name: str) -> Build | None:
    """The build that a library's version.py names."""
    spec = importlib.util.find_spec(name)
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.exists():
        return None
    text = file.read_text(errors="replace").replace('"', "'")
    said = dict(re.findall(r"^(__version__|cuda)(?:: [^=]*)? = '([^']+)'", text, re.MULTILINE))
    return Build(said.get("__version__", ""), said.get("cuda", ""))


def _asked(python: str, code: str) -> Any:
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=ASK_S)
        return json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
