"""An executor: owns one GPU. This module is its I/O half; engine.py is the half that computes.

The loop's thread has the sockets and no torch; one device thread has torch and no sockets. Frames go over a queue as
they came; what the engine emits comes back through ``call_soon_threadsafe``. The I/O half decides nothing but whether
a frame may pass (gate.py) and whether a Wake has all it needs: the instance's arena and its manifest in the wanted
version. Answers that name slabs wait for the slabs, which arrive over another socket. Neither half waits for the other:
what a wake's copies need is passed on while the device thread computes.
"""

import asyncio
import gc
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage, and looking for it takes a tenth of torch's time

from dormouse.core.actor import Actor, run_actor
from dormouse.core.config import NodeConfig
from dormouse.core.evidence import Evidence
from dormouse.core.fds import Inbox
from dormouse.core.link import Link, RawLink
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver import gate, operators
from dormouse.gpuserver.allocator import ApproximateActivations
from dormouse.gpuserver.device import DeviceError
from dormouse.gpuserver.devices import open_device
from dormouse.gpuserver.effects import AskPeer, BeginWake, Effect, LeavePeer, Reply, StopWake, Violated, WakeOver
from dormouse.gpuserver.engine import Engine
from dormouse.gpuserver.lease.wakes import Wakes
from dormouse.gpuserver.lending import Lending
from dormouse.gpuserver.peers import Peers
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire
from dormouse.schemas.errors import DormouseError, PeerLost

INSTANCE_HWM: Final = 4 * wire.WINDOW_FRAMES
"""Messages per direction that an instance may leave unread: what it may have parked, and the replies to them."""


