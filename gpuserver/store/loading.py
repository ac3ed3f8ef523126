"""Carries out what one instance loads: bytes from its arena or its files into working storages, these into segments.

What a storage is at any time is models.py's decision. Bytes are copied, read and hashed in threads; what they are
copied to is marked as busy or sealed meanwhile, because an executor may write the same storage back at any time.
"""

import asyncio
import ctypes
from collections.abc import Callable, Coroutine
from typing import Any

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.store.blobs import Blobs
from dormouse.gpuserver.store.fingerprint import Keys
from dormouse.gpuserver.store.functions import Functions
from dormouse.gpuserver.store.index import Identity
from dormouse.gpuserver.store.lifts import LiftFailed, Lifts
from dormouse.gpuserver.store.memory import Memory
from dormouse.gpuserver.store.models import Model, ModelError, Piece, Working
from dormouse.gpuserver.store.offers import Changed, Offer, identity_of
from dormouse.gpuserver.store.packing import SMALL_NBYTES
from dormouse.gpuserver.store.segments import Segment, Segments
from dormouse.gpuserver.store.slabs import Span
from dormouse.gpuserver.store.writer import Writer
from dormouse.schemas import messages as m
from dormouse.schemas.errors import RemoteProtocolError


class Node:
    """What all instances share."""

    def __init__(
        self,
        segments: Segments,
        functions: Functions,
        memory: Memory,
        lifts: Lifts,
        writer: Writer,
        keys: Keys,
        blobs: Blobs,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        log: Any,
    ) -> None:
        self.segments = segments
        self.functions = functions
        self.memory = memory
        self.lifts = lifts
        self.writer = writer
        self.keys = keys
        self.blobs = blobs
        self.spawn = spawn
        self.log = log


