"""The zygote that has imported torch alone: for functions whose own libraries are not those that the other one has
imported, and for builds of such libraries. It is started for its first fork, and ended when none of its children has
lived for a while.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dormouse.core.config import NodeConfig
from dormouse.core.decisions.requests import events as e
from dormouse.core.decisions.requests import failures
from dormouse.core.links.fds import close_all
from dormouse.core.paths import RunPaths
from dormouse.core.quantities import signal_name
from dormouse.core.sandbox.world import PLAIN_ZYGOTE
from dormouse.router.instances.instances import Instances
from dormouse.router.instances.zygote import ZygoteLink
from dormouse.schemas import messages as m


class Node(Protocol):
    """The part of the router that this module uses."""

    config: NodeConfig
    paths: RunPaths
    instances: Instances
    log: Any
    supervisor: Any
    peers: dict[str, int]

    def dispatch(self, event: e.Event) -> None: ...


class PlainZygote:
    """Forks wait in it until it is warm. ``ended`` receives ended builds by name: why, "" if it ended by itself."""

    def __init__(self, node: Node, ended: Callable[[str, str], None]) -> None:
        self._node, self._ended = node, ended
        self._waiting: dict[str, tuple[m.Fork, list[int]]] = {}  # by instance, with descriptors of ours
        self._children: dict[str, m.Fork] = {}  # by instance
        self._idle: asyncio.TimerHandle | None = None
        self._dismissed = 0  # the epoch of the one that is to end: nothing more is forked from it
        self._link = ZygoteLink(
            node.config.sandbox,
            node.paths,
            node.instances,
            self._heard,
            self._changed,
            self._lost,
            node.log,
            PLAIN_ZYGOTE,
        )

    def has(self, name: str) -> bool:
        return name in self._children or name in self._waiting

    @property
    def modules(self) -> frozenset[str]:
        """Modules that it has imported; none as long as it has not started."""
        return self._link.modules

    def fork(self, fork: m.Fork, fds: tuple[int, ...]) -> None:
        """Now, or when it is warm. The descriptors stay the caller's."""
        self._rest(False)
        if self._link.warm:
            self._children[fork.instance] = fork
            self._link.post(fork, fds)
        else:
            self._waiting[fork.instance] = fork, [os.dup(fd) for fd in fds]
            self._node.supervisor.send(m.WantRole(role=PLAIN_ZYGOTE))

    def signal(self, name: str, number: int) -> None:
        if (waiting := self._waiting.pop(name, None)) is not None:
            close_all(waiting[1])
            self._gone(waiting[0], f"was killed by {signal_name(number)}")
        else:
            self._link.post(m.Signal(instance=name, signal=number))

    def peers_changed(self, peers: Mapping[str, int], down: Mapping[str, str]) -> None:
        self._connect(peers.get(PLAIN_ZYGOTE, 0))
        if PLAIN_ZYGOTE in down:
            for fork, fds in [*self._waiting.values()]:
                del self._waiting[fork.instance]
                close_all(fds)
                self._gone(fork, f"could not be forked: its zygote does not start: {down[PLAIN_ZYGOTE]}")

    def _connect(self, epoch: int) -> None:
        self._link.connect(epoch if epoch != self._dismissed else 0)

    def reset(self) -> None:
        """The others have lost their zygote, and are forgotten: so are these."""
        waiting, self._waiting = self._waiting, {}
        for _, fds in waiting.values():
            close_all(fds)
        forgotten = (*self._children.values(), *(fork for fork, _ in waiting.values()))
        builds = [fork for fork in forgotten if fork.build is not None]
        self._children.clear()
        self._link.reset()
        for fork in builds:
            self._gone(fork, "was ended with all others")
        self._connect(self._node.peers.get(PLAIN_ZYGOTE, 0))

    def close(self) -> None:
        self._rest(False)
        self._link.close()
        for _, fds in self._waiting.values():
            close_all(fds)
        self._waiting.clear()

    def _changed(self) -> None:
        if not self._link.warm:
            return
        waiting, self._waiting = self._waiting, {}
        for fork, fds in waiting.values():
            self._children[fork.instance] = fork
            self._link.post(fork, tuple(fds))
            close_all(fds)
        self._rest(not self._children)

    def _lost(self) -> None:
        children, self._children = self._children, {}
        for fork in children.values():
            self._gone(fork, "died with its zygote")

    def _heard(self, event: e.Event) -> None:
        assert isinstance(event, e.InstanceExited), "all that a zygote says as an event"
        fork = self._children.pop(event.instance, None)
        self._rest(not self._children and not self._waiting)
        if fork is not None and fork.build is not None:
            self._ended(event.instance, "" if event.text == "exited with status 0" else event.text)
        else:
            self._node.dispatch(event)

    def _gone(self, fork: m.Fork, how: str) -> None:
        if fork.build is not None:
            self._ended(fork.instance, how)
        else:
            self._node.dispatch(e.InstanceExited(fork.instance, how, failures.sandboxes_restart()))

    def _rest(self, idle: bool) -> None:
        """Whether it has nothing to do from now on."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        if idle:
            after_s = self._node.config.environments.idle_ms / 1000
            self._idle = asyncio.get_running_loop().call_later(after_s, self._dismiss)

    def _dismiss(self) -> None:
        self._idle = None
        if (epoch := self._node.peers.get(PLAIN_ZYGOTE, 0)) and not self._children and not self._waiting:
            self._dismissed = epoch
            self._link.connect(0)  # later forks wait for its successor
            self._node.supervisor.send(m.DismissRole(role=PLAIN_ZYGOTE, epoch=epoch))