class Executor(Actor):
    """The actor of role ``gpu<k>``."""

    def __init__(self, role: str, epoch: int, config: NodeConfig) -> None:
        super().__init__(role, epoch, config)
        self.gpu = int(role.removeprefix("gpu"))
        self.gate = gate.Gate()
        self.links: dict[str, RawLink] = {}  # by instance
        self.versions: dict[str, m.Manifest] = {}  # by instance: newest manifest, also of instances not attached yet
        self._untold: set[str] = set()  # instances with a manifest that the device thread will look at
        self.slabs: set[int] = set()
        self.coming: deque[m.Wake] = deque()  # not begun
        self.awaiting: deque[m.Placed | m.Fetched] = deque()  # whose slabs are not here yet
        self.evidence = Evidence.inherited()
        self._troubles: deque[str] = deque()  # not told yet
        self._greeted = False
        self._work: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()

    async def start(self) -> None:
        operators.grant(self.config.gpu.operators)
        self.device, reason = open_device(self.config, self.gpu, self.paths.trusted)
        self.device.on_lost = self._lost
        self.device.on_trouble = partial(self._threadsafe, self.trouble)
        if self.device.approximate:
            self.log.warning("activations_approximate", reason="no C++ compiler; see `dormouse doctor`")
        # What a wake keeps in the store's memory at a time, so that all GPUs together leave half of it alone.
        batch_nbytes = self.config.host_nbytes // (4 * self.config.gpu_count)
        self.engine = Engine(self.device, self._emit)
        self.wakes = Wakes(self.device, self.engine.residency, batch_nbytes, self._perform, self._threadsafe)
        self.lending = Lending(self.engine.residency)
        if isinstance(measured := getattr(self.device, "activations", None), ApproximateActivations):
            measured.measure = self.engine.transient_nbytes
        gc.collect()
        gc.enable()
        gc.freeze()  # so that a collection costs milliseconds, not half a second
        self.neighbours = Peers(self)
        attached: asyncio.Future[None] = self.loop.create_future()
        self.thread = threading.Thread(target=self._device_thread, args=(attached,), name="device", daemon=True)
        self.thread.start()
        await attached
        self.inbox: Inbox[m.InboxPacket] = Inbox(
            self.paths.inbox(self.role, self.epoch), m.InboxPacket, self._on_packet
        )
        self.controller: Link[m.ControllerToExecutor, m.ExecutorToController] = Link(
            self.paths.link("controller", self.role, self.epoch),
            bind=False,
            incoming=m.ControllerToExecutor,
            on_message=self._on_controller,
        )
        self.store: Link[m.StoreToExecutor, m.ExecutorToStore] = Link(
            self.paths.link("store", self.role, self.epoch),
            bind=False,
            incoming=m.StoreToExecutor,
            on_message=self._on_store,
        )
        self.controller.send(
            m.Hello(
                info=self.device.info,
                pool=self.device.strategy,
                reason=reason,
                stats=self.engine.stats(),
                place=self.device.place,
            )
        )
        self._greeted = True
        self._tell_troubles()

    async def stop(self) -> None:
        """Sockets only: the device thread may never return from a kernel, and the process ends after this."""
        for name in ("inbox", "controller", "store"):
            if hasattr(self, name):
                getattr(self, name).close()
        for link in list(self.links.values()):
            link.close()
        self.neighbours.close()
        self._work.put(None)

    def peers_changed(self, before: dict[str, int]) -> None:
        self.neighbours.changed(self.peers)

    # --- the device thread

    def _device_thread(self, attached: asyncio.Future[None]) -> None:
        try:
            self.device.attach_thread()
        except BaseException as error:  # the thread's outermost frame
            text = f"GPU {self.gpu} cannot be made ready: {error if isinstance(error, DormouseError) else repr(error)}"
            self._threadsafe(attached.set_exception, DeviceError(text))
            return
        self._threadsafe(attached.set_result, None)
        try:
            while (item := self._work.get()) is not None:
                item[0](*item[1])
        except BaseException as error:  # the thread's outermost frame: this GPU can no longer be trusted
            self._lost(error)

    def _lost(self, error: BaseException) -> None:
        """From any thread. That this host lacks memory is nobody's fault."""
        if not isinstance(error, MemoryError):
            self.evidence.failed()
        self._threadsafe(self.fail, error)

    def trouble(self, text: str) -> None:
        """What does not work as well as it could, for a person."""
        self.log.warning("device_trouble", text=text)
        self._troubles.append(text)
        self._tell_troubles()

    def _tell_troubles(self) -> None:
        """Only after Hello, from which on the controller knows this executor."""
        while self._greeted and self._troubles:
            self.controller.send(m.Trouble(text=self._troubles.popleft()))

    def _frame(self, instance: str, serial: int, data: bytes) -> None:
        """On the device thread; if it does not come back, the evidence says whose commands these were."""
        self.evidence.enter(instance)
        self.engine.frame(instance, serial, data)
        self.evidence.leave()

    def give(self, work: Callable[..., None], *arguments: Any) -> None:
        self._work.put((work, arguments))

    def _threadsafe(self, work: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(work, *arguments)

    def _emit(self, effect: Effect) -> None:
        """From the device and copy threads."""
        self._threadsafe(self._perform, effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Reply(instance=instance, serial=serial, frames=frames, messages=messages):
                self.gate.acknowledge(serial, frames)
                self._reply(instance, messages)
            case Violated(instance=instance, text=text, story=story):
                if story:
                    self.log.error("instance_raised", instance=instance, text=text, story=story)
                self._apply(self.gate.expel(instance, text))
            case BeginWake() | StopWake() | WakeOver():
                self.wakes.handle(effect)
            case m.AskPlace() | m.Written() | m.LetGo() | m.Fetch() | m.FirstUse():
                self.store.send(effect)
            case AskPeer(gpu=gpu, ticket=ticket, segments=segments):
                self.neighbours.ask(gpu, ticket, segments)
            case LeavePeer(gpu=gpu, ticket=ticket):
                self.neighbours.leave(gpu, ticket)
            case m.Done():
                self.evidence.clear()
                self._apply(self.gate.end(effect.serial))
                self.controller.send(effect)
                self._next_wake()
            case m.Awake() | m.Pressed():
                self.controller.send(effect)

    def _reply(self, instance: str, messages: list[bytes]) -> None:
        link = self.links.get(instance)
        if link is None:
            return
        try:
            for message in messages:
                link.send_raw(message)
        except PeerLost as error:
            self._apply(self.gate.expel(instance, f"it does not read its replies: {error}"))

    # --- leases

    def _on_controller(self, message: m.ControllerToExecutor) -> None:
        match message:
            case m.Wake():
                self.coming.append(message)
                self._next_wake()
            case m.Revoke(serial=serial):
                self._revoke(serial)
            case m.Forget(instance=instance):
                self._detach(instance)

    def _next_wake(self) -> None:
        """Begin the oldest Wake if no lease is in progress and everything it needs has arrived."""
        if not self.coming or self.gate.serial is not None:
            return
        wake = self.coming[0]
        manifest = self.versions.get(wake.instance)
        if wake.instance not in self.links or (manifest.version if manifest else 0) < wake.version:
            return
        self.coming.popleft()
        actions = self.gate.start(wake.lease.serial, wake.lease.secret, wake.instance)
        self.give(self.engine.wake, wake)
        self._apply(actions)

    def _revoke(self, serial: int) -> None:
        for wake in self.coming:
            if wake.lease.serial == serial:  # not begun: nothing to undo, but its Done is owed, and its frames are late
                self.coming.remove(wake)
                self._apply(self.gate.skip(serial))
                manifest = self.versions.get(wake.instance)
                self.controller.send(self._nothing_done(serial, manifest.version if manifest else 0))
                self._next_wake()
                return
        if self.gate.serial == serial:
            self.engine.revoked = serial
            self.wakes.interrupt(serial)
            self.give(self.engine.revoke, serial)

    # --- store

    def _on_store(self, message: m.StoreToExecutor) -> None:
        match message:
            case m.Manifest(instance=instance):
                known = self.versions.get(instance)
                if known is None or known.version <= message.version:
                    self.versions[instance] = message
                if instance not in self._untold:  # an instance that commits in a loop does not fill the queue
                    self._untold.add(instance)
                    self.give(self._manifest, instance)
                self._next_wake()
            case m.Placed() | m.Fetched():
                self.awaiting.append(message)
                self._pass_places()
            case m.FetchFailed():
                self.wakes.fetch_failed(message)
            case m.PlaceRefused():
                self.give(self.engine.place_refused, message)
            case m.Dropped(instance=instance):
                self.versions.pop(instance, None)
                self.give(self.engine.dropped, instance)

    def _pass_places(self) -> None:
        """Fetched is for a wake under way, and the device thread may be waiting for it; Placed is for that thread."""
        while self.awaiting and all(place.slab in self.slabs for place in self.awaiting[0].places):
            message = self.awaiting.popleft()
            if isinstance(message, m.Fetched):
                self.wakes.fetched(message)
            else:
                self.give(self.engine.placed, message)

    def _map_slab(self, made: m.SlabMade, fd: int) -> None:
        self.device.map_host(made.slab, SharedMemory.adopt(fd, made.nbytes, made.pinnable))
        self.slabs.add(made.slab)
        self._pass_places()

    def _unmap_slab(self, slab: int) -> None:
        self.slabs.discard(slab)
        self.device.unmap_host(slab)

    def _manifest(self, instance: str) -> None:
        """On the device thread: the newest manifest that has come."""
        self._untold.discard(instance)
        manifest = self.versions.get(instance)
        if manifest is not None:
            self.engine.manifest(manifest)

    # --- instances

    def _on_packet(self, message: m.InboxPacket, fds: list[int]) -> None:
        match message:
            case m.AttachInstance() if len(fds) == 1 and message.instance not in self.links:
                self._attach(message, fds.pop())
            case m.DetachInstance(instance=instance):
                self._detach(instance)
            case m.SlabMade(slab=slab) if len(fds) == 1 and slab not in self.slabs:
                self._map_slab(message, fds.pop())
            case m.SlabGone(slab=slab) if slab in self.slabs:
                self._unmap_slab(slab)
            case m.PoolExported() | m.PeerPin() | m.PeerPinned() | m.PeerUnpin():
                self.neighbours.heard(message, fds)
        for fd in fds:
            os.close(fd)

    def _attach(self, attach: m.AttachInstance, fd: int) -> None:
        arena = SharedMemory.adopt(fd, attach.arena.nbytes)
        path = os.path.join(attach.directory, f"{self.role}.{self.epoch}")
        link: RawLink | None = None
        try:
            link = RawLink(
                path,
                bind=True,
                on_message=lambda data: self._heard(attach.instance, data),
                on_garbage=lambda error: self._apply(self.gate.expel(attach.instance, str(error))),
                max_nbytes=wire.MAX_FRAME_NBYTES,
                hwm=INSTANCE_HWM,
            )
            os.chown(path, attach.uid, -1, follow_symlinks=False)  # the directory is the instance's
        except (PeerLost, OSError) as error:  # its directory is gone: it died while this was on its way
            self.log.warning("instance_not_attached", instance=attach.instance, error=str(error))
            if link is not None:
                link.close()
            arena.close()
            # Else its next lease would wait for this endpoint, and the GPU's other leases behind it.
            self.controller.send(m.Violation(instance=attach.instance, text="its endpoint cannot be made"))
            return
        self.links[attach.instance] = link
        self.gate.attach(attach.instance)
        self.give(self.engine.attach, attach, arena)
        self.give(self._manifest, attach.instance)
        self._next_wake()

    def _heard(self, instance: str, data: bytes) -> None:
        try:
            self._apply(self.gate.frame(instance, data))
        except Exception as error:  # the outermost frame of this instance's session
            self.log.error("instance_raised", instance=instance, story=traceback.format_exc())
            self._apply(self.gate.expel(instance, f"what it sent raised {type(error).__name__} in the executor"))

    def _detach(self, instance: str) -> None:
        link = self.links.pop(instance, None)
        if link is not None:
            link.close()
        if self.gate.holder == instance and self.gate.serial is not None:
            self.wakes.interrupt(self.gate.serial)
        self.gate.detach(instance)
        self.give(self.engine.forget, instance)

    def _apply(self, actions: list[gate.Action]) -> None:
        for action in actions:
            match action:
                case gate.Deliver(instance=instance, serial=serial, data=data):
                    self.give(self._frame, instance, serial, data)
                case gate.Refuse(instance=instance, serial=serial, reason=reason):
                    self._reply(instance, [gate.refusal(serial, reason)])
                case gate.Violate(instance=instance, text=text):
                    self.log.warning("instance_violation", instance=instance, text=text)
                    if self.gate.holder == instance and self.gate.serial is not None:
                        self.wakes.interrupt(self.gate.serial)
                        self.give(self.engine.violate, self.gate.serial)
                    link = self.links.get(instance)
                    if link is not None:
                        link.close()
                    self.controller.send(m.Violation(instance=instance, text=text))

    def _nothing_done(self, serial: int, version: int) -> m.Done:
        return m.Done(
            serial=serial,
            outcome="revoked",
            gpu_us=0,
            copied_nbytes=0,
            peer_nbytes=0,
            file_nbytes=0,
            resident=[],
            peak_activation_nbytes=0,
            version=version,
            stats=self.engine.stats(),
        )


if __name__ == "__main__":
    run_actor(Executor)
