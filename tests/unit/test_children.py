"""A process of the node that cannot be started as it should be: its log has no place, or the machine has no process."""

import asyncio
import errno
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NoReturn

import pytest

from dormouse.core.node.children import RunningRole
from dormouse.schemas.errors import ProcessFailed


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 120))


def child(directory: Path, exited: Callable[[RunningRole, int], None]) -> RunningRole:
    """A metrics process without a node: it ends as soon as it finds none."""
    return RunningRole(
        "metrics",
        1,
        run=directory,
        link_path=str(directory / "link"),
        python=sys.executable,
        threads=1,
        stderr=directory / "metrics.err",
        inherits={},
        on_message=lambda *_: None,
        on_exit=exited,
    )


def test_a_log_that_has_no_place_keeps_no_process_from_its_work(tmp_path: Path) -> None:
    (tmp_path / "metrics.err").mkdir()  # as little of a file as a full disk has

    async def work() -> None:
        ended = asyncio.get_running_loop().create_future()
        started = child(tmp_path, lambda who, status: ended.set_result(status))
        assert os.readlink(f"/proc/{started.pid}/fd/2") == os.devnull
        assert started.last_words() == ""
        started.kill()
        assert await ended == -9

    run(work())


def test_a_machine_that_starts_no_process_more_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> NoReturn:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", refuses)

    async def work() -> None:
        with pytest.raises(ProcessFailed, match=r"does not start it \(Resource temporarily unavailable\); close other"):
            child(tmp_path, lambda *_: None)
        assert not (tmp_path / "link").exists()

    run(work())
