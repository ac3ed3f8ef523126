"""Registry of a node's processes: its roles, and the process that each has now. Starts and ends them.

Owns the processes, their epochs, and what they inherit: the listening socket, pages of evidence, and the sockets that
an old node hands over. The supervisor handles their messages and their ends.
"""

import asyncio
import math
import signal
import socket
import sys
from collections.abc import Callable
from typing import Final

from dormouse.core import log
from dormouse.core.config import NodeConfig
from dormouse.core.evidence import EVIDENCE_FD, EvidencePages
from dormouse.core.listening import LISTEN_FD
from dormouse.core.node.children import RunningRole, patience_s
from dormouse.core.node.legacies import Legacies
from dormouse.core.node.roles import ON_DEMAND, kind
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.sandbox.warming import Warming
from dormouse.core.sandbox.worlds import dormant_worlds, worlds
from dormouse.core.startup import read_drained_gpus
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, ProcessFailed

STOPPED_S: Final = 2.5
"""A process that is stopped (SIGSTOP) for so long is dead to the node. Looked at each second: noticed within five."""

AWAY_S: Final = 5.0
"""Between two looks, which are a second apart: so long this process was itself stopped, or had no time. Messages that
others have sent meanwhile are not received yet, and that is no silence.
"""

STOP_S: Final = 10.0
LEAVE_S: Final = 3.0  # for a router that has lost the controller or the store: a second for answers, and room
END_S: Final = 10.0  # for a zygote to end its instances: milliseconds, but for a machine with much else to do
EPOCHS_APART: Final = 10  # of a node and its successor: more than processes are started before that is decided


