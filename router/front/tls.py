"""TLS of the front door: the certificate from the current files, and the bounds of one socket before it speaks HTTP.

A socket counts from its acceptance until it is closed, whether its handshake ends or not, and has ``header_s`` for the
handshake and again for the farewell. One that has no place (places.py) is closed without a word: nothing can be sent
before the handshake. connection.py takes over after it.
"""

import asyncio
import os
import ssl
from asyncio.sslproto import SSLProtocol
from typing import TYPE_CHECKING, Any, cast

from dormouse.core.exposure import tls_context
from dormouse.router.front.connection import Bounds, HttpConnection
from dormouse.schemas.errors import Unsafe

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from dormouse.core.config import NodeSection


class Certificate:
    """The context for the next handshake; raises Unsafe if there is none to begin with."""

    def __init__(self, node: "NodeSection", log: "FilteringBoundLogger") -> None:
        self._node, self._log = node, log
        self._read = self._stamps()
        self._refused: object = None  # stamps of files that cannot be used, so that they are complained of once
        self.context = tls_context(node)

    def look(self) -> None:
        """Read the files again if they have changed; those that cannot be used change nothing, and are tried again."""
        stamps = self._stamps()
        if stamps == self._read:
            return
        try:
            self.context, self._read, self._refused = tls_context(self._node), stamps, None
        except Unsafe as error:
            if stamps != self._refused:
                self._refused = stamps
                self._log.error("certificate_refused", reason=str(error), served="the one that was read before")
        else:
            self._log.info("certificate_read", path=self._node.tls_cert)

    def _stamps(self) -> object:
        return [_stamp(path) for path in (self._node.tls_cert, self._node.tls_key)]


def _stamp(path: str) -> object:
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


class TlsSocket(SSLProtocol):
    """One accepted socket: it has ``connection``'s place and is, once its handshake is done, its transport.

    asyncio's, which makes one itself when a server has a context; but only that of the server's start.
    """

    max_size = 64 << 10  # read at once, and kept by each connection; asyncio's 256 KiB are for bulk

    def __init__(
        self,
        connection: HttpConnection,
        bounds: Bounds,
        context: ssl.SSLContext,
    ) -> None:
        rest: Any = {  # which typeshed has narrower than they are
            "waiter": None,
            "ssl_handshake_timeout": bounds.header_s,
            "ssl_shutdown_timeout": bounds.header_s,
        }
        super().__init__(asyncio.get_running_loop(), connection, context, server_side=True, **rest)
        self._connection, self._bounds = connection, bounds

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.below = cast(asyncio.Transport, transport)
        if not self._connection.arrives(self._connection.below):
            self._connection.below.abort()
            return
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._bounds.places.gone(self._connection)
        super().connection_lost(exc)
