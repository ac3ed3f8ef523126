"""What one store leaves to the next: the same memory, no bytes of anybody else, and nothing that does not fit."""

import os
import resource
import socket
from collections.abc import Iterator

import msgspec
import pytest

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.store.memory import legacy
from dormouse.gpuserver.store.memory.functions import KeptFunctions
from dormouse.gpuserver.store.memory.segments import Segments
from dormouse.gpuserver.store.memory.slabs import Slabs
from dormouse.schemas.errors import RemoteProtocolError

MIB = 1 << 20
KEY = ("f", 3)


class Books:
    """A store's, with their memory; two segments are function f's, one is an instance's draft."""

    def __init__(self, pinnable: bool = False) -> None:
        self.slabs = Slabs(64 * MIB, 2 * MIB, pinnable)
        self.segments = Segments()
        self.functions = KeptFunctions(self.segments)
        self.maps: dict[int, SharedMemory] = {}

    def segment(self, owner: str, nbytes: int, letter: bytes) -> "object":
        span = self.slabs.place(owner, nbytes)
        for number, size in self.slabs.slabs.items():
            if number not in self.maps:
                self.maps[number] = SharedMemory.create("slab", size, self.slabs.pinnable)
        self.maps[span.slab].view[span.offset : span.offset + nbytes] = letter * nbytes
        segment = self.segments.new(nbytes, "node", span)
        self.segments.hold(segment, owner)
        return segment

    def close(self) -> None:
        for memory in self.maps.values():
            memory.close()


@pytest.fixture(params=[False, True], ids=["pageable", "pinnable"])
def books(request: pytest.FixtureRequest) -> Iterator[Books]:
    found = Books(request.param)
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def filled(books: Books) -> None:
    a = books.segment("load", 5000, b"a")
    draft = books.segment("draft", 70_000, b"d")
    b = books.segment("load", 3000, b"b")
    assert draft is not a
    for segment, fingerprint in ((a, b"A" * 32), (b, b"B" * 32)):
        books.segments.identify(segment, fingerprint)  # type: ignore[arg-type]
    books.functions.remember(KEY, [b, a])  # type: ignore[list-item]


def left(books: Books, end: socket.socket) -> legacy.LegacyBooks:
    found = legacy.books_of(books.functions, books.slabs)
    legacy.scrub(found, books.slabs, books.maps)
    legacy.leave(end, found, books.maps)
    return found


def test_the_next_store_has_the_same_memory_and_nobody_elses_bytes(
    books: Books, pair: tuple[socket.socket, socket.socket]
) -> None:
    filled(books)
    said = left(books, pair[0])
    inodes = {number: os.fstat(memory.fd).st_ino for number, memory in books.maps.items()}
    books.close()
    books.maps.clear()  # the store before has ended; the memory is on its way
    found = legacy.take(pair[1])
    assert found is not None
    assert found.books == said
    assert {number: os.fstat(memory.fd).st_ino for number, memory in found.maps.items()} == inodes

    after = Books(books.slabs.pinnable)
    after.maps = found.maps
    after.slabs.adopt(dict(said.slabs), (segment.span for segment in said.segments))
    after.slabs.check()
    legacy.adopt(said, after.segments, after.functions)
    after.segments.check()
    record = after.functions.records[KEY]
    assert [segment.fingerprint for segment in record.segments] == [b"B" * 32, b"A" * 32]
    assert [segment.holders for segment in record.segments] == [{KEY}, {KEY}]
    kept = set()
    for segment, letter in zip(record.segments, (b"b", b"a"), strict=True):
        assert segment.span is not None
        kept.add((segment.span.slab, segment.span.offset, segment.nbytes))
        view = after.maps[segment.span.slab].view[segment.span.offset : segment.span.offset + segment.nbytes]
        assert bytes(view) == letter * segment.nbytes
    for number, memory in after.maps.items():
        text = bytearray(memory.view)
        for slab, offset, nbytes in kept:
            if slab == number:
                text[offset : offset + nbytes] = bytes(nbytes)
        assert not any(text), "the draft's bytes are gone"
    new = after.segment("next", 9000, b"n")
    assert new not in record.segments
    after.slabs.check()
    after.close()


def test_what_is_known_from_files_is_the_same_segment(books: Books, pair: tuple[socket.socket, socket.socket]) -> None:
    filled(books)
    said = left(books, pair[0])
    after = Books(books.slabs.pinnable)
    known = [after.segments.restore(letter * 32, nbytes, "node") for letter, nbytes in ((b"B", 3000), (b"A", 5000))]
    after.functions.restore(KEY, known)
    legacy.adopt(said, after.segments, after.functions)
    after.segments.check()
    assert after.functions.records[KEY].segments == known
    assert after.functions.records[KEY].saved
    assert all(segment.span is not None for segment in known)


def test_nothing_is_found_where_nothing_was_left(pair: tuple[socket.socket, socket.socket]) -> None:
    assert legacy.take(pair[1]) is None
    pair[0].close()
    assert legacy.take(pair[1]) is None


@pytest.mark.parametrize("broken", ["garbage", "format", "fewer", "unsealed"])
def test_what_does_not_fit_together_is_refused_whole(
    broken: str, books: Books, pair: tuple[socket.socket, socket.socket]
) -> None:
    filled(books)
    said = legacy.books_of(books.functions, books.slabs)
    if broken == "format":
        said = msgspec.structs.replace(said, format=99)
    data = b"\xc1" if broken == "garbage" else msgspec.msgpack.encode(said)
    memory = os.memfd_create("books")
    os.write(memory, data)
    plain = os.memfd_create("plain")
    os.ftruncate(plain, 2 * MIB)
    fds = [plain if broken == "unsealed" else books.maps[number].fd for number, _ in said.slabs]
    socket.send_fds(pair[0], [b"books"], [memory])
    socket.send_fds(pair[0], [b"slabs"], fds[1:] if broken == "fewer" else fds)
    os.close(memory)
    os.close(plain)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RemoteProtocolError, match="what the store before has left"):
        legacy.take(pair[1])
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("budget", [1 * MIB, 64 * MIB])
def test_slabs_that_overlap_or_are_too_many_are_refused(budget: int, books: Books) -> None:
    filled(books)
    said = legacy.books_of(books.functions, books.slabs)
    spans = [segment.span for segment in said.segments]
    after = Slabs(budget if books.slabs.pinnable else budget // 1000, 2 * MIB, books.slabs.pinnable)
    with pytest.raises(ValueError, match="is not free" if budget == 64 * MIB else "hold"):
        after.adopt(dict(said.slabs), [*spans, *spans] if budget == 64 * MIB else spans)


def test_a_process_that_may_not_have_so_many_descriptors_says_so(
    books: Books, pair: tuple[socket.socket, socket.socket]
) -> None:
    books.segment("f", 2 * MIB, b"a")
    legacy.leave(pair[0], legacy.books_of(books.functions, books.slabs), books.maps)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = os.listdir("/proc/self/fd")
    with open("/dev/null", "rb") as lowest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest.fileno() + 1, hard))
        try:
            with pytest.raises(RemoteProtocolError, match="ulimit -n"):
                legacy.take(pair[1])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert os.listdir("/proc/self/fd") == before
