"""The bodies of requests, from their first byte until their request is settled, under one budget for the whole node.

Small ones are plain bytes: the bound on connections bounds their number. A larger one first gets room for its announced
length, in order of arrival, and is written into pages of its own as it arrives; until there is room its socket is not
read. So none waits with half its bytes for another that does the same, and released pages go back to the system. Where
there are several tenants, one has a part of the room at most, and its waiting bodies hold up nobody else. Answers that
clients have not read yet count too.

Nothing here knows of HTTP or looks at the bytes.
"""

import asyncio
import contextlib
import mmap
from collections import Counter, deque
from typing import Final

SMALL_NBYTES: Final = 64 << 10
"""A body up to this size takes no room and travels to its instance within a message."""

TYPE_NBYTES: Final = 500
"""Of a content type: it travels with each request."""

ROOM_S: Final = 10.0
"""So long a body waits for room: a burst is read as fast as it is served, a flood is told to come back."""


FORGET_S: Final = 1.0
"""Pages of a body are kept for the next one so long: new ones are zeroed first, which takes as long as to fill them."""


class NoRoom(Exception):
    """The budget is spent."""


class Body:
    """One request's bytes: ``data`` once it is complete. Its holder closes it, once. ``kind`` and ``accept`` are
    as in Run. ``owner``: the tenant that sends it; "": the node itself.
    """

    def __init__(self, bodies: "Bodies", owner: str = "") -> None:
        self._owner = owner
        self.data: bytes | memoryview = b""
        self.kind = self.accept = ""
        self.nbytes = 0
        self._bodies = bodies
        self._room_nbytes = 0
        self._end = 0  # of what was announced
        self._spare_nbytes = 0  # of pages that another body has filled: they are there, whatever comes now
        self._chunks: list[bytes] = []
        self._pages: mmap.mmap | None = None

    async def expect(self, expected_nbytes: int) -> None:
        """Have room for so many, if they need any. Raises NoRoom."""
        if self._pages is None and expected_nbytes > SMALL_NBYTES:
            await self._bodies.take(expected_nbytes, self._owner)
            self._end = expected_nbytes
            self._pages, self._spare_nbytes = self._bodies.pages(expected_nbytes, self._owner)
            self._room_nbytes = max(expected_nbytes, self._spare_nbytes)
            for early in self._chunks:
                self._pages.write(early)
            self._chunks = []

    async def add(self, chunk: bytes, expected_nbytes: int) -> None:
        """``expected_nbytes``: at most so many will come in all. Raises NoRoom."""
        if self.nbytes + len(chunk) > SMALL_NBYTES:
            await self.expect(expected_nbytes)
        if self._pages is None:
            self._chunks.append(chunk)
        else:
            self._pages.write(chunk)
        self.nbytes += len(chunk)

    def rest(self) -> memoryview | None:
        """Where all that is still to come will lie, once there is room for it; :meth:`filled` follows."""
        return None if self._pages is None else memoryview(self._pages)[self.nbytes : self._end]

    def filled(self) -> None:
        """The rest has come, and lies there."""
        self.nbytes = self._end

    def complete(self) -> "Body":
        """All has come: room that was not needed is given back."""
        if self._pages is None:
            self.data = b"".join(self._chunks)
        else:
            self.data = memoryview(self._pages)[: self.nbytes]
            kept_nbytes = max(self.nbytes, self._spare_nbytes)
            self._bodies.give(self._room_nbytes - kept_nbytes, self._owner)
            self._room_nbytes = kept_nbytes
        return self

    def close(self) -> None:
        self._chunks, room_nbytes, self._room_nbytes = [], self._room_nbytes, 0
        if self._pages is not None:
            if isinstance(self.data, memoryview):
                self.data.release()
            self._bodies.give(room_nbytes, self._owner)
            self._bodies.keep(self._pages)
            self._pages = None
        self.data = b""


class Bodies:
    """The budget, and what one owner may have of it."""

    def __init__(self, budget_nbytes: int, part_nbytes: int | None = None) -> None:
        self.budget_nbytes = budget_nbytes
        self.part_nbytes = budget_nbytes if part_nbytes is None else min(part_nbytes, budget_nbytes)
        self._owned: Counter[str] = Counter()  # bytes by owner
        self.taken_nbytes = 0
        self.unread_nbytes = 0  # of answers; reported once a second
        self._waiting: deque[tuple[int, str, asyncio.Future[None]]] = deque()
        self._spare: mmap.mmap | None = None  # pages of the last body that was closed
        self._forgetting: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How many bodies wait for room."""
        return len(self._waiting)

    def _has_part(self, owner: str, nbytes: int) -> bool:
        return not owner or self._owned[owner] + nbytes <= self.part_nbytes

    def _take(self, owner: str, nbytes: int) -> None:
        self.taken_nbytes += nbytes
        self._owned[owner] += nbytes
        if not self._owned[owner]:
            del self._owned[owner]

    def _fits(self, nbytes: int) -> bool:
        return self.taken_nbytes + self.unread_nbytes + nbytes <= self.budget_nbytes

    def pages(self, nbytes: int, owner: str = "") -> tuple[mmap.mmap, int]:
        """For so many bytes, which have been taken: the spare ones, of which then all are taken, or new ones; and how
        many are spare ones.
        """
        spare, self._spare = self._spare, None
        if spare is not None and nbytes <= len(spare) <= 2 * nbytes and self._fits(len(spare) - nbytes):
            spare.seek(0)
            self._take(owner, len(spare) - nbytes)
            return spare, len(spare)
        pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them: first writes take ten times as long
            pages.madvise(mmap.MADV_HUGEPAGE)
        return pages, 0

    def keep(self, pages: mmap.mmap) -> None:
        """For the next body, a while, if nobody else needs the room."""
        if self._forgetting is not None:
            self._forgetting.cancel()
        self._spare = pages if self._fits(len(pages)) else None
        self._forgetting = asyncio.get_running_loop().call_later(FORGET_S, self._forget)

    def _forget(self) -> None:
        self._spare = None

    async def take(self, nbytes: int, owner: str = "") -> None:
        """Have room, after those who asked before. Raises NoRoom after ROOM_S."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, owner, turn))
        self._admit()
        if turn.done():
            return
        try:
            await asyncio.wait_for(asyncio.shield(turn), ROOM_S)
        except BaseException as error:
            if turn.done():
                self.give(nbytes, owner)  # it came too late
            else:
                self._waiting.remove((nbytes, owner, turn))
                self._admit()  # those behind may need less
            if isinstance(error, TimeoutError):
                raise NoRoom from None
            raise

    def give(self, nbytes: int, owner: str = "") -> None:
        """Back. Less than none: of what came and nobody could keep waiting; who asks for room waits for it."""
        self._take(owner, -nbytes)
        self._admit()

    def unread(self, nbytes: int) -> None:
        """So many bytes of answers wait for their clients."""
        self.unread_nbytes = nbytes
        self._admit()

    def _admit(self) -> None:
        for waiting in [each for each in self._waiting if self._has_part(each[1], each[0])]:
            nbytes, owner, turn = waiting
            if not self._fits(nbytes):
                return
            if self._has_part(owner, nbytes):  # still, after those before it
                self._waiting.remove(waiting)
                self._take(owner, nbytes)
                turn.set_result(None)
