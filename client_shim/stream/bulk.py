"""Copies bulk bytes between this process's memory and the arena that the node maps, in pieces, so that copying in,
copying out and the wire overlap. It does not know storages.
"""

import ctypes
from collections.abc import Iterator
from typing import Final

from dormouse.client_shim.commands.metas import Meta
from dormouse.client_shim.stream.arena_ring import ArenaRing
from dormouse.client_shim.stream.backend import Backend
from dormouse.client_shim.stream.connection import REPLY_TIMEOUT_S, StreamConnection
from dormouse.client_shim.stream.remote_storage import RemoteStorage
from dormouse.schemas import stream as wire

CHUNK_NBYTES: Final = 4 << 20
"""A small arena makes the pieces smaller."""

INLINE: Final = -1
"""The region of data so small that it comes in the answer itself."""


class Bulk:
    """One arena. ``ring`` knows its free parts."""

    def __init__(self, backend: Backend) -> None:
        arena = backend.arena
        self.ring = ArenaRing(len(arena))
        self.uploaded_nbytes = 0  # through the arena
        self.file_nbytes = 0  # that the store has read from files instead
        self._backend = backend
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(arena)) if len(arena) else 0
        self.chunk_nbytes = max(64, min(CHUNK_NBYTES, self.ring.capacity // 4 // 64 * 64))

    def to_store(self, storage: RemoteStorage, offset: int, address: int, nbytes: int) -> None:
        """While no lease is held: from the file that the bytes are mapped from, or through the arena."""
        if self._backend.store_file(storage.id, storage.nbytes, offset, address, nbytes):
            self.file_nbytes += nbytes
            return
        for start, region, size in self._copied_in(None, address, nbytes):
            if self._backend.store_upload(storage.id, storage.nbytes, offset + start, region, size):
                self.ring.settle(0)

    def to_executor(
        self, connection: StreamConnection, storage: RemoteStorage, offset: int, address: int, nbytes: int
    ) -> None:
        for start, region, size in self._copied_in(connection, address, nbytes):
            connection.commands += (wire.UPLOAD, storage.id, storage.nbytes, offset + start, region, size)
            connection.flush()

    def _copied_in(
        self, connection: StreamConnection | None, address: int, nbytes: int
    ) -> Iterator[tuple[int, int, int]]:
        """Piece by piece: where it begins, its region, its size. The commands for one piece are sent before the next
        needs its room.
        """
        self.uploaded_nbytes += nbytes
        for start in range(0, nbytes, self.chunk_nbytes) or [0]:
            size = min(self.chunk_nbytes, nbytes - start)
            region = self._room(connection, size)
            ctypes.memmove(self._address + region, address + start, size)
            yield start, region, size

    def _room(self, connection: StreamConnection | None, nbytes: int) -> int:
        while (region := self.ring.take(nbytes, connection.number if connection else 0)) is None:
            if connection is None:
                self._backend.store_settle()
                self.ring.settle(0)
                continue
            connection.flush()
            connection.pump(REPLY_TIMEOUT_S)
        return region

    def regions(self, connection: StreamConnection, pieces: list[Meta]) -> list[int]:
        """For as many of them as there is room for now, at least one. All are taken before anything is pumped: a
        settled region that is not read yet must not be given out.
        """
        while True:
            found: list[int] = []
            for piece in pieces:
                nbytes = piece.nbytes()
                region = INLINE if nbytes <= wire.INLINE_NBYTES else self.ring.take(nbytes, connection.number)
                if region is None:
                    break
                found.append(region)
            if found or not pieces:
                return found
            connection.flush()
            connection.pump(REPLY_TIMEOUT_S)

    def copy_out(self, payload: bytes | int, region: int, address: int) -> None:
        """An executor's answer to a download: the bytes, or their number in the region."""
        if isinstance(payload, int):
            ctypes.memmove(address, self._address + region, payload)
        else:
            ctypes.memmove(address, payload, len(payload))
