"""The instance's end of its link to an executor, where no executor is."""

from pathlib import Path

import pytest

from dormouse.client_shim.node.executor_channel import ExecutorChannel
from dormouse.client_shim.node.router_port import RouterPort


def test_a_frame_that_cannot_leave_is_an_error_and_not_silence(tmp_path: Path) -> None:
    """Nobody but this end knows that the executor will never answer it."""
    (tmp_path / "file").touch()
    channel = ExecutorChannel(f"{tmp_path}/file/gpu0.1", RouterPort(f"{tmp_path}/router", None), lambda: None)
    with pytest.raises(ConnectionError, match=r"cannot connect .*gpu0\.1: .*Not a directory"):
        channel.send(b"frame")
