"""Processes that another one has started and left to us, as a node that has been replaced leaves its successor."""

import contextlib
import ctypes
import os
import signal
import time
from typing import Final

WAIT_S: Final = 90.0
"""A node that stops in order takes seconds; a busy machine, ten times that."""

_PR_SET_CHILD_SUBREAPER: Final = 36


class OrphanProcess:
    """A process that another one has started and left to us, with what is needed of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    @staticmethod
    def adopt_all() -> None:
        """From now on this process is the parent of what its descendants leave."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # its first parent is there yet
                return None
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = WAIT_S) -> int:
        end_s = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < end_s, f"process {self.pid} has not ended"
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal_process(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def signal_process(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself, or with its parent
        os.kill(pid, number)
