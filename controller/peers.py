"""The controller's links to router, store and executors: one to each process that there is, until another takes its
place. Knows the messages that may be sent on them, and not their reasons.
"""

from collections.abc import Callable, Iterable
from typing import Any

from dormouse.core.links.link import Link
from dormouse.core.links.zmq_link import ZmqLink
from dormouse.core.paths import RunPaths
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost


class ControllerPeers:
    """``log`` is the process's."""

    def __init__(self, paths: RunPaths, log: Any) -> None:
        self._paths, self._log = paths, log
        self._router: Link[m.RouterToController, m.ControllerToRouter] | None = None
        self._store: ZmqLink[m.StoreToController, m.ControllerToStore] | None = None
        self._gpus: dict[int, tuple[int, Link[m.ExecutorToController, m.ControllerToExecutor]]] = {}  # (epoch, link)

    @property
    def has_store(self) -> bool:
        return self._store is not None

    @property
    def gpus(self) -> Iterable[int]:
        """Those that have an executor."""
        return self._gpus.keys()

    def open_router(self, epoch: int, heard: Callable[[m.RouterToController], None]) -> None:
        path = self._paths.link("controller", "router", epoch)
        self._router = Link(path, bind=True, incoming=m.RouterToController, on_message=heard)

    def open_store(self, epoch: int, heard: Callable[[m.StoreToController], None]) -> None:
        path = self._paths.link("controller", "store", epoch)
        self._store = ZmqLink(path, bind=True, incoming=m.StoreToController, on_message=heard)

    def open_gpu(self, gpu: int, epoch: int, heard: Callable[[int, int, m.ExecutorToController], None]) -> None:
        """``heard`` receives the GPU and the epoch, too."""
        path = self._paths.link("controller", f"gpu{gpu}", epoch)
        link = Link[m.ExecutorToController, m.ControllerToExecutor](
            path, bind=True, incoming=m.ExecutorToController, on_message=lambda message: heard(gpu, epoch, message)
        )
        self._gpus[gpu] = (epoch, link)

    def close_gpu(self, gpu: int) -> None:
        _, link = self._gpus.pop(gpu)
        link.close()

    def close(self) -> None:
        for link in (self._router, self._store, *(link for _, link in self._gpus.values())):
            if link is not None:
                link.close()

    def to_router(self, message: m.ControllerToRouter) -> None:
        """A router that comes later receives all that holds."""
        if self._router is not None:
            self._router.send(message)

    def to_store(self, message: m.ControllerToStore) -> None:
        if self._store is not None:
            self._store.send(message)

    def to_gpu(self, gpu: int, message: m.ControllerToExecutor) -> None:
        """An executor that does not read is as good as dead: its sentinel or its silence will show it."""
        if gpu in self._gpus:
            try:
                self._gpus[gpu][1].send(message)
            except PeerLost as error:
                self._log.error("executor_unreachable", gpu=gpu, error=str(error))
