"""Triton's kernels are compiled for GPUs that are not here: what they need is what such a GPU has."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton_here

if not triton_here.HERE:
    pytest.skip("needs Triton, which make setup puts beside the environment", allow_module_level=True)

KERNELS = {"write": 1, "attend": 3, "merge": 1, "shrink": 1, "expand": 1}
"""How many of each are compiled: attention for single tokens, for their parts, and for prompts."""

SHARED_NBYTES = 99 << 10
"""What a program may have at most on GPUs of compute capability 8.6, 8.9 and 12.0; others have more."""


def compiled(tmp_path: Path, capability: int, dtype: str, *widths: int) -> list[dict[str, Any]]:
    command = [sys.executable, str(Path(triton_here.__file__).with_name("triton_compiled.py"))]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [*command, str(capability), dtype, *map(str, widths)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("capability", "dtype", "widths"),
    [(89, "bfloat16", (64, 128, 80, 256)), (89, "float32", (64, 256)), (90, "bfloat16", (128,))],
)
def test_kernels_fit_a_gpu(tmp_path: Path, capability: int, dtype: str, widths: tuple[int, ...]) -> None:
    found = compiled(tmp_path, capability, dtype, *widths)
    for width in widths:
        kernels = [each for each in found if each["width"] == width]
        kinds = {name: {each["hash"] for each in kernels if each["kernel"] == name} for name in KERNELS}
        assert {name: len(hashes) for name, hashes in kinds.items()} == KERNELS, "one for any way in which tables lie"
        for each in kernels:
            assert each["shared_nbytes"] <= SHARED_NBYTES, each
            assert each["stack_nbytes"] == 0, f"registers are spilled: {each}"
            if each["kernel"] in ("shrink", "expand"):
                assert each["tensor_cores"] == (dtype == "bfloat16"), each
            if each["kernel"] == "attend":
                assert each["wide_copies"], f"keys are not read in words of 16 bytes: {each}"
                assert each["tensor_cores"] == (dtype == "bfloat16"), each  # fp32 is not rounded to TF32
