"""The file descriptors that one instance has offered: owns them and its ``files`` socket.

An instance passes files that it could open for reading itself, never a path, so nothing enters that it could not read.
Only an ordinary file is taken; its bytes are read by range, hashed by the store, and known again as long as the file's
identity shows that it has not changed.
"""

import ctypes
import fcntl
import os
import stat
import time
from collections import OrderedDict
from contextlib import suppress
from typing import Final

from dormouse.core.links.fds import Listener, PacketSocket
from dormouse.gpuserver.store.disk.index import Identity
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

MAX_FILES: Final = 64
"""Per instance; the least recently used is closed for one more. A model in more parts is read part by part."""

MAX_CONNECTIONS: Final = 4
"""An instance has one; the others are for processes that it forks."""

QUIET_NS: Final = 2_000_000_000
"""A file that was touched within this time may be touched again without its times showing it: file systems stamp with a
clock of some milliseconds, a few of a second."""

DURABLE: Final = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x794C7630: "overlayfs",
    0xF2F52010: "f2fs",
    0x2FC12FC1: "zfs",
    0x4D44: "vfat",
    0x2011BAB0: "exfat",
    0x73717368: "squashfs",
    0xE0F5E1E2: "erofs",
}
VOLATILE: Final = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""File systems that answer a read from a local disk or from memory (linux/magic.h)."""

_libc = ctypes.CDLL(None, use_errno=True)

OfferSocket = PacketSocket[m.FileOffer, m.FileAnswer]


class Changed(Exception):
    """The file has changed since its range was named; the text says how."""


class Offer:
    """A descriptor that the store owns."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.durable = file_system(fd) in DURABLE
        self.reading = False
        self._closing = False

    def stat(self) -> os.stat_result:
        """Raises OSError."""
        return os.fstat(self.fd)

    def close(self) -> None:
        """Now, or when the read under way is over."""
        self._closing = True
        if not self.reading and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def read(self, start: int, into: memoryview, before: os.stat_result, blob: bool = False) -> None:
        """Fill ``into`` from byte ``start``; blocks. Raises Changed, OSError. Nobody writes to a ``blob``."""
        with suppress(OSError):  # a read-only file system has nothing to write
            os.fsync(self.fd)  # a write through a mapping is stamped only where the page was clean
        done = 0
        while done < into.nbytes:
            count = os.preadv(self.fd, [into[done : done + (64 << 20)]], start + done)
            if not count:
                raise Changed(f"it ended at byte {start + done:,} while it was read")
            done += count
        after = self.stat()
        if not blob and _stamp(after) != _stamp(before):
            raise Changed("it was written to while it was read")

    def read_over(self) -> None:
        self.reading = False
        if self._closing:
            self.close()


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def identity_of(
    status: os.stat_result, durable: bool, start: int, nbytes: int, scope: str, blob: str = ""
) -> Identity | None:
    """By which a range is known again, or None if a change of the file might not show in its times: they are too young,
    or the file system keeps nothing (tmpfs stamps no write to a mapping, and its device number is used again).

    A ``blob`` is known by its name, the hash of its bytes, instead of the time of its last change.
    """
    if blob:
        content = int.from_bytes(bytes.fromhex(blob)[:7])
        return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, content, start, nbytes, scope)
    newest_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    if time.time_ns() - newest_ns < QUIET_NS or not durable:
        return None
    return Identity(status.st_dev, status.st_ino, *_stamp(status), start, nbytes, scope)


def refusal(fd: int) -> str | None:
    """Why a descriptor is not taken, if so."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if flags & os.O_PATH:
        return "the descriptor was opened with O_PATH: it proves no right to read"
    if flags & os.O_ACCMODE == os.O_WRONLY:
        return "the descriptor is not open for reading"
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return "not a regular file"
    if file_system(fd) not in (*DURABLE, *VOLATILE):
        return "on a file system that is not known to be local: a read might never return"
    return None


def file_system(fd: int) -> int:
    """Its kind, as in statfs(2)."""
    answer = (ctypes.c_long * 32)()  # struct statfs begins with the kind and is shorter than this
    if _libc.fstatfs(fd, answer):
        return 0
    return answer[0] & 0xFFFFFFFF


class Offers:
    """The offers of one instance, at ``path``, which only it can reach. Raises PeerLost if that cannot be bound."""

    def __init__(self, path: str, uid: int) -> None:
        self._offers: OrderedDict[int, Offer] = OrderedDict()  # by the instance's number, least recently used first
        self._connections: set[OfferSocket] = set()
        self._listener: Listener[m.FileOffer, m.FileAnswer] = Listener(path, m.FileOffer, self._connected, owner=uid)

    def find(self, file: int) -> Offer | None:
        if file in self._offers:
            self._offers.move_to_end(file)
        return self._offers.get(file)

    def _connected(self, connection: OfferSocket) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        self._connections.add(connection)
        connection.serve(
            lambda message, fds: self._on_offer(connection, message, fds),
            lambda: self._connections.discard(connection),
        )

    def _on_offer(self, connection: OfferSocket, offer: m.FileOffer, fds: list[int]) -> None:
        answer: m.FileAnswer
        try:
            text = refusal(fds[0]) if len(fds) == 1 else f"{len(fds)} descriptors"
        except OSError as error:  # a file system may refuse whatever it likes
            text = f"it cannot be looked at: {error.strerror}"
        if text is None:
            self._take(offer.file, fds.pop())
            answer = m.FileTaken(file=offer.file)
        else:
            answer = m.FileRefused(file=offer.file, text=text)
        for fd in fds:
            os.close(fd)
        try:
            connection.send(answer)
        except (PeerLost, BlockingIOError):  # it does not read its answers
            connection.close()
            self._connections.discard(connection)

    def _take(self, file: int, fd: int) -> None:
        before = self._offers.pop(file, None)
        if before is not None:
            before.close()
        self._offers[file] = Offer(fd)
        while len(self._offers) > MAX_FILES:
            self._offers.popitem(last=False)[1].close()

    def close(self) -> None:
        with suppress(OSError):  # its directory may be gone
            self._listener.close()
        for connection in list(self._connections):
            connection.close()
        for offer in self._offers.values():
            offer.close()
