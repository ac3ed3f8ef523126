"""Serves the HTTP application under uvicorn inside the actor's loop: on the node's TCP address and on the admin Unix
socket.

The TCP socket is the supervisor's (core/listening.py); signals stay the actor's.
"""

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from dormouse.core import listening
from dormouse.core.link import remove_path
from dormouse.router.connection import SWEEP_S, Bounds, Connection
from dormouse.router.http import Application, raw_error

if TYPE_CHECKING:
    from dormouse.router.main import Router

KEEP_ALIVE_S: Final = 30
OTHER_FDS: Final = 512
"""Kept for what is no connection: each instance has its arena, its log and a socket or two here."""


class _Server(uvicorn.Server):
    """Leaves the process's signal handlers alone, and looks at all connections once a second."""

    def __init__(self, config: uvicorn.Config, unread: Callable[[int], None]) -> None:
        super().__init__(config)
        self._unread = unread
        self._swept_s = 0.0

    async def on_tick(self, counter: int) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            self._unread(sum(c.sweep(now_s) for c in list(self.server_state.connections) if isinstance(c, Connection)))
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _descriptors() -> int:
    """How many this process may have: all that the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


class HttpServer:
    """Both listeners and the application behind them."""

    def __init__(self, router: "Router") -> None:
        self._router = router
        self._servers: list[_Server] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.address: tuple[str, int] = ("", 0)

    async def open(self) -> None:
        tcp = listening.inherited()
        self.address = tcp.getsockname()[:2]
        admin_path = self._router.paths.admin
        remove_path(admin_path)
        admin = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        admin.bind(admin_path)
        admin.close()  # uvicorn binds it again; this only tells early whether it can be
        remove_path(admin_path)
        application = Application(self._router)
        limits = self._router.config.limits
        bounds = Bounds(
            most=max(1, min(limits.connections, _descriptors() - OTHER_FDS)),
            header_s=limits.header_ms / 1000,
            body_s=limits.body_ms / 1000,
            render=raw_error,
        )
        connection: Any = partial(Connection, bounds)  # uvicorn only calls it
        for uds, sockets in ((None, [tcp]), (admin_path, None)):
            server = _Server(
                uvicorn.Config(
                    application,
                    uds=uds,
                    http=connection,
                    loop="none",
                    ws="none",
                    lifespan="off",
                    interface="asgi3",
                    backlog=listening.BACKLOG,
                    access_log=False,
                    log_config=None,
                    log_level="error",  # clients' mistakes are theirs, and would fill the disk
                    server_header=False,
                    proxy_headers=False,
                    timeout_keep_alive=KEEP_ALIVE_S,
                    timeout_graceful_shutdown=1,
                ),
                self._router.bodies.unread if uds is None else lambda nbytes: None,
            )
            self._servers.append(server)
            self._tasks.append(self._router.spawn(server.serve(sockets=sockets)))
        while not all(server.started for server in self._servers):
            await asyncio.sleep(0.01)  # uvicorn has no event for it; start-up only
            for task in self._tasks:
                if task.done():
                    task.result()

    async def close(self) -> None:
        for server in self._servers:
            server.should_exit = True
        if waiting := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(waiting, timeout=2)
        remove_path(self._router.paths.admin)
