"""Uploads by file identity: names to the store the file that bytes come from, instead of sending them.

Owns the files offered to the store: each open descriptor once, and never a path, as the store may read only files that
this process could. In every unexpected case the bytes are sent; only the store's reports of its own state are errors,
and those are not known here.
"""

import os
import stat
from dataclasses import dataclass
from itertools import count
from typing import Final

from dormouse.client_shim.node.mappings import Mapped, Mappings
from dormouse.core.links.fds import PacketSocket
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

MIN_NBYTES: Final = 1 << 20
"""Smaller runs are sent as bytes. At 1 MiB both ways take about the same time (measured: 0.25 ms; at 64 MiB the file
takes 0.6 of the bytes' time), and most of a model is in larger tensors."""

MAX_FILES: Final = 32
"""Files that are remembered; a model in more parts than this is read part by part."""

OFFER_S: Final = 10.0  # the store answers an offer at once, or is not there

Stamp = tuple[int, int, int, int]
"""(device, inode, time of change in ns, size) of a file, as `stat` says: another one means other contents."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of an offered file, from ``offset`` on."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class _OfferedFile:
    """The store's reply to a file: its number, or None if it was refused."""

    stamp: Stamp
    file: int | None
    path: bytes


class MappedFiles:
    """The mapped files of one process. ``path`` is the store's ``files`` socket. Used under the stream's lock only."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: PacketSocket[m.FileAnswer, m.FileOffer] | None = None
        self._mappings: Mappings | None = None
        self._numbers = count(1)
        self._known: dict[tuple[int, int], _OfferedFile] = {}  # by identity, the least recently used first
        self._usable = True

    def range_at(self, address: int, nbytes: int) -> FileRange | None:
        """The range of an offered file that has the bytes of ``[address, +nbytes)``; None: send the bytes."""
        if nbytes < MIN_NBYTES or not self._usable:
            return None
        if self._mappings is None:
            try:
                self._mappings = Mappings()
            except OSError:
                self._usable = False
                return None
        mapped = self._mappings.file_at(address, nbytes)
        if mapped is None:
            return None
        stamp = _stamp(mapped.path)
        if stamp is None or mapped.offset + nbytes > stamp[3]:
            return None
        known = self._known.pop(mapped.identity, None)
        if known is None or known.stamp != stamp:
            known = self._offer(mapped, stamp)
        if known is None:
            return None
        self._known[mapped.identity] = known
        while len(self._known) > MAX_FILES:
            del self._known[next(iter(self._known))]
        return None if known.file is None else FileRange(known.file, mapped.offset)

    def refused(self, file: int) -> bool:
        """The store could not read this file: name it no more. Whether its bytes can be sent instead, because the file
        is still the one that was offered; reading the mapping of one that has become shorter kills this process.
        """
        for identity, known in self._known.items():
            if known.file == file:
                self._known[identity] = _OfferedFile(known.stamp, None, known.path)
                return _stamp(known.path) == known.stamp
        return False

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._mappings is not None:
            self._mappings.close()

    def _offer(self, mapped: Mapped, stamp: Stamp) -> _OfferedFile | None:
        assert self._mappings is not None
        try:
            # Not blocking: by now, a pipe may have the file's name.
            fd = os.open(mapped.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            return None
        try:
            if _stamp(fd) != stamp or self._mappings.identity_of(fd) != mapped.identity:
                return None  # another file has its name
            return _OfferedFile(stamp, self._answer(fd), mapped.path)
        except _NobodyListens:
            return None
        finally:
            os.close(fd)

    def _answer(self, fd: int) -> int | None:
        """Offer a descriptor; its number, or None if the store refuses it. Raises _NobodyListens."""
        if self._socket is None:
            try:
                self._socket = PacketSocket.connect(self._path, m.FileAnswer, OFFER_S)
            except PeerLost as error:  # the store does not know us yet
                raise _NobodyListens from error
        number = next(self._numbers)
        try:
            self._socket.send(m.FileOffer(file=number), [fd])
            packet = self._socket.recv()
            if packet is None or packet[0].file != number:
                raise RemoteProtocolError("not the answer to this offer")
        except (PeerLost, RemoteProtocolError) as error:
            self._usable = False
            raise _NobodyListens from error
        return number if isinstance(packet[0], m.FileTaken) else None


class _NobodyListens(Exception):
    """The store does not take offers."""


def _stamp(file: bytes | int) -> Stamp | None:
    """The stamp of a regular file; None if there is no such file, or if it is not a regular one."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
