"""An executor: owns one GPU. This module is its I/O half, the actor; compute.py is the half that computes.

The loop's thread has the sockets and no torch; one compute thread has torch, and on loan the connection of the instance
whose lease it serves. Decisions on leases (leases/machine.py) are made here, on the loop's thread, and go to the
compute thread as orders; their outcomes come back as events. Answers that name slabs wait for the slabs, which arrive
over another socket. Neither half waits for the other but where a command needs room, or the right to write: then the
compute thread asks.
"""

import asyncio
import gc
import os
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage, and looking for it takes a tenth of torch's time

from msgspec import structs

from dormouse.core.actor import Actor, run_actor
from dormouse.core.config import NodeConfig
from dormouse.core.decisions.leases import events as e
from dormouse.core.due_timer import DueTimer
from dormouse.core.evidence import Evidence
from dormouse.core.links.ends import STRANGER_RATE_S
from dormouse.core.links.fds import Inbox
from dormouse.core.links.link import Link, RawLink
from dormouse.core.links.loan import Loan
from dormouse.core.native import EXECUTOR, RECORDER
from dormouse.core.rate import SharedBuckets
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.commands import fast_path, graph_builds, operators, oplist
from dormouse.gpuserver.device.allocator import ApproximateActivations
from dormouse.gpuserver.device.opening import open_device
from dormouse.gpuserver.device.protocol import DeviceError
from dormouse.gpuserver.executor.compute import Compute
from dormouse.gpuserver.executor.leases import Leases
from dormouse.gpuserver.executor.orders import Orders, Posted
from dormouse.gpuserver.executor.peers import PeerLinks
from dormouse.gpuserver.executor.runtimes import UID_STEP, UIDS, Runtimes
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire
from dormouse.schemas.errors import DormouseError, PeerLost, RemoteProtocolError

INSTANCE_HWM: Final = 4 * wire.WINDOW_FRAMES
"""Messages per direction that an instance may leave unread: those that it may have parked, and the replies to them."""

LLM_HWM: Final = 1 << 16
LLM_HWM_NBYTES: Final = 16 << 20
"""A language model sends tokens at its own pace, and its instance may be at something else for seconds: at making a
whole answer of them, or without a processor. Sixteen sequences with twenty logprobs each are 4 KB a step.
"""


