"""Starting and stopping a node from the command line: the supervisor as a process of its own, its ready file, its
end.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from dormouse.core import procfs
from dormouse.core.config import NodeConfig
from dormouse.core.directories import RunDirectory, expect_apart, open_directory
from dormouse.core.links.fds import PacketSocket
from dormouse.core.nodefile import load_config, named_config
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.quantities import ended
from dormouse.schemas import succession as s
from dormouse.schemas.errors import (
    ConfigError,
    DormouseError,
    PeerLost,
    ProcessFailed,
    RemoteProtocolError,
    Unsafe,
)

START_S: Final = 180.0
"""A first import of torch from a cold disk, in the zygote and in every executor, takes tens of seconds."""

MIN_FREE_NBYTES: Final = 1 << 20
"""Of a disk that takes a supervisor's last words."""

STOP_S: Final = 30.0
POLL_S: Final = 0.05
LOOK_S: Final = 1.0
STOPPED_LOOKS: Final = 3
"""During a handover, the caller checks once a second whether the node's supervisor is stopped (SIGSTOP)."""

SUPERVISOR: Final = "dormouse.core.node.supervisor"


def config_of(file: str | None, node: str | None, run: str | None = None) -> NodeConfig:
    """The configuration that the supervisor will read; ``run`` is its run directory where the file names none. Raises
    ConfigError.
    """
    if file is not None and node is not None:
        raise ConfigError("give a node file or --node, not both; the file has the node's name in [node]")
    config = named_config(node) if node is not None else NodeConfig() if file is None else load_config(file)
    return config.placed(run or "")


def _words(file: str | None, node: str | None) -> list[str]:
    """The supervisor's options for the same node; its directory is another."""
    if node is not None:
        return ["--node", node]
    return [] if file is None else [os.path.abspath(file)]