class Loading:
    """The uploads of one model, one at a time.

    Args:
        arena: its memory; ``area`` is its layout.
        scope: within which its segments are shared.
        on_change: called when host memory may be used otherwise than before.
    """

    def __init__(
        self, model: Model, arena: SharedMemory, area: m.Arena, scope: str, node: Node, on_change: Callable[[], None]
    ) -> None:
        self.model = model
        self.scope = scope
        self._arena = arena
        self._area = area
        self._node = node
        self._on_change = on_change
        self._hashes: set[asyncio.Task[None]] = set()

    # --- uploads

    async def upload(self, upload: m.StoreUpload) -> None:
        arena, end = self._area, upload.arena_offset + upload.nbytes
        if min(upload.arena_offset, upload.nbytes) < 0 or end > arena.stream_nbytes:
            raise RemoteProtocolError(
                f"an upload of bytes [{upload.arena_offset}, {end}) of a stream area of {arena.stream_nbytes} bytes"
            )
        working = await self._working(upload.storage, upload.total_nbytes, upload.offset, upload.nbytes)
        source = self._arena.address + arena.stream_offset + upload.arena_offset
        working.busy = True
        await self._node.memory.copy(source, working.span, upload.offset, upload.nbytes)
        if self.model.give_back(upload.storage, working):
            self._written(upload.storage, working, upload.offset, upload.nbytes, None)

    async def _working(self, storage: int, total_nbytes: int, offset: int, nbytes: int) -> Working:
        """Where bytes ``[offset, +nbytes)`` of a storage are written. Segments are immutable: of a storage that has
        one, the other bytes are copied.
        """
        model, memory = self.model, self._node.memory
        item = model.find(storage, total_nbytes, offset, nbytes)
        while isinstance(item, Working) and item.sealed:
            await self.settled()
            item = model.find(storage, total_nbytes, offset, nbytes)
        if isinstance(item, Working):
            return item
        model.admit(storage, total_nbytes)
        working = Working(await memory.place(model, total_nbytes))
        item = model.find(storage, total_nbytes, offset, nbytes)  # while we waited, a write-back may have replaced it
        if isinstance(item, Working):
            self._node.segments.freed.append(working.span)
            return item
        if isinstance(item, Piece) and nbytes < total_nbytes:
            try:
                await self._copy_piece(item, working)
            except LiftFailed:
                self._node.segments.freed.append(working.span)
                raise
        model.put(storage, working)
        return working

    async def _copy_piece(self, piece: Piece, working: Working) -> None:
        segment, memory = piece.segment, self._node.memory
        self._node.segments.pin(segment)
        try:
            await self._node.lifts.lift(segment, self.model)
            assert segment.span is not None
            await memory.copy(memory.address(segment.span) + piece.offset, working.span, 0, piece.nbytes)
        finally:
            memory.unpin(segment)
        working.coverage.add(0, piece.nbytes)

    def _written(self, storage: int, working: Working, offset: int, nbytes: int, identity: Identity | None) -> None:
        """A large storage that is complete is hashed at once: a second instance of the same function never needs much
        more than its own share of memory.
        """
        working.coverage.add(offset, nbytes)
        if working.nbytes > SMALL_NBYTES and working.coverage.complete and not working.sealed:
            self._seal([(storage, working, 0)], working.span, identity)

    def _seal(
        self, placed: list[tuple[int, Working, int]], span: Span, identity: Identity | None = None
    ) -> "asyncio.Task[None]":
        for _, working, _ in placed:
            working.sealed = True
        task = asyncio.get_running_loop().create_task(self._settle(placed, span, identity))
        self._hashes.add(task)
        task.add_done_callback(self._hashes.discard)
        return task

    async def _settle(self, placed: list[tuple[int, Working, int]], span: Span, identity: Identity | None) -> None:
        """Hash a span that holds these storages: it becomes their segment, unless there is one with its bytes."""
        node = self._node
        moves = [
            (node.memory.address(span) + offset, node.memory.address(working.span), working.nbytes)
            for _, working, offset in placed
            if working.span is not span  # packed
        ]
        if moves:
            await node.memory.run(_copy_all, moves)
        fingerprint = await node.memory.hash(node.keys.of(self.scope), span)
        segment = node.segments.settle(span.nbytes, self.scope, span, fingerprint)
        self.model.settle(placed, segment)
        for _, working, _ in placed:
            if working.span is not span:
                node.segments.freed.append(working.span)
        if identity is not None:
            node.writer.note(identity, fingerprint)
        node.memory.collect()
        self._on_change()

    async def settled(self) -> None:
        """Wait for all hashes under way."""
        while begun := set(self._hashes):
            await asyncio.gather(*begun)
            self._hashes -= begun  # from Python 3.12 on, what is done already is not waited for, and stays here

    # --- files

    async def read_file(self, part: m.StoreFile, offer: Offer | None) -> None:
        """Raises ModelError when the file does not have the range, or changes under us."""
        end = part.file_offset + part.nbytes
        name = f"file {part.file}"
        if offer is None:
            raise ModelError(f"{name} was not offered, or is closed for newer ones: offer it again or upload the bytes")
        try:
            before = offer.stat()
        except OSError as error:
            raise ModelError(f"{name} cannot be read: {error.strerror}") from error
        if part.file_offset < 0 or part.nbytes < 0 or end > before.st_size:
            raise ModelError(
                f"bytes [{part.file_offset:,}, {end:,}) are not in {name}, which has {before.st_size:,} bytes: it is "
                "truncated or was replaced; load it again"
            )
        item = self.model.find(part.storage, part.total_nbytes, part.offset, part.nbytes)
        whole = part.nbytes == part.total_nbytes and part.nbytes > SMALL_NBYTES
        identity = None
        blob = self._node.blobs.name_of(before)
        if whole:
            identity = identity_of(before, offer.durable, part.file_offset, part.nbytes, self.scope, blob)
        if identity is not None and (segment := self._known(identity)) is not None:
            if item is None:
                self.model.admit(part.storage, part.nbytes)
            self.model.put(part.storage, segment)
            self._node.memory.collect()
            return
        working = await self._working(part.storage, part.total_nbytes, part.offset, part.nbytes)
        into = self._node.memory.view(working.span)[part.offset : part.offset + part.nbytes]
        offer.reading = working.busy = True
        text = ""
        try:
            await self._node.memory.run(offer.read, part.file_offset, into, before, bool(blob))
        except Changed as error:
            text = f"{name} has changed under the store: {error}; load it again"
        except OSError as error:
            text = f"{name} cannot be read: {error.strerror}"
        offer.read_over()
        used = self.model.give_back(part.storage, working)
        if text:  # the range is as if it had not come: the instance sends its bytes instead, or fails
            if used and working.coverage.empty:
                self.model.free([part.storage])
            raise ModelError(text)
        if used:
            self._written(part.storage, working, part.offset, part.nbytes, identity)

    def _known(self, identity: Identity) -> Segment | None:
        """The segment with the bytes of a file that has not changed since they were read."""
        fingerprint = self._node.writer.find(identity)
        segment = None if fingerprint is None else self._node.segments.find(fingerprint)
        return segment if segment is not None and segment.nbytes == identity.nbytes else None

    # --- commit

    async def commit(self) -> bool:
        """Everything gets its segment: small storages together, others each their own; whether the version is new."""
        memory, model = self._node.memory, self.model
        await self.settled()
        packed, nbytes = model.small()
        if len(packed) > 1:
            span = await memory.place(model, nbytes)
            while model.small() != (packed, nbytes):  # a write-back has replaced one of them while we waited
                self._node.segments.freed.append(span)
                packed, nbytes = model.small()
                span = await memory.place(model, nbytes)
            self._seal(packed, span)
        for storage, working in model.unsealed():
            self._seal([(storage, working, 0)], working.span)
        await self.settled()
        memory.done_placing(model)
        return model.commit()

    async def close(self) -> None:
        """The instance is gone, and nothing is under way but hashes."""
        self.model.close()
        self._node.memory.done_placing(self.model)
        if self._hashes:  # they give back what they read
            await asyncio.wait(self._hashes)
        self._node.memory.collect()
        self._on_change()


def _copy_all(moves: list[tuple[int, int, int]]) -> None:
    """``(target, source, nbytes)``."""
    for move in moves:
        ctypes.memmove(*move)
