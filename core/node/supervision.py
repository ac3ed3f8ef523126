"""The processes of a node: started, watched by their sentinels and heartbeats, replaced when they die.

Knows roles and epochs and nothing of GPUs; deaths.py decides what becomes of the node. An executor or a zygote is
replaced alone; the router, the controller and the store hold state that the others refer to, so when one of them dies
all are started anew from the catalogue. Only zygotes stay, which have no other state than their imports: they end their
instances. The TCP socket on which the router listens is the supervisor's: connections that a dying router has not
accepted wait in it for the next one.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, Final

import orjson

from dormouse.core import log
from dormouse.core.config import NodeConfig
from dormouse.core.directories import RunDirectory
from dormouse.core.evidence import EVIDENCE_FD, EvidencePages
from dormouse.core.listening import LISTEN_FD
from dormouse.core.node.children import RunningRole, patience_s
from dormouse.core.node.deaths import Deaths, EndNode, StartAll, StartAlone
from dormouse.core.node.heir import Heirs
from dormouse.core.node.legacies import Legacies
from dormouse.core.node.notify import ServiceManager
from dormouse.core.node.predecessor import Predecessor
from dormouse.core.node.roles import ALONE, ON_DEMAND, kind
from dormouse.core.node.succession import ChildLost, RouterLeft, Stopped
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.sandbox.warming import Warming
from dormouse.core.sandbox.world import ZYGOTE, dormant_worlds, worlds
from dormouse.core.startup import keep_node_config
from dormouse.core.version import this_version
from dormouse.schemas import messages as m
from dormouse.schemas import succession as s
from dormouse.schemas.errors import ConfigError, PeerLost, ProcessFailed

STOPPED_S: Final = 2.5
"""A process that is stopped (SIGSTOP) for so long is dead to the node. Looked at each second: noticed within five."""

STOP_S: Final = 10.0
LEAVE_S: Final = 3.0  # for a router that has lost the controller or the store: a second for answers, and room
END_S: Final = 10.0  # for a zygote to end its instances: milliseconds, but for a machine with much else to do
EPOCHS_APART: Final = 10  # of a node and its successor: more than processes are started before that is decided


class Supervisor:
    """State of a node's processes, by role."""

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
        self.dormant = dormant_worlds(config)
        self.worlds = worlds(config) | self.dormant
        self.roles = ["store", "controller", "router", *worlds(config), *(f"gpu{k}" for k in range(config.gpu_count))]
        self.children: dict[str, RunningRole] = {}
        before = {} if predecessor is None else predecessor.estate.epochs
        self.epochs: dict[str, int] = dict.fromkeys(self.roles, 0) | before
        self._legacies = Legacies({} if predecessor is None else predecessor.given)
        self.loop = asyncio.get_running_loop()
        self.log = log.get_logger()
        self._deaths = Deaths(self.roles, self.worlds)
        self._pauses: dict[str, asyncio.TimerHandle] = {}  # by role that is started again after one
        self._stopping = False
        self._left_out: dict[str, dict[str, str]] = {role: {} for role in self.worlds}  # reasons, by library
        self._evidence = EvidencePages()
        self._restarting_all = False
        self._ended = asyncio.Event()  # a process has, or the instances of a zygote
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
            self._predecessor.serve(self._has_it, self._predecessor_left)
        for role in self.roles:
            self._start(role)
        watch = self.loop.call_later(1.0, self._watch)
        try:
            await self._outcome
        finally:
            watch.cancel()
            await self._stop()

    def _take_charge(self) -> None:
        """The run directory is ours. Raises OSError."""
        self.paths.version.write_text(this_version())
        keep_node_config(self.config)
        if self._heirs is None:
            errors = self.state.logs / "supervisor.err"
            self._heirs = Heirs(self, self.paths.replace, self.service.environment, errors)

    def _say_who(self) -> None:
        """Whom `dormouse down` ends."""
        self.paths.pid.write_text(str(os.getpid()))

    # --- a node that takes over from another

    def _begin_if_all_have_imported(self) -> None:
        children = [self.children.get(role) for role in self.roles]
        if not self._said_ready and all(child is not None and child.imported for child in children):
            self._said_ready = True
            assert self._predecessor is not None
            self._predecessor.say(s.HeirReady())

    def _has_it(self) -> None:
        """Nothing of the old node runs any more but zygotes."""
        try:
            self.directory.make()
            self._take_charge()
        except (ConfigError, OSError, PeerLost) as error:
            self._fail(f"run directory {self.paths.run} cannot be taken over: {error}")
            return
        for child in self.children.values():
            child.begin()

    def _predecessor_left(self) -> None:
        predecessor, self._predecessor = self._predecessor, None
        if predecessor is not None and not predecessor.owned:
            self._fail("the node that was to be replaced has ended, or does not go over")
        elif self._deaths.was_ready:
            self._tell_peers()  # a service manager listens to its main process alone, which is this one now

    # --- a node from which another takes over

    def have_router_leave(self, wait_s: float) -> None:
        if (router := self.children.get("router")) is not None:
            router.send(m.Leave(within_ms=int(wait_s * 1000)))

    def stop_for_heir(self) -> None:
        self._ending = self.loop.create_task(self._stop_for_heir())
        self._ending.add_done_callback(self._stopped_for_heir)

    async def _stop_for_heir(self) -> None:
        """The store is last: nobody writes to what it leaves. The successor's instances get the uids of ours."""
        await self._end_all({"router"} & self.children.keys())
        for role in self.worlds.keys() & self.children.keys():
            self.children[role].end_instances(within_s=END_S)
        await self._end_all(self.children.keys() - self.worlds.keys() - {"store"})
        await self._until(lambda: not any(child.ending_instances for child in self.children.values()))
        if (store := self.children.get("store")) is not None:
            store.send(m.Leave())
        await self._end_all({"store"} & self.children.keys())
        assert self._heirs is not None
        self._heirs.handle(Stopped())

    def _stopped_for_heir(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    def refusal(self) -> str:
        """Why it cannot go over just now, or "". A successor is given what the router and the store have then."""
        roles = [role for role in self.roles if kind(role) not in ALONE]
        missing = [role for role in roles if role not in self.children or not self.children[role].ready]
        return f"{', '.join(missing)} of the node starts; try again when it is up" if missing else ""

    def estate(self) -> tuple[s.Estate, list[int]]:
        """Ours from now on are later epochs, should it come to nothing."""
        estate = s.Estate(
            run=str(self.paths.run),
            state=str(self.state.state),
            epochs=dict(self.epochs),
            generation=self.config.start.generation,
        )
        self.epochs = {role: epoch + EPOCHS_APART for role, epoch in self.epochs.items()}
        fds = [self.listening.fileno(), self.directory.fd, self.state_fd]
        return estate, [*fds, *(self._legacies.heir_end(role) for role in ("router", "store"))]

    def serve_on(self, anew: bool) -> None:
        if not anew or self._stopping:
            return
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        try:
            self._take_charge()
            self._say_who()
        except (ConfigError, OSError, PeerLost) as error:
            self._fail(f"run directory {self.paths.run} cannot be had back: {error}")
            return
        self._restart_all("its successor did not start")
        self._go_on()

    def retire(self, heir_pid: int) -> None:
        self.owns = False
        self.service.main_is(heir_pid)
        self._finish()

    # --- processes

    def _start(self, role: str) -> None:
        epoch = self.epochs[role] = self.epochs[role] + 1
        try:
            self.children[role] = RunningRole(
                role,
                epoch,
                run=self.paths.run,
                link_path=self.paths.link("supervisor", role, epoch),
                python=self.worlds[role].python if role in self.worlds else sys.executable,
                threads=self.config.gpu_threads,
                stderr=self.state.logs / f"{role}.err",
                inherits=self._inherits(role),
                stands_by=self._predecessor is not None and not self._predecessor.owned,
                on_message=self._heard,
                on_exit=self._exited,
            )
        except ProcessFailed as error:
            self.log.error("process_not_started", child=role, epoch=epoch, reason=str(error))
            self._lost(role, str(error), ready=False, blamed=False)
            return
        self.log.info("process_started", child=role, epoch=epoch, pid=self.children[role].pid)

    def _wanted(self, role: str) -> None:
        if (role in ON_DEMAND or role in self.dormant) and role not in self.roles:
            self.roles.append(role)
            self.epochs.setdefault(role, 0)
            self._deaths.add(role)
            if not self._restarting_all and not self._stopping and role not in self.children:
                self._start(role)  # else when the one that was dismissed has ended

    def _inherits(self, role: str) -> dict[str, int]:
        if role == "store":
            return self._legacies.inherits(role)
        if role == "router":
            return {LISTEN_FD: self.listening.fileno()} | self._legacies.inherits(role)
        if kind(role) == "gpu":
            return {EVIDENCE_FD: self._evidence.renew(role)}
        return {}

    def _heard(self, child: RunningRole, message: m.ToSupervisor) -> None:
        if self._predecessor is not None and not self._predecessor.owned:
            self._begin_if_all_have_imported()
        match message:
            case m.Ready():
                child.ready = True
                self._deaths.ready(child.role)
                self._ended.set()
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
            case m.WantRole(role=role):
                self._wanted(role)
            case m.DismissRole(role=role, epoch=epoch):
                dismissed = self.children.get(role)
                if role in self.dormant and role in self.roles and dismissed is not None and dismissed.epoch == epoch:
                    self.roles.remove(role)
                    dismissed.dismissed = True
                    dismissed.send(m.Shutdown())
            case m.Left():
                if self._heirs is not None:
                    self._heirs.handle(RouterLeft())
            case m.Heartbeat():
                pass

    def _tell_peers(self) -> None:
        up, down = {role: child.epoch for role, child in self.children.items() if child.ready}, self._deaths.down
        for child in self.children.values():
            child.send(m.Peers(up=up, down=down))
        if all(role in up or role in down for role in self.roles) and not self._stopping:
            self._deaths.was_ready = self.owns = True
            self._say_ready(up, down)

    def _say_ready(self, up: dict[str, int], down: dict[str, str]) -> None:
        """To whoever waits for the ready file, the service manager, and the node that this one replaces."""
        ready = {
            "pid": os.getpid(),
            "host": self.config.node.host,
            "port": self.listening.getsockname()[1],
            "up": up,
            "left_out": self._left_out[ZYGOTE],
            "down": down,
        }
        temporary = self.paths.trusted / "ready.new"
        temporary.write_bytes(orjson.dumps(ready))
        temporary.rename(self.paths.trusted / "ready")
        reasons = [f"{role} is down: {why}" for role, why in down.items()]
        self.service.ready("; ".join(reasons) or f"all processes are up, port {ready['port']}")
        if self._predecessor is not None:
            self._say_who()  # before that, who ends the old node ends both
            self._predecessor.say(s.HeirServes())

    def _exited(self, child: RunningRole, status: int) -> None:
        if self.children.get(child.role) is child:
            del self.children[child.role]
        self._ended.set()
        if self._stopping or (self._heirs is not None and self._heirs.ends_children):
            return
        if child.dismissed:
            self.log.info("process_dismissed", child=child.role, epoch=child.epoch)
            self._tell_peers()
            if child.role in self.roles and not self._restarting_all:  # wanted again meanwhile
                self._start(child.role)
            return
        words = child.last_words(500)
        self.log.error("process_exited", child=child.role, epoch=child.epoch, status=status, last_words=words)
        if child.role in self.worlds and self._fewer_libraries(child.role) and not self._restarting_all:
            self._start(child.role)
            return
        why = child.failure or f"status {status}: {child.last_words().strip()}"
        self._lost(child.role, why, ready=child.ready, blamed=self._blame(child, status))

    def _lost(self, role: str, why: str, *, ready: bool, blamed: bool) -> None:
        """A process has ended, or could not be started: what becomes of it, and of the node?"""
        if self._predecessor is not None and not self._predecessor.owned:
            self._fail(f"{role} did not start: {why}")
            return
        if self._heirs is not None and kind(role) not in ALONE:
            self._heirs.handle(ChildLost(role))
        now_s = self.loop.time()
        match self._deaths.died(role, why, ready=ready, blamed=blamed, all_start=self._restarting_all, now_s=now_s):
            case EndNode(text=text):
                self._fail(text)
            case StartAlone(pause_s=pause_s):
                self._tell_peers()
                if (waiting := self._pauses.pop(role, None)) is not None:
                    waiting.cancel()
                self._pauses[role] = self.loop.call_later(pause_s, self._start_again, role)
            case StartAll() if self._restarting_all:
                self._go_on()
            case StartAll():
                self._restart_all(role)

    def _restart_all(self, because: str) -> None:
        self.log.error("node_restarts", because=because)
        self._restarting_all = True
        for other in self.children.values():
            match kind(other.role):
                case "router":  # it answers its clients first
                    other.signal(signal.SIGTERM)
                    self.loop.call_later(LEAVE_S, other.kill)
                case "zygote":
                    other.end_instances(within_s=END_S)
                case _:
                    other.kill()

    def _go_on(self) -> None:
        """Start all anew, once nothing of the old ones is left."""
        left = (child for child in self.children.values() if child.role not in self.worlds or child.ending_instances)
        if not self._restarting_all or any(left):
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

    def _fewer_libraries(self, role: str) -> bool:
        """Whether a zygote ended because of a library that its successor will leave out; never for the same twice."""
        found = Warming.read(self.paths.warming(role), role).left_out
        new = {name: reason for name, reason in found.items() if name not in self._left_out[role]}
        for name, reason in new.items():
            self.log.warning("library_left_out", child=role, library=name, reason=reason)
        self._left_out[role] = found
        return bool(new)

    def _start_again(self, role: str) -> None:
        if not self._stopping and not self._restarting_all and role not in self.children:
            self._start(role)

    def _blame(self, child: RunningRole, status: int) -> bool:
        """Tell the router whose command an executor has died of; False if of nobody's."""
        instance, why = self._evidence.blame(child.role, status, child.watchdog)
        if not why:
            return False
        self.log.error("executor_died_of", child=child.role, epoch=child.epoch, instance=instance, reason=why)
        if (router := self.children.get("router")) is not None:
            router.send(m.Blame(instance=instance, text=why))
        return True

    def _watch(self) -> None:
        """Once a second: who is stopped or has been silent, and who has not managed to start?"""
        now_s = self.loop.time()
        self.service.alive()
        for child in list(self.children.values()):
            if (stopped_s := child.look(now_s)) >= STOPPED_S:
                self.log.error("process_stopped", child=child.role, epoch=child.epoch, for_s=stopped_s)
                child.kill()
            if now_s - child.seen_s > patience_s(waits=child.waits, ready=child.ready):
                self.log.error("process_silent", child=child.role, epoch=child.epoch, for_s=now_s - child.seen_s)
                child.watchdog = f"no sign of life for {now_s - child.seen_s:.0f} s"
                child.kill()
        self.loop.call_later(1.0, self._watch)

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
        self._stopping = True
        if self._heirs is not None:
            self._heirs.close()
        if self._ending is not None:
            self._ending.cancel()
        if self.owns:
            self.service.stopping()
        for child in self.children.values():
            if child.stands_by or not self.owns:
                child.kill()
        await self._end_all({"router"} & self.children.keys())
        await self._end_all(set(self.children))

    async def _end_all(self, roles: set[str]) -> None:
        for role in roles:
            self.children[role].send(m.Shutdown())
        try:
            async with asyncio.timeout(STOP_S):
                await self._gone(roles)
        except TimeoutError:
            for role in roles & self.children.keys():
                self.children[role].kill()
            await self._gone(roles)

    async def _gone(self, roles: set[str]) -> None:
        await self._until(lambda: not roles & self.children.keys())

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._ended.clear()
            await self._ended.wait()
