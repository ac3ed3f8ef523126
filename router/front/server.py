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
from dormouse.core.listening import HandedSockets
from dormouse.router.front.connection import SWEEP_S, Bounds, HttpConnection, Onward
from dormouse.router.front.exchange import raw_error
from dormouse.router.front.http import Application
from dormouse.router.front.places import ENDING, ConnectionPlaces
from dormouse.router.front.tls import Certificate, TlsSocket
from dormouse.schemas.messages import Failure

KEEP_ALIVE_S: Final = 30
TLS_IDLE_S: Final = 1.0
LEAVE_LOOK_S: Final = 0.01
"""While a successor waits, a few seconds in a node's life."""

OTHER_FDS: Final = 512
"""Kept for descriptors that are no connections: each instance has its arena, its log and a socket or two here."""


def _descriptors() -> int:
    """How many this process may have: all that the system lets it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


class Node(Protocol):
    """The part of the router that this module uses."""

    config: NodeConfig
    log: Any

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class HttpServer(uvicorn.Server):
    """Leaves the process's signal handlers alone, and looks at all connections once a second: ``unread`` receives
    then how many bytes of answers wait for their clients. ``refused`` receives failures that no
    application has seen.
    """

    def __init__(
        self, node: Node, application: Application, unread: Callable[[int], None], refused: Callable[[Failure], None]
    ) -> None:
        settings, limits = node.config.node, node.config.limits
        self._onward = Onward()

        def render(failure: Failure) -> bytes:
            refused(failure)
            return raw_error(failure)

        most = max(1, min(limits.connections, _descriptors() - OTHER_FDS - ENDING))
        self._bounds = Bounds(
            places=ConnectionPlaces(most, settings.tenants == "many"),
            header_s=limits.header_ms / 1000,
            body_s=limits.body_ms / 1000,
            keep_alive_s=KEEP_ALIVE_S,
            onward=self._onward,
            render=render,
        )
        connection: Any = partial(HttpConnection, self._bounds)  # uvicorn only calls it
        super().__init__(
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
            )
        )
        self._unread = unread
        self._certificate = Certificate(settings, node.log) if settings.tls_cert else None
        self._swept_s = 0.0
        self._heir: HandedSockets | None = None  # while connections go over
        self._tcp = listening.inherited()
        self.address: tuple[str, int] = self._tcp.getsockname()[:2]
        self._task = node.spawn(self.serve(sockets=[self._tcp]))

    async def listens(self) -> None:
        """Wait until it does; raises what keeps it from that."""
        while not self.started:
            await asyncio.sleep(0.01)  # uvicorn has no event for it; start-up only
            if self._task.done():
                self._task.result()
        await self._adopt(HandedSockets(listening.inherited_at(listening.LEGACY_FD)))

    async def _adopt(self, legacy: HandedSockets) -> None:
        """HandedSockets of the node that this one replaces."""
        loop = asyncio.get_running_loop()
        for fd in legacy.take():
            sock = socket.socket(fileno=fd)
            try:
                _, connection = await loop.connect_accepted_socket(self._plain, sock)
            except OSError:  # its client has left
                sock.close()
            else:
                connection.adopted()
        legacy.close()

    async def leave(self) -> None:
        """A successor takes over: accept nothing more, and have connections go over as they are idle. Returns when none
        is left whose answer will end.
        """
        heir = self._heir = HandedSockets(listening.inherited_at(listening.HEIR_FD))
        self._onward.give = heir.give
        for server in self.servers:
            server.close()  # the socket itself is the supervisor's
        for connection in self._connections():
            connection.is_left()
        if self._certificate is not None:
            await asyncio.sleep(TLS_IDLE_S)  # clients that send now are answered, and told to reconnect
        while found := [each for each in self._connections() if not (each.stays or each.is_over)]:
            for connection in found:
                connection.go_over()
            await asyncio.sleep(LEAVE_LOOK_S)  # of what a client has not read yet there is no event
        heir.flush()

    def _connections(self) -> list[HttpConnection]:
        return [each for each in self.server_state.connections if isinstance(each, HttpConnection)]

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

        def accepted() -> asyncio.BaseProtocol:
            made = self._plain()
            if self._certificate is None:
                return made
            return TlsSocket(made, self._bounds, self._certificate.context)

        self.servers = [
            await loop.create_server(accepted, sock=sock, backlog=self.config.backlog) for sock in sockets or ()
        ]
        self.started = True

    def _plain(self) -> HttpConnection:
        kind: Any = self.config.http_protocol_class
        made: HttpConnection = kind(config=self.config, server_state=self.server_state, app_state={})
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def close(self) -> None:
        self.should_exit = True
        if not self._task.done():
            await asyncio.wait((self._task,), timeout=2)
        if self._heir is not None:
            self._heir.flush()
