"""Carries out the decisions of uploads.py for one instance: finds room, copies, reads and hashes, and reports the
outcome.

Bytes are moved in threads. Their target stays there until the machine has received the outcome.
"""

import ctypes
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.store.disk.blobs import Blobs
from dormouse.gpuserver.store.disk.file_reads import FileReadFailed, FileReads
from dormouse.gpuserver.store.disk.writer import Writer
from dormouse.gpuserver.store.ingest import steps as o
from dormouse.gpuserver.store.ingest.models import StoredModel
from dormouse.gpuserver.store.ingest.offers import Changed, Offer, identity_of
from dormouse.gpuserver.store.ingest.uploads import Uploads
from dormouse.gpuserver.store.memory.fingerprint import HashKeys
from dormouse.gpuserver.store.memory.functions import KeptFunctions
from dormouse.gpuserver.store.memory.segments import Segments
from dormouse.gpuserver.store.memory.slabs import HostFull
from dormouse.gpuserver.store.memory.store_memory import StoreMemory
from dormouse.schemas import messages as m


@dataclass(frozen=True, slots=True)
class StoreServices:
    """Services that all instances share. ``report`` is called when host memory may be used otherwise than before."""

    segments: Segments
    functions: KeptFunctions
    memory: StoreMemory
    reads: FileReads
    writer: Writer
    keys: HashKeys
    blobs: Blobs
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    report: Callable[[], None]
    log: Any


class Endpoint(Protocol):
    """The endpoint of the instance."""

    def find_offer(self, file: int) -> Offer | None: ...

    def answer(self, message: m.StoreToInstance) -> None: ...

    def publish(self) -> None:
        """The model has a new version."""


