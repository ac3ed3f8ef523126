"""The process that forks runtimes, as its executor sees it: started when it is first needed, and again when it has
died. All that it has forked dies with it.
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Final

from dormouse.core import openmp
from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.schemas import messages as m

ENVIRONMENT: Final = {
    **openmp.WAITING,
    "OPENBLAS_NUM_THREADS": "1",  # else NumPy and SciPy make threads at their import, which no fork has
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a library may ask for GPUs at its import: that must begin nothing
}


class RuntimeZygote:
    """``spawned(number, pidfd)`` is called for each runtime and owns the descriptor; ``gone()`` once all are gone.
    ``cuda``: runtimes have a CUDA device.
    """

    def __init__(self, spawned: Callable[[int, int], None], gone: Callable[[], None], cuda: bool = False) -> None:
        self._spawned, self._gone, self._cuda = spawned, gone, cuda
        self._socket: PacketSocket[m.FromRuntimeZygote, m.ToRuntimeZygote] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def warm(self) -> None:
        """One will be needed."""
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "dormouse.gpuserver.runtime.zygote", str(theirs.fileno())]
        command += ["cuda"] * self._cuda
        environment = {
            **os.environ,
            **ENVIRONMENT,
            "DORMOUSE_PARENT": str(os.getpid()),
        }
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._socket = PacketSocket(ours, m.FromRuntimeZygote)
        self._socket.serve(self._heard, self._died)

    def fork(self, spawn: m.SpawnRuntime, theirs: socket.socket) -> None:
        """With its end of the connection, which is closed here."""
        self.warm()
        assert self._socket is not None
        with theirs:
            self._socket.send(spawn, [theirs.fileno()])

    def _heard(self, message: m.FromRuntimeZygote, fds: list[int]) -> None:
        if isinstance(message, m.RuntimeSpawned) and len(fds) == 1:
            self._spawned(message.number, fds.pop())
        close_all(fds)

    def _died(self) -> None:
        self._socket = None
        self._end()
        self._gone()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self._end()
        if self._socket is not None:
            self._socket.close()
