"""Computes native PyTorch's answers: runs unmodified function files in one process, without Dormouse.

    python -m examples.reference cpu|cuda WORK.json ANSWERS.json

``WORK.json`` is a list of ``{"name", "path", "requests"}``; ``ANSWERS.json`` maps a name to its list of answers. A
function file asks for ``cuda``; where that is to be the CPU, a TorchFunctionMode, PyTorch's public way to see each
call, hands every call the CPU instead. Prints one line per function and one ``.`` line per answer, for the caller's
progress display.
"""

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnTheCpu(TorchFunctionMode):
    """Every call that names ``cuda`` gets ``cpu``; all else is as it was."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return func(*map(_host, args), **{key: _host(value) for key, value in (kwargs or {}).items()})


def _host(value: Any) -> Any:
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


def load_function(path: Path) -> ModuleType:
    """Import a function file as a node does: its folder can be imported from."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"native_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(device: str, work: Path, out: Path) -> None:
    torch.set_num_threads(1)  # as each of the demo's GPUs
    answers: dict[str, list[Any]] = {}
    for job in json.loads(work.read_text()):
        started = time.monotonic()
        with OnTheCpu() if device == "cpu" else contextlib.nullcontext():
            module = load_function(Path(job["path"]))
            state = module.load()
            loaded = time.monotonic()
            answers[job["name"]] = []
            for request in job["requests"]:
                answers[job["name"]].append(json.loads(json.dumps(module.handle(state, request))))
                print(".", flush=True)
        del state
        print(f"{job['name']} load {loaded - started:.1f} s, {time.monotonic() - loaded:.1f} s", flush=True)
    out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
