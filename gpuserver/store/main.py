"""The store: owns the host copies of all models and decides nothing about GPUs.

An instance uploads storages during ``load()`` and commits them as a manifest; an executor asks where segments lie, and
for places to which it writes changed storages back. This actor wires the parts: messages of instances go to ingest/,
those of executors to peers.py; the state that all share is in memory/, the state that outlives the process in disk/.
"""

import asyncio
import os
import resource
import socket
from functools import partial
from typing import Final

from dormouse.core import tenants
from dormouse.core.actor import Actor
from dormouse.core.config import NodeConfig
from dormouse.core.links.ends import STRANGER_RATE_S
from dormouse.core.links.fds import Inbox
from dormouse.core.links.link import Link
from dormouse.core.links.zmq_link import ZmqLink
from dormouse.core.listening import HEIR_FD, inherited_at
from dormouse.core.rate import SharedBuckets
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver import inboxes
from dormouse.gpuserver.store.disk.blobs import Blobs
from dormouse.gpuserver.store.disk.file_reads import FileReads
from dormouse.gpuserver.store.disk.files import SegmentFiles
from dormouse.gpuserver.store.disk.index import Index, forget_all
from dormouse.gpuserver.store.disk.writer import Writer
from dormouse.gpuserver.store.ingest.instances import StoreInstance
from dormouse.gpuserver.store.ingest.loading import StoreServices
from dormouse.gpuserver.store.inheritance import bequeath, inherited
from dormouse.gpuserver.store.memory import legacy
from dormouse.gpuserver.store.memory.fingerprint import load_keys, scope_of
from dormouse.gpuserver.store.memory.functions import KeptFunctions
from dormouse.gpuserver.store.memory.segments import Holder, Segment, Segments
from dormouse.gpuserver.store.memory.shares import HostShares
from dormouse.gpuserver.store.memory.store_memory import StoreMemory
from dormouse.gpuserver.store.metering import HostMeter
from dormouse.gpuserver.store.peers import ExecutorSession
from dormouse.gpuserver.store.report import instance_bytes
from dormouse.gpuserver.store.telling import Telling
from dormouse.schemas import messages as m
from dormouse.schemas.errors import ConfigError, PeerLost

UNCLAIMED: Final = ("", 0)
"""Holds segments that the index had of no function (sessions), until the controller has reported the deployed
functions.
"""

LOAD_TENSORS: Final = 100_000
"""Cost that a tenant's instances may incur at once beyond their pace: a message for each tensor of the largest models.
"""


