"""Posts packets with descriptors without ever blocking the loop: packets that a slow receiver does not take wait here,
in order.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.schemas.errors import PeerLost

In = TypeVar("In")
Out = TypeVar("Out")

MAX_WAITING: Final = 10_000
"""Packets that may wait for a receiver: more than there are instances, and each holds at most two descriptors."""


class Poster(Generic[In, Out]):
    """One connection to an inbox or to the zygote. A receiver that is gone is reported by ``on_end``, never by an
    exception.
    """

    def __init__(self, path: str, incoming: Any, on_packet: Callable[[In], None], on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket: PacketSocket[In, Out] = PacketSocket.connect(path, incoming)
        self._waiting: deque[tuple[Out, list[int]]] = deque()
        self._on_packet = on_packet
        self._on_end = on_end
        self._closed = False
        self._socket.serve(self._packet, self._ended)

    def _packet(self, message: In, fds: list[int]) -> None:
        close_all(fds)  # nobody sends us any
        self._on_packet(message)

    def _ended(self) -> None:
        if not self._closed:
            self.close()
            self._on_end()

    def post(self, message: Out, fds: tuple[int, ...] = ()) -> None:
        """Send now or as soon as there is room; the descriptors are duplicated."""
        if self._closed:
            return
        if not self._waiting and self._sent(message, list(fds)):
            return
        if len(self._waiting) >= MAX_WAITING:
            self._loop.call_soon(self._ended)
            return
        if not self._waiting:
            self._loop.add_writer(self._socket.sock.fileno(), self._flush)
        self._waiting.append((message, [os.dup(fd) for fd in fds]))

    def _sent(self, message: Out, fds: list[int]) -> bool:
        try:
            self._socket.send(message, fds)
        except BlockingIOError:
            return False
        except PeerLost:
            self._loop.call_soon(self._ended)
        return True

    def _flush(self) -> None:
        while self._waiting:
            message, fds = self._waiting[0]
            if not self._sent(message, fds):
                return
            if self._closed:
                return
            self._waiting.popleft()
            close_all(fds)
        self._loop.remove_writer(self._socket.sock.fileno())

    def close(self) -> None:
        self._closed = True
        if self._socket.sock.fileno() >= 0:
            self._loop.remove_writer(self._socket.sock.fileno())
        self._socket.close()
        for _, fds in self._waiting:
            close_all(fds)
        self._waiting.clear()
