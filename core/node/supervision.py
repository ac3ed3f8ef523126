"""A node's life: its processes watched by their sentinels and heartbeats, and replaced when they die; the node handed
over to a successor, or taken over from its predecessor.

Knows roles and epochs and nothing of GPUs. deaths.py decides about the death of a process, succession.py about a
handover; phase.py has the table of phases. An executor or a zygote is replaced alone; the router, the controller and
the store hold state that the others refer to, so when one of them dies all are started anew from the catalogue. Only
zygotes stay, which have no other state than their imports: they end their instances. The TCP socket on which the router
listens is the supervisor's: connections that a dying router has not accepted wait in it for the next.
"""

import asyncio
import os
import signal
import socket
from typing import Any, Final

import orjson

from dormouse.core import log, wayback
from dormouse.core.config import NodeConfig
from dormouse.core.directories import RunDirectory
from dormouse.core.migrations import expect_not_newer, migrate_with_way_back
from dormouse.core.node import startaudit
from dormouse.core.node.children import RunningRole
from dormouse.core.node.deaths import Deaths, EndNode, StartAll, StartAlone
from dormouse.core.node.heir import Heirs
from dormouse.core.node.notify import ServiceManager
from dormouse.core.node.phase import NodePhase, entered
from dormouse.core.node.predecessor import Predecessor
from dormouse.core.node.registry import Registry
from dormouse.core.node.roles import ALONE, kind
from dormouse.core.node.succession import ChildLost, RouterLeft, Stopped
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.quantities import ended
from dormouse.core.sandbox.world import ZYGOTE
from dormouse.core.startup import keep_node_config
from dormouse.core.version import this_version
from dormouse.core.wholefile import write_whole
from dormouse.schemas import messages as m
from dormouse.schemas import succession as s
from dormouse.schemas.errors import ConfigError, PeerLost, ProcessFailed

WATCH_S: Final = 1.0


