"""A real node for tests: its supervisor in directories of its own, HTTP to it, and a check that nothing is left behind.

Nothing is faked: processes, sockets and shared memory are those of `dormouse up`.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from benchmarks.nodes.orphans import OrphanProcess, signal_process
from benchmarks.nodes.ports import reserved_port
from dormouse.core import procfs
from dormouse.core.folder import FunctionFolder
from dormouse.core.node import nodeprocess
from dormouse.core.node.adminclient import AdminClient
from dormouse.core.node.refusals import CallRefused, Unreachable

START_S: Final = 180.0
STOP_S: Final = 90.0

FAILED_NBYTES: Final = 20_000  # of each log, when what a test did with a node has failed

KEPT: Final = "DORMOUSE_TEST_LOGS"  # a folder in which all logs of each node are kept, by the name of its own


@dataclass(frozen=True)
class HttpAnswer:
    """An HTTP answer; ``body`` is decoded JSON where it is JSON, else text."""

    status: int
    body: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        """The stable error code, or "" for a good answer."""
        return str(self.body["error"]["code"]) if isinstance(self.body, dict) and "error" in self.body else ""

    @property
    def message(self) -> str:
        return str(self.body["error"]["message"]) if self.code else ""


class TestNode:
    """A running node. Use :func:`running_node`."""

    __test__ = False  # not a test class, whatever its name says to pytest

    def __init__(self, directory: Path, config: str, launcher: tuple[str, ...] = (), node: str = "") -> None:
        """``node``: more lines of the section [node]."""
        self.directory = directory
        self.run = directory / "r"
        self.state = directory / "s"
        self._reserved = reserved_port()
        self.port = int(self._reserved.getsockname()[1])
        self.file = directory / "node.toml"
        self.shared = directory / "shared"  # what functions see under its own name, also what comes there later
        self.shared.mkdir()
        text = f'[node]\nname = "test"\nrun = "{self.run}"\nstate = "{self.state}"\nport = {self.port}\n{node}\n'
        read = f'read = ["{self.shared}"]\n'
        config = textwrap.dedent(config)
        if "[sandbox]" in config:
            config = config.replace("[sandbox]\n", f"[sandbox]\n{read}")
        else:
            text += f"[sandbox]\nwarm = []\n{read}"  # most tests need torch alone, and a second counts
        self.file.write_text(text + config)
        self.process: subprocess.Popen[bytes] | OrphanProcess | None = None
        self._launcher = launcher
        self.stderr = directory / "stderr"

    def start(self, *options: str) -> None:
        """``options``: the supervisor's, of this start."""
        command = [
            *self._launcher,
            sys.executable,
            "-P",
            "-m",
            "dormouse.core.node.supervisor",
            str(self.file),
            *options,
        ]
        with self.stderr.open("wb") as sink:
            self.process = subprocess.Popen(command, stderr=sink, stdin=subprocess.DEVNULL)
        self.wait(lambda: (self.run / "t" / "ready").exists(), START_S, "the node to be ready")
        self.wait(lambda: self.http("GET", "/readyz").status == 200, START_S, "/readyz")

    def replace(self, wait_s: float = 60.0, told: Callable[[str], None] = lambda stage: None) -> None:
        """Have the node go over to a new one, of the node file as it is. Raises ConfigError, ProcessFailed; then it
        goes on.
        """
        assert self.process is not None
        OrphanProcess.adopt_all()
        old = self.process
        ready = nodeprocess.replace(str(self.file), None, None, (), wait_s, told)
        self.process = OrphanProcess(ready["pid"])
        assert old.wait(STOP_S) == 0, f"{self.stderr.read_text()}\n{self.logs()}"

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for something that another process does and does not announce; fails with the node's logs.

        A status may lack what the condition looks for while processes start: then it is not so yet.
        """
        end_s = time.monotonic() + seconds
        trouble = ""
        while True:
            try:
                if condition():
                    return
                trouble = ""
            except (OSError, http.client.HTTPException, LookupError, CallRefused, Unreachable) as error:
                trouble = f"; it was not to be seen: {error!r}"
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"the node exited with {self.process.returncode}: {self.stderr.read_text()}")
            if time.monotonic() > end_s:
                raise AssertionError(f"waited {seconds:g} s for {what}{trouble}\n{self.logs()}")
            time.sleep(0.02)

    def logs(self, nbytes: int = 3000) -> str:
        """The end of every log."""
        files = sorted(file for file in (self.state / "logs").glob("*") if file.suffix != ".times")
        return "\n".join(
            f"--- {f.name}\n{f.read_bytes()[-nbytes:].decode(errors='replace')}" for f in files if f.stat().st_size
        )

    # --- requests

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)

    def http(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        timeout_s: float = 120.0,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> HttpAnswer:
        """One request on a connection of its own. Raises OSError or HTTPException as ``http.client`` does."""
        connection = self.connect(timeout_s)
        try:
            data = raw if raw is not None else None if body is None else json.dumps(body).encode()
            connection.request(method, path, data, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            text = response.read().decode()
            came = {name.lower(): value for name, value in response.getheaders()}
        finally:
            connection.close()
        try:
            return HttpAnswer(response.status, json.loads(text), came)
        except json.JSONDecodeError:
            return HttpAnswer(response.status, text, came)

    @property
    def admin(self) -> AdminClient:
        return AdminClient(self.run)

    def deploy(
        self, name: str, source: str, files: Mapping[str, Path | str] | None = None, **settings: Any
    ) -> HttpAnswer:
        """Deploy a function from source text, with these settings alone, and ``files`` beside it: their text, or where
        they are.
        """
        own = self.folder(name)
        (own / f"{name}.py").write_text(textwrap.dedent(source))
        for beside, content in (files or {}).items():
            target = own / beside
            if isinstance(content, str):
                target.write_text(content)
            elif content.is_dir():
                shutil.copytree(content, target, dirs_exist_ok=True)
            else:
                target.unlink(missing_ok=True)
                target.symlink_to(content)
        found = FunctionFolder(own, f"{name}.py", False)
        return _answer(lambda: self.admin.deploy(name, found, settings, reset=["all"]))

    def folder(self, name: str) -> Path:
        """The folder of a function, from which it is deployed."""
        own = self.directory / "f" / name
        own.mkdir(parents=True, exist_ok=True)
        return own

    def deployed(self, name: str, source: str, files: Mapping[str, Path | str] | None = None, **settings: Any) -> None:
        """Deploy and insist."""
        answer = self.deploy(name, source, files, **settings)
        assert answer.status in (200, 201), f"{answer}\n{self.logs()}"

    def invoke(self, name: str, request: Any = None, timeout_s: float = 120.0) -> HttpAnswer:
        return self.http("POST", f"/functions/{name}/invoke", request, timeout_s=timeout_s)

    def told(self, name: str, request: Any = None) -> HttpAnswer:
        """What who may read the function's log is answered, who is at the node."""
        return _answer(lambda: self.admin.invoke(name, json.dumps(request).encode()))

    def result(self, name: str, request: Any = None) -> Any:
        """Invoke and insist."""
        answer = self.invoke(name, request)
        assert answer.status == 200, f"{answer}\n{self.logs()}"
        return answer.body

    def remove(self, name: str) -> HttpAnswer:
        return _answer(lambda: self.admin.remove(name))

    def restart(self, name: str) -> HttpAnswer:
        return _answer(lambda: self.admin.restart(name))

    def log_of(self, name: str) -> str:
        """The end of a function's log."""
        return b"".join(self.admin.logs(name, 200, follow=False)).decode(errors="replace")

    def marked_log(self, name: str) -> bytes:
        """With who printed what (core/logrecords.py)."""
        return b"".join(self.admin.logs(name, 1000, follow=False, marks=True))

    def status(self) -> Any:
        """With the store's part, if it can be had: on a busy machine it may come later than a person would wait."""
        for _ in range(5):
            found = self.admin.status()
            if found.get("store", {}).get("answered"):
                break
        return found

    # --- processes

    def pids(self) -> dict[str, int]:
        """Process id by role, of the supervisor's children."""
        return {role: pid for role, (pid, _) in self._roles().items()}

    def _roles(self) -> dict[str, tuple[int, int]]:
        """``(pid, epoch)`` by role."""
        assert self.process is not None
        found: dict[str, tuple[int, int]] = {}
        for pid in procfs.children(self.process.pid):
            words = procfs.words(pid)
            if "--role" in words:
                found[words[words.index("--role") + 1]] = pid, int(words[words.index("--epoch") + 1])
        return found

    def replaced(self, role: str, pid: int) -> None:
        """Wait until the process ``pid`` has a successor, and until the router knows it: before, the router may still
        call the node ready because it has not noticed the death.
        """

        def known() -> bool:
            successor, epoch = self._roles()[role]
            return successor != pid and self.status()["node"]["peers"].get(role) == epoch

        self.wait(known, START_S, f"{role} to be replaced")

    def descendants(self) -> list[int]:
        """Every process of the node, instances included."""
        assert self.process is not None
        found, todo = [], [self.process.pid]
        while todo:
            children = procfs.children(todo.pop())
            found += children
            todo += children
        return found

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        """Signal a role's process; returns its pid."""
        pid = self.pids()[role]
        os.kill(pid, number)
        return pid

    def kill_all(self) -> None:
        """SIGKILL to every process at once, as when a machine loses power; :meth:`start` finds what is left."""
        assert self.process is not None
        everyone: list[int] = []
        found = [self.process.pid]
        while found:  # none may run on and act on another's death, nor what was forked while others were stopped
            for pid in found:
                signal_process(pid, signal.SIGSTOP)
            everyone += found
            found = [pid for pid in self.descendants() if pid not in everyone]
        for pid in everyone:
            signal_process(pid, signal.SIGKILL)
        self.process.wait()
        end_s = time.monotonic() + STOP_S
        while left := [pid for pid in everyone if _alive(pid)]:
            assert time.monotonic() < end_s, f"still there after SIGKILL: {left}"
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop in order and check that no process, socket or directory is left."""
        assert self.process is not None
        everyone = self.descendants()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_S)
        finally:
            self.process.kill()
        assert self.process.returncode == 0, f"{self.stderr.read_text()}\n{self.logs()}"
        self.expect_nothing_left(everyone)

    def close(self) -> None:
        """Give the port back."""
        self._reserved.close()

    def expect_nothing_left(self, pids: list[int], seconds: float = STOP_S) -> None:
        """No process of ``pids`` lives and the run directory is gone, within ``seconds``."""
        end_s = time.monotonic() + seconds
        while (left := [pid for pid in pids if _alive(pid)]) or self.run.exists():
            assert time.monotonic() < end_s, f"left behind: processes {left}, files {sorted(self.run.rglob('*'))}"
            time.sleep(0.02)


Node = TypeVar("Node", bound=TestNode)


def _answer(act: Callable[[], Any]) -> HttpAnswer:
    """What came of an administrative act, as HTTP would say it."""
    try:
        return HttpAnswer(200, act(), {})
    except CallRefused as error:
        return HttpAnswer(error.status, {"error": {"code": error.code, "message": str(error)}}, {})


def _alive(pid: int) -> bool:
    return procfs.state(pid) not in ("", "Z", "X")


@contextlib.contextmanager
def running_node(
    config: str = '[gpu]\ncount = 2\nmemory = "256MiB"\npoison = true\n',
    launcher: tuple[str, ...] = (),
    node: str = "",
) -> Iterator[TestNode]:
    """A node with two small emulated GPUs that poison what they evict; stopped and checked at the end. ``launcher`` is
    a program that starts the node's, ``node`` more lines of the section [node]."""
    with tempfile.TemporaryDirectory(prefix="dm") as directory:
        os.chmod(directory, 0o755)  # instances have a uid of their own, and sockets and files below it
        with kept_running(TestNode(Path(directory), config, launcher, node)) as running:
            yield running


@contextlib.contextmanager
def kept_running(node: Node) -> Iterator[Node]:
    """The same of a node whose directory is there."""
    try:
        node.start()
        yield node
    except BaseException:
        if node.process is not None:
            node.process.kill()
            node.process.wait()
        print(f"--- the node's logs\n{node.logs(FAILED_NBYTES)}", file=sys.stderr)
        raise
    else:
        node.stop()
    finally:
        if (kept := os.environ.get(KEPT)) is not None:
            shutil.copytree(node.state / "logs", Path(kept) / node.directory.name, dirs_exist_ok=True)
        node.close()
