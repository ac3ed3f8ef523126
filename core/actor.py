"""The frame of every node process: command line, supervisor link, heartbeat, shutdown.

An actor owns its state in one asyncio loop; subclasses open their links in :meth:`Actor.start` and react to messages.
Slow work is a task of ``self.tasks`` that ends in a call back into the actor. Any exception that reaches the loop ends
the process: the supervisor replaces it, because state that surprised us once is not to be trusted.
"""

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Coroutine
from typing import Any, ClassVar, Final

import uvloop

from dormouse.core import log
from dormouse.core.config import NodeConfig
from dormouse.core.links.zmq_link import ZmqLink, close_context
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.standby import await_turn
from dormouse.core.startup import die_with_parent, parse_arguments, read_node_config
from dormouse.schemas import messages as m
from dormouse.schemas.errors import DormouseError

HEARTBEAT_S: Final = 1.0
LAST_WORD_S: Final = 10.0
"""For the reason of a failed start to leave this process: as long as the supervisor waits for one that stops."""


class Actor:
    """Base of router, controller, store and executors.

    Attributes:
        role: this process's name on the node, e.g. ``gpu0``.
        epoch: how many times this role has been started.
        peers: epoch of every role that is up, as last sent by the supervisor.
    """

    parent_death_signal: ClassVar[int] = signal.SIGKILL

    def __init__(self, role: str, epoch: int, config: NodeConfig) -> None:
        self.role = role
        self.epoch = epoch
        self.config = config
        self.paths = RunPaths(config.run_directory)
        self.state = StatePaths(config.state_directory)
        self.peers: dict[str, int] = {}
        self.down: dict[str, str] = {}
        self.ended: dict[str, tuple[int, float]] = {}
        self.left: dict[str, tuple[int, float]] = {}
        self.leaving = False  # a successor takes over
        self.orderly = False  # the supervisor has told us to stop, and will see to the rest
        self.log = log.get_logger()
        self.loop = asyncio.get_running_loop()
        self._start_failed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = self.loop.create_future()

    async def start(self) -> None:
        """Bind and connect what is needed; Ready is said when this returns."""

    def peers_changed(self, before: dict[str, int]) -> None:
        """``self.peers`` is new; ``before`` is what it was."""

    def blamed(self, blame: m.Blame) -> None:
        """An executor has died of an instance's commands. Only the router is told."""

    def leave(self, within_s: float) -> None:
        """A successor takes over. Only the router and the store are told."""

    async def stop(self) -> None:
        """Close everything; called once, whatever the reason."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run slow work beside the loop; an exception in it ends the process like one in the loop itself."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def fail(self, error: BaseException) -> None:
        """End this process because of ``error``."""
        if not self._stopping.done():
            self._stopping.set_exception(error)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _on_supervisor(self, message: m.FromSupervisor) -> None:
        if self._start_failed:
            return  # what this process knows is not to be acted on
        match message:
            case m.Peers(up=up, down=down, ended=ended, left=left):
                before, self.peers, self.down, self.ended, self.left = self.peers, up, down, ended, left
                self.peers_changed(before)
            case m.Blame():
                self.blamed(message)
            case m.Leave():
                self.leaving = True
                self.leave(message.within_ms / 1000)
            case m.Shutdown():
                self.orderly = True
                self.request_stop()

    def request_stop(self) -> None:
        if not self._stopping.done():
            self._stopping.set_result(None)

    async def run(self) -> None:
        """Live until told to stop, or until something raises."""
        self.loop.set_exception_handler(
            lambda _, context: self.fail(context.get("exception") or RuntimeError(str(context)))
        )
        self.loop.add_signal_handler(signal.SIGTERM, self.request_stop)
        self.loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal's Ctrl-C is for the supervisor
        link: ZmqLink[m.FromSupervisor, m.ToSupervisor]
        self.supervisor = link = ZmqLink(
            self.paths.link("supervisor", self.role, self.epoch),
            bind=False,
            incoming=m.FromSupervisor,
            on_message=self._on_supervisor,
        )
        linger_s = 0.0
        try:
            try:
                await self.start()
            except DormouseError as error:
                self._start_failed = True
                link.send(m.RoleFailed(text=str(error)))
                linger_s = LAST_WORD_S
                await asyncio.sleep(0.2)  # the supervisor had better read it before it sees this process end
                raise
            link.send(m.Ready())
            heartbeat = self.loop.call_later(0, lambda: None)

            def beat() -> None:
                nonlocal heartbeat
                link.send(m.Heartbeat())
                heartbeat = self.loop.call_later(HEARTBEAT_S, beat)

            beat()
            await self._stopping
            heartbeat.cancel()
        finally:
            for task in list(self._tasks):
                task.cancel()
            await self.stop()
            link.close(linger_s)


def run_actor(kind: type[Actor]) -> None:
    """``main`` of an actor's module: never returns; the exit status is 0 only after an orderly stop."""
    arguments = parse_arguments()
    await_turn()
    config = read_node_config(arguments.run)
    die_with_parent(kind.parent_death_signal)
    log.configure(arguments.role, StatePaths(config.state_directory).role_log(arguments.role))

    async def main() -> None:
        await kind(arguments.role, arguments.epoch, config).run()

    try:
        uvloop.run(main())
        status = 0
    except Exception as error:  # the outermost frame: log the story, then leave
        log.get_logger().error("process_failed", error=repr(error), story=traceback.format_exc())
        traceback.print_exc(file=sys.stderr)
        status = 1
    close_context()
    sys.stderr.flush()
    os._exit(status)  # executors have threads that may never return from a copy or a kernel
