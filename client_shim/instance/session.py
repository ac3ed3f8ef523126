"""``dormouse run``: links any Python program to a running node, with an instance's identity from the router.

Leases are taken at the first command that computes, and given back at the end or by a watchdog after an idle moment.
The script runs in the user's own process with the user's own rights; nothing is confined here.
"""

import code
import os
import runpy
import sys
import threading
from contextlib import suppress
from typing import Any, Final

import torch

from dormouse.client_shim import torch_device
from dormouse.client_shim.instance import report
from dormouse.client_shim.instance.session_end import EndOfSession
from dormouse.client_shim.node.attachment import attach
from dormouse.client_shim.node.node_backend import NodeBackend
from dormouse.client_shim.stream.stream import Stream
from dormouse.client_shim.torch_face.install import install
from dormouse.core.exits import SESSION_ENDED, UNREACHABLE
from dormouse.core.startup import read_node_config
from dormouse.core.terminal import harmless
from dormouse.schemas.errors import DormouseError, PeerLost

USAGE: Final = "usage: dormouse run [--restart] [-i] [SCRIPT.py [ARGS...]]"


class IdleWatch:
    """Gives the lease back when the program has not used it for a while: other functions wait for the GPU."""

    def __init__(self, stream: Stream, idle_s: float) -> None:
        self._stream = stream
        self._idle_s = idle_s
        self._stop = threading.Event()
        self._seen = 0
        self._thread = threading.Thread(target=self._watch, name="dormouse-idle", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(self._idle_s):
            self.look()

    def look(self) -> None:
        """End the lease if nothing was done since the last look."""
        stream = self._stream
        seen = stream.commands_recorded + stream.answers.round_trips
        if seen != self._seen or not stream.leased:
            self._seen = seen
            return
        if stream.lock.acquire(blocking=False):  # held: the program is waiting for a result
            try:
                give_back(stream)
            finally:
                stream.lock.release()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def give_back(stream: Stream) -> None:
    """End the lease, if one is held; a lost executor has ended it already."""
    try:
        stream.end_lease()
    except Exception as error:  # its END reports any error that a command may raise
        stream.lose_lease()
        if isinstance(stream.backend, NodeBackend):
            stream.backend.lease_lost()
        print(f"dormouse: {harmless(str(error))}", file=sys.stderr)


def main(argv: list[str], run: str) -> int:
    """Run a script, or a prompt. Exit status: the script's; 1 if it raised, 2 if there is no such script, 4 if there is
    no node, 75 if the session has ended before the script.
    """
    interactive = not argv or argv[0] == "-i"
    arguments = argv[1:] if argv[:1] == ["-i"] else argv
    if arguments and not os.path.isfile(arguments[0]):
        print(f"dormouse: {arguments[0]}: no such file\n{USAGE}", file=sys.stderr)
        return 2
    try:
        attachment = attach(run)
        idle_ms = read_node_config(run).limits.idle_ms
    except (DormouseError, OSError) as error:
        print(f"dormouse: {harmless(str(error))}", file=sys.stderr)
        return UNREACHABLE if isinstance(error, PeerLost) else 2
    backend = NodeBackend(attachment.directory, attachment.stream_area, tie=attachment)
    torch_device.hide_gpus()
    stream = install(backend, attachment.device)
    os.register_at_fork(after_in_child=attachment.close)  # the session ends with this process, not with its children
    watch = IdleWatch(stream, idle_ms / 1000)
    end = None if interactive else EndOfSession(attachment)  # a person reads of it, and has names to look at
    pid = os.getpid()
    try:
        status = _run(arguments, interactive)
    finally:
        if os.getpid() == pid:  # else the program has forked, and the lease is its parent's
            if end is not None:
                end.close()
            watch.close()
            if not attachment.over:  # else it was reported to the program
                give_back(stream)
            attachment.close()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpid() == pid and end is not None and (end.interrupted or (status and attachment.over)):
        return SESSION_ENDED
    return status


def _run(arguments: list[str], interactive: bool) -> int:
    names: dict[str, Any] = {"__name__": "__main__"}
    status = 0
    if arguments:
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
        try:
            names = runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as stop:
            if stop.code is not None and not isinstance(stop.code, int):
                print(stop.code, file=sys.stderr)
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except KeyboardInterrupt:
            status = 130
        except Exception as error:  # the outermost frame of the user's program
            print(report.describe(error), file=sys.stderr)
            status = 1
    if interactive:
        with suppress(ImportError):
            import readline  # noqa: F401  (line editing, by being imported)
        banner = f"Python {sys.version.split()[0]}, torch {torch.__version__}: cuda:0 is the node's GPUs"
        code.interact(banner, local=names, exitmsg="")
    return status
