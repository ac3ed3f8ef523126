"""Writes segments to files in the background, and the index rows that refer to them; forgets those that nobody wants.

Writes are requested by memory/functions.py (records that are not on disk) and by callers that need room. One batch at a
time goes to one thread: drop rows and files that are doomed, write files, then write rows. So rows never refer to bytes
that are not on disk, and a fingerprint that comes back after it was doomed is written after it was removed.
"""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from dormouse.gpuserver.store.disk.files import SegmentFiles
from dormouse.gpuserver.store.disk.index import FiledSegment, Identity, Index
from dormouse.gpuserver.store.memory.functions import KeptFunctions, Key
from dormouse.gpuserver.store.memory.segments import Segment, Segments
from dormouse.gpuserver.store.memory.store_memory import StoreMemory

BATCH_NBYTES: Final = 128 << 20
"""About a second of a slow disk: a crash costs no more, and callers that wait for room get some soon."""

BATCH_SEGMENTS: Final = 512
MAX_IDENTITIES: Final = 100_000
"""File ranges that wait to be written to the index, some 20 MB; more are not remembered."""

RETRY_S: Final = 5.0
"""Between two attempts at a disk that is full or broken: somebody else may free it."""


@dataclass(slots=True)
class _Batch:
    doomed: list[bytes]
    dropped: set[Key]
    segments: dict[bytes, Segment] = field(default_factory=dict)
    functions: dict[Key, tuple[int, list[bytes]]] = field(default_factory=dict)
    identities: dict[Identity, bytes] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.doomed or self.dropped or self.segments or self.functions or self.identities)


class Writer:
    """The background writer.

    Args:
        files: None if the node has no file tier; then nothing is written but file identities.
        on_change: called when ``trouble`` or the set of files has changed.
    """

    def __init__(
        self,
        segments: Segments,
        functions: KeptFunctions,
        files: SegmentFiles | None,
        index: Index,
        on_change: Callable[[], None],
    ) -> None:
        self.trouble = ""  # why something that should be in a file is not
        self.identities: dict[Identity, bytes] = {}  # not yet in the index
        self._noting: dict[Identity, bytes] = {}  # on their way there
        self._segments = segments
        self._functions = functions
        self._files = files
        self._index = index
        self._on_change = on_change
        self._pressed: dict[Segment, None] = {}
        self._work = asyncio.Event()
        self._busy = False
        self._sweep = False
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(1, "store-write")

    def poke(self) -> None:
        """There may be something to write."""
        self._work.set()

    def press(self, nbytes: int) -> bool:
        """Host memory is short by ``nbytes``: write segments so that they can move down; whether that makes room."""
        if self._files is None:
            return False
        if self.trouble:
            return self._functions.abandon()
        wanted = self._segments.unfiled(nbytes)
        self._pressed.update(dict.fromkeys(wanted))
        self.poke()
        return bool(wanted) or self._busy

    def sweep(self) -> None:
        """The controller has reported the deployed functions: files that the index does not have are of a crash."""
        self._sweep = self._files is not None
        self.poke()

    def find(self, identity: Identity) -> bytes | None:
        """The fingerprint that a file range had when it was last read."""
        noted = self.identities.get(identity) or self._noting.get(identity)
        if noted is not None:
            return noted
        try:
            return self._index.find(identity)
        except sqlite3.Error:  # it only saves a read; the writer of the index reports its errors
            return None

    def note(self, identity: Identity, fingerprint: bytes) -> None:
        if len(self.identities) < MAX_IDENTITIES:
            self.identities[identity] = fingerprint
            self.poke()

    async def run(self, memory: StoreMemory) -> None:
        """Write, for ever."""
        while True:
            timeout_s = RETRY_S if self.trouble else None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._work.wait(), timeout_s)
            self._work.clear()
            while batch := self._plan(memory):
                if not await self._write(batch, memory):
                    break

    def _plan(self, memory: StoreMemory) -> _Batch:
        doomed, self._segments.doomed = self._segments.doomed, []
        batch = _Batch(doomed, set(self._functions.dropped))
        batch.identities, self.identities = self.identities, {}
        self._noting = batch.identities
        if self._files is None:
            return batch
        trouble, nbytes = "", 0
        for segment in [*self._pressed, *self._functions.unfiled()]:
            fingerprint = segment.fingerprint
            if fingerprint is None or fingerprint in batch.segments or self._segments.is_filed(segment):
                continue
            if segment.span is None or segment.id not in self._segments.by_id:
                continue
            if batch.segments and (nbytes + segment.nbytes > BATCH_NBYTES or len(batch.segments) >= BATCH_SEGMENTS):
                break
            try:
                refusal = self._files.refusal(self._segments.filed_nbytes + nbytes, segment.nbytes)
            except OSError as error:
                refusal = str(error)
            if refusal is not None:
                trouble = refusal
                continue
            nbytes += segment.nbytes
            batch.segments[fingerprint] = segment
        self._pressed.clear()
        batch.functions = self._functions.savable(set(batch.segments))
        if not batch.segments:
            self._set_trouble(trouble, memory)
        for segment in batch.segments.values():
            self._segments.pin(segment)
        return batch

    async def _write(self, batch: _Batch, memory: StoreMemory) -> bool:
        """Whether it is on disk."""
        self._busy = True
        stored, data = [], []
        for fingerprint, segment in batch.segments.items():
            assert segment.span is not None
            stored.append(FiledSegment(fingerprint, segment.nbytes, segment.scope))
            data.append((fingerprint, memory.view(segment.span)))
        try:
            await self._loop.run_in_executor(self._pool, self._perform, batch, stored, data)
            trouble = ""
        except (OSError, sqlite3.Error) as error:
            trouble = f"segment files cannot be written: {error}; a restart will not find the models of late"
        finally:
            self._busy = False
            self._noting = {}
        if trouble:
            self.identities = {**batch.identities, **self.identities}
            self._segments.doomed = batch.doomed + self._segments.doomed
            self._set_trouble(trouble, memory)
        else:
            self._functions.dropped -= batch.dropped
            for segment in batch.segments.values():
                self._segments.mark_filed(segment)
            for key, (generation, _) in batch.functions.items():
                self._functions.saved(key, generation)
        for segment in batch.segments.values():
            self._segments.unpin(segment)
        memory.collect()
        memory.changed.set()
        self._on_change()
        return not trouble

    def _perform(self, batch: _Batch, stored: list[FiledSegment], data: list[tuple[bytes, memoryview]]) -> None:
        """Write a batch; in the thread. Raises OSError, sqlite3.Error."""
        if batch.doomed or batch.dropped:
            self._index.forget(batch.doomed, batch.dropped)
        if self._files is not None:
            for fingerprint in batch.doomed:
                self._files.remove(fingerprint)
            if self._sweep:
                self._sweep = False
                self._files.sweep(self._index.has)
            if data:
                self._files.write(data)
        if stored or batch.functions or batch.identities:
            functions = {key: fingerprints for key, (_, fingerprints) in batch.functions.items()}
            self._index.keep(stored, functions, batch.identities)

    def _set_trouble(self, trouble: str, memory: StoreMemory) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            memory.changed.set()  # waiting for files is in vain
            self._on_change()

    def close(self) -> None:
        """Wait for the batch under way."""
        self._pool.shutdown(wait=True, cancel_futures=True)
