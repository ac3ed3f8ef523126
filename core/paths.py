"""Where things are in a node's run and state directories. Names only; docs/design.md draws the tree."""

import os
from pathlib import Path
from typing import Final

STORE_SOCKET: Final = "store"
FILES_SOCKET: Final = "files"
"""The store's endpoints in an instance's directory: its link, and where the instance offers open files."""


class RunPaths:
    """Paths under a node's run directory."""

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        self.trusted = self.run / "t"
        self.instances = self.run / "i"
        self.node_json = self.trusted / "node.json"
        self.pid = self.trusted / "supervisor.pid"
        self.version = self.trusted / "version"
        self.attach = str(self.trusted / "attach")
        self.admin = str(self.trusted / "admin")  # the router's HTTP face for the command line, over a Unix socket

    def link(self, binder: str, connecter: str, epoch: int) -> str:
        """A link between node processes; ``epoch`` is that of the process that is restarted alone (an executor), else
        the connecter's.
        """
        return str(self.trusted / f"{binder}-{connecter}.{epoch}")

    def inbox(self, role: str, epoch: int) -> str:
        return str(self.trusted / f"{role}.fds.{epoch}")

    def zygote(self, epoch: int) -> str:
        return str(self.trusted / f"zygote.{epoch}")

    def instance(self, instance: str) -> str:
        return str(self.instances / instance)

    def make(self) -> None:
        """Create the directories with their modes, independent of the umask."""
        for path, mode in ((self.run, 0o711), (self.trusted, 0o700), (self.instances, 0o711)):
            path.mkdir(parents=True, exist_ok=True)
            os.chmod(path, mode)


class StatePaths:
    """Paths under a node's state directory."""

    def __init__(self, state: str | Path) -> None:
        self.state = Path(state)
        self.catalogue = self.state / "catalogue.sqlite3"
        self.functions = self.state / "functions"
        self.logs = self.state / "logs"
        self.store = self.state / "store"
        self.store_key = self.store / "key"
        self.store_index = self.store / "index.sqlite3"
        self.store_segments = self.store / "segments"

    def function_source(self, name: str, version: int) -> Path:
        return self.functions / name / str(version) / "function.py"

    def function_log(self, name: str) -> Path:
        return self.logs / f"fn-{name}.log"

    def role_log(self, role: str) -> Path:
        return self.logs / f"{role}.log"

    def make(self) -> None:
        for path in (self.state, self.functions, self.logs):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
