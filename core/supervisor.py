"""The node supervisor: ``python -m dormouse.core.supervisor [NODE.toml] [--without NAME] [--forget-models]``.

Starts every process of a node, watches their sentinels and heartbeats, replaces what dies, and removes the run
directory when it leaves. It knows roles and epochs and nothing of GPUs. An executor or the zygote is replaced alone;
the router, the controller and the store hold state that the others refer to, so when one of them dies all are started
anew from the catalogue. Only the zygote stays, which has no other state than its imports: it ends its instances. The
TCP socket on which the router listens is the supervisor's: connections that a dying router has not accepted wait in it
for the next one.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections import deque
from typing import Final

import msgspec
import orjson
import uvloop

from dormouse.core import exposure, log
from dormouse.core.children import Child, sandbox_python
from dormouse.core.config import NodeConfig, StartSection, load_config
from dormouse.core.directories import RunDirectory, expect_apart, lock, open_directory
from dormouse.core.evidence import EVIDENCE_FD, blame, make_page, read_page
from dormouse.core.gpus import counted
from dormouse.core.link import close_context
from dormouse.core.listening import LISTEN_FD, bind_tcp
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.version import this_version
from dormouse.core.warming import Warming
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError, ProcessFailed, Unsafe

SILENCE_S: Final = 30.0
"""Without a heartbeat for so long a process is taken for hung. Thirty heartbeats: a busy machine must not look like a
dead one.
"""

STOPPED_S: Final = 2.5
"""A process that is stopped (SIGSTOP) for so long is dead to the node. Looked at once a second, so noticed within five.
"""

STOP_S: Final = 10.0
LEAVE_S: Final = 3.0  # for a router that has lost the controller or the store: a second for answers, and room
RESTARTS: Final = 8  # of one role within RESTART_WINDOW_S, before the supervisor gives the role up
RESTART_WINDOW_S: Final = 60.0
START_S: Final = 120.0  # a first `import torch` from a cold disk takes tens of seconds
ALONE: Final = ("gpu", "zygote")
BACKOFF_S: Final = (0.25, 60.0)
"""Pauses before a role that is replaced alone is started again, from its second death within RESTART_WINDOW_S on, or
from the first of those in a row before it was ready; they double. One that keeps dying costs the node its part, not its
life.
"""


class Supervisor:
    """State of a node's processes, by role."""

    def __init__(self, config: NodeConfig, directory: RunDirectory, listening: socket.socket) -> None:
        self.config = config
        self.directory = directory
        self.listening = listening
        self.paths = RunPaths(config.run_directory)
        self.state = StatePaths(config.state_directory)
        self.roles = ["store", "controller", "router", "zygote", *(f"gpu{k}" for k in range(config.gpu_count))]
        self.children: dict[str, Child] = {}
        self.epochs: dict[str, int] = dict.fromkeys(self.roles, 0)
        self.loop = asyncio.get_running_loop()
        self.log = log.get_logger()
        self._down: dict[str, str] = {}  # why roles could not start, until they are ready
        self._failures: dict[str, int] = dict.fromkeys(self.roles, 0)  # deaths in a row before it was ready
        self._deaths: dict[str, deque[float]] = {role: deque(maxlen=RESTARTS) for role in self.roles}
        self._stopping = False
        self._was_ready = False
        self._left_out: dict[str, str] = {}  # reasons, by library that the zygote does not import
        self._evidence: dict[str, int] = {}  # by executor's role: its page
        self._restarting_all = False
        self._started_s = self.loop.time()
        self._empty = asyncio.Event()
        self._outcome: asyncio.Future[None] = self.loop.create_future()

    async def run(self) -> None:
        """Live until SIGTERM or SIGINT, or until the node cannot go on. Raises ProcessFailed with the reason."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._finish)
        for role in self.roles:
            self._start(role)
        watch = self.loop.call_later(1.0, self._watch)
        try:
            await self._outcome
        finally:
            watch.cancel()
            await self._stop()

    def _start(self, role: str) -> None:
        self.epochs[role] += 1
        epoch = self.epochs[role]
        self.children[role] = Child(
            role,
            epoch,
            run=self.paths.run,
            link_path=self.paths.link("supervisor", role, epoch),
            python=sandbox_python(self.config.sandbox.python) if role == "zygote" else sys.executable,
            threads=self.config.gpu_threads,
            stderr=self.state.logs / f"{role}.err",
            inherits=self._inherits(role),
            on_message=self._heard,
            on_exit=self._exited,
        )
        self._empty.clear()
        self.log.info("process_started", child=role, epoch=epoch, pid=self.children[role].pid)

    def _inherits(self, role: str) -> dict[str, int]:
        if role == "router":
            return {LISTEN_FD: self.listening.fileno()}
        if role.startswith("gpu"):
            if (old := self._evidence.pop(role, None)) is not None:
                os.close(old)
            self._evidence[role] = make_page()
            return {EVIDENCE_FD: self._evidence[role]}
        return {}

    def _heard(self, child: Child, message: m.ToSupervisor) -> None:
        match message:
            case m.Ready():
                child.ready = True
                self._down.pop(child.role, None)
                self._failures[child.role] = 0
                self.log.info("process_ready", child=child.role, epoch=child.epoch)
                self._tell_peers()
                self._go_on()
            case m.RoleFailed(text=text):
                child.failure = text
            case m.KillRole(role=role, epoch=epoch, text=text):
                victim = self.children.get(role)
                if victim is not None and victim.epoch == epoch:
                    self.log.error("process_killed", child=role, epoch=epoch, reason=text)
                    victim.look(self.loop.time())
                    if victim.stopped_s is None:  # else it could not do otherwise
                        victim.watchdog = text
                    victim.kill()
            case m.Heartbeat():
                pass

    def _tell_peers(self) -> None:
        up = {role: child.epoch for role, child in self.children.items() if child.ready}
        for child in self.children.values():
            child.send(m.Peers(up=up, down=self._down))
        if all(role in up or role in self._down for role in self.roles) and not self._stopping:
            self._was_ready = True
            port = self.listening.getsockname()[1]
            ready = {
                "pid": os.getpid(),
                "host": self.config.node.host,
                "port": port,
                "up": up,
                "left_out": self._left_out,
                "down": self._down,
            }
            temporary = self.paths.trusted / "ready.new"
            temporary.write_bytes(orjson.dumps(ready))
            temporary.rename(self.paths.trusted / "ready")

    def _exited(self, child: Child, status: int) -> None:
        if self.children.get(child.role) is child:
            del self.children[child.role]
        if not self.children:
            self._empty.set()
        if self._stopping:
            return
        self.log.error(
            "process_exited", child=child.role, epoch=child.epoch, status=status, last_words=child.last_words(500)
        )
        if child.role == "zygote" and self._fewer_libraries() and not self._restarting_all:
            self._start(child.role)
            return
        blamed = self._blame(child, status)
        why = child.failure or f"status {status}: {child.last_words().strip()}"
        if not child.ready and not blamed:
            self._failures[child.role] += 1
            self._down[child.role] = why
        if not self._was_ready and not blamed and not self._can_start_without(child.role):
            failed = self._down | {child.role: why}
            self._fail("; ".join(f"{role} did not start: {failed[role]}" for role in sorted(failed)))
            return
        if self._restarting_all:
            self._go_on()
            return
        alone = child.role.startswith(ALONE)
        now_s = self.loop.time()
        deaths = self._deaths[child.role]
        recent = sum(now_s - death_s < RESTART_WINDOW_S for death_s in deaths)
        if recent == RESTARTS and not alone:
            self._fail(
                f"{child.role} died {RESTARTS + 1} times within {RESTART_WINDOW_S:g} s: {child.last_words().strip()}"
            )
            return
        if not blamed:
            deaths.append(now_s)
        if alone:
            self._tell_peers()
            count = 0 if blamed else min(max(recent, self._failures[child.role]), RESTARTS + 1)
            pause_s = min(BACKOFF_S[0] * 2.0 ** (count - 1), BACKOFF_S[1]) if count else 0.0
            self.loop.call_later(pause_s, self._start_again, child.role)
        else:
            self._restart_all(child.role)

    def _can_start_without(self, role: str) -> bool:
        """A broken GPU, or one that others have filled, keeps no other from work."""
        gpus = [each for each in self.roles if each.startswith("gpu")]
        return role in gpus and any(each not in self._down for each in gpus)

    def _restart_all(self, because: str) -> None:
        self.log.error("node_restarts", because=because)
        self._restarting_all = True
        for other in self.children.values():
            match other.role:
                case "router":  # it answers its clients first
                    other.signal(signal.SIGTERM)
                    self.loop.call_later(LEAVE_S, other.kill)
                case "zygote":
                    other.end_instances(within_s=LEAVE_S)
                case _:
                    other.kill()

    def _go_on(self) -> None:
        """Start all anew, once nothing of the old ones is left."""
        if not self._restarting_all or any(
            child.role != "zygote" or child.ending_instances for child in self.children.values()
        ):
            return
        self._restarting_all = False
        try:
            self.directory.make()
        except (ConfigError, OSError) as error:
            self._fail(f"run directory {self.paths.run} cannot be made anew: {error}")
            return
        for role in self.roles:
            if role not in self.children:
                self._start(role)

    def _fewer_libraries(self) -> bool:
        """Whether the zygote ended because of a library that its successor will leave out; never for the same twice."""
        found = Warming.read(self.paths.warming).left_out
        new = {name: reason for name, reason in found.items() if name not in self._left_out}
        for name, reason in new.items():
            self.log.warning("library_left_out", library=name, reason=reason)
        self._left_out = found
        return bool(new)

    def _start_again(self, role: str) -> None:
        if not self._stopping and not self._restarting_all and role not in self.children:
            self._start(role)

    def _blame(self, child: Child, status: int) -> bool:
        """Tell the router whose command an executor has died of; False if of nobody's."""
        if child.role not in self._evidence:
            return False
        found = read_page(self._evidence[child.role])
        why = blame(found, status, child.watchdog)
        if not why:
            return False
        self.log.error("executor_died_of", child=child.role, epoch=child.epoch, instance=found.instance, reason=why)
        if (router := self.children.get("router")) is not None:
            router.send(m.Blame(instance=found.instance, text=why))
        return True

    def _watch(self) -> None:
        """Once a second: who is stopped or has been silent, and who has not managed to start?"""
        now_s = self.loop.time()
        for child in list(self.children.values()):
            if (stopped_s := child.look(now_s)) >= STOPPED_S:
                self.log.error("process_stopped", child=child.role, epoch=child.epoch, for_s=stopped_s)
                child.kill()
            if now_s - child.seen_s > (SILENCE_S if child.ready else START_S):
                self.log.error("process_silent", child=child.role, epoch=child.epoch, for_s=now_s - child.seen_s)
                child.watchdog = f"no sign of life for {now_s - child.seen_s:.0f} s"
                child.kill()
        self.loop.call_later(1.0, self._watch)

    def _finish(self) -> None:
        if not self._outcome.done():
            self._outcome.set_result(None)

    def _fail(self, text: str) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(ProcessFailed(text))

    async def _stop(self) -> None:
        """End every child; router first, so that it can end its instances while the zygote still lives."""
        self._stopping = True
        for child in list(self.children.values()):
            child.send(m.Shutdown())
        if not self.children:
            self._empty.set()
        try:
            await asyncio.wait_for(self._empty.wait(), STOP_S)
        except TimeoutError:
            for child in list(self.children.values()):
                child.kill()
            await self._empty.wait()


