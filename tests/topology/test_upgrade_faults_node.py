"""What an operator may meet at night with `dormouse up --replace`: who asks, the old node or the new one is killed, is
stopped, has no disk or does not import; a state directory of an older version. There is a node that serves afterwards,
or it is said why not.

A request that runs holds the old node at the stage "requests end" for as long as a test likes.
"""

import json
import os
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest
from held_requests import FUNCTION, held

from benchmarks.nodes.orphans import OrphanProcess
from benchmarks.nodes.testnode import TestNode, kept_running, running_node
from dormouse.core import procfs, wayback
from dormouse.core.node import nodeprocess
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.schemas.errors import ProcessFailed

pytestmark = pytest.mark.timeout(400)

CONFIG = '[gpu]\ncount = 1\nmemory = "64MiB"\nthreads = 1\n'
CERTIFICATES = Path(__file__).parents[1] / "certificate"
STAGE = "requests end"
OLD = '{"version": 0, "dormouse": "an older one"}'


def at_stage(act: Callable[[], None], stage: str = STAGE) -> Callable[[str], None]:
    """For who is told how far a node has come."""
    return lambda at: act() if at == stage else None


def answers(node: TestNode) -> bool:
    return bool(node.invoke("f", {"x": 1}).body == {"sum": 4.0, "had": 1})


def heir_of(node: TestNode) -> int:
    assert node.process is not None
    found: list[int] = []

    def there() -> bool:
        assert node.process is not None
        found[:] = [pid for pid in procfs.children(node.process.pid) if "--succeed" in procfs.words(pid)]
        return len(found) == 1

    node.wait(there, 60, "the new node's supervisor")
    return found[0]


def ready_pid(node: TestNode) -> int:
    return int(json.loads((RunPaths(node.run).trusted / "ready").read_bytes())["pid"])


def taken_over(node: TestNode) -> None:
    """Another node has the place of that which was started, and is this test's from now on."""
    assert node.process is not None
    old, node.process = node.process, None
    node.wait(lambda: ready_pid(node) != old.pid, 120, "the new node")
    old.wait(60)
    node.process = OrphanProcess(ready_pid(node))
    node.wait(lambda: answers(node), 120, "answers")
    assert nodeprocess.running_pid(node.run) == node.process.pid


def ask(node: TestNode, told: Callable[[str], None]) -> None:
    nodeprocess.replace(str(node.file), None, None, (), 300.0, told)


def test_two_who_ask_at_once() -> None:
    """The second is told, and the first goes on."""
    with running_node(CONFIG) as node:
        node.deployed("f", FUNCTION)
        stages = list[str]()

        def told(stage: str) -> None:
            stages.append(stage)
            if stage == "imports":
                with pytest.raises(ProcessFailed, match=r"goes on, .* the node is being replaced already"):
                    ask(node, lambda _: None)

        node.replace(told=told)
        assert stages == ["imports", "requests end", "the old processes end", "the new processes start", "done"]
        assert answers(node)


