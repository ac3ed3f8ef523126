"""The store: owns the host copies of all models and decides nothing about GPUs.

An instance uploads storages during ``load()`` and commits them as a manifest; an executor asks for places, writes
changed storages back and so makes the next one. Segments are immutable: a changed storage gets a new segment, and the
old one is used again only when every executor has said that it copies nothing older than the manifest that dropped
it. Freed bytes read as zero, so that no instance finds another's.
"""

import asyncio
import os
from collections.abc import Callable
from typing import Final

from dormouse.core.actor import Actor, run_actor
from dormouse.core.config import NodeConfig
from dormouse.core.fds import Inbox, PacketSocket
from dormouse.core.link import Link
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.slabs import HostFull, Slabs
from dormouse.gpuserver.uploads import Model, ModelError
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

INBOX_TRIES: Final = 200
INBOX_RETRY_S: Final = 0.05
"""An executor binds its inbox before it says Ready, so the first try succeeds unless it has died: 10 s, then it is
given up.
"""

REPORT_S: Final = 0.02
"""Delay of StoreStatus: people read it."""

INSTANCE_HWM: Final = 64
"""Uploads that one instance may have queued: its arena holds no more."""

ExecutorLink = Link[m.ExecutorToStore, m.StoreToExecutor]
InstanceLink = Link[m.InstanceToStore, m.StoreToInstance]


class Tenant:
    """One attached instance: its arena, its link and its model."""

    def __init__(self, attach: m.AttachInstance, arena: SharedMemory, model: Model) -> None:
        self.attach = attach
        self.arena = arena
        self.model = model
        self.link: InstanceLink | None = None
        self.broken = False  # it broke the protocol: nothing it says counts any more


