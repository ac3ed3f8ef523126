"""Emulates the bandwidth of links: a copy over one takes at least as long as the link would.

A link that several processes share, such as the switch above two GPUs, keeps its state in a small mapped file, so that
their copies really delay each other.
"""

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dormouse.core.config import NodeConfig, parse_nbytes

SLACK_S: Final = 0.001
"""A sleep ends late, mostly by 60 us. That much is made up for by the next copy, which would have begun by then."""


class EmulatedLink:
    """Carries bytes one after the other at ``nbytes_s``; 0 carries them in no time."""

    def __init__(self, nbytes_s: float) -> None:
        self.nbytes_s = nbytes_s
        self._busy_until_s = 0.0
        self._late_s = 0.0  # by how much the last copy ended later than the link
        self._lock = threading.Lock()  # the copy stream's thread and the compute stream's may both use it

    def book(self, nbytes: int) -> float:
        """Time of the monotonic clock at which the bytes will have been carried; the link is taken until then."""
        with self._lock:
            self._busy_until_s = self._after(self._busy_until_s, nbytes)
            return self._busy_until_s

    def _after(self, busy_until_s: float, nbytes: int) -> float:
        if not self.nbytes_s:
            return 0.0
        begin_s = max(busy_until_s, time.monotonic() - self._late_s)
        self._late_s = 0.0
        return begin_s + nbytes / self.nbytes_s

    def ended_late(self, late_s: float) -> None:
        """The copy that was booked last has ended so long after the link could have carried it."""
        self._late_s = min(late_s, SLACK_S)

    def close(self) -> None: ...


class SharedLink(EmulatedLink):
    """One link of several processes. ``path`` names the file with its state, which is made if it is not there."""

    def __init__(self, nbytes_s: float, path: Path) -> None:
        super().__init__(nbytes_s)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, 8)
        self._state = mmap.mmap(self._fd, 8)

    def book(self, nbytes: int) -> float:
        with self._lock:  # the file's lock is the process's
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                (busy_until_s,) = struct.unpack("d", self._state[:8])
                after_s = self._after(busy_until_s, nbytes)
                self._state[:8] = struct.pack("d", after_s)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
            return after_s

    def close(self) -> None:
        self._state.close()
        os.close(self._fd)


def carry(links: Sequence[EmulatedLink], nbytes: int, move: Callable[[], object]) -> None:
    """Call ``move`` and return when all ``links``, side by side, would have carried the bytes."""
    done_s = max((link.book(nbytes) for link in links), default=0.0)
    move()
    left_s = done_s - time.monotonic()
    if left_s > 0:
        time.sleep(left_s)
        for link in links:
            link.ended_late(time.monotonic() - done_s)


def emulated_links(config: NodeConfig, gpu: int, directory: Path) -> tuple[list[EmulatedLink], list[EmulatedLink]]:
    """The links of an emulated GPU to the host and to other GPUs, as the configuration says; ``directory`` is shared by
    the node's processes. GPUs 0 and 1, 2 and 3, ... have a switch in common.
    """
    host: list[EmulatedLink] = []
    peers: list[EmulatedLink] = []
    if config.gpu.link:
        host.append(EmulatedLink(parse_nbytes(config.gpu.link)))
    if config.gpu.switch:
        host.append(SharedLink(parse_nbytes(config.gpu.switch), directory / f"switch{gpu // 2}"))
    if config.gpu.peer:
        peers.append(EmulatedLink(parse_nbytes(config.gpu.peer)))
    return host, peers
