"""Who asks a node to go over: the words of the command, and a supervisor that is stopped or has left."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dormouse.core import procfs
from dormouse.core.node import nodeprocess, supervisor
from dormouse.core.paths import RunPaths
from dormouse.schemas import succession as s
from dormouse.schemas.errors import PeerLost, ProcessFailed


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A process that is taken for a node's supervisor, and where it listens; it says nothing."""
    words = [sys.executable, "-c", "print(flush=True); input()", nodeprocess.SUPERVISOR]
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        process.stdout.readline()
        path = str(tmp_path / "replace")
        listening.bind(path)
        listening.listen()
        run = RunPaths(tmp_path)
        run.make()
        run.pid.write_text(str(process.pid))
        yield process.pid, path
        process.kill()


ASK = s.Replace(command=["python"], wait_s=1.0)


def test_one_that_is_stopped_is_named(there: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pid, path = there
    monkeypatch.setattr(nodeprocess, "LOOK_S", 0.01)
    os.kill(pid, signal.SIGSTOP)
    while procfs.state(pid) != "T":
        os.sched_yield()
    with pytest.raises(ProcessFailed, match=rf"\(pid {pid}\) is stopped.*`kill -CONT {pid}`"):
        nodeprocess._asked(path, ASK, lambda _: None, pid)


def test_what_is_there_when_nobody_has_answered(there: tuple[int, str], tmp_path: Path) -> None:
    pid, _ = there
    assert "version that could? `dormouse drain`" in str(nodeprocess._unanswered(tmp_path, pid, "it hung up"))
    assert f"another has its place (pid {pid})" in str(nodeprocess._unanswered(tmp_path, pid + 1, "it hung up"))
    RunPaths(tmp_path).pid.unlink()
    assert "has ended meanwhile: `dormouse up`" in str(nodeprocess._unanswered(tmp_path, pid, "it hung up"))


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(PeerLost):
        nodeprocess._asked(str(tmp_path / "replace"), ASK, lambda _: None, os.getpid())


def test_a_node_that_is_named_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert nodeprocess._words(None, "chat") == ["--node", "chat"]
    assert nodeprocess._words("node.toml", None) == [os.path.abspath("node.toml")]
    assert nodeprocess._words(None, None) == []
    assert nodeprocess.config_of(None, "chat").node.name == "chat"
    assert supervisor.main(["--node", "Not a name"]) == 2
    assert "--node Not a name" in capsys.readouterr().err
