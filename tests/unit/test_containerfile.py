"""scripts/Containerfile, as far as it can be read without a builder: paths that it takes are there."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "scripts" / "Containerfile").read_text()
ALL = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE))


def test_it_takes_extras_and_modules_that_are_there() -> None:
    (extras,) = re.findall(r'"\.\[(\w+)\$', ALL)
    assert f"\n{extras} = [" in (ROOT / "pyproject.toml").read_text()
    modules = re.findall(r"-m (dormouse[\w.]+)", ALL)
    assert len(modules) == 2
    for module in modules:
        assert (ROOT / Path(*module.split(".")[1:])).with_suffix(".py").exists()
    assert "scripts/install-torch" in ALL
    assert (ROOT / "scripts" / "install-torch").exists()


def test_the_node_is_not_roots_and_its_directories_are_its_own() -> None:
    lines = [line.strip() for line in ALL.split("FROM ")[-1].splitlines()]
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["dormouse"]
    last_run = max(number for number, line in enumerate(lines) if line.startswith("RUN "))
    assert lines.index("USER dormouse") > last_run
    assert shlex.split(next(line for line in lines if line.startswith("VOLUME")))[1] == "/var/lib/dormouse"
