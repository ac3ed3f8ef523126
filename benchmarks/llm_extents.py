"""KV memory on demand without a node: a runtime's own code asks, and a thread of this process answers.

The thread stands in for an executor: it gives the next memory file, as an emulated GPU's pool has one for each granule,
with its pages there before. What an executor decides of its pool is not in it.
"""

import os
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final, Self

import torch

from benchmarks.llm_alone import Alone
from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.gpuserver.runtime.engine import Engine
from dormouse.gpuserver.runtime.executor_link import ExecutorLink
from dormouse.gpuserver.runtime.extents import EXTENT_NBYTES, KvExtents
from dormouse.gpuserver.runtime.mapping import HostMapping
from dormouse.gpuserver.runtime.tables import KvLayout
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

EXTENTS: Final = 100


class Pool:
    """``asked``: how often a step had to wait for memory, ``waited_s`` in all."""

    def __init__(self, folder: Path, dtype: str, block_tokens: int) -> None:
        self.mapping = HostMapping(EXTENTS * EXTENT_NBYTES)
        self._files = [_file(number) for number in range(EXTENTS)]
        self._given = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link = ExecutorLink(ours, self.mapping)
        self._sockets = ours, theirs
        self._thread = threading.Thread(target=self._answer, args=(theirs,), daemon=True)
        self.alone = Alone(folder, dtype, block_tokens=block_tokens, memory=self._memory)
        self.asked, self.waited_s = 0, 0.0

    def _memory(self, layout: KvLayout) -> torch.Tensor:
        return self.mapping.elements(layout.dtype)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._sockets[0].close()
        self._thread.join()
        self._sockets[1].close()
        self.mapping.clear()
        close_all(self._files)

    def engine(self, reserved: bool) -> Engine:
        """A new one; the memory of the one before is not mapped any more, or all of it is (``reserved``)."""
        self.mapping.clear()
        self._given = 0
        extents = KvExtents(self._link, self.mapping)

        def grow(blocks: int) -> bool:
            began_s = time.perf_counter()
            grown = extents.grow(blocks)
            self.asked, self.waited_s = self.asked + 1, self.waited_s + time.perf_counter() - began_s
            return grown

        engine = extents.engine = Engine(self.alone.model, self.alone.attention, grow)
        if reserved:
            while extents.grow(1):
                pass
            self.mapping.elements(torch.uint8)[:: os.sysconf("SC_PAGE_SIZE")].sum()  # each page is there
        return engine

    def _answer(self, sock: socket.socket) -> None:
        runtime: PacketSocket[Any, m.ExecutorToRuntime] = PacketSocket(sock, m.RuntimeToExecutor)
        while True:
            try:
                packet = runtime.recv()
            except PeerLost:
                return
            if packet is None:
                return
            message, _ = packet
            if isinstance(message, m.KvWanted):
                numbers = range(self._given, min(self._given + message.extents, EXTENTS))
                self._given = numbers.stop
                granules = [_granule(number) for number in numbers]
                if granules:
                    files = [self._files[number] for number in numbers]
                    runtime.send(m.GranulesGiven(granules=granules, writable=True), files)
                runtime.send(m.KvGiven(extents=[(number, number * EXTENT_NBYTES) for number in numbers]))


def _granule(number: int) -> m.GranuleAt:
    return m.GranuleAt(offset=number * EXTENT_NBYTES, physical=number * EXTENT_NBYTES, nbytes=EXTENT_NBYTES)


def _file(number: int) -> int:
    fd = os.memfd_create(f"granule-{number}", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, EXTENT_NBYTES)
    return fd
