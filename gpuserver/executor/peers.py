"""An executor's exchange with the other executors: the segments that each has, and access to their memory.

Each executor connects to the inboxes of the others, gives them its pool's memory, reports which of the segments that
one asks for it has, and keeps those until they are released. All of it is on the I/O thread, so a GPU that computes
answers at once. A peer that dies or is silent counts as having nothing; segments kept for it stay until it releases
them or dies.
"""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, Final, Protocol

import structlog

from dormouse.core.config import NodeConfig
from dormouse.core.decisions.leases import events as e
from dormouse.core.links.fds import MAX_FDS
from dormouse.core.paths import RunPaths
from dormouse.gpuserver import inboxes
from dormouse.gpuserver.device.host.device import HostDevice
from dormouse.gpuserver.device.protocol import Device, DeviceError
from dormouse.gpuserver.executor.leases import Leases
from dormouse.gpuserver.inboxes import InboxPoster
from dormouse.schemas import messages as m

ANSWER_S: Final = 1.0
"""A peer answers in less than a millisecond; one that does not is passed over."""

MAX_EXTENTS: Final = 2000
"""An answer is one packet."""

Message = m.PoolExported | m.PeerPin | m.PeerPinned | m.PeerUnpin


class Owner(Protocol):
    """The parts of the executor that are used here."""

    gpu: int
    epoch: int
    config: NodeConfig
    paths: RunPaths
    device: Device
    leases: Leases
    loop: asyncio.AbstractEventLoop
    log: structlog.stdlib.BoundLogger

    def trouble(self, text: str) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None]) -> object: ...


class PeerLinks:
    """The other executors of the node, by GPU number."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._epochs: dict[int, int] = {}  # of those that are up
        self._posters: dict[int, InboxPoster] = {}
        self._readable: dict[int, int] = {}  # epoch whose memory is mapped
        self._lost: dict[int, int] = {}  # newest epoch that is known to be dead
        self._parts: dict[tuple[int, int], list[int]] = {}  # by GPU, epoch: descriptors of incomplete memory

    def changed(self, up: dict[str, int]) -> None:
        """The supervisor's list of roles that are up."""
        if isinstance(self._owner.device, HostDevice) and not self._owner.config.gpu.peer:
            return
        gpus = {int(role.removeprefix("gpu")): epoch for role, epoch in up.items() if role.startswith("gpu")}
        gpus.pop(self._owner.gpu, None)
        for gpu in [gpu for gpu, epoch in self._epochs.items() if gpus.get(gpu) != epoch]:
            self._lose(gpu, self._epochs.pop(gpu))
        for gpu, epoch in gpus.items():
            if gpu not in self._epochs:
                self._epochs[gpu] = epoch
                self._owner.spawn(self._introduce(gpu, epoch))

    async def _introduce(self, gpu: int, epoch: int) -> None:
        """Give a new peer our memory."""
        path = self._owner.paths.inbox(f"gpu{gpu}", epoch)
        poster = await inboxes.reach(path, lambda: self._epochs.get(gpu) == epoch)
        if poster is not None:
            self._posters[gpu] = poster
            self._export(gpu)
        elif self._epochs.get(gpu) == epoch:
            self._owner.log.warning("peer_has_no_inbox", gpu=gpu)

    def _export(self, gpu: int) -> None:
        owner = self._owner
        try:
            handle, descriptors = owner.device.export()
        except DeviceError as error:
            owner.trouble(f"other GPUs cannot copy from this one: {error}")
            return
        groups = [descriptors[start : start + MAX_FDS] for start in range(0, len(descriptors), MAX_FDS)] or [[]]
        try:
            for part, group in enumerate(groups):
                us = m.PoolExported(
                    gpu=owner.gpu,
                    epoch=owner.epoch,
                    nbytes=owner.device.pool_nbytes,
                    handle=handle,
                    part=part,
                    parts=len(groups),
                )
                self._posters[gpu].post(us, tuple(group))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _lose(self, gpu: int, epoch: int) -> None:
        """It is gone: it answers nothing, and reads nothing of ours. Its successor's memory may be here already: that
        comes over another socket than the news of either.
        """
        self._lost[gpu] = epoch
        self._close_parts(gpu, epoch)
        if (poster := self._posters.pop(gpu, None)) is not None:
            poster.close()
        if self._readable.get(gpu, epoch) <= epoch:
            self._readable.pop(gpu, None)
            self._owner.device.drop_peer(gpu)
        self._owner.leases.wakes.peer_lost(gpu)
        self._forget(self._owner.leases.lending.unpin_all(gpu))

    def _forget(self, segments: list[int]) -> None:
        if segments:
            self._owner.leases.dispatch(e.Forgotten(segments))

    # --- requests of wakes

    def ask(self, gpu: int, ticket: int, segments: list[int]) -> None:
        """Ask which of these it has; a peer that cannot be read has nothing."""
        pin = m.PeerPin(gpu=self._owner.gpu, epoch=self._owner.epoch, ticket=ticket, segments=segments)
        if gpu in self._readable and gpu in self._posters:
            self._posters[gpu].post(pin)
            self._owner.loop.call_later(ANSWER_S, self._owner.leases.wakes.peer_answered, ticket)
        else:
            self._owner.leases.wakes.peer_answered(ticket)

    def leave(self, gpu: int, ticket: int) -> None:
        if gpu in self._posters:
            self._posters[gpu].post(m.PeerUnpin(gpu=self._owner.gpu, epoch=self._owner.epoch, ticket=ticket))

    # --- messages of others

    def heard(self, message: Message, fds: list[int]) -> None:
        """A packet of another executor; takes the descriptors that it uses."""
        owner = self._owner
        match message:
            case m.PoolExported():
                self._exported(message, fds)
            case m.PeerPin() if self._epochs.get(message.gpu) == message.epoch and message.gpu in self._posters:
                found = owner.leases.lending.pin(message, MAX_EXTENTS)
                answer = m.PeerPinned(gpu=owner.gpu, epoch=owner.epoch, ticket=message.ticket, extents=found)
                self._posters[message.gpu].post(answer)
            case m.PeerPin():
                pass  # of one that is dead, or that we have not met: it goes on without us
            case m.PeerPinned() if self._readable.get(message.gpu) == message.epoch:
                owner.leases.wakes.peer_answered(message.ticket, message.extents)
            case m.PeerPinned():
                owner.leases.wakes.peer_answered(message.ticket)  # the memory that we have is not the one that it means
            case m.PeerUnpin():
                self._forget(owner.leases.lending.unpin(message))

    def _exported(self, message: m.PoolExported, fds: list[int]) -> None:
        """Part of another's memory; readable once all is here. Parts from one that died may come after the news of its
        death, or between the parts of its successor's.
        """
        gpu, epoch = message.gpu, message.epoch
        if epoch <= self._lost.get(gpu, 0) or epoch < self._readable.get(gpu, 0):
            return
        kept = self._parts.setdefault((gpu, epoch), [])
        kept += fds
        fds.clear()
        if message.part + 1 < message.parts:
            return
        try:
            self._owner.device.map_peer(gpu, message.nbytes, message.handle, kept)
            self._readable[gpu] = epoch
        except DeviceError as error:
            self._owner.trouble(f"it cannot copy from GPU {gpu}: {error}")
        self._close_parts(gpu, epoch)

    def _close_parts(self, gpu: int, epoch: int) -> None:
        for descriptor in self._parts.pop((gpu, epoch), []):
            os.close(descriptor)

    def close(self) -> None:
        for poster in self._posters.values():
            poster.close()
        self._posters.clear()
