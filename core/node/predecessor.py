"""The new supervisor's side of an upgrade: the node that it is to take over, and the descriptors received from that.

Until `Yours` comes, they belong to the old node, and are only held. Decides nothing.
"""

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.schemas import succession as s
from dormouse.schemas.errors import ConfigError, PeerLost, RemoteProtocolError

MEET_S: Final = 20.0
GIVEN: Final = ("listening", "run", "state", "router", "store")
"""The descriptors that come with the `Estate`, in this order."""


class Predecessor:
    """Use :meth:`meet`. ``given``: descriptors by name; each is the taker's to close."""

    def __init__(self, packets: PacketSocket[s.ToHeir, s.FromHeir], estate: s.Estate, fds: list[int]) -> None:
        self._packets = packets
        self.estate = estate
        self.given = dict(zip(GIVEN, fds, strict=True))
        self.owned = False  # the node is ours

    @classmethod
    def meet(cls, fd: int) -> Self:
        """At the inherited descriptor. Raises ConfigError."""
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
        sock.settimeout(MEET_S)
        packets: PacketSocket[s.ToHeir, s.FromHeir] = PacketSocket(sock, s.ToHeir)
        try:
            packet = packets.recv()
        except (PeerLost, RemoteProtocolError) as error:
            raise ConfigError(f"the running node cannot be replaced: {error}") from error
        if packet is None or not isinstance(packet[0], s.Estate) or len(packet[1]) != len(GIVEN):
            close_all([] if packet is None else packet[1])
            raise ConfigError("the running node is of another version, which cannot be replaced: `down`, and then `up`")
        if packet[0].format != s.FORMAT:
            close_all(packet[1])
            raise ConfigError("the running node goes over in another way than this version: `down`, and then `up`")
        return cls(packets, packet[0], packet[1])

    def serve(self, on_yours: Callable[[], None], on_end: Callable[[], None]) -> None:
        def heard(message: s.ToHeir, fds: list[int]) -> None:
            close_all(fds)
            if isinstance(message, s.Yours) and not self.owned:
                self.owned = True
                on_yours()

        self._packets.serve(heard, on_end)

    def say(self, message: s.FromHeir) -> None:
        with suppress(PeerLost, BlockingIOError):  # its end is heard
            self._packets.send(message)

    def close(self) -> None:
        self._packets.close()