class Store(Actor):
    """The actor of role ``store``."""

    def __init__(self, role: str, epoch: int, config: NodeConfig) -> None:
        super().__init__(role, epoch, config)
        self.slabs = Slabs(config.host_nbytes)
        self.memories: list[SharedMemory] = []  # by slab
        self.tenants: dict[str, Tenant] = {}  # by instance
        self.executors: dict[str, ExecutorLink] = {}  # by role, those alive
        self.packets: dict[str, PacketSocket[None, m.InboxPacket]] = {}  # by role: their inboxes
        self.departed: dict[str, tuple[Model, set[str]]] = {}  # by instance, with who may still copy
        self._status = m.StoreStatus(host_nbytes=0, slabs=0)
        self._reporting: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self.controller: Link[m.ControllerToStore, m.StoreToController] = Link(
            self.paths.link("controller", "store", self.epoch),
            bind=False,
            incoming=m.ControllerToStore,
            on_message=self._on_controller,
        )
        self.inbox: Inbox[m.InboxPacket] = Inbox(self.paths.inbox("store", self.epoch), m.InboxPacket, self._on_packet)

    async def stop(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        self.controller.close()
        self.inbox.close()
        for tenant in self.tenants.values():
            if tenant.link is not None:
                tenant.link.close()
        for role in list(self.executors):
            self._executor_gone(role)

    # --- executors

    def peers_changed(self, before: dict[str, int]) -> None:
        for role in [role for role in before if role in self.executors and before[role] != self.peers.get(role)]:
            self._executor_gone(role)
        for role, epoch in self.peers.items():
            if role.startswith("gpu") and role not in self.executors:
                self.executors[role] = Link(
                    self.paths.link("store", role, epoch),
                    bind=True,
                    incoming=m.ExecutorToStore,
                    on_message=self._from(role),
                )
                self.spawn(self._introduce(role, epoch))

    def _from(self, role: str) -> Callable[[m.ExecutorToStore], None]:
        return lambda message: self._on_executor(role, message)

    async def _introduce(self, role: str, epoch: int) -> None:
        """Give a new executor all slabs and all manifests."""
        path = self.paths.inbox(role, epoch)
        for attempt in range(INBOX_TRIES):
            if self.peers.get(role) != epoch:
                return
            try:
                packets: PacketSocket[None, m.InboxPacket] = PacketSocket.connect(path, None)
                break
            except PeerLost as error:
                if attempt == INBOX_TRIES - 1:
                    self.log.error("executor_has_no_inbox", executor=role, error=str(error))
                    return
                await asyncio.sleep(INBOX_RETRY_S)
        self.packets[role] = packets
        for slab in range(len(self.memories)):
            self._send_slab(role, slab)
        for instance, tenant in self.tenants.items():
            if tenant.model.version:
                self._to_executor(role, tenant.model.manifest(instance))

    def _send_slab(self, role: str, slab: int) -> None:
        memory = self.memories[slab]
        try:
            self.packets[role].send(m.SlabMade(slab=slab, nbytes=memory.nbytes), [memory.fd])
        except PeerLost as error:
            # The supervisor will tell us that it died.
            self.log.warning("executor_inbox_lost", executor=role, error=str(error))

    def _to_executor(self, role: str, message: m.StoreToExecutor) -> None:
        try:
            self.executors[role].send(message)
        except PeerLost as error:
            self.log.warning("executor_link_lost", executor=role, error=str(error))

    def _executor_gone(self, role: str) -> None:
        """A dead process copies nothing: give up its tickets, and do not wait for it any more."""
        self.executors.pop(role).close()
        if role in self.packets:
            self.packets.pop(role).close()
        for instance, tenant in self.tenants.items():
            tenant.model.forget_executor(role)
            self._collect(instance)
        for instance in list(self.departed):
            self._settled_departed(instance, role)

    def _on_executor(self, role: str, message: m.ExecutorToStore) -> None:
        match message:
            case m.Place(ticket=ticket, instance=instance, storages=storages):
                self._place(role, ticket, instance, storages)
            case m.Written(ticket=ticket, freed=freed):
                for instance, tenant in self.tenants.items():
                    if tenant.model.has_ticket(role, ticket):
                        tenant.model.written(role, ticket, freed)
                        self._publish(instance, tenant)
                        break
            case m.Settled(instance=instance, version=version):
                if instance in self.tenants:
                    self.tenants[instance].model.settled(role, version)
                    self._collect(instance)
                elif version < 0:
                    self._settled_departed(instance, role)

    def _place(self, role: str, ticket: int, instance: str, storages: list[tuple[int, int]]) -> None:
        tenant = self.tenants.get(instance)
        if tenant is None:
            self._to_executor(role, m.PlaceRefused(ticket=ticket, text=f"instance {instance} is gone"))
            return
        try:
            segments = tenant.model.place(role, ticket, storages)
        except (HostFull, ModelError) as error:
            self._to_executor(role, m.PlaceRefused(ticket=ticket, text=str(error)))
            return
        self._make_slabs()
        self._to_executor(role, m.Placed(ticket=ticket, segments=segments))
        self._report()

    # --- memory

    def _make_slabs(self) -> None:
        """Give memory to slabs that the books have added, and show it to the executors."""
        sizes = self.slabs.slabs
        for slab in range(len(self.memories), len(sizes)):
            self.memories.append(SharedMemory.create(f"dormouse-slab-{slab}", sizes[slab]))
            for role in self.packets:
                self._send_slab(role, slab)

    def _publish(self, instance: str, tenant: Tenant) -> None:
        """A new manifest version: the controller first, so that it never asks an executor for an older one."""
        manifest = tenant.model.manifest(instance)
        self.controller.send(m.ModelSize(instance=instance, version=manifest.version, nbytes=tenant.model.nbytes))
        for role in self.executors:
            self._to_executor(role, manifest)
        self._collect(instance)

    def _collect(self, instance: str) -> None:
        """Free what no manifest, ticket or executor refers to any more."""
        model = self.tenants[instance].model
        for place in model.collect(set(self.executors)):
            self.memories[place.slab].scrub(place.offset, place.nbytes)
            self.slabs.free(place)
        self._report()

    def _report(self) -> None:
        """Tell the controller soon: a load changes the numbers hundreds of times in a second."""
        if self._reporting is None:
            self._reporting = self.loop.call_later(REPORT_S, self._send_status)

    def _send_status(self) -> None:
        self._reporting = None
        status = m.StoreStatus(host_nbytes=self.slabs.used_nbytes, slabs=len(self.memories))
        if status != self._status:
            self._status = status
            self.controller.send(status)

    def _on_controller(self, message: m.ControllerToStore) -> None:
        self._forget(message.instance)

    def _forget(self, instance: str) -> None:
        """The instance is gone: free its segments as soon as no executor copies from them."""
        tenant = self.tenants.pop(instance, None)
        if tenant is None:
            return
        if tenant.link is not None:
            tenant.link.close()
        tenant.arena.close()
        self.departed[instance] = (tenant.model, set(self.executors))
        for role in self.executors:
            self._to_executor(role, m.Dropped(instance=instance))
        self._settled_departed(instance, "")

    def _settled_departed(self, instance: str, role: str) -> None:
        model, waiting = self.departed.get(instance, (None, set[str]()))
        waiting.discard(role)
        if model is not None and not waiting:
            del self.departed[instance]
            for place in model.release():
                self.memories[place.slab].scrub(place.offset, place.nbytes)
                self.slabs.free(place)
            self._report()

    # --- instances

    def _on_packet(self, message: m.InboxPacket, fds: list[int]) -> None:
        match message:
            case m.AttachInstance() if len(fds) == 1 and message.instance not in self.tenants:
                self._attach(message, fds.pop())
            case m.DetachInstance(instance=instance):
                self._forget(instance)  # the controller says the same when it learns of it
        for fd in fds:
            os.close(fd)

    def _attach(self, attach: m.AttachInstance, fd: int) -> None:
        tenant = Tenant(attach, SharedMemory.adopt(fd, attach.arena.nbytes), Model(self.slabs, attach.quota_nbytes))
        path = os.path.join(attach.directory, "store")
        try:
            tenant.link = Link(
                path,
                bind=True,
                incoming=m.InstanceToStore,
                on_message=lambda message: self._on_instance(tenant, message),
                on_garbage=lambda error: self._break(tenant, str(error)),
                max_nbytes=1 << 20,
                hwm=INSTANCE_HWM,
            )
            os.chown(path, attach.uid, -1, follow_symlinks=False)  # the directory is the instance's
        except (PeerLost, OSError) as error:  # its directory is gone: it died while this was on its way
            self.log.warning("instance_not_attached", instance=attach.instance, error=str(error))
            if tenant.link is not None:
                tenant.link.close()
            tenant.arena.close()
            return
        self.tenants[attach.instance] = tenant

    def _on_instance(self, tenant: Tenant, message: m.InstanceToStore) -> None:
        if tenant.broken:
            return
        model = tenant.model
        try:
            match message:
                case m.StoreUpload():
                    self._upload(tenant, message)
                    self._answer(tenant, m.Uploaded())
                case m.StoreFree(storages=storages):
                    model.free(storages)
                    self._collect(tenant.attach.instance)
                case m.Commit():
                    if model.commit():
                        self._publish(tenant.attach.instance, tenant)
                    self._answer(tenant, m.Committed(version=model.version, nbytes=model.nbytes))
        except RemoteProtocolError as error:
            self._break(tenant, str(error))
        except (HostFull, ModelError) as error:
            self._answer(tenant, m.StoreFailed(text=str(error)))

    def _upload(self, tenant: Tenant, upload: m.StoreUpload) -> None:
        arena, end = tenant.attach.arena, upload.arena_offset + upload.nbytes
        if min(upload.arena_offset, upload.nbytes) < 0 or end > arena.stream_nbytes:
            raise RemoteProtocolError(
                f"an upload of bytes [{upload.arena_offset}, {end}) of a stream area of {arena.stream_nbytes} bytes"
            )
        place, whole, previous = tenant.model.upload(upload.storage, upload.total_nbytes, upload.offset, upload.nbytes)
        self._make_slabs()
        memory = self.memories[place.slab]
        if previous is not None and not whole:  # segments are immutable: the rest of a changed storage comes along
            old = self.memories[previous.slab]
            memory.view[place.offset : place.offset + place.nbytes] = old.view[
                previous.offset : previous.offset + place.nbytes
            ]
        source = arena.stream_offset + upload.arena_offset
        target = place.offset + upload.offset
        memory.view[target : target + upload.nbytes] = tenant.arena.view[source : source + upload.nbytes]
        self._report()

    def _answer(self, tenant: Tenant, message: m.StoreToInstance) -> None:
        try:
            if tenant.link is not None:
                tenant.link.send(message)
        except PeerLost as error:
            self._break(tenant, str(error))

    def _break(self, tenant: Tenant, text: str) -> None:
        """It broke the protocol: tell it once, then hear nothing more from it. Its own ``load()`` will time out."""
        if not tenant.broken:
            tenant.broken = True
            self.log.warning("instance_violation", instance=tenant.attach.instance, text=text)
            self._answer(tenant, m.StoreFailed(text=text))


if __name__ == "__main__":
    run_actor(Store)
