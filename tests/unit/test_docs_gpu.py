"""The table in docs/gpu.md that says what has run where names what is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CUDA = ROOT / "gpuserver" / "device" / "cuda"


def named_files() -> set[str]:
    """Paths and bare names of files in the table's rows."""
    _, _, rest = (ROOT / "docs" / "gpu.md").read_text().partition("## What has run where")
    rows = [line for line in rest.splitlines() if line.startswith("|")]
    return {name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)}


def test_each_file_that_the_table_names_is_there() -> None:
    missing = [name for name in named_files() if not (ROOT / name).is_file() and not (CUDA / name).is_file()]
    assert missing == []


def test_each_module_that_drives_cuda_is_in_the_table() -> None:
    named = {Path(name).name for name in named_files()}
    modules = {path.name for path in CUDA.glob("*.py")} - {"__init__.py"}
    assert sorted(modules - named) == []
