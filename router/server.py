"""Serves the HTTP application under uvicorn inside the actor's loop: on the node's TCP address and on the admin Unix
socket.

The TCP socket is the supervisor's (core/listening.py); signals stay the actor's.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import uvicorn

from dormouse.core import listening
from dormouse.core.link import remove_path
from dormouse.router.http import Application

if TYPE_CHECKING:
    from dormouse.router.main import Router

KEEP_ALIVE_S: Final = 30
HEADER_NBYTES: Final = 64 << 10


class _Server(uvicorn.Server):
    """Leaves the process's signal handlers alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


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
        for uds, sockets in ((None, [tcp]), (admin_path, None)):
            server = _Server(
                uvicorn.Config(
                    application,
                    uds=uds,
                    http="httptools",
                    loop="none",
                    ws="none",
                    lifespan="off",
                    interface="asgi3",
                    backlog=listening.BACKLOG,
                    access_log=False,
                    log_config=None,
                    server_header=False,
                    proxy_headers=False,
                    timeout_keep_alive=KEEP_ALIVE_S,
                    timeout_graceful_shutdown=1,
                    h11_max_incomplete_event_size=HEADER_NBYTES,
                )
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
