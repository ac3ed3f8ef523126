"""Which node runs, as others read it."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dormouse.core.node.supervision import Supervisor


def test_a_pid_that_is_said_again_is_never_half_there(tmp_path: Path) -> None:
    """Who reads it in that moment would be told that no node runs."""
    path = tmp_path / "supervisor.pid"
    node: Any = SimpleNamespace(paths=SimpleNamespace(pid=path))
    Supervisor._say_who(node)
    with path.open() as reading:
        Supervisor._say_who(node)
        assert reading.read() == str(os.getpid())
        assert os.fstat(reading.fileno()).st_ino != path.stat().st_ino
    assert path.read_text() == str(os.getpid())
    assert path.stat().st_mode & 0o777 == 0o644
    assert os.listdir(tmp_path) == ["supervisor.pid"]