def _raise_descriptor_limit() -> None:
    """Instances offer files by the dozen, and many systems give a process only 1024 descriptors unless it asks."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Store(Actor):
    """The actor of role ``store``."""

    def __init__(self, role: str, epoch: int, config: NodeConfig) -> None:
        super().__init__(role, epoch, config)
        self.instances: dict[str, StoreInstance] = {}  # by instance
        self.executors: dict[str, ExecutorSession] = {}  # by role, those alive
        self._unclaimed: list[Segment] = []
        self._paces = SharedBuckets(STRANGER_RATE_S, LOAD_TENSORS)
        self._displaced: set[str] = set()  # instances that are to end, and have not yet
        self._opened = False
        self._heir: socket.socket | None = None  # where a successor finds its legacy

    async def start(self) -> None:
        _raise_descriptor_limit()  # first: slabs are inherited
        config = self.config
        durable = config.disk_nbytes != 0
        try:
            self.state.store.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"{self.state.store}: {error.strerror}; set [node] state") from error
        keys = load_keys(self.state.store_key)
        forget = config.start.forget_models and self.epoch == 1
        if forget:
            forget_all(self.state.store_index)
        self.index = Index(self.state.store_index if durable else None, None if forget else self.state.store_segments)
        files = SegmentFiles(self.state.store_segments, config.disk_nbytes)
        if durable:
            files.open()
        self.segments = Segments(self.index.first_id)
        self.functions = KeptFunctions(self.segments)
        meter = HostMeter(self.segments, self._owner)
        self._telling = Telling(meter, self._totals, lambda message: self.controller.send(message), self.log)
        self.writer = Writer(self.segments, self.functions, files if durable else None, self.index, self._telling.soon)
        slabs, left = inherited(config.host_nbytes, config.start.cuda, self.log)
        maps = {} if left is None else left.maps
        self._shares = HostShares(self.segments, self._tenant, partial(tenants.host_nbytes, config))
        self.memory = StoreMemory(
            self.segments,
            slabs,
            self._on_slab,
            self._on_slab_gone,
            self._telling.soon,
            self.writer.press,
            maps,
            self._shares,
            self._displace,
        )
        self.reads = FileReads(self.segments, self.memory, files, keys, self._damaged, self.spawn)
        self.node = StoreServices(
            self.segments,
            self.functions,
            self.memory,
            self.reads,
            self.writer,
            keys,
            Blobs(self.state.blobs),
            self.spawn,
            self._telling.soon,
            self.log,
        )
        self._restore()
        if left is not None:
            legacy.adopt(left.books, self.segments, self.functions)
            nbytes = self.memory.slabs.used_nbytes
            self.log.info("legacy_adopted", slabs=len(maps), segments=len(left.books.segments), nbytes=nbytes)
            self.writer.poke()
        self._opened = True
        self.spawn(self.writer.run(self.memory))
        self.controller: ZmqLink[m.ControllerToStore, m.StoreToController] = ZmqLink(
            self.paths.link("controller", "store", self.epoch),
            bind=False,
            incoming=m.ControllerToStore,
            on_message=self._on_controller,
        )
        self.inbox: Inbox[m.InboxPacket] = Inbox(self.paths.inbox("store", self.epoch), m.InboxPacket, self._on_packet)
        self._telling.soon()

    def leave(self, within_s: float) -> None:
        """The models here go to a successor when this store stops, which is next."""
        self._heir = inherited_at(HEIR_FD)

    def _restore(self) -> None:
        """Restore the state from the index; no file is looked at."""
        by_fingerprint = {
            stored.fingerprint: self.segments.restore(stored.fingerprint, stored.nbytes, stored.scope)
            for stored in self.index.segments
        }
        for key, fingerprints in self.index.functions.items():
            self.functions.restore(key, [by_fingerprint[each] for each in fingerprints if each in by_fingerprint])
        self._unclaimed = [segment for segment in by_fingerprint.values() if not segment.holders]
        for segment in self._unclaimed:
            self.segments.hold(segment, UNCLAIMED)
        self.log.info("store_opened", segments=len(by_fingerprint), file_nbytes=self.segments.filed_nbytes)

    async def stop(self) -> None:
        if not self._opened:  # it could not start
            return
        self._telling.close()
        self.controller.close()
        self.inbox.close()
        for attached in self.instances.values():
            attached.close()
        for role in list(self.executors):
            self.executors.pop(role).close()
        self.writer.close()
        self.reads.close()
        if self._heir is not None:
            bequeath(self._heir, self.functions, self.memory, self.log)
        self.memory.close()
        self.index.close()

    # --- executors

    def peers_changed(self, before: dict[str, int]) -> None:
        for role in [role for role in before if role in self.executors and before[role] != self.peers.get(role)]:
            self.executors.pop(role).close()
            self._telling.soon()
        for role, epoch in self.peers.items():
            if role.startswith("gpu") and role not in self.executors:
                executor = self.executors[role] = ExecutorSession(role, epoch, self.node)
                executor.link = Link(
                    self.paths.link("store", role, epoch),
                    bind=True,
                    incoming=m.ExecutorToStore,
                    on_message=partial(self._on_executor, executor),
                )
                self.spawn(self._introduce(executor, epoch))

    async def _introduce(self, executor: ExecutorSession, epoch: int) -> None:
        """Give a new executor all slabs and all manifests."""
        wanted = partial(self._has, executor)
        executor.inbox = await inboxes.reach(self.paths.inbox(executor.role, epoch), wanted)
        if executor.inbox is None:
            if wanted():
                self.log.error("executor_has_no_inbox", executor=executor.role)
            return
        for slab in self.memory.maps:
            executor.send_slab(slab)
        for attached in self.instances.values():
            if attached.model.version:
                executor.send(attached.model.manifest())

    def _has(self, executor: ExecutorSession) -> bool:
        return self.executors.get(executor.role) is executor

    def _on_slab(self, slab: int) -> None:
        for executor in self.executors.values():
            executor.send_slab(slab)

    def _on_slab_gone(self, slab: int) -> None:
        for executor in self.executors.values():
            executor.send_slab_gone(slab)

    def _on_executor(self, executor: ExecutorSession, message: m.ExecutorToStore) -> None:
        match message:
            case m.Fetch(ticket=ticket, segments=segments):
                executor.fetch(ticket, segments)
            case m.AskPlace(ticket=ticket, instance=instance, storages=storages):
                attached = self.instances.get(instance)
                if attached is None:
                    executor.send(m.PlaceRefused(ticket=ticket, text=f"instance {instance} is gone"))
                else:
                    executor.ask_place(ticket, attached, storages)
            case m.Written(ticket=ticket, freed=freed):
                written = executor.written(ticket, freed)
                if written is not None:
                    self._publish(written)
            case m.LetGo(ticket=ticket):
                executor.let_go(ticket)
            case m.FirstUse(instance=instance, version=version, segments=segments):
                attached = self.instances.get(instance)
                if attached is not None and attached.model.first_use(version, segments):
                    self._show(attached)
        self._telling.soon()

    # --- models

    def _publish(self, attached: StoreInstance) -> None:
        """A new manifest version: the controller first, so that it never asks an executor for an older one."""
        model = attached.model
        self.controller.send(m.ModelSize(instance=model.instance, version=model.version, nbytes=model.nbytes))
        self._show(attached)
        self.memory.collect()
        self._telling.soon()

    def _show(self, attached: StoreInstance) -> None:
        manifest = attached.model.manifest()
        for executor in self.executors.values():
            executor.send(manifest)
        if attached.key is not None and self.config.disk_nbytes != 0:
            self.functions.remember(attached.key, attached.model.order)
            self.writer.poke()

    def _damaged(self, segment: Segment, text: str) -> None:
        """A file does not have its bytes: forget it, and have the models that need it loaded again. Bytes that are in
        host memory as well are written anew.
        """
        assert segment.fingerprint is not None
        lost = self.segments.damage(segment.fingerprint)
        instances = sorted({holder for each in lost for holder in each.holders if isinstance(holder, str)})
        for each in lost:
            self.functions.lose(each)
        self.functions.unsave(segment.fingerprint)
        self.log.error("segment_damaged", segment=segment.id, instances=instances, text=text)
        self.controller.send(m.ModelDamaged(instances=instances, text=text))
        self.writer.poke()
        self._telling.soon()

    # --- instances

    def _on_packet(self, message: m.InboxPacket, fds: list[int]) -> None:
        match message:
            case m.AttachInstance() if len(fds) == 1 and message.instance not in self.instances:
                self._attach(message, fds.pop())
            case m.DetachInstance(instance=instance):
                self._forget(instance)  # the controller reports the same when it learns of it
        for fd in fds:
            os.close(fd)

    def _attach(self, attach: m.AttachInstance, fd: int) -> None:
        arena = SharedMemory.adopt(fd, attach.arena.nbytes)
        scope = scope_of(self.config.node.sharing, attach)
        pace = self._paces.of(attach.tenant, asyncio.get_running_loop().time())
        attached = StoreInstance(attach, arena, scope, self.node, pace, self._publish)
        try:
            attached.open()
        except PeerLost as error:
            self.log.warning("instance_not_attached", instance=attach.instance, error=str(error))
            return
        self.instances[attach.instance] = attached
        if attached.key is not None:
            self.functions.attach(attached.key)

    def _forget(self, instance: str) -> None:
        """The instance is gone: free its segments as soon as nothing copies from them."""
        attached = self.instances.pop(instance, None)
        if attached is None:
            return
        self._displaced.discard(instance)
        attached.leave()
        if attached.key is not None:
            self.functions.detach(attached.key)
        for executor in self.executors.values():
            executor.send(m.Dropped(instance=instance))
        self.memory.collect()
        self.writer.poke()
        self._telling.soon()

    # --- controller

    def _on_controller(self, message: m.ControllerToStore) -> None:
        match message:
            case m.StoreForget(instance=instance):
                self._forget(instance)
            case m.Keep(functions=functions):
                self._keep(functions)
            case m.MoveDown():
                self._move_down(message)
            case m.AskStore(query=query):
                models = [(attached.attach, attached.model) for attached in self.instances.values()]
                answer = m.StoreReport(query=query, instances=instance_bytes(self.segments, models))
                self._telling.now()  # first, so that the totals and the models' shares are of one moment
                self.controller.send(answer)

    def _move_down(self, asked: m.MoveDown) -> None:
        models = [self.instances[name].model for name in asked.instances if name in self.instances]
        segments = {segment.id: segment for model in models for segment in model.order}
        left_nbytes = self.segments.forget_here(segments.values(), asked.instances)
        self.memory.collect()
        self._telling.soon()
        self.controller.send(m.MovedDown(query=asked.query, left_nbytes=left_nbytes))

    def _keep(self, functions: list[tuple[str, int]]) -> None:
        self.functions.keep(functions)
        unclaimed, self._unclaimed = self._unclaimed, []
        for segment in unclaimed:
            self.segments.release(segment, UNCLAIMED)
        self.memory.collect()
        self.writer.sweep()
        self._telling.soon()

    def _owner(self, holder: Holder) -> str:
        if isinstance(holder, tuple):
            return holder[0] if holder in self.functions.records else ""
        attached = self.instances.get(holder)
        return "" if attached is None else attached.attach.function or holder

    def _tenant(self, holder: Holder) -> str | None:
        attached = None if isinstance(holder, tuple) else self.instances.get(holder)
        return None if attached is None else attached.attach.tenant

    def _displace(self) -> bool:
        """A deployed model is needed, and models being loaded take its room: whether an instance gives it back."""
        if not self._displaced and (name := self._shares.largest_draft()):
            self._displaced.add(name)
            self.log.warning("load_displaced", instance=name)
            self.controller.send(m.LoadDisplaced(instance=name))
        return bool(self._displaced)

    def _totals(self) -> m.StoreStatus:
        budget = self.config.disk_nbytes
        return m.StoreStatus(
            host_nbytes=self.memory.slabs.held_nbytes,
            host_budget_nbytes=self.memory.slabs.budget_nbytes,
            file_nbytes=self.segments.filed_nbytes,
            file_budget_nbytes=-1 if budget is None else budget,
            segments=len(self.segments.by_id),
            slabs=len(self.memory.maps),
            trouble=self.writer.trouble,
        )
