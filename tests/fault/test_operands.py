"""Every operation on the allow-list with hostile operands: none ends its process or writes outside its operands.

Six variants of each here; `python -m benchmarks.operands` has as many as one likes. In a process of its own, because it
forks, and none may fork that has run PyTorch's threads.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(900)
def test_d3_hostile_operands_end_no_executor(tmp_path: Path) -> None:
    out = tmp_path / "operands.json"
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.operands", "--variants", "6", "--out", str(out)]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    result = json.loads(out.read_text())
    assert {goal["name"]: goal["measured"] for goal in result["goals"]} == {
        "calls that ended the process": 0,
        "calls that wrote elsewhere": 0,
        "calls of more than 10 s": 0,
    }, run.stdout
    assert result["results"]["operations"] > 1500
    assert result["results"]["calls"] == 6 * result["results"]["operations"]
