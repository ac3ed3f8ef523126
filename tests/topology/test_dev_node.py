"""`dormouse dev` with the settings of a deploy, on a real node whose run directory only DORMOUSE_RUN names."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wheels import PackageIndex

from benchmarks.nodes.ports import reserved_port

pytestmark = pytest.mark.timeout(600)

FUNCTION = """
import os
import colours
def handle(state, request):
    return [colours.VERSION, *(os.environ.get(name) for name in ("MODE", "SIZE", "TOKEN"))]
"""

BROKEN = "def handle(:\n"
BROKEN_TOLD = [
    '  File "/function/f.py", line 1\n', "    def handle(:\n", "               ^\n", "SyntaxError: invalid syntax\n",
]  # fmt: skip


class Commands:
    """`dormouse` as it is in a shell that has said which node it means."""

    def __init__(self, run: Path) -> None:
        self._environment = os.environ | {"DORMOUSE_RUN": str(run)}

    def begin(self, *words: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-u", "-P", "-m", "dormouse.core.cli.main", *words]
        return subprocess.Popen(
            command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip

    def __call__(self, *words: str, said: str = "", status: int = 0) -> str:
        with self.begin(*words) as process:
            text, _ = process.communicate(said)
        assert process.returncode == status, text
        return text

    def answer(self, name: str) -> Any:
        return json.loads(self("invoke", name, "0"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def dormouse(tmp_path: Path, run: Path) -> Iterator[Commands]:
    tmp_path.chmod(0o755)
    index = PackageIndex(tmp_path / "index")
    for version in ("1.0", "2.0"):
        index.wheel("colours", version, {"colours/__init__.py": f"VERSION = {version!r}\n"})
    commands = Commands(run)
    with reserved_port() as held:
        (tmp_path / "node.toml").write_text(
            f'[node]\nname = "own"\nstate = "{tmp_path}/state"\nport = {held.getsockname()[1]}\n'
            f'[gpu]\ncount = 1\nmemory = "64MiB"\n[sandbox]\nwarm = []\n[environments]\nindex = "{index.url}"\n'
        )
        up = json.loads(commands("up", str(tmp_path / "node.toml"), "--json"))
        try:
            assert up["run"] == str(run)
            yield commands
        finally:
            assert commands("down") == "stopped\n"
    assert not run.exists()


def _save(path: Path, text: str) -> None:
    """At once: who looks meanwhile would see half of it, and deploy that."""
    half = path.parent.parent / "half"
    half.write_text(text)
    half.replace(path)


def test_all_that_is_deployed_with_it_counts(dormouse: Commands, tmp_path: Path) -> None:
    function, variables, required = tmp_path / "f" / "f.py", tmp_path / "f.env", tmp_path / "required.txt"
    function.parent.mkdir()
    _save(function, BROKEN)
    _save(variables, "MODE=slow\nSIZE=1\n")
    _save(required, "colours==1.0\n")
    dormouse("secret", "set", "TOKEN", said="of the shop")
    words = ["--env-file", str(variables), "--env", "SIZE=2", "--secret", "TOKEN", "--requirements", str(required)]
    missing = dormouse("dev", str(function), *words, "--env-file", str(tmp_path / "nothing"), status=2)
    assert "nothing cannot be read" in missing
    with dormouse.begin("dev", str(function), *words, "--stateless") as dev:
        try:
            assert dev.stdout is not None
            said = iter(dev.stdout.readline, "")
            assert "Successfully installed colours-1.0\n" in said, "how far it has come"
            told = list(itertools.takewhile(lambda line: line != "nothing is deployed\n", said))
            assert told[-5:] == [*BROKEN_TOLD, "! SyntaxError: invalid syntax\n"], "its lines of code once"
            assert len([line for line in told if "invalid syntax" in line]) == 2
            _save(function, FUNCTION)
            assert "f-dev version 1 is deployed\n" in said
            assert dormouse.answer("f-dev") == ["1.0", "slow", "2", "of the shop"]
            assert json.loads(dormouse("history", "f-dev", "--json"))[0]["stateless"] is True
            _save(variables, "MODE=fast\n")
            assert "f-dev version 2 is deployed\n" in said
            assert dormouse.answer("f-dev") == ["1.0", "fast", "2", "of the shop"]
            _save(required, "colours==2.0\n")
            assert "f-dev version 3 is deployed\n" in said
            assert dormouse.answer("f-dev") == ["2.0", "fast", "2", "of the shop"]
            _save(required, "colours==3.0\n")
            told = list(itertools.takewhile(lambda line: line != "version 3 goes on\n", said))
            assert told[-1] == "ERROR: No matching distribution found for colours==3.0\n"
            assert dormouse.answer("f-dev")[0] == "2.0", "the one before goes on"
            variables.unlink()
            assert any(line.startswith(f"! {variables} cannot be read") for line in said)
            _save(variables, "MODE=back\n")
            _save(required, "colours==1.0\n")
            assert "f-dev version 4 is deployed\n" in said
            assert dormouse.answer("f-dev") == ["1.0", "back", "2", "of the shop"]
            _save(function, BROKEN)
            wanted, told = {*BROKEN_TOLD, "! SyntaxError: invalid syntax\n", "version 4 goes on\n"}, []
            while not wanted <= set(told):  # the log, which is followed, and what is made of it: in any order
                told.append(next(said))
        finally:
            dev.send_signal(signal.SIGINT)
        told += said
        assert "f-dev is removed\n" in told
        assert [told.count(line) for line in wanted] == [1] * len(wanted), told
    assert dev.returncode == 0