class Executor(Actor):
    """The actor of role ``gpu<k>``."""

    def __init__(self, role: str, epoch: int, config: NodeConfig) -> None:
        super().__init__(role, epoch, config)
        self.gpu = int(role.removeprefix("gpu"))
        self.links: dict[str, RawLink] = {}  # by instance
        self._paces = SharedBuckets(STRANGER_RATE_S, STRANGER_RATE_S)
        self.slabs: set[int] = set()
        self.awaiting: deque[m.Placed | m.Fetched] = deque()  # whose slabs are not here yet
        self.evidence = Evidence.inherited()
        self._troubles: deque[str] = deque()  # not reported yet
        self._greeted = False
        self._timer = DueTimer(lambda: self._dispatch(e.Tick()))
        self._orders = Orders()

    async def start(self) -> None:
        oplist.allowed()  # else the first request would wait until the table is made
        operators.grant(self.config.gpu.operators)
        self.device, reason = open_device(self.config, self.gpu, self.paths.trusted)
        builds = graph_builds.of_config(self.config, self.device.torch_device)
        graph_builds.enable(builds)
        self.device.on_lost = self._lost
        self.device.on_trouble = partial(self._threadsafe, self.trouble)
        if self.device.approximate:
            self.log.warning("activations_approximate", reason="no C++ compiler; see `dormouse doctor`")
        self.leases = Leases.of_config(self.config, self.device, self._orders, self, self._threadsafe)
        find_fast = fast_path.load if self.config.gpu.fast_path and EXECUTOR.prepare() else lambda: None
        if self.config.gpu.fast_path:
            RECORDER.prepare()  # for instances of the node's next start
        turn_s, captures = self.config.schedule.turn_ms / 1000, self.config.gpu.graphs
        self.compute = Compute(
            self.device,
            self._orders,
            self._post,
            self.evidence,
            turn_s,
            find_fast,
            captures == "on" or (captures == "auto" and self.device.captures),
        )
        if isinstance(measured := getattr(self.device, "activations", None), ApproximateActivations):
            measured.measure = self.compute.transient_nbytes
        gc.collect()
        gc.enable()
        gc.freeze()  # so that a collection costs milliseconds, not half a second
        self.neighbours = PeerLinks(self)
        limits, threads, policy = self.config.limits, self.config.gpu.threads, self.config.schedule
        uid = self.config.sandbox.uid_base + UID_STEP + self.gpu * UIDS
        batching = m.Batching(kind=policy.batching, size=policy.batch_size, delay_ms=policy.batch_delay_ms)
        cuda = self.device.torch_device.type == "cuda"  # not over the fake driver
        yield_s, leave_s = limits.yield_ms / 1e3, limits.lease_ms / 2e3
        self.runtimes = Runtimes(self, self.device, self._dispatch, threads, yield_s, leave_s, uid, batching, cuda)
        attached: asyncio.Future[None] = self.loop.create_future()
        self.thread = threading.Thread(target=self._compute_thread, args=(attached,), name="compute", daemon=True)
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
                info=structs.replace(self.device.info, compiles=builds is not None),
                pool=self.device.strategy,
                reason=reason,
                stats=self.leases.machine.stats(),
                place=self.device.place,
                context_nbytes=self.device.context_nbytes,
                beside_nbytes=self.device.beside_nbytes,
            )
        )
        self._greeted = True
        self._tell_troubles()

    async def stop(self) -> None:
        """Sockets only: the compute thread may never return from a kernel, and the process ends after this."""
        graph_builds.enable(None)  # whose processes end
        for name in ("inbox", "controller", "store"):
            if hasattr(self, name):
                getattr(self, name).close()
        for link in list(self.links.values()):
            link.close()
        self.neighbours.close()
        self.runtimes.close()
        self._orders.give(None)

    def peers_changed(self, before: dict[str, int]) -> None:
        self.neighbours.changed(self.peers)

    # --- the compute thread

    def _compute_thread(self, attached: asyncio.Future[None]) -> None:
        try:
            self.device.attach_thread()
        except BaseException as error:  # the thread's outermost frame
            text = f"GPU {self.gpu} cannot be made ready: {error if isinstance(error, DormouseError) else repr(error)}"
            self._threadsafe(attached.set_exception, DeviceError(text))
            return
        self._threadsafe(attached.set_result, None)
        try:
            self.compute.run()
        except BaseException as error:  # the thread's outermost frame: this GPU can no longer be trusted
            self._lost(error)

    def _post(self, event: Posted) -> None:
        self._threadsafe(self._dispatch, event)

    def _threadsafe(self, work: Callable[..., None], *arguments: Any) -> None:
        self.loop.call_soon_threadsafe(work, *arguments)

    def _lost(self, error: BaseException) -> None:
        """From any thread. A lack of memory on this host is nobody's fault."""
        if not isinstance(error, MemoryError):
            self.evidence.failed()
        self._threadsafe(self.fail, error)

    def trouble(self, text: str) -> None:
        """A description, for a person, of something that does not work as well as it could."""
        self.log.warning("device_trouble", text=text)
        self._troubles.append(text)
        self._tell_troubles()

    def _tell_troubles(self) -> None:
        """Only after Hello, from which on the controller knows this executor."""
        while self._greeted and self._troubles:
            self.controller.send(m.Trouble(text=self._troubles.popleft()))

    # --- leases

    def _dispatch(self, event: Posted) -> None:
        self.leases.dispatch(event)
        self._set_timer()

    def _set_timer(self) -> None:
        self._timer.set(self.leases.machine.next_deadline_s)

    def _on_controller(self, message: m.ControllerToExecutor) -> None:
        match message:
            case m.Wake():
                self.leases.wake(message)
                self._set_timer()
            case m.Preload():
                self.leases.preload(message)
            case m.Forget(instance=instance):
                self._detach(instance)
            case m.Retire():
                self.request_stop()
            case _:
                self._dispatch(message)

    def to_controller(self, message: m.ExecutorToController) -> None:
        self.controller.send(message)

    def to_store(self, message: m.ExecutorToStore) -> None:
        self.store.send(message)

    def reply(self, instance: str, message: bytes) -> None:
        link = self.links.get(instance)
        if link is None:
            return
        try:
            link.send_raw(message)
        except PeerLost as error:
            self._dispatch(e.Expelled(instance, f"it does not read its replies: {error}"))

    def hears(self, instance: str) -> bool:
        """Whether it is connected."""
        return (link := self.links.get(instance)) is not None and link.connected

    def lend(self, instance: str) -> Loan | None:
        link = self.links.get(instance)
        return None if link is None else link.lend()

    def take_back(self, loan: Loan) -> None:
        loan.link.take_back(loan)

    def expel(self, instance: str, text: str, story: str) -> None:
        if story:
            self.log.error("instance_raised", instance=instance, text=text, story=story)
        self.log.warning("instance_violation", instance=instance, text=text)
        if (link := self.links.get(instance)) is not None:
            link.close()
        self.controller.send(m.Violation(instance=instance, text=text))

    def to_runtime(self, serial: int, instance: str, runtime: str, message: m.ExecutorToRuntime) -> None:
        self.runtimes.tell(serial, instance, runtime, message)

    def open_runtime(self, instance: str, runtime: str) -> None:
        self.runtimes.open(instance, runtime)

    def lease_over(self, serial: int) -> None:
        self.runtimes.lease_over(serial)

    def ask_peer(self, gpu: int, ticket: int, segments: list[int]) -> None:
        self.neighbours.ask(gpu, ticket, segments)

    def leave_peer(self, gpu: int, ticket: int) -> None:
        self.neighbours.leave(gpu, ticket)

    # --- store

    def _on_store(self, message: m.StoreToExecutor) -> None:
        match message:
            case m.Placed() | m.Fetched():
                self.awaiting.append(message)
                self._pass_places()
            case m.FetchFailed():
                self.leases.wakes.fetch_failed(message)
            case _:
                self._dispatch(message)

    def _pass_places(self) -> None:
        while self.awaiting and all(place.slab in self.slabs for place in self.awaiting[0].places):
            message = self.awaiting.popleft()
            if isinstance(message, m.Fetched):
                self.leases.wakes.fetched(message)
            else:
                self._dispatch(message)

    # --- instances

    def _on_packet(self, message: m.InboxPacket, fds: list[int]) -> None:
        match message:
            case m.AttachInstance() if len(fds) == 1 and message.instance not in self.links:
                self._attach(message, fds.pop())
            case m.DetachInstance(instance=instance):
                self._detach(instance)
            case m.SlabMade(slab=slab) if len(fds) == 1 and slab not in self.slabs:
                self.device.map_host(slab, SharedMemory.adopt(fds.pop(), message.nbytes, message.pinnable))
                self.slabs.add(slab)
                self._pass_places()
            case m.SlabGone(slab=slab) if slab in self.slabs:
                self.slabs.discard(slab)
                self.device.unmap_host(slab)
            case m.PoolExported() | m.PeerPin() | m.PeerPinned() | m.PeerUnpin():
                self.neighbours.heard(message, fds)
        for fd in fds:
            os.close(fd)

    def _attach(self, attach: m.AttachInstance, fd: int) -> None:
        arena = SharedMemory.adopt(fd, attach.arena.nbytes)
        path = os.path.join(attach.directory, f"{self.role}.{self.epoch}")
        try:
            link = RawLink(
                path,
                bind=True,
                on_message=lambda data: self._heard(attach, data),
                on_garbage=lambda error: self._dispatch(e.Expelled(attach.instance, str(error))),
                max_nbytes=wire.MAX_FRAME_NBYTES,
                hwm=LLM_HWM if attach.llm else INSTANCE_HWM,
                hwm_nbytes=LLM_HWM_NBYTES if attach.llm else sys.maxsize,
                owner=attach.uid,
                pace=self._paces.of(attach.tenant, self.loop.time()),
            )
        except PeerLost as error:  # its directory is gone: it died while this was on its way
            self.log.warning("instance_not_attached", instance=attach.instance, error=str(error))
            arena.close()
            # Else its next lease would wait for this endpoint, and the GPU's other leases behind it.
            self.controller.send(m.Violation(instance=attach.instance, text="its endpoint cannot be made"))
            return
        self.links[attach.instance] = link
        if attach.llm:
            self.runtimes.attach(attach)
        self.leases.attach(attach, arena)

    def _heard(self, attach: m.AttachInstance, data: bytes) -> None:
        instance = attach.instance
        try:
            if attach.llm:
                self.runtimes.heard(instance, data)
            else:
                self._dispatch(e.Heard(instance, data))
        except RemoteProtocolError as error:
            self._dispatch(e.Expelled(instance, str(error)))
        except Exception as error:  # the outermost frame of this instance's session
            self.log.error("instance_raised", instance=instance, story=traceback.format_exc())
            self._dispatch(e.Expelled(instance, f"what it sent raised {type(error).__name__} in the executor"))

    def _detach(self, instance: str) -> None:
        link = self.links.pop(instance, None)
        if link is not None:
            link.close()
        self._dispatch(e.Detached(instance))
        self.runtimes.detach(instance)


if __name__ == "__main__":
    run_actor(Executor)