@pytest.mark.parametrize("stage", ["imports", STAGE, "the new processes start"])
def test_who_asked_is_killed_and_the_node_goes_over_all_the_same(stage: str) -> None:
    with running_node(CONFIG) as node:
        OrphanProcess.adopt_all()
        node.deployed("f", FUNCTION)
        command = [sys.executable, "-P", "-m", "dormouse.core.cli.main", "up", "--replace", str(node.file)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as asker:
            assert asker.stderr is not None
            said = next(line for line in asker.stderr if line.strip() == stage)
            asker.kill()
        assert (said.strip(), asker.returncode) == (stage, -signal.SIGKILL)
        taken_over(node)


ROLE = """
import os, sys
if "gpu0" in sys.orig_argv:
    os.write(2, b"ImportError: a file of the new version is broken\\n")
    os._exit(1)
"""


@pytest.mark.parametrize("whose", ["supervisor", "executor"])
def test_a_version_that_does_not_import_is_said_and_nobody_notices(
    whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_node(CONFIG) as node:
        node.deployed("f", FUNCTION)
        processes = node.pids()
        (tmp_path / "sitecustomize.py").write_text(ROLE)
        python = tmp_path / "python"
        broken = "import dormouse.core.broken" if whose == "supervisor" else ""
        run = f'exec {sys.executable} -c "{broken}"' if broken else f'exec {sys.executable} "$@"'
        python.write_text(f"#!/bin/sh\nexport PYTHONPATH={tmp_path}\n{run}\n")
        python.chmod(0o755)
        error = (
            "No module named 'dormouse.core.broken'" if broken else "gpu0 did not start: .*of the new version is broken"
        )
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(ProcessFailed, match=f"(?s)goes on, .*{error}"):
            ask(node, lambda _: None)
        assert node.pids() == processes
        assert answers(node)


def test_an_old_node_that_is_killed_before_it_goes_over_is_said_to_have_ended() -> None:
    with running_node(CONFIG) as node:
        node.deployed("f", FUNCTION)
        assert node.process is not None
        old = node.process
        with held(node):
            everyone = node.descendants()

            def kill() -> None:
                everyone.extend([heir_of(node), *procfs.children(heir_of(node))])
                old.kill()

            with pytest.raises(ProcessFailed, match="has ended meanwhile: `dormouse up` starts this one"):
                ask(node, at_stage(kill))
        old.wait(60)
        node.process = None
        node.wait(lambda: all(procfs.state(pid) in ("", "Z", "X") for pid in everyone), 60, "the end of all processes")
        node.start()
        node.wait(lambda: answers(node), 120, "answers")


def test_an_old_node_that_is_killed_once_it_has_gone_over_leaves_one_that_serves() -> None:
    """The new one is stopped until then; what it finds is that all is its own."""
    with running_node(CONFIG) as node:
        OrphanProcess.adopt_all()
        node.deployed("f", FUNCTION)
        assert node.process is not None
        old = node.process
        with held(node) as request:

            def stop() -> None:
                heirs.append(heir_of(node))
                os.kill(heirs[0], signal.SIGSTOP)
                request.go()

            def kill() -> None:
                # What it is told is said before it acts: it has acted when it waits for the new one.
                node.wait(lambda: not os.path.exists(RunPaths(node.run).replace), 60, "the new one's turn")
                node.wait(lambda: procfs.state(old.pid) == "S", 60, "the old one to have said so")
                old.kill()
                os.kill(heirs[0], signal.SIGCONT)

            heirs = list[int]()
            with pytest.raises(ProcessFailed, match="ended meanwhile"):
                ask(node, lambda at: stop() if at == STAGE else kill() if at == "the new processes start" else None)
            assert request.answer().status == 200
        taken_over(node)
        assert node.process.pid == heirs[0]


def test_an_old_node_that_is_stopped_is_said_and_goes_over_later() -> None:
    with running_node(CONFIG) as node:
        OrphanProcess.adopt_all()
        node.deployed("f", FUNCTION)
        assert node.process is not None
        old = node.process.pid
        with held(node) as request:
            with pytest.raises(ProcessFailed, match=rf"\(pid {old}\) is stopped.*`kill -CONT {old}` has it go on"):
                ask(node, at_stage(lambda: os.kill(old, signal.SIGSTOP)))
            assert procfs.state(old) == "T"
            os.kill(old, signal.SIGCONT)
            request.go()
            assert request.answer().body == {"sum": 4.0, "had": 7}
        taken_over(node)


NOT_ASIDE = "what its migration changes could not be put aside"


@pytest.mark.parametrize(
    ("version", "most_nbytes", "says"),
    [(None, 20, "cannot be taken over"), (OLD, 20, NOT_ASIDE), (OLD, 1024, "cannot be taken over")],
    ids=["no migration", "before a migration", "after a migration"],
)
def test_a_disk_that_is_full_as_the_node_goes_over_leaves_the_old_one(
    version: str | None, most_nbytes: int, says: str
) -> None:
    """Of all that the new supervisor writes, the node's configuration alone has more than 1024 bytes. Where the state
    directory has been migrated by then, that is undone.
    """
    with running_node(CONFIG) as node:
        node.deployed("f", FUNCTION)
        assert node.process is not None
        old, file = node.process, node.state / "version"
        if version is not None:
            file.write_text(version)
        found = file.read_text()
        with held(node) as request:

            def fill() -> None:
                resource.prlimit(heir_of(node), resource.RLIMIT_FSIZE, (most_nbytes, resource.RLIM_INFINITY))
                request.go()

            with pytest.raises(ProcessFailed, match=rf"goes on, .*{says}.*File too large"):
                ask(node, at_stage(fill))
            assert request.answer().status == 200
        assert node.process is old
        node.wait(lambda: answers(node), 120, "answers")
        assert file.read_text() == found
        assert not (node.state / "before").exists()
        assert ("migration_undone" in node.logs(1 << 20)) == (most_nbytes > 20)
        node.replace()
        assert answers(node)
        assert json.loads(file.read_text())["version"] == 1
        assert not (node.state / "before").exists()


@contextmanager
def heir_with(folder: Path, code: str) -> Iterator[None]:
    """A new node's supervisor runs this code before its own."""
    (folder / "sitecustomize.py").write_text(code)
    python = folder / "python"
    path = f"{folder}${{PYTHONPATH:+:$PYTHONPATH}}"
    python.write_text(f'#!/bin/sh\nexport PYTHONPATH={path}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", str(python))
        yield


NOT_READY = """
import pathlib, sys
if "--succeed" in sys.orig_argv:
    write = pathlib.Path.write_bytes

    def full(self, data):
        if self.name == "ready.new":
            raise OSError(28, "No space left on device", str(self))
        return write(self, data)

    pathlib.Path.write_bytes = full
"""


@pytest.mark.parametrize("migrates", [False, True])
def test_a_new_node_that_cannot_say_that_it_is_ready_leaves_the_old_one_its_directories(
    migrates: bool, tmp_path: Path
) -> None:
    """All of its processes are up by then, and the old ones have ended."""
    with running_node(CONFIG) as node:
        node.deployed("f", FUNCTION)
        assert node.process is not None
        old, file = node.process, node.state / "version"
        if migrates:
            file.write_text(OLD)
        found = file.read_text()
        says = r"goes on, .*cannot be written \(.*No space left.*\); free space"
        with heir_with(tmp_path, NOT_READY), pytest.raises(ProcessFailed, match=says):
            ask(node, lambda _: None)
        assert node.process is old
        node.wait(lambda: answers(node), 120, "answers")
        assert file.read_text() == found
        assert not (node.state / "before").exists()
        node.replace()
        assert answers(node)
        assert json.loads(file.read_text())["version"] == 1


KILLED = """
import os, signal, sys, time
if "--succeed" in sys.orig_argv:
    from dormouse.core import procfs
    from dormouse.core.node import predecessor

    say, old = predecessor.Predecessor.say, os.getppid()

    def killed(self, message):
        if type(message).__name__ == "HeirServes":
            if %r:  # it has said so, and the old node hears of it when it is gone
                heir = os.getpid()
                os.kill(old, signal.SIGSTOP)
                while procfs.state(old) != "T":
                    time.sleep(0.01)
                say(self, message)
                if os.fork() == 0:
                    while os.getppid() == heir:
                        time.sleep(0.01)
                    os.kill(old, signal.SIGCONT)
                    os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        say(self, message)

    predecessor.Predecessor.say = killed
"""


@pytest.mark.parametrize("said", [False, True], ids=["before it says that it serves", "before that is heard"])
def test_a_new_node_that_is_killed_when_it_serves_leaves_the_old_one(said: bool, tmp_path: Path) -> None:
    """It has migrated the state directory, of which the old one makes nothing."""
    with running_node(CONFIG) as node:
        node.deployed("f", FUNCTION)
        assert node.process is not None
        old, file = node.process, node.state / "version"
        file.write_text(OLD)
        # its text says why, or that the old one is stopped
        with heir_with(tmp_path, KILLED % said), pytest.raises(ProcessFailed):
            ask(node, lambda _: None)
        node.wait(lambda: "migration_undone" in node.logs(1 << 20), 120, "the old node to go on")
        node.wait(lambda: answers(node), 120, "answers")
        assert node.process is old
        assert old.poll() is None
        assert (file.read_text(), (node.state / "before").exists()) == (OLD, False)
        node.replace()
        assert answers(node)
        assert (json.loads(file.read_text())["version"], (node.state / "before").exists()) == (1, False)


def test_a_machine_that_ends_before_the_new_node_serves_starts_with_what_was_there() -> None:
    """As it is then: migrated, with a way back."""
    with running_node(CONFIG) as node:
        node.deployed("f", FUNCTION)
        state = StatePaths(node.state)
        found = state.version.read_bytes()
        node.kill_all()
        wayback.keep(state, [state.version.name])
        state.version.write_text('{"version": 1000}')
        node.start()
        assert state.version.read_bytes() == found
        assert not state.before.exists()
        node.wait(lambda: answers(node), 120, "answers")


# --- TLS: nothing of a connection can go over but its end


class TlsNode(TestNode):
    """Served with the certificate that its node file names, for clients that trust both."""

    __test__ = False

    @staticmethod
    def context() -> ssl.SSLContext:
        found = ssl.create_default_context(cafile=str(CERTIFICATES / "cert.pem"))
        found.load_verify_locations(str(CERTIFICATES / "other-cert.pem"))
        return found

    def connect(self, timeout_s: float = 120.0) -> HTTPSConnection:
        return HTTPSConnection("localhost", self.port, timeout=timeout_s, context=self.context())


def asked(connection: HTTPSConnection, x: int, **more: str) -> tuple[int, Any, str | None]:
    connection.request(
        "POST", "/functions/f/invoke", json.dumps({"x": x, **more}), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read()), answer.getheader("connection")


def served_with(connection: HTTPSConnection) -> bytes:
    if connection.sock is None:
        connection.connect()
    assert isinstance(connection.sock, ssl.SSLSocket)
    return connection.sock.getpeercert(binary_form=True) or b""


def certificate(name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((CERTIFICATES / name).read_text())


def test_with_tls_requests_under_way_are_answered_and_the_next_handshake_is_with_the_new_certificate() -> None:
    """Who is idle is sent away, who connects meanwhile waits for the new node."""
    with tempfile.TemporaryDirectory(prefix="dm") as directory, ThreadPoolExecutor(8) as pool:
        os.chmod(directory, 0o755)
        for name in ("cert.pem", "key.pem", "other-cert.pem", "other-key.pem"):
            shutil.copy(CERTIFICATES / name, directory)
        section = f'tls_cert = "{directory}/cert.pem"\ntls_key = "{directory}/key.pem"\n'
        with kept_running(TlsNode(Path(directory), CONFIG, node=section)) as node:
            node.deployed("f", FUNCTION)
            go, waiting = node.shared / "go", list[Future[tuple[int, Any, str | None]]]()
            kept, idle, new = [node.connect() for _ in range(3)], node.connect(), node.connect()
            for connection in (*kept, idle):
                assert asked(connection, 1) == (200, {"sum": 4.0, "had": 1}, None)
                assert served_with(connection) == certificate("cert.pem")
            under_way = [pool.submit(asked, each, 2, until=str(go)) for each in kept]
            node.wait(lambda: node.status()["node"]["requests_open"] == 3, 60, "requests under way")
            text = node.file.read_text()
            node.file.write_text(text.replace("cert.pem", "other-cert.pem").replace("key.pem", "other-key.pem"))

            def told(stage: str) -> None:
                if stage == STAGE:
                    assert idle.sock is not None
                    assert idle.sock.recv(1) == b"", "it is sent away, in order"
                    go.touch()
                elif stage == "the old processes end":
                    waiting.append(pool.submit(asked, new, 3))

            node.replace(told=told)
            assert [each.result() for each in under_way] == [(200, {"sum": 4.0, "had": 2}, "close")] * 3
            assert [each.result() for each in waiting] == [(200, {"sum": 4.0, "had": 3}, None)]
            for connection in kept:
                assert asked(connection, 4) == (200, {"sum": 4.0, "had": 4}, None)
                assert served_with(connection) == certificate("other-cert.pem")
            for connection in (*kept, idle, new):
                connection.close()
