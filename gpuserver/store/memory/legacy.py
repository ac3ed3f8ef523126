"""The legacy of a store to its successor of a newer version: its slabs, by descriptor, and the state of their contents.

Only models of functions go over, and only bytes whose fingerprint is known. Everything else in the slabs is scrubbed
before: a successor's free memory reads as zeros, as ours does. A legacy that does not fit together is refused as a
whole, and then the successor has only the files.
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from dormouse.core.links.fds import close_all
from dormouse.core.listening import MAX_FDS
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.store.memory.functions import KeptFunctions
from dormouse.gpuserver.store.memory.segments import Segment, Segments
from dormouse.gpuserver.store.memory.slabs import Slabs, SlabSpan
from dormouse.schemas.errors import RemoteProtocolError

FORMAT: Final = 1

_ADOPTING: Final = ("", -1)
"""Holds adopted segments until a function does."""


class LegacySegment(msgspec.Struct, frozen=True):
    fingerprint: bytes
    nbytes: int
    scope: str
    slab: int
    offset: int

    @property
    def span(self) -> SlabSpan:
        return SlabSpan(self.slab, self.offset, self.nbytes)


class LegacyFunction(msgspec.Struct, frozen=True):
    """``segments``: by their position among all."""

    name: str
    version: int
    segments: list[int]


class LegacyBooks(msgspec.Struct, frozen=True):
    """In a file of memory, for versions of the store that need not be alike."""

    format: int
    pinnable: bool
    slabs: list[tuple[int, int]]  # number, nbytes
    segments: list[LegacySegment]
    functions: list[LegacyFunction]


def books_of(functions: KeptFunctions, slabs: Slabs) -> LegacyBooks:
    """Of all that can go over."""
    numbers: dict[bytes, int] = {}
    segments: list[LegacySegment] = []
    records: list[LegacyFunction] = []
    for (name, version), record in functions.records.items():
        for segment in record.segments:
            if segment.fingerprint is None or segment.span is None or segment.fingerprint in numbers:
                continue
            numbers[segment.fingerprint] = len(segments)
            span = segment.span
            segments.append(LegacySegment(segment.fingerprint, segment.nbytes, segment.scope, span.slab, span.offset))
        if all(segment.fingerprint in numbers for segment in record.segments):
            known = [numbers[segment.fingerprint] for segment in record.segments if segment.fingerprint is not None]
            records.append(LegacyFunction(name, version, known))
    return LegacyBooks(FORMAT, slabs.pinnable, sorted(slabs.slabs.items()), segments, records)


def scrub(books: LegacyBooks, slabs: Slabs, maps: Mapping[int, SharedMemory]) -> None:
    """All that does not go over."""
    kept = {(segment.slab, segment.offset) for segment in books.segments}
    for number, offset, nbytes in slabs.taken():
        if (number, offset) not in kept:
            maps[number].scrub(offset, nbytes)


def leave(end: socket.socket, books: LegacyBooks, maps: Mapping[int, SharedMemory]) -> None:
    """Into the pair of sockets of which ``end`` is one; the owner of the other may be there or not. Raises OSError."""
    end.setblocking(False)
    memory = os.memfd_create("dormouse-books", os.MFD_CLOEXEC)
    with open(memory, "wb") as file:
        file.write(msgspec.msgpack.encode(books))
        file.flush()
        socket.send_fds(end, [b"books"], [file.fileno()])
    fds = [maps[number].fd for number, _ in books.slabs]
    for start in range(0, len(fds), MAX_FDS):
        socket.send_fds(end, [b"slabs"], fds[start : start + MAX_FDS])


@dataclass(frozen=True)
class Legacy:
    """The legacy that was found; the memory is the taker's."""

    books: LegacyBooks
    maps: dict[int, SharedMemory]  # by slab


def take(end: socket.socket) -> Legacy | None:
    """None: there is none. Raises RemoteProtocolError if it does not fit together."""
    end.setblocking(False)
    found: list[int] = []
    try:
        while True:
            data, fds, flags, _ = socket.recv_fds(end, 16, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            found += fds
            if flags & socket.MSG_CTRUNC:
                close_all(found)
                raise RemoteProtocolError("this process may not have so many descriptors (ulimit -n)")
            if not data:
                break
    except OSError:  # no more has been sent
        pass
    if not found:
        return None
    maps: dict[int, SharedMemory] = {}
    try:
        with open(found.pop(0), "rb") as file:
            file.seek(0)
            books = msgspec.msgpack.decode(file.read(), type=LegacyBooks)
        if books.format != FORMAT or len(found) != len(books.slabs):
            raise RemoteProtocolError(f"format {books.format}, {len(found)} of {len(books.slabs)} slabs")
        for number, nbytes in books.slabs:
            maps[number] = SharedMemory.adopt(found.pop(0), nbytes, books.pinnable)
    except (msgspec.MsgspecError, OSError, RemoteProtocolError) as error:
        for memory in maps.values():
            memory.close()
        for fd in found:
            os.close(fd)
        raise RemoteProtocolError(f"what the store before has left: {error}") from error
    return Legacy(books, maps)


def adopt(books: LegacyBooks, segments: Segments, functions: KeptFunctions) -> None:
    """Into the state, after the segments in files; the slabs have the spans already."""
    found: list[Segment] = []
    for each in books.segments:
        segment = segments.find(each.fingerprint)
        if segment is None:
            segment = segments.new(each.nbytes, each.scope, each.span)
            segments.identify(segment, each.fingerprint)
        else:
            segments.move_up(segment, each.span)
        segments.hold(segment, _ADOPTING)
        found.append(segment)
    for function in books.functions:
        functions.remember((function.name, function.version), [found[number] for number in function.segments])
    for segment in found:
        segments.release(segment, _ADOPTING)