class Supervisor:
    """State of a node; that of its processes is the registry's."""

    def __init__(
        self,
        config: NodeConfig,
        directory: RunDirectory,
        listening: socket.socket,
        service: ServiceManager,
        state_fd: int,
        predecessor: Predecessor | None = None,
    ) -> None:
        self.config = config
        self.state_fd = state_fd
        self._predecessor = predecessor  # until all processes are up
        self._said_ready = False  # to it
        self.owns = predecessor is None  # the run directory
        self.service = service
        self.directory = directory
        self.listening = listening
        self.paths = RunPaths(config.run_directory)
        self.state = StatePaths(config.state_directory)
        self._phase = NodePhase.RUNS if predecessor is None else NodePhase.STANDS_BY
        given, epochs = ({}, {}) if predecessor is None else (predecessor.given, predecessor.estate.epochs)
        self._registry = Registry(config, listening, given, epochs, self._heard, self._exited, self._lost)
        self.loop = asyncio.get_running_loop()
        self.log = log.get_logger()
        self._deaths = Deaths(self._registry.roles, self._registry.worlds)
        self._pauses: dict[str, asyncio.TimerHandle] = {}  # by role that is started again after one
        self._outcome: asyncio.Future[None] = self.loop.create_future()
        self._heirs: Heirs | None = None
        self._ending: asyncio.Task[None] | None = None  # all but zygotes, for a successor

    async def run(self) -> None:
        """Live until SIGTERM or SIGINT, or until the node cannot go on. Raises ProcessFailed with the reason."""
        self.loop.set_exception_handler(self._raised)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._finish)
        if self._predecessor is None:
            self._take_charge()
            self._say_who()
        else:
            self._registry.forget_imports()
            self._predecessor.serve(self._has_it, self._predecessor_left)
        self._start_missing()
        watch = self.loop.call_later(WATCH_S, self._watch)
        try:
            await self._outcome
        finally:
            watch.cancel()
            await self._stop()

    def _enter(self, phase: NodePhase) -> None:
        self._phase = entered(self._phase, phase)

    def _take_charge(self) -> None:
        """The run directory is ours. Raises OSError."""
        self.paths.version.write_text(this_version())
        keep_node_config(self.config)
        startaudit.started(self.state, self.config, "up --replace" if self._predecessor is not None else "up")
        if self._heirs is None:
            errors = self.state.logs / "supervisor.err"
            self._heirs = Heirs(self, self.paths.replace, self.service.environment, errors)

    def _say_who(self) -> None:
        """Writes the pid that `dormouse down` ends; as a whole, so that a reader never finds an empty file."""
        write_whole(self.paths.pid, str(os.getpid()).encode(), 0o644)

    # --- a node that takes over from another

    def _begin_if_all_have_imported(self) -> None:
        if not self._said_ready and self._registry.imported:
            self._said_ready = True
            assert self._predecessor is not None
            self._predecessor.say(s.HeirReady())

    def _has_it(self) -> None:
        """Nothing of the old node runs any more but zygotes."""
        try:
            if migrate_with_way_back(self.state):
                self.log.info("state_migrated")
            self.directory.make()
            self._take_charge()
        except (ConfigError, OSError, PeerLost) as error:
            self._fail(f"the directories of the node cannot be taken over: {error}")
            return
        self._enter(NodePhase.RUNS)
        for child in self._registry.children.values():
            child.begin()

    def _predecessor_left(self) -> None:
        predecessor, self._predecessor = self._predecessor, None
        if predecessor is not None and not predecessor.owned:
            self._fail("the node that was to be replaced has ended, or does not go over")
        elif self._deaths.was_ready:
            try:
                wayback.drop(self.state)  # if the old node was killed before it did
            except OSError as error:
                self._fail(f"the way back from a migration cannot be dropped ({error}); free space on its disk")
                return
            self._tell_peers()  # a service manager listens to its main process alone, which is this one now
        else:
            self._say_who()

    # --- a node from which another takes over

    def have_router_leave(self, wait_s: float) -> None:
        self._registry.tell("router", m.Leave(within_ms=int(wait_s * 1000)))

    def stop_for_heir(self) -> None:
        self._enter(NodePhase.GOES_OVER)
        self._ending = self.loop.create_task(self._stop_for_heir())
        self._ending.add_done_callback(self._stopped_for_heir)

    async def _stop_for_heir(self) -> None:
        await self._registry.end_for_heir()
        assert self._heirs is not None
        self._heirs.handle(Stopped())

    def _stopped_for_heir(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def refusal(self) -> str:
        """Why it cannot go over just now, or "". A successor is given what the router and the store have then."""
        roles = [role for role in self._registry.roles if kind(role) not in ALONE]
        missing = [role for role in roles if role not in self._registry.up]
        return f"{', '.join(missing)} of the node starts; try again when it is up" if missing else ""

    def estate(self) -> tuple[s.Estate, list[int]]:
        epochs, ends = self._registry.leave_to_heir()
        estate = s.Estate(
            run=str(self.paths.run),
            state=str(self.state.state),
            epochs=epochs,
            generation=self.config.start.generation,
            goes_back=True,
            drops=True,
        )
        return estate, [self.listening.fileno(), self.directory.fd, self.state_fd, *ends]

    def drop_way_back(self) -> None:
        wayback.drop(self.state)

    def serve_on(self, anew: bool) -> None:
        if not anew or self._phase is NodePhase.ENDS:
            return
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        try:
            if wayback.go(self.state):
                self.log.warning("migration_undone")
            expect_not_newer(self.state)
            self._take_charge()
            self._say_who()
        except (ConfigError, OSError, PeerLost) as error:
            self._fail(f"the directories of the node cannot be had back: {error}")
            return
        self._start_anew("its successor did not start")

    def retire(self, heir_pid: int) -> None:
        self.owns = False
        self.service.main_is(heir_pid)
        self._finish()

    # --- what processes say

    def _heard(self, child: RunningRole, message: m.ToSupervisor) -> None:
        if self._phase is NodePhase.STANDS_BY:
            self._begin_if_all_have_imported()
        match message:
            case m.Ready():
                child.ready = True
                self._deaths.ready(child.role)
                self._registry.changed()
                self.log.info("process_ready", child=child.role, epoch=child.epoch)
                self._tell_peers()
                self._go_on()
            case m.RoleFailed(text=text):
                child.failure = text
            case m.KillRole(role=role, epoch=epoch, text=text):
                self._registry.kill(role, epoch, text)
            case m.WantRole(role=role):
                if self._registry.add(role):
                    self._deaths.add(role)
                    self._start(role)  # else when the one that was dismissed has ended
            case m.DismissRole(role=role, epoch=epoch):
                self._registry.dismiss(role, epoch)
                if role not in self._registry.roles:
                    self._deaths.forget(role)
                    if role not in self._registry.children:  # else when it has ended
                        self._tell_peers()
            case m.Left():
                if self._heirs is not None:
                    self._heirs.handle(RouterLeft())
            case m.Heartbeat():
                pass

    def _tell_peers(self) -> None:
        up, down = self._registry.up, self._deaths.down
        for child in self._registry.children.values():
            child.send(m.Peers(up=up, down=down, ended=self._deaths.ended, left=self._deaths.left))
        if all(role in up or role in down for role in self._registry.roles) and self._phase is not NodePhase.ENDS:
            self._say_ready(up, down)

    def _say_ready(self, up: dict[str, int], down: dict[str, str]) -> None:
        """To whoever waits for the ready file, the service manager, and the node that this one replaces. Until that
        hears of it, it may have to go on: what can fail comes first.
        """
        ready = {
            "pid": os.getpid(),
            "host": self.config.node.host,
            "port": self.listening.getsockname()[1],
            "up": up,
            "left_out": self._registry.left_out[ZYGOTE],
            "down": down,
        }
        temporary = self.paths.trusted / "ready.new"
        try:
            temporary.write_bytes(orjson.dumps(ready))
            temporary.rename(self.paths.trusted / "ready")
            if not self._deaths.was_ready:
                self._say_who()  # before the old node hears of it, who ends that ends both
                if self._predecessor is None or not self._predecessor.estate.drops:
                    wayback.drop(self.state)
        except OSError as error:
            text = f"what the node says of itself cannot be written ({error}); free space on that disk"
            if not self._deaths.was_ready:
                self._fail(text)
                return
            self.log.warning("ready_not_written", reason=text)
        self._deaths.was_ready = self.owns = True
        reasons = [f"{role} is down: {why}" for role, why in down.items()]
        self.service.ready("; ".join(reasons) or f"all processes are up, port {ready['port']}")
        if self._predecessor is not None:
            self._predecessor.say(s.HeirServes())

    # --- starting, and starting again

    def _start(self, role: str) -> None:
        roles, children = self._registry.roles, self._registry.children
        if self._phase.starts_roles and role in roles and role not in children:
            self._registry.start(role, stands_by=self._phase is NodePhase.STANDS_BY)

    def _start_missing(self) -> None:
        for role in list(self._registry.roles):
            self._start(role)

    def _exited(self, child: RunningRole, status: int) -> None:
        if self._phase.wants_ends:
            return
        if child.dismissed:
            self.log.info("process_dismissed", child=child.role, epoch=child.epoch)
            self._tell_peers()
            if child.role in self._registry.roles:  # wanted again meanwhile
                self._start(child.role)
            return
        words, say = child.last_words(500), self.log.error if status else self.log.info
        say("process_exited", child=child.role, epoch=child.epoch, status=status, last_words=words)
        if self._registry.fewer_libraries(child.role) and self._phase.starts_roles:
            self._start(child.role)
            return
        why = child.failure or ": ".join(filter(None, (f"it {ended(status)}", child.last_words().strip())))
        blamed = self._registry.blame(child, status)
        self._lost(child.role, why, ready=child.ready, blamed=blamed, in_order=status == 0)

    def _lost(self, role: str, why: str, *, ready: bool = False, blamed: bool = False, in_order: bool = False) -> None:
        """A process has ended, or could not be started: decide about it, and about the node."""
        if self._phase is NodePhase.STANDS_BY:
            self._fail(f"{role} did not start: {why}")
            return
        if self._heirs is not None and kind(role) not in ALONE:
            self._heirs.handle(ChildLost(role))
        now_s, all_start = self.loop.time(), self._phase is NodePhase.ANEW
        match self._deaths.died(
            role, why, ready=ready, blamed=blamed, all_start=all_start, now_s=now_s, in_order=in_order
        ):
            case EndNode(text=text):
                self._fail(text)
            case StartAlone(pause_s=pause_s):
                self._tell_peers()
                if (waiting := self._pauses.pop(role, None)) is not None:
                    waiting.cancel()
                self._pauses[role] = self.loop.call_later(pause_s, self._start, role)
            case StartAll() if all_start:
                self._go_on()
            case StartAll():
                self._start_anew(role)

    def _start_anew(self, because: str) -> None:
        self.log.error("node_restarts", because=because)
        self._enter(NodePhase.ANEW)
        self._registry.end_soon()
        self._go_on()

    def _go_on(self) -> None:
        """Start all anew, once nothing of the old ones is left."""
        if self._phase is not NodePhase.ANEW or self._registry.lasting:
            return
        self._enter(NodePhase.RUNS)
        try:
            self.directory.make()
        except (ConfigError, OSError) as error:
            self._fail(f"run directory {self.paths.run} cannot be made anew: {error}")
            return
        self._start_missing()

    def _watch(self) -> None:
        self.service.alive()
        self._registry.watch(self.loop.time())
        self.loop.call_later(WATCH_S, self._watch)

    # --- the node's end

    def _finish(self) -> None:
        if not self._outcome.done():
            self._outcome.set_result(None)

    def _raised(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback ends this process, as in an actor."""
        error = context.get("exception")
        self.log.error("supervisor_raised", reason=context.get("message"), exc_info=error)
        self._fail(f"{context.get('message')}: {error!r}")

    def _fail(self, text: str) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(ProcessFailed(text))

    async def _stop(self) -> None:
        """End every child; the router before the others, for it answers its clients and ends its instances while these
        still live, and takes no end of theirs for a fault.
        """
        self._enter(NodePhase.ENDS)
        if self._heirs is not None:
            self._heirs.close()
        if self._ending is not None:
            self._ending.cancel()
        if self.owns:
            self.service.stopping()
        for child in self._registry.children.values():
            if child.stands_by or not self.owns:
                child.kill()
        await self._registry.end({"router"})
        await self._registry.end(set(self._registry.children))