async def serve(config: NodeConfig) -> None:
    """Run a node until it is told to stop. Raises ConfigError, ProcessFailed."""
    paths, state = RunPaths(config.run_directory), StatePaths(config.state_directory)
    expect_apart(paths.run, state.state)
    state_fd = open_directory(state.state, "state directory", 0o700, links=True)
    assert state_fd is not None
    try:
        directory = RunDirectory.claim(paths.run)
        try:
            lock(state_fd, state.state, "state directory")
            directory.empty()
            directory.make()
            state.make()
            paths.version.write_text(this_version())
            paths.pid.write_text(str(os.getpid()))
            paths.node_json.write_bytes(msgspec.json.encode(config))
            log.configure("supervisor", state.role_log("supervisor"))
            with bind_tcp(config.node.host, config.node.port) as listening:
                await Supervisor(config, directory, listening).run()
        finally:
            directory.remove()
            directory.close()
    finally:
        os.close(state_fd)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 stopped in order, 1 the node failed, 2 the configuration cannot be used, 5 it would be unsafe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--forget-models", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        config = load_config(arguments.file) if arguments.file else NodeConfig()
        start = StartSection(without=tuple(arguments.without), forget_models=arguments.forget_models)
        config = counted(msgspec.structs.replace(config, start=start))
        exposure.check(config)
        uvloop.run(serve(config))
        return 0
    except ConfigError as error:
        sys.stderr.write(orjson.dumps({"error": "config", "message": str(error)}).decode() + "\n")
        return 5 if isinstance(error, Unsafe) else 2
    except ProcessFailed as error:
        sys.stderr.write(orjson.dumps({"error": "failed", "message": str(error)}).decode() + "\n")
        return 1
    finally:
        close_context()


if __name__ == "__main__":
    sys.exit(main())
