"""Serves the HTTP application under uvicorn inside the actor's loop, on the node's TCP address.

The TCP socket is the supervisor's (core/listening.py); signals stay the actor's.
"""

import asyncio
import contextlib
import resource
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Final, Protocol, cast

import uvicorn

from dormouse.core import listening
from dormouse.core.config import NodeConfig
from dormouse.router.connection import SWEEP_S, Bounds, HttpConnection
from dormouse.router.exchange import raw_error
from dormouse.router.http import Application
from dormouse.router.tls import Certificate, TlsSocket

KEEP_ALIVE_S: Final = 30
OTHER_FDS: Final = 512
"""Kept for what is no connection: each instance has its arena, its log and a socket or two here."""


class _Server(uvicorn.Server):
    """Leaves the process's signal handlers alone, and looks at all connections once a second."""

    def __init__(
        self,
        config: uvicorn.Config,
        bounds: Bounds,
        unread: Callable[[int], None],
        certificate: Certificate | None,
    ) -> None:
        super().__init__(config)
        self._bounds = bounds
        self._unread = unread
        self._certificate = certificate
        self._tls_sockets: set[TlsSocket] = set()
        self._swept_s = 0.0

    async def on_tick(self, counter: int) -> bool:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._swept_s >= SWEEP_S:
            self._swept_s = now_s
            self._unread(
                sum(c.sweep(now_s) for c in list(self.server_state.connections) if isinstance(c, HttpConnection))
            )
            if self._certificate is not None:
                self._certificate.look()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which neither counts TLS handshakes nor bounds their time, and reads a certificate once."""
        loop = asyncio.get_running_loop()
        kind: Any = self.config.http_protocol_class

        def accepted() -> asyncio.BaseProtocol:
            made: HttpConnection = kind(config=self.config, server_state=self.server_state, app_state={})
            if self._certificate is None:
                return made
            return TlsSocket(made, self._bounds, self._certificate.context, self._tls_sockets)

        self.servers = [
            await loop.create_server(accepted, sock=sock, backlog=self.config.backlog) for sock in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _descriptors() -> int:
    """How many this process may have: all that the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


class Node(Protocol):
    """What is asked of the router."""

    config: NodeConfig
    log: Any

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class HttpServer:
    """The listener. ``unread`` is told once a second how many bytes of answers wait for their clients."""

    def __init__(self, node: Node, unread: Callable[[int], None]) -> None:
        self._node = node
        self._unread = unread
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None
        self.address: tuple[str, int] = ("", 0)

    async def open(self, application: Application) -> None:
        tcp = listening.inherited()
        self.address = tcp.getsockname()[:2]
        node, limits = self._node.config.node, self._node.config.limits
        bounds = Bounds(
            most=max(1, min(limits.connections, _descriptors() - OTHER_FDS)),
            header_s=limits.header_ms / 1000,
            body_s=limits.body_ms / 1000,
            keep_alive_s=KEEP_ALIVE_S,
            render=raw_error,
        )
        connection: Any = partial(HttpConnection, bounds)  # uvicorn only calls it
        self._server = _Server(
            uvicorn.Config(
                cast(Any, application),  # uvicorn only gives it to connections
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
                timeout_graceful_shutdown=1,
            ),
            bounds,
            self._unread,
            Certificate(node, self._node.log) if node.tls_cert else None,
        )
        self._task = self._node.spawn(self._server.serve(sockets=[tcp]))
        while not self._server.started:
            await asyncio.sleep(0.01)  # uvicorn has no event for it; start-up only
            if self._task.done():
                self._task.result()

    async def close(self) -> None:
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            if not self._task.done():
                await asyncio.wait((self._task,), timeout=2)
