"""One executor as the store sees it: owns the link, the inbox and the tickets.

A ticket pins the segments of a Fetch, or holds the new ones of an AskPlace, until the executor lets go of it or dies.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Final

from dormouse.core.links.link import Link
from dormouse.gpuserver.inboxes import InboxPoster
from dormouse.gpuserver.store.disk.file_reads import FileReadFailed
from dormouse.gpuserver.store.ingest.instances import StoreInstance
from dormouse.gpuserver.store.ingest.loading import StoreServices
from dormouse.gpuserver.store.ingest.models import ModelError
from dormouse.gpuserver.store.memory.segments import Segment
from dormouse.gpuserver.store.memory.slabs import HostFull
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

FETCHED_NBYTES: Final = 32 << 20
"""Read from files before the executor is notified: a few chunks of its copies, so that it begins while we read on."""

READS_AHEAD: Final = 4
"""Reads of one Fetch that are under way together, beyond those that the threads can do at once."""

ExecutorLink = Link[m.ExecutorToStore, m.StoreToExecutor]


@dataclass(slots=True, eq=False)
class _Fetch:
    segments: list[Segment]
    over: bool = False


@dataclass(slots=True, eq=False)
class _Placement:
    instance: StoreInstance
    segments: dict[int, Segment] = field(default_factory=dict)  # by storage
    over: bool = False


class ExecutorSession:
    """The executor of ``role``."""

    def __init__(self, role: str, epoch: int, node: StoreServices) -> None:
        self.role = role
        self.link: ExecutorLink | None = None
        self.inbox: InboxPoster | None = None  # once it has one
        self._name = f"ticket of {role}.{epoch}"  # holds the segments of its tickets: an epoch numbers them anew
        self._node = node
        self._tickets: dict[int, _Fetch | _Placement] = {}

    def send(self, message: m.StoreToExecutor) -> None:
        try:
            if self.link is not None:
                self.link.send(message)
        except PeerLost as error:
            # The supervisor will tell us that it died.
            self._node.log.warning("executor_link_lost", executor=self.role, error=str(error))

    def send_slab(self, slab: int) -> None:
        if self.inbox is not None:
            memory = self._node.memory.maps[slab]
            made = m.SlabMade(slab=slab, nbytes=memory.nbytes, pinnable=memory.pinnable)
            self.inbox.post(made, (memory.fd,))

    def send_slab_gone(self, slab: int) -> None:
        if self.inbox is not None:  # else it will not learn of this slab
            self.inbox.post(m.SlabGone(slab=slab))

    # --- fetches

    def fetch(self, number: int, ids: list[int]) -> None:
        """Report the places of segments; those that are only in files come later."""
        books = self._node.segments
        segments = [books.by_id[id] for id in ids if id in books.by_id]
        unknown = [id for id in ids if id not in books.by_id or books.by_id[id].damaged]
        damaged = any(segment.damaged for segment in segments)
        if unknown or number in self._tickets:
            text = f"segments {unknown[:8]} are not known, or damaged" if unknown else f"ticket {number} is in use"
            self.send(m.FetchFailed(ticket=number, text=text, damaged=damaged))
            return
        ticket = self._tickets[number] = _Fetch(segments)
        for segment in segments:
            books.pin(segment)
            books.touch(segment)
        missing = [segment for segment in segments if segment.span is None]
        here = [_place(segment) for segment in segments if segment.span is not None]
        self.send(m.Fetched(ticket=number, places=here, file_nbytes=0, last=not missing))
        if missing:
            self._node.spawn(self._fetch_files(number, ticket, missing))

    async def _fetch_files(self, number: int, ticket: _Fetch, missing: list[Segment]) -> None:
        places: list[m.Place] = []
        nbytes = 0
        begun: list[asyncio.Future[str]] = []
        self._node.memory.slabs.expect(ticket, [segment.nbytes for segment in missing])
        try:
            for index, segment in enumerate(missing):
                begun = [
                    self._node.reads.begin(ahead, ticket)
                    for ahead in missing[index : index + READS_AHEAD]
                    if ahead.span is None and not ahead.damaged
                ]
                await self._node.reads.read(segment, ticket)
                if ticket.over:
                    break
                places.append(_place(segment))
                nbytes += segment.nbytes
                last = index + 1 == len(missing)
                if last or nbytes >= FETCHED_NBYTES:
                    self.send(m.Fetched(ticket=number, places=places, file_nbytes=nbytes, last=last))
                    places, nbytes = [], 0
        except FileReadFailed as error:
            if not ticket.over:
                damaged = any(segment.damaged for segment in missing)
                self.send(m.FetchFailed(ticket=number, text=str(error), damaged=damaged))
        if begun:  # those ahead of one that failed
            await asyncio.wait(begun)
        self._node.memory.done_placing(ticket)

    # --- write-backs

    def ask_place(self, number: int, instance: StoreInstance, storages: list[tuple[int, int]]) -> None:
        if number in self._tickets:
            self.send(m.PlaceRefused(ticket=number, text=f"ticket {number} is in use"))
            return
        ticket = self._tickets[number] = _Placement(instance)
        self._node.spawn(self._place(number, ticket, dict(storages)))

    async def _place(self, number: int, ticket: _Placement, storages: dict[int, int]) -> None:
        node = self._node
        try:
            ticket.instance.model.admit_write(storages)
            spans = await node.memory.place_all(ticket, storages.values())
        except (HostFull, ModelError) as error:
            self._refuse(number, ticket, str(error))
            return
        if ticket.over or ticket.instance.gone:
            node.segments.freed.extend(spans)
            node.memory.collect()
            self._refuse(number, ticket, f"instance {ticket.instance.attach.instance} is gone")
            return
        for storage, span in zip(storages, spans, strict=True):
            segment = node.segments.new(span.nbytes, ticket.instance.scope, span)
            node.segments.hold(segment, (self._name, number))
            ticket.segments[storage] = segment
        self.send(m.Placed(ticket=number, places=[_place(segment) for segment in ticket.segments.values()]))

    def _refuse(self, number: int, ticket: _Placement, text: str) -> None:
        """Unless the executor has let go of it meanwhile."""
        if not ticket.over:
            del self._tickets[number]
            self.send(m.PlaceRefused(ticket=number, text=text))

    def written(self, number: int, freed: list[int]) -> StoreInstance | None:
        """The bytes of a placement are there; returns the instance if it has a new version by that."""
        ticket = self._tickets.get(number)
        if not isinstance(ticket, _Placement):
            return None
        del self._tickets[number]
        if not ticket.instance.gone:
            ticket.instance.written(ticket.segments, freed)
            for segment in ticket.segments.values():
                self._node.segments.pin(segment)
                self._node.spawn(self._identify(segment, ticket.instance.scope))
        self._release(number, ticket)
        return None if ticket.instance.gone else ticket.instance

    async def _identify(self, segment: Segment, scope: str) -> None:
        """The fingerprint of a segment that was written back, behind the request's answer."""
        node = self._node
        assert segment.span is not None
        fingerprint = await node.memory.hash(node.keys.of(scope), segment.span)
        node.segments.identify(segment, fingerprint)
        node.memory.unpin(segment)
        node.writer.poke()

    # ---

    def let_go(self, number: int) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            self._release(number, ticket)

    def _release(self, number: int, ticket: _Fetch | _Placement) -> None:
        books = self._node.segments
        ticket.over = True
        if isinstance(ticket, _Fetch):
            for segment in ticket.segments:
                books.unpin(segment)
        else:
            for segment in ticket.segments.values():
                books.release(segment, (self._name, number))
        self._node.memory.collect()
        self._node.memory.changed.set()

    def close(self) -> None:
        """The executor is dead: it copies nothing any more."""
        if self.link is not None:
            self.link.close()
        if self.inbox is not None:
            self.inbox.close()
        for number in list(self._tickets):
            self.let_go(number)


def _place(segment: Segment) -> m.Place:
    span = segment.span
    assert span is not None
    return m.Place(segment=segment.id, slab=span.slab, offset=span.offset, nbytes=span.nbytes)
