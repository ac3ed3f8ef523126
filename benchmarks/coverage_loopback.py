"""A worker of `benchmarks.coverage --loopback`: the coverage function in a process that is client and executor at once.

Reads requests as JSON lines and answers with JSON lines; the parent replaces it when it dies or is silent.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks import coverage_function

ROOT = Path(__file__).parents[1]


def world() -> Any:
    spec = importlib.util.spec_from_file_location("dormouse_tests_loopback", ROOT / "tests" / "loopback.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LoopbackWorld(arena_nbytes=64 << 20, by_cpp="DORMOUSE_BY_PYTHON" not in os.environ)


def main() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an operator prints must not look like an answer
    state = coverage_function.load()
    node = world()
    for line in sys.stdin:
        answers.write(json.dumps(coverage_function.handle(state, json.loads(line))) + "\n")
        answers.flush()
    node.close()


if __name__ == "__main__":
    main()
