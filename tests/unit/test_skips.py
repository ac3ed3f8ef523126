"""A test that is skipped says what would make it run, and scripts/test lists that."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


def reasons(path: Path) -> Iterator[str]:
    """Of each skip in the file that gives one as a text."""
    for call in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        given = (
            call.args if call.func.attr == "skip" else [each.value for each in call.keywords if each.arg == "reason"]
        )
        if call.func.attr in ("skip", "skipif", "importorskip"):
            first = given[0].values[0] if given and isinstance(given[0], ast.JoinedStr) else (*given, None)[0]
            if first is None:
                yield "nothing"
            elif isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def test_each_reason_says_what_is_needed() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {reason}" for path in (ROOT / "tests").rglob("*.py") for reason in reasons(path)
    }
    assert len(found) > 40
    assert sorted(each for each in found if ": needs " not in each) == []


SKIPPING = """
import pytest

@pytest.mark.skipif(True, reason="needs a moon")
def test_marked(): ...

def test_inside():
    pytest.skip("needs a sun")

def test_runs(): ...

def test_wants_a_program():
    import subprocess
    subprocess.run(["no-such-program"])

def test_fails():
    open("no/such/file")
"""
MODULE = 'import pytest\npytest.skip("needs stars", allow_module_level=True)\n'


def test_what_is_skipped_is_noted_once_by_however_many_processes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").symlink_to(ROOT / "tests" / "conftest.py")
    (tmp_path / "test_a.py").write_text(SKIPPING)
    (tmp_path / "test_b.py").write_text(MODULE)
    path = os.pathsep.join((str(ROOT / "tests"), str(ROOT)))
    environment = os.environ | {"DORMOUSE_SKIPPED": str(tmp_path / "skipped"), "PYTHONPATH": path}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert re.search("1 failed, 1 passed, [34] skipped", done.stdout), done.stdout
    assert sorted(set((tmp_path / "skipped").read_text().splitlines())) == [
        "needs a moon\ttest_a.py::test_marked",
        "needs a sun\ttest_a.py::test_inside",
        "needs no-such-program\ttest_a.py::test_wants_a_program",
        "needs stars\ttest_b.py",
    ]
