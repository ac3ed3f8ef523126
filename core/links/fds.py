"""Descriptors between processes: Unix SEQPACKET sockets, one msgpack message and its descriptors per packet.

ZeroMQ cannot carry descriptors, so memory and log pipes travel here. A listener accepts from whoever can reach its
path; the directory's mode limits that, or :attr:`PacketSocket.peer`. The command line uses it too and pays for every
import, so asyncio is imported by those who serve.
"""

import os
import socket
import struct
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

from dormouse.core.links.sockets import checked_path, listener_at, remove_path
from dormouse.schemas.errors import LocalProtocolError, PeerLost, RemoteProtocolError

if TYPE_CHECKING:
    import asyncio

In = TypeVar("In")
Out = TypeVar("Out")

MAX_PACKET_NBYTES: Final = 64 << 10
MAX_FDS: Final = 64


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


class PacketSocket(Generic[In, Out]):
    """One SEQPACKET connection. Blocking by default; :meth:`serve` hands it to the running asyncio loop."""

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self.sock = sock
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def peer(self) -> tuple[int, int]:
        """``(pid, uid)`` of who connected, as the kernel noted it then."""
        pid, uid, _ = struct.unpack("iII", self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return pid, uid

    @classmethod
    def connect(cls, path: str, incoming: Any, timeout_s: float = 10.0) -> "PacketSocket[In, Out]":
        """Raises PeerLost if nobody listens."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(timeout_s)
        try:
            sock.connect(path)
        except OSError as error:
            sock.close()
            raise PeerLost(f"{path}: {error}") from error
        return cls(sock, incoming)

    def send(self, message: Out, fds: list[int] | None = None) -> None:
        """Send one packet; the descriptors are duplicated, ours stay open.

        Raises PeerLost, and BlockingIOError when a served socket has no room.
        """
        data = msgspec.msgpack.encode(message)
        if len(data) > MAX_PACKET_NBYTES:
            raise LocalProtocolError(f"a packet of {len(data)} bytes; at most {MAX_PACKET_NBYTES}")
        try:
            socket.send_fds(self.sock, [data], fds or [])
        except BlockingIOError:
            raise
        except OSError as error:
            raise PeerLost(f"descriptor socket: {error}") from error

    def recv(self) -> tuple[In, list[int]] | None:
        """The next packet, or None at the end. Raises RemoteProtocolError for garbage (its descriptors are closed),
        PeerLost.
        """
        try:
            data, fds, flags, _ = socket.recv_fds(self.sock, MAX_PACKET_NBYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            raise
        except OSError as error:
            raise PeerLost(f"descriptor socket: {error}") from error
        if not data:
            close_all(fds)  # an empty packet can carry descriptors, and looks like the end
            return None
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise RemoteProtocolError("a truncated packet")
            return self._decoder.decode(data), fds
        except (msgspec.DecodeError, UnicodeDecodeError, RemoteProtocolError) as error:
            close_all(fds)
            raise RemoteProtocolError(f"descriptor socket: {error}") from error

    def serve(self, on_packet: Callable[[In, list[int]], None], on_end: Callable[[], None]) -> None:
        """Deliver packets from the running loop until the peer is gone, then call ``on_end`` once."""
        from asyncio import get_running_loop

        self._loop = get_running_loop()
        self.sock.setblocking(False)

        def ready() -> None:
            try:
                packet = self.recv()
            except BlockingIOError:
                return
            except (PeerLost, RemoteProtocolError):
                packet = None
            if packet is None:
                self.close()
                on_end()
            else:
                on_packet(*packet)

        self._loop.add_reader(self.sock.fileno(), ready)

    def close(self) -> None:
        if self.sock.fileno() >= 0:
            if self._loop is not None:
                self._loop.remove_reader(self.sock.fileno())
            self.sock.close()


class Listener(Generic[In, Out]):
    """Accepts packet sockets at ``path`` from the running asyncio loop and hands each to ``on_connection``.

    ``how``: the path's owner and mode, as in :func:`listener_at`. Raises PeerLost.
    """

    def __init__(
        self,
        path: str,
        incoming: Any,
        on_connection: Callable[[PacketSocket[In, Out]], None],
        **how: int,
    ) -> None:
        from asyncio import get_running_loop

        self.path = checked_path(path)
        self._incoming = incoming
        self._on_connection = on_connection
        self._loop = get_running_loop()
        self._sock = listener_at(path, socket.SOCK_SEQPACKET, **how)
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        self._on_connection(PacketSocket(sock, self._incoming))

    def close(self) -> None:
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        remove_path(self.path)


class Inbox(Generic[In]):
    """A listener that only receives: every packet of every connection goes to ``on_packet(message, descriptors)``."""

    def __init__(self, path: str, incoming: Any, on_packet: Callable[[In, list[int]], None]) -> None:
        self._connections: set[PacketSocket[In, Any]] = set()
        self._on_packet = on_packet
        self._listener: Listener[In, Any] = Listener(path, incoming, self._connected)

    def _connected(self, connection: PacketSocket[In, Any]) -> None:
        self._connections.add(connection)
        connection.serve(self._on_packet, lambda: self._connections.discard(connection))

    def close(self) -> None:
        self._listener.close()
        for connection in list(self._connections):
            connection.close()
