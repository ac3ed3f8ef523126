"""Brings segments up from their files: one read for however many wait for it."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from dormouse.gpuserver.store.disk.files import Damaged, SegmentFiles
from dormouse.gpuserver.store.memory.fingerprint import HashKeys
from dormouse.gpuserver.store.memory.segments import Segment, Segments
from dormouse.gpuserver.store.memory.slabs import HostFull
from dormouse.gpuserver.store.memory.store_memory import StoreMemory
from dormouse.schemas.errors import DormouseError

READERS: Final = 2
"""Threads that read files: one waits for the disk while the other hashes."""

_Turn = tuple["asyncio.Future[None] | None", "asyncio.Future[None]"]
"""Segments of one owner are placed in the order in which they are wanted: when the one before is placed, and when this
one is."""


class FileReadFailed(DormouseError):
    """A segment could not be brought up; the text says why. Worth a retry unless the segment is damaged."""


class FileReads:
    """Reads under way.

    Args:
        on_damage: called once with each segment whose file has other bytes, and the evidence.
        spawn: starts a task that ends the process if it raises.
    """

    def __init__(
        self,
        segments: Segments,
        memory: StoreMemory,
        files: SegmentFiles,
        keys: HashKeys,
        on_damage: Callable[[Segment, str], None],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._segments = segments
        self._memory = memory
        self._files = files
        self._keys = keys
        self._on_damage = on_damage
        self._spawn = spawn
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(READERS, "store-read")
        self._turns: dict[object, asyncio.Future[None]] = {}  # by owner: its last segment is placed
        self._outcomes: dict[Segment, asyncio.Future[str]] = {}  # of the reads under way: why they failed, or nothing

    async def read(self, segment: Segment, owner: object) -> None:
        """Return when the segment, which the caller has pinned, is in host memory, behind the owner's last one if
        possible. Raises FileReadFailed.
        """
        if segment.damaged:
            raise FileReadFailed(f"segment {segment.id} is damaged: its instances must be loaded again")
        self._segments.touch(segment)
        if segment.span is None and (text := await asyncio.shield(self.begin(segment, owner))):
            raise FileReadFailed(text)

    def begin(self, segment: Segment, owner: object) -> "asyncio.Future[str]":
        """Start to read a segment that has no host copy, unless somebody has; the result is empty or why it failed."""
        outcome = self._outcomes.get(segment)
        if outcome is None:
            outcome = self._outcomes[segment] = self._loop.create_future()
            self._segments.pin(segment)
            turn = self._turns.get(owner), self._loop.create_future()
            self._turns[owner] = turn[1]
            self._spawn(self._read(segment, owner, turn, outcome))
        return outcome

    async def _read(self, segment: Segment, owner: object, turn: _Turn, outcome: "asyncio.Future[str]") -> None:
        text = await self._try(segment, owner, turn)
        del self._outcomes[segment]
        outcome.set_result(text)
        self._memory.unpin(segment)

    async def _try(self, segment: Segment, owner: object, turn: _Turn) -> str:
        fingerprint = segment.fingerprint
        assert fingerprint is not None
        before, placed = turn
        try:
            if before is not None:
                await before
            span = await self._memory.place(owner, segment.nbytes)
        except HostFull as error:
            return str(error)
        finally:
            placed.set_result(None)
            if self._turns[owner] is placed:
                del self._turns[owner]
        text = ""
        try:
            key = self._keys.of(segment.scope)
            await self._loop.run_in_executor(self._pool, self._files.read, fingerprint, key, self._memory.view(span))
        except Damaged as error:
            text = f"segment {segment.id}: {error}"
        except OSError as error:
            self._segments.freed.append(span)
            return f"segment {segment.id} cannot be read now: {error}"
        if text and not segment.damaged:
            self._on_damage(segment, text)
        if not text and segment.span is None:
            self._segments.move_up(segment, span)
            return ""
        self._segments.freed.append(span)
        return text if segment.span is None else ""  # an upload of the same bytes was faster

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