def running_pid(run: Path) -> int | None:
    """The supervisor's pid, if it lives. After a machine has lost power, its number may be another process's."""
    try:
        pid = int(RunPaths(run).pid.read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return None
    return pid if SUPERVISOR in procfs.words(pid) else None


def foreground(file: str | None, node: str | None, run: str | None, options: Sequence[str] = ()) -> None:
    """Become the supervisor. Does not return."""
    words = [*_words(file, node), *options, *_placed(run), "--plain"]
    os.execv(sys.executable, [sys.executable, "-m", SUPERVISOR, *words])


def start(file: str | None, node: str | None, run: str | None, options: Sequence[str] = ()) -> dict[str, Any]:
    """Start a node, wait until it is ready, and return the contents of its ready file. ``run``: its run directory where
    the file names none; ``options``: the supervisor's, of this start. Raises ConfigError, ProcessFailed.
    """
    config, options = config_of(file, node, run), [*options, *_placed(run)]
    if (pid := running_pid(config.run_directory)) is not None:
        raise ProcessFailed(
            f"a node runs already (pid {pid}) in {config.run_directory}; stop it with `dormouse --run "
            f"{config.run_directory} down`, or give this one another name, port, run and state directory"
        )
    state = StatePaths(config.state_directory)
    expect_apart(config.run_directory, state.state)
    RunDirectory.examine(config.run_directory)
    try:
        if (fd := open_directory(state.state, "state directory", 0o700, links=True)) is not None:
            os.close(fd)
        state.make()
        errors = (state.logs / "supervisor.err").open("w+b")
    except OSError as error:
        raise ConfigError(f"state directory {state.state}: {error.strerror}; set [node] state") from error
    return _launch(config, [*_words(file, node), *options], errors)


def replace(
    file: str | None,
    node: str | None,
    run: str | None,
    options: Sequence[str],
    wait_s: float,
    told: Callable[[str], None],
) -> dict[str, Any]:
    """Have the running node go over to this version and node file; what its ready file says then. Requests that run
    there have ``wait_s`` to end. ``told`` is called with its progress. Raises ConfigError, ProcessFailed: it runs on.
    """
    config, options = config_of(file, node, run), [*options, *_placed(run)]
    paths = RunPaths(config.run_directory)
    if (pid := running_pid(paths.run)) is None:
        raise ProcessFailed(f"no node {config.node.name!r} runs that could be replaced; start it without --replace")
    command = [sys.executable, "-P", "-m", SUPERVISOR, *_words(file, node), *options]
    try:
        said = _asked(paths.replace, s.Replace(command=command, wait_s=wait_s), told, pid)
    except (PeerLost, RemoteProtocolError) as error:
        raise _unanswered(paths.run, pid, str(error)) from error
    if isinstance(said, s.NotReplaced):
        kind = {2: ConfigError, 5: Unsafe}.get(said.status, ProcessFailed)
        raise kind(f"the running node goes on, and was not replaced: {said.text}")
    ready: dict[str, Any] = json.loads((paths.trusted / "ready").read_bytes())
    return ready


def _placed(run: str | None) -> list[str]:
    """The supervisor's option for that. It works elsewhere, so the path is a whole one."""
    return ["--run", os.path.abspath(run)] if run else []


def _asked(path: str, replace: s.Replace, told: Callable[[str], None], pid: int) -> s.Replaced | s.NotReplaced:
    """Asks for the handover, and returns its outcome. Raises PeerLost, RemoteProtocolError; ProcessFailed if the
    supervisor ``pid`` is stopped.
    """
    asker: PacketSocket[s.SaidToAsker, s.Replace] = PacketSocket.connect(path, s.SaidToAsker)
    looks = 0  # in a row at which it was stopped
    try:
        asker.send(replace)
        asker.sock.settimeout(None)
        while looks < STOPPED_LOOKS:
            if not select.select([asker.sock], [], [], LOOK_S)[0]:
                looks = looks + 1 if procfs.state(pid) == "T" else 0
            elif (packet := asker.recv()) is None:
                raise PeerLost("it hung up")
            elif isinstance(said := packet[0], s.Going):
                told(said.text)
            else:
                return said
    finally:
        asker.close()
    raise ProcessFailed(
        f"the running node's supervisor (pid {pid}) is stopped, and was asked to go over: `kill -CONT {pid}` has it go "
        f"on with that, `kill -KILL {pid}` ends it"
    )


def _unanswered(run: Path, pid: int, why: str) -> ProcessFailed:
    """The supervisor hung up without a reply: the error depends on the node that is there now."""
    found = running_pid(run)
    if found == pid:
        return ProcessFailed(
            f"the running node cannot be asked to go over ({why}); is it of a version that could? `dormouse drain`, "
            "`dormouse down`, and then `up`"
        )
    if found is None:
        return ProcessFailed("the node that was to be replaced has ended meanwhile: `dormouse up` starts this one")
    return ProcessFailed(
        f"the node that was to be replaced ended meanwhile, and another has its place (pid {found}): `dormouse status`"
    )


def _launch(config: NodeConfig, words: list[str], errors: Any) -> dict[str, Any]:
    with errors:
        child = subprocess.Popen(
            [sys.executable, "-m", SUPERVISOR, *words],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            start_new_session=True,
            cwd="/",
        )
        try:
            ready = _await_ready(child, config.run_directory / "t" / "ready")
        except KeyboardInterrupt:
            child.terminate()
            child.wait(STOP_S)
            raise
        if ready is not None:
            child.returncode = 0  # it is on its own now: no warning about a living child
            return ready
        if child.poll() is None:
            child.terminate()
            child.wait(STOP_S)
            raise ProcessFailed(f"the node was not ready after {START_S:g} s; see {config.state_directory}/logs")
        errors.seek(0)
        text = errors.read().decode(errors="replace")
        if not text and shutil.disk_usage(state := config.state_directory).free < MIN_FREE_NBYTES:
            raise ProcessFailed(f"the disk of the state directory {state} is full; make room, or set [node] state")
        raise _reason(child.returncode, text)


def _await_ready(child: "subprocess.Popen[bytes]", path: Path) -> dict[str, Any] | None:
    """The contents of the ready file, or None when the child has ended or the time is over."""
    deadline_s = time.monotonic() + START_S
    sentinel = os.pidfd_open(child.pid)
    try:
        while time.monotonic() < deadline_s:
            if path.exists():
                ready: dict[str, Any] = json.loads(path.read_bytes())
                if ready.get("pid") == child.pid:
                    return ready
            if select.select([sentinel], [], [], POLL_S)[0]:
                child.wait()
                return None
    finally:
        os.close(sentinel)
    return None


def _reason(status: int, text: str) -> DormouseError:
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        said = json.loads(lines[-1])
        message = str(said["message"])
    except (IndexError, ValueError, KeyError, TypeError):
        message = "\n".join(lines[-5:]) or f"the supervisor {ended(status)} and said nothing"
    kind = {2: ConfigError, 5: Unsafe}.get(status, ProcessFailed)
    return kind(message)


def stop(run: Path) -> bool:
    """End the node in order; False if none runs. Raises ProcessFailed when it does not end."""
    pid = running_pid(run)
    if pid is None:
        return False
    try:
        sentinel = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        signal.pidfd_send_signal(sentinel, signal.SIGTERM)
        if not select.select([sentinel], [], [], STOP_S)[0]:
            raise ProcessFailed(
                f"the supervisor (pid {pid}) has not ended within {STOP_S:g} s; see its log, then kill it"
            )
    finally:
        os.close(sentinel)
    return True