class Loading:
    """The uploads of one model.

    Args:
        arena: its memory, which is closed when the instance is gone; ``area`` is its layout.
        scope: within which its segments are shared.
    """

    def __init__(
        self,
        model: StoredModel,
        arena: SharedMemory,
        area: m.Arena,
        scope: str,
        node: StoreServices,
        endpoint: Endpoint,
    ) -> None:
        self._model = model
        self._arena = arena
        self._area = area
        self._scope = scope
        self._node = node
        self._endpoint = endpoint
        self._uploads = Uploads(model, node.segments, scope, area.stream_nbytes)

    def hear(self, event: o.Event) -> None:
        """Take an event that is not the outcome of a step."""
        for step in self._handle(event):
            self._node.spawn(self._run(step))

    async def _run(self, step: o.Step) -> None:
        """A step, and those behind it."""
        while True:
            event = await self._attempt(step)
            steps = self._handle(event)
            if not steps:
                return
            step, *others = steps
            for other in others:
                self._node.spawn(self._run(other))

    async def _attempt(self, step: o.Step) -> o.Outcome | o.Hashed:
        try:
            return await self._perform(step)
        except (HostFull, FileReadFailed) as error:
            text = str(error)
            if not isinstance(step, o.Hash):
                return o.Failed(text)
        except Exception as error:  # the outermost frame of work for this instance
            text = self._raised(error)
            if not isinstance(step, o.Hash):
                return o.Failed(text, raised=True)
        self.hear(o.Broke(text))
        return o.Hashed(step.number, None)

    def _handle(self, event: o.Event) -> list[o.Step]:
        """Returns the steps that take time."""
        steps: list[o.Step] = []
        going = True
        while going:
            going = False
            for effect in self._decide(event):
                match effect:
                    case o.GoOn():
                        going, event = True, effect
                    case o.Look() | o.FindSpan() | o.CopySegment() | o.CopyFromArena() | o.ReadFile() | o.Hash():
                        steps.append(effect)
                    case _:
                        self._do(effect)
        self._node.report()
        return steps

    def _decide(self, event: o.Event) -> list[o.Effect]:
        try:
            return self._uploads.handle(event)
        except Exception as error:  # the same, of decisions for it
            return self._uploads.handle(o.Broke(self._raised(error)))

    def _do(self, effect: o.Deed) -> None:
        match effect:
            case o.GiveBack(spans=spans):
                self._node.memory.give_back(spans)
            case o.Unpin(segment=segment):
                self._node.memory.unpin(segment)
            case o.DonePlacing():
                self._node.memory.done_placing(self._model)
            case o.NoteFileRange(identity=identity, fingerprint=fingerprint):
                self._node.writer.note(identity, fingerprint)
            case o.Publish():
                self._endpoint.publish()
            case o.Say(message=message):
                self._endpoint.answer(message)
            case o.Warn(text=text):
                self._node.log.warning("instance_violation", instance=self._model.instance, text=text)
            case o.ReadersGone():
                self._arena.close()
                self._node.memory.done_placing(self._model)
            case _:
                assert_never(effect)

    def _raised(self, error: Exception) -> str:
        self._node.log.error("instance_raised", instance=self._model.instance, story=traceback.format_exc())
        return f"what it sent raised {type(error).__name__} in the store"

    async def _perform(self, step: o.Step) -> o.Outcome | o.Hashed:
        """Raises HostFull, FileReadFailed."""
        node, memory = self._node, self._node.memory
        match step:
            case o.Look():
                return self._look(step)
            case o.FindSpan(nbytes=nbytes):
                return o.SpanFound(await memory.announce(self._model, self._model.instance, nbytes))
            case o.CopySegment(segment=segment, offset=offset, span=span):
                await memory.come(span, self._model.instance, span.nbytes)
                await node.reads.read(segment, self._model)
                assert segment.span is not None
                await memory.copy(memory.address(segment.span) + offset, span, 0, span.nbytes)
                return o.Copied()
            case o.CopyFromArena(upload=upload, span=span):
                await memory.come(span, self._model.instance, upload.nbytes)
                source = self._arena.address + self._area.stream_offset + upload.arena_offset
                await memory.copy(source, span, upload.offset, upload.nbytes)
                return o.BytesWritten()
            case o.ReadFile(part=part, span=span):
                await memory.come(span, self._model.instance, part.nbytes)
                return o.BytesWritten(await self._read(step))
            case o.Hash(number=number, span=span, parts=parts):
                await memory.come(span, self._model.instance, span.nbytes)  # missing bytes are zeros
                if parts:
                    start = memory.address(span)
                    moves = [(start + offset, memory.address(part), part.nbytes) for part, offset in parts]
                    await memory.run(_copy_all, moves)
                return o.Hashed(number, await memory.hash(node.keys.of(self._scope), span))
            case _:
                assert_never(step)

    def _look(self, look: o.Look) -> o.Seen | o.Failed:
        part, node = look.part, self._node
        name = f"file {part.file}"
        offer = self._endpoint.find_offer(part.file)
        if offer is None:
            return o.Failed(f"{name} was not offered, or is closed for newer ones: offer it again or upload the bytes")
        try:
            found = offer.stat()
        except OSError as error:
            return o.Failed(f"{name} cannot be read: {error.strerror}")
        blob = node.blobs.name_of(found)
        identity = fingerprint = None
        if look.whole and 0 <= part.file_offset <= found.st_size - part.nbytes:
            identity = identity_of(found, offer.durable, part.file_offset, part.nbytes, self._scope, blob)
        if identity is not None:
            fingerprint = node.writer.find(identity)
        return o.Seen(found.st_size, (offer, found, blob), identity, fingerprint)

    async def _read(self, step: o.ReadFile) -> str:
        """Why the bytes are not there."""
        offer, before, blob = step.file
        part, memory = step.part, self._node.memory
        into = memory.view(step.span)[part.offset : part.offset + part.nbytes]
        offer.reading = True
        try:
            await memory.run(offer.read, part.file_offset, into, before, bool(blob))
        except Changed as error:
            return f"file {part.file} has changed under the store: {error}; load it again"
        except OSError as error:
            return f"file {part.file} cannot be read: {error.strerror}"
        finally:
            offer.read_over()
        return ""


def _copy_all(moves: list[tuple[int, int, int]]) -> None:
    """``(target, source, nbytes)``."""
    for move in moves:
        ctypes.memmove(*move)