class Registry:
    """``given``: descriptors, by role, that the predecessor of this node has handed over; ``epochs``: of that one's
    processes. Callbacks are those of :class:`RunningRole`; ``on_failure(role, why)``: of one that could not be started.
    """

    def __init__(
        self,
        config: NodeConfig,
        listening: socket.socket,
        given: dict[str, int],
        epochs: dict[str, int],
        on_message: Callable[[RunningRole, m.ToSupervisor], None],
        on_exit: Callable[[RunningRole, int], None],
        on_failure: Callable[[str, str], None],
    ) -> None:
        self._config = config
        self._listening = listening
        self._paths, self._state = RunPaths(config.run_directory), StatePaths(config.state_directory)
        self.dormant = dormant_worlds(config)
        self.worlds = worlds(config) | self.dormant
        self._gpus = [f"gpu{number}" for number in range(config.gpu_count)]
        left_alone = {f"gpu{number}" for number in read_drained_gpus(config.run_directory)}
        gpus = (role for role in self._gpus if role not in left_alone)
        self.roles = ["store", "controller", "router", *worlds(config), *gpus]
        self.children: dict[str, RunningRole] = {}
        self.epochs: dict[str, int] = dict.fromkeys(self.roles, 0) | epochs
        self.left_out: dict[str, dict[str, str]] = {role: {} for role in self.worlds}  # reasons, by library
        self._legacies = Legacies(given)
        self._evidence = EvidencePages()
        self._looked_s = math.inf
        self._changed = asyncio.Event()  # a process has ended, or the instances of a zygote, or is ready
        self._on_message, self._on_exit, self._on_failure = on_message, on_exit, on_failure
        self._log = log.get_logger()

    # --- who there is

    @property
    def up(self) -> dict[str, int]:
        """Epochs of those that are ready, by role."""
        return {role: child.epoch for role, child in self.children.items() if child.ready}

    @property
    def imported(self) -> bool:
        """All have, also those that stand by."""
        children = [self.children.get(role) for role in self.roles]
        return all(child is not None and child.imported for child in children)

    @property
    def lasting(self) -> bool:
        """Whether anything but idle zygotes is there."""
        return any(role not in self.worlds or child.ending_instances for role, child in self.children.items())

    def add(self, role: str) -> bool:
        """A role that somebody wants from now on; False if it is none of those, or there already."""
        if role in self.roles or not (role in ON_DEMAND or role in self.dormant or role in self._gpus):
            return False
        self.roles.append(role)
        self.epochs.setdefault(role, 0)
        return True

    def dismiss(self, role: str, epoch: int) -> None:
        """Nobody wants a dormant world's zygote for now, or the executor of a GPU, whichever that has."""
        child = self.children.get(role)
        if role not in self.roles or not (role in self._gpus or (role in self.dormant and child is not None)):
            return
        if child is not None:
            if epoch not in (0, child.epoch):
                return
            child.dismissed = True
            child.send(m.Shutdown())
        self.roles.remove(role)

    def changed(self) -> None:
        self._changed.set()

    # --- starting

    def forget_imports(self) -> None:
        """Removes the files about imports of a node of the same generation, which did not come to be."""
        for role in self.worlds:
            self._paths.warming(role, self._config.start.generation).unlink(missing_ok=True)

    def start(self, role: str, stands_by: bool) -> None:
        epoch = self.epochs[role] = self.epochs[role] + 1
        try:
            child = self.children[role] = RunningRole(
                role,
                epoch,
                run=self._paths.run,
                link_path=self._paths.link("supervisor", role, epoch),
                python=self.worlds[role].python if role in self.worlds else sys.executable,
                threads=self._config.gpu_threads,
                stderr=self._state.logs / f"{role}.err",
                inherits=self._inherits(role),
                stands_by=stands_by,
                on_message=self._on_message,
                on_exit=self._exited,
            )
        except (ProcessFailed, PeerLost) as error:
            self._log.error("process_not_started", child=role, epoch=epoch, reason=str(error))
            self._on_failure(role, str(error))
            return
        self._log.info("process_started", child=role, epoch=epoch, pid=child.pid)

    def _inherits(self, role: str) -> dict[str, int]:
        if role == "store":
            return self._legacies.inherits(role)
        if role == "router":
            return {LISTEN_FD: self._listening.fileno()} | self._legacies.inherits(role)
        if kind(role) == "gpu":
            return {EVIDENCE_FD: self._evidence.renew(role)}
        return {}

    def leave_to_heir(self) -> tuple[dict[str, int], list[int]]:
        """Epochs and descriptors. Ours from now on are later epochs, should it come to nothing."""
        epochs = dict(self.epochs)
        self.epochs = {role: epoch + EPOCHS_APART for role, epoch in epochs.items()}
        return epochs, [self._legacies.heir_end(role) for role in ("router", "store")]

    # --- what they are told, and whether they live

    def tell(self, role: str, message: m.FromSupervisor) -> None:
        """If it is there."""
        if (child := self.children.get(role)) is not None:
            child.send(message)

    def kill(self, role: str, epoch: int, why: str) -> None:
        """Another process says that it cannot go on with it."""
        child = self.children.get(role)
        if child is not None and child.epoch == epoch:
            self._log.error("process_killed", child=role, epoch=epoch, reason=why)
            child.look(asyncio.get_running_loop().time())
            if child.stopped_s is None:  # else it could not do otherwise
                child.watchdog = why
            child.kill()

    def watch(self, now_s: float) -> None:
        """Kills processes that are stopped, have been silent, or have not managed to start."""
        away, self._looked_s = now_s - self._looked_s >= AWAY_S, now_s
        for child in list(self.children.values()):
            if away:
                child.seen_s, child.stopped_s = now_s, None
            if (stopped_s := child.look(now_s)) >= STOPPED_S:
                self._log.error("process_stopped", child=child.role, epoch=child.epoch, for_s=stopped_s)
                child.kill()
            if now_s - child.seen_s > patience_s(waits=child.waits, ready=child.ready):
                self._log.error("process_silent", child=child.role, epoch=child.epoch, for_s=now_s - child.seen_s)
                child.watchdog = f"no sign of life for {now_s - child.seen_s:.0f} s"
                child.kill()

    # --- ending

    def _exited(self, child: RunningRole, status: int) -> None:
        if self.children.get(child.role) is child:
            del self.children[child.role]
        self._changed.set()
        self._on_exit(child, status)

    def fewer_libraries(self, role: str) -> bool:
        """Whether a zygote ended because of a library that its successor will leave out; never for the same twice."""
        if role not in self.worlds:
            return False
        found = Warming.read(self._paths.warming(role, self._config.start.generation), role).left_out
        new = {name: reason for name, reason in found.items() if name not in self.left_out[role]}
        for name, reason in new.items():
            self._log.warning("library_left_out", child=role, library=name, reason=reason)
        self.left_out[role] = found
        return bool(new)

    def blame(self, child: RunningRole, status: int) -> bool:
        """Tell the router whose command an executor has died of; False if of nobody's."""
        instance, why = self._evidence.blame(child.role, status, child.watchdog)
        if not why:
            return False
        self._log.error("executor_died_of", child=child.role, epoch=child.epoch, instance=instance, reason=why)
        self.tell("router", m.Blame(instance=instance, text=why))
        return True

    async def end(self, roles: set[str]) -> None:
        """Those of them that are there."""
        for role in roles & self.children.keys():
            self.children[role].send(m.Shutdown())
        try:
            async with asyncio.timeout(STOP_S):
                await self._gone(roles)
        except TimeoutError:
            for role in roles & self.children.keys():
                self.children[role].kill()
            await self._gone(roles)

    def end_soon(self) -> None:
        """All but zygotes: what they hold of each other is lost."""
        for child in self.children.values():
            match kind(child.role):
                case "router":  # it answers its clients first
                    child.signal(signal.SIGTERM)
                    asyncio.get_running_loop().call_later(LEAVE_S, child.kill)
                case "zygote":
                    child.end_instances(within_s=END_S)
                case _:
                    child.kill()

    async def end_for_heir(self) -> None:
        """All but zygotes. The store is last: nobody writes to what it leaves. The successor's instances get the uids
        of ours.
        """
        await self.end({"router"})
        for role in self.worlds.keys() & self.children.keys():
            self.children[role].end_instances(within_s=END_S)
        await self.end(self.children.keys() - self.worlds.keys() - {"store"})
        await self._until(lambda: not any(child.ending_instances for child in self.children.values()))
        self.tell("store", m.Leave())
        await self.end({"store"})

    async def _gone(self, roles: set[str]) -> None:
        await self._until(lambda: not roles & self.children.keys())

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self._changed.clear()
            await self._changed.wait()
