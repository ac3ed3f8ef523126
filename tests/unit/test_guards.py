"""The table of tests/guards.toml fits the tree: each fault test has an entry, and each entry still has what it breaks.

That the tests notice is shown by `scripts/break-guards`, which takes an hour.
"""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script() -> Any:
    loader = SourceFileLoader("break_guards", str(ROOT / "scripts" / "break-guards"))
    spec = importlib.util.spec_from_loader("break_guards", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_table_of_guards_fits_the_tree(script: Any) -> None:
    assert script.problems() == []


def test_a_table_that_does_not_fit_is_told(script: Any, tmp_path: Path) -> None:
    name = "tests/fault/test_functions.py::test_a_removed_function_is_gone"
    line = '[[guard]]\ntest = "{}"\nfile = "router/decisions/changes.py"\nfind = "{}"\nreplace = ""\n'
    script.TABLE = tmp_path / "guards.toml"
    script.TABLE.write_text(
        line.format(name, "no such text") + line.format("tests/fault/test_x.py::test_y", "def kept(")
    )
    told = script.problems()
    assert told[0] == f"{name}: what it breaks is 0 times in router/decisions/changes.py"
    assert told[1] == "tests/fault/test_x.py::test_y: there is no such test"
    assert len(told) > 200
    assert all(text.endswith(": has no entry in guards.toml") for text in told[2:])
