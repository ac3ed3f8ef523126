"""The pages of docs/ as somebody follows them: their commands are typed as they are written, all but the port."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from benchmarks.nodes.testnode import TestNode

ROOT: Final = Path(__file__).parents[1]
GUIDES: Final = ("README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))))


def blocks(page: str, language: str) -> list[str]:
    """The fenced code of a page. Commands are in blocks of the language ``sh``."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [text for of, text in found if of == language]


def commands(page: str) -> list[str]:
    """Each with its continuation lines."""
    return [each for text in blocks(page, "sh") for each in re.findall(r"(?:.*\\\n)*.+", text)]


class Reader:
    """Who follows a page, in a folder of their own and in one shell: what a command sets, the next one has."""

    def __init__(self, folder: Path, place: Path, node: TestNode | None = None, **environment: str) -> None:
        """``place``: for what a shell has that is not in the folder."""
        self.folder = folder
        self.timeout_s = 240.0  # of one command
        self._place = place
        self._node = node
        self._environment = os.environ | environment
        if node is not None:
            self._environment["DORMOUSE_RUN"] = str(node.run)
        (place / "bin").mkdir(parents=True)
        self._environment["PATH"] = f"{place}/bin:{os.environ['PATH']}"
        self.has("dormouse", f'exec "{sys.executable}" -P -m dormouse.core.cli.main "$@"')

    def has(self, command: str, script: str) -> None:
        file = self._place / "bin" / command
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def here(self, text: str) -> str:
        """A page's text with the port of this node."""
        return text if self._node is None else text.replace(":8700", f":{self._node.port}")

    def types(self, command: str, stdin: str = "") -> str:
        """What it prints. It must succeed."""
        status, out, err = self.tries(command, stdin)
        if status == 127 and (missing := re.search(r"^bash: .*: (\S+): command not found$", err, re.MULTILINE)):
            pytest.skip(f"needs {missing[1]}")
        logs = "" if self._node is None else self._node.logs()
        assert status == 0, f"{command}\n{out}\n{err}\n{logs}"
        return out

    def tries(self, command: str, stdin: str = "") -> tuple[int, str, str]:
        """Its status, and what it prints and says."""
        after = self._place / "environment"
        script = f"set -aeo pipefail\n{self.here(command)}\nenv -0 >{after}\n"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self._environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=self.timeout_s,
        )
        if done.returncode == 0:
            self._environment = dict(pair.split("=", 1) for pair in after.read_text().split("\0") if "=" in pair)
        return done.returncode, done.stdout, done.stderr
