"""A runtime's connection to its executor: received messages wait in order; memory that is given is mapped at once."""

import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import msgspec

from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.gpuserver.runtime.mapping import PoolMapping
from dormouse.schemas import messages as m
from dormouse.schemas.errors import DormouseError, PeerLost

SILENT_S: Final = 60.0
"""Longest wait for memory, or for weights that are on their way."""

SOON_S: Final = 0.02
"""Some steps: a layer's weights that take longer leave others time for one."""


class WeightsLost(DormouseError):
    """Some of the model's memory will not come."""


class ExecutorLink:
    """See the module."""

    def __init__(self, sock: socket.socket, mapping: PoolMapping) -> None:
        self._executor: PacketSocket[m.ExecutorToRuntime, m.RuntimeToExecutor] = PacketSocket(sock, m.ExecutorToRuntime)
        sock.setblocking(True)
        self._mapping = mapping
        self.heard: deque[m.ExecutorToRuntime] = deque()
        self.reclaim: Callable[[int], None] = lambda nbytes: None  # others need memory: not to be kept waiting
        self.leaves: Callable[[m.MemberLeaves], None] = lambda message: (
            None
        )  # neither is this, where memory is asked for

    def hear(self, block: bool, until_s: float = math.inf) -> None:
        """Take in what is there; at least one packet if ``block``, unless it is later than ``until_s``. Raises
        PeerLost.
        """
        if block and until_s < math.inf:
            block = bool(select.select([self._executor.sock], [], [], max(0.0, until_s - time.perf_counter()))[0])
        while block or select.select([self._executor.sock], [], [], 0)[0]:
            packet = self._executor.recv()
            if packet is None:
                raise PeerLost("the executor has hung up")
            message, fds = packet
            try:
                if isinstance(message, m.GranulesGiven):  # at once: descriptors do not wait
                    self._mapping.map(message.granules, fds, message.writable)
                else:
                    self.heard.append(message)
            finally:
                close_all(fds)
            block = False

    def wait_for_memory(self) -> m.KvGiven:
        """As `wait_for`. A lease that is to leave meanwhile does so: its adapter may be in the way."""
        while True:
            message = self.wait_for(m.KvGiven, m.MemberLeaves)
            if isinstance(message, m.KvGiven):
                return message
            void = m.SeatGiven if message.stays else (m.SeatGiven, m.ForRuntime)  # messages from before it left
            mine = [each for each in self.heard if isinstance(each, void) and each.serial == message.serial]
            for each in mine:
                self.heard.remove(each)
            self.leaves(message)

    def wait_for(self, *kinds: type[Any], late: m.RuntimeToExecutor | None = None) -> Any:
        """The next message of these kinds; others wait, but for KvReclaim. ``late`` is sent if it does not come soon.
        Raises WeightsLost if none comes.
        """
        began_s = time.monotonic()
        end_s = began_s + SILENT_S
        while True:
            for message in list(self.heard):
                if isinstance(message, m.KvReclaim):  # this may wait for the one that asks
                    self.heard.remove(message)
                    self.reclaim(message.nbytes)
                elif isinstance(message, kinds):
                    self.heard.remove(message)
                    return message
            until_s = end_s if late is None else began_s + SOON_S
            if not select.select([self._executor.sock], [], [], max(0.0, until_s - time.monotonic()))[0]:
                if late is not None:
                    self.say(late)
                    late = None
                    continue
                raise WeightsLost(f"the executor has said nothing in {SILENT_S:g} s")
            self.hear(block=True)

    def say(self, message: m.RuntimeToExecutor) -> None:
        self._executor.send(message)

    def tell(self, serial: int, message: m.RuntimeToInstance) -> None:
        """To the instance that has this lease, through the executor."""
        self.say(m.FromRuntime(data=msgspec.msgpack.encode(message), serial=serial))
