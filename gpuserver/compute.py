"""The compute thread of an executor: carries out what leases order (lease/machine.py) on the device; has no socket.

`Orders` is what it has been given; `Compute` carries them out, one at a time, and posts what came of them. A frame runs
in the settings, with the random state and as the owner of memory of its own instance: they follow the turn. What is
raised on an instance's behalf ends that instance and nothing else, unless it is the device's.
"""

import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final, assert_never

import msgpack
import torch

from dormouse.core.evidence import Evidence
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver import transfer
from dormouse.gpuserver.device import Device, DeviceError, DeviceLost
from dormouse.gpuserver.effects import BeginWake, StopWake, WakeOver
from dormouse.gpuserver.interpreter import ProtocolViolation
from dormouse.gpuserver.lease import events as e
from dormouse.gpuserver.lease.arrivals import Board
from dormouse.gpuserver.pools.protocol import Plan
from dormouse.gpuserver.storages import Failure
from dormouse.gpuserver.tenant import Tenant
from dormouse.gpuserver.transfer import Copy
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

STORY_LETTERS: Final = 4000
"""Of a traceback that goes to the log: its end, some dozen frames."""


@dataclass(frozen=True, slots=True)
class Attach:
    """A new instance, and its memory."""

    attach: m.AttachInstance
    arena: SharedMemory


Item = e.Order | Attach | e.Answer | None
Posted = e.Event | BeginWake | StopWake | WakeOver


class Orders:
    """What the compute thread is to do, in order; from the executor's thread.

    While it waits for an answer it is given only what may be done in the middle of a command: what makes room. A plan
    of the pool is carried out as soon as any order is looked at, whatever else was given before it: seats see to it
    that no command can tell.
    """

    def __init__(self) -> None:
        self.skipped: set[int] = set()  # leases whose frames are not to be begun any more
        self.plans: deque[e.Arrange] = deque()
        self.items: SimpleQueue[Item] = SimpleQueue()
        self.urgent: SimpleQueue[Item] = SimpleQueue()
        self._asked = False  # it waits for an answer

    def heard(self, event: Posted) -> None:
        """Before the event is handled."""
        if isinstance(event, e.MayWrite | e.Relieve):
            self._asked = True

    def give(self, order: Item) -> None:
        if isinstance(order, e.Arrange):
            self.plans.append(order)
        if isinstance(order, e.Answer):
            self._asked = False
            self.urgent.put(order)
        elif self._asked and (isinstance(order, e.Arrange | e.Own) or (isinstance(order, e.CopyOut) and order.spill)):
            self.urgent.put(order)
        else:
            self.items.put(order)


@dataclass(slots=True)
class _Running:
    """A lease that has begun here."""

    serial: int
    tenant: Tenant
    repaired_before: int  # results whose layout was not the predicted one, of earlier leases
    began_s: float = field(default_factory=time.perf_counter)
    board: Board | None = None  # of a wake that is not over
    writing: list[int] | None = None  # storages that its END writes back, if it waits for the store


class InstanceDevice:
    """The device as interpreters see it."""

    def __init__(self, compute: "Compute") -> None:
        self._compute = compute
        self.torch_device = compute.device.torch_device

    def generator(self) -> torch.Generator:
        return torch.Generator(self.torch_device)

    def relieve(self) -> str | None:
        return self._compute.relieve()

    def activation_stats(self) -> tuple[int, int, int]:
        return self._compute.device.activation_stats()

    def contains(self, pointer: int, nbytes: int) -> bool:
        return self._compute.device.contains(pointer, nbytes)

    def synchronize(self) -> None:
        self._compute.device.synchronize()


class Compute:
    """See the module. ``post`` takes events to the executor's thread, in order."""

    def __init__(self, device: Device, orders: Orders, post: Callable[[Posted], None], evidence: Evidence) -> None:
        self.device = device
        self.orders = orders
        self._post = post
        self._evidence = evidence
        self._tenants: dict[str, Tenant] = {}  # by instance
        self._leases: dict[int, _Running] = {}  # by serial
        self._current: _Running | None = None  # whose settings hold
        self._unmapped: dict[int, str] = {}  # by lease: why its plans could not be carried out
        self._owners = 1  # of activations; 1 is the executor itself
        self._view = InstanceDevice(self)

    def run(self) -> None:
        """Until there is None to do."""
        while (item := self.orders.items.get()) is not None:
            self.carry_out(item)

    def carry_out(self, item: Item) -> None:
        """Raises DeviceLost, and what is the executor's own fault."""
        if self.orders.plans:
            self._arrange()
        match item:
            case e.Execute():
                self._execute(item)
            case e.Begin():
                self._guarded(item.instance, self._begin, item)
            case e.Close():
                self._close(item)
            case e.Arrange() | e.Answer() | None:
                pass
            case e.CopyOut():
                self._leased(self._copy_out, item)
            case e.Own():
                self._leased(self._own, item)
            case e.Return():
                self._leased(self._return, item)
            case e.Adopt():
                if (tenant := self._tenants.get(item.manifest.instance)) is not None:
                    tenant.adopt(item.manifest)
            case Attach():
                self._owners += 1
                name = item.attach.instance
                self._tenants[name] = Tenant(item.attach, item.arena, self._view, self._owners)
            case e.Detach():
                if (tenant := self._tenants.pop(item.instance, None)) is not None:
                    tenant.close()
            case _:
                assert_never(item)

    # --- memory

    def _arrange(self) -> None:
        """Make the device as the pool's books say."""
        while self.orders.plans:
            arrange = self.orders.plans.popleft()
            moving: list[int] = []
            try:
                for plan in arrange.plans:
                    moving = [move.segment for move in plan.moves]
                    self._carry_out(plan)
                    if moving:
                        self._post(e.Moved(moving))
            except DeviceError as error:
                self._unmapped[arrange.serial] = str(error)
                self._post(e.Unmapped(arrange.serial, f"the GPU refused memory for the model: {error}", moving))
            self.device.set_activation_limit(arrange.limit_nbytes)

    def _carry_out(self, plan: Plan) -> None:
        homeless = [*plan.evicted, *(move.segment for move in plan.moves)]
        if homeless:
            for tenant in self._tenants.values():
                tenant.unbind_segments(homeless)
        for span in plan.freed:
            self.device.poison(span.offset, span.nbytes)
        if plan.unmapped or plan.mapped:
            self.device.remap(plan.unmapped, plan.mapped)
        if plan.moves:
            moves = [Copy(transfer.POOL, move.source, move.target, move.nbytes) for move in plan.moves]
            self.device.copy_in(moves, lambda: None).join()

    def _ask(self, question: e.MayWrite | e.Relieve) -> Any:
        """Wait for the answer; what makes room for it is done meanwhile."""
        self._post(question)
        while not isinstance(item := self.orders.urgent.get(), e.Answer):
            current = self._current
            self.carry_out(item)
            self._switch(current)
        if self.orders.plans:
            self._arrange()
        return item.value

    def relieve(self) -> str | None:
        """An operation was refused memory: None if there is room now, else why not."""
        assert self._current is not None
        serial = self._current.serial
        if not self.device.activations_share_pool:
            if self.device.relieve():
                return None
            answer: str | None = self._ask(e.Relieve(serial, 0, 0))
            self.device.relieve()
            return answer
        answer = self._ask(e.Relieve(serial, *self.device.refused()))
        return answer

    def transient_nbytes(self) -> int:
        """What leases hold outside the pool, as far as their interpreters know."""
        total = 0
        for lease in list(self._leases.values()):
            for stored in lease.tenant.interpreter.table.by_id.values():
                if not stored.persistent and stored.error is None:
                    storage = stored.storage if stored.tensor is None else stored.tensor.untyped_storage()
                    total += storage.nbytes() if storage is not None else 0
        return total

    def _use(self) -> e.Use:
        now, peak, _ = self.device.activation_stats()
        return e.Use(now, peak)

    # --- turns

    def _switch(self, lease: _Running | None) -> None:
        """Whose commands come next: settings, random state and ownership of memory follow."""
        before = self._current
        if lease is before or lease is None:
            return
        if before is not None:
            self.device.synchronize()  # what it has queued is its own: its time, and its fault if it fails
            before.tenant.interpreter.pause()
        self._current = lease
        self.device.set_owner(lease.tenant.number)
        lease.tenant.interpreter.resume()

    def _begin(self, begin: e.Begin) -> None:
        tenant = self._tenants[begin.instance]
        lease = _Running(begin.serial, tenant, tenant.interpreter.repaired_strides)
        self._leases[begin.serial] = lease
        if len(self._leases) == 1:
            self.device.reset_peak()
        tenant.used.clear()
        tenant.interpreter.begin(begin.serial, begin.secret)
        self._switch(lease)
        self._bind(lease, begin)

    def _bind(self, lease: _Running, begin: e.Begin) -> None:
        tenant = lease.tenant
        refused = begin.refused or self._unmapped.pop(lease.serial, "")
        if refused:
            text = refused if begin.refused else f"the GPU refused memory for the model: {refused}"
            tenant.bind_none(Failure("OutOfMemoryError", text, None))
            return
        if begin.missing:
            board = lease.board = Board(self.device, [segment for segment, _, _ in begin.missing])
            after = self.device.record()
            self._post(BeginWake(lease.serial, board, after, begin.missing, begin.peers, lease.began_s))
        if begin.places is not None:
            tenant.bind_all(self.device, begin.places, lease.board, self._claim)

    def _claim(self, segment: int) -> int | None:
        """Of the model of whoever has the turn."""
        assert self._current is not None
        number: int | None = self._ask(e.MayWrite(self._current.serial, segment))
        return number

    # --- commands

    def _execute(self, execute: e.Execute) -> None:
        lease = self._leases.get(execute.serial)
        if lease is None or execute.serial in self.orders.skipped:
            return  # the lease is over, and its Close on its way
        name = lease.tenant.name
        self._evidence.enter(name)
        self._guarded(name, self._run, lease, execute.data)
        if lease.serial in self._leases:
            self._evidence.leave()
        else:
            self._evidence.clear()

    def _run(self, lease: _Running, data: bytes) -> None:
        self._switch(lease)
        began_s = time.perf_counter()
        interpreter = lease.tenant.interpreter
        replies = interpreter.execute(data)
        busy_s = time.perf_counter() - began_s
        ended = None
        if interpreter.ending is not None and lease.writing is None:
            ended = self._end(lease)
            if ended.over:
                replies = [*replies, *interpreter.finish_end(lease.tenant.manifest.version)]
                self.device.synchronize()
                self._forget(lease)
        self._post(e.Executed(lease.serial, replies, busy_s, self._use(), ended))

    def _guarded(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        """The outermost frame of what is done on an instance's behalf. What it has caused ends it."""
        try:
            work(*arguments)
        except ProtocolViolation as error:
            self._post(e.Escaped(name, str(error)))
        except DeviceLost:
            raise
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                self.device.synchronize()
            story = "".join(traceback.format_exception(error))[-STORY_LETTERS:]
            self._post(e.Escaped(name, f"what it sent raised {type(error).__name__} in the executor", story))

    def _leased(self, work: Callable[..., None], order: e.CopyOut | e.Own | e.Return) -> None:
        serial = order.begin.serial if isinstance(order, e.Return) else order.serial
        lease = self._leases.get(serial)
        if lease is not None:  # else it has ended, and what was posted says so
            self._guarded(lease.tenant.name, work, lease, order)

    # --- ends

    def _end(self, lease: _Running) -> e.Ended:
        """Its END: what it did to the model. If there is something to write or to free, it waits for the store."""
        tenant = lease.tenant
        interpreter, request = tenant.interpreter, tenant.interpreter.ending
        assert request is not None
        left = self._join(lease, cancel=False)  # before anything is dropped: what comes late must not land there
        report = interpreter.report()
        freed = [storage for storage in report.freed if storage in tenant.known]
        gone = [*report.spoiled, *freed, *(() if request.wait else report.dirty)]
        storages: list[tuple[int, int]] = []
        if request.wait:
            storages = [(storage, interpreter.storage(storage).nbytes()) for storage in report.dirty]
            storages += report.created
        claims = ((storage, tenant.claim_of(storage)) for storage, _ in storages)
        claimed = {storage: claim for storage, claim in claims if claim is not None}
        tenant.unbind(gone)
        kept = set(claimed.values())
        dropped = [claim for claim in tenant.over() if claim not in kept]
        ended = e.Ended(
            storages=storages,
            claimed=claimed,
            freed=freed,
            dropped=dropped,
            wrote=bool(request.wait and report.dirty),
            rebind=bool(gone),
            used=list(tenant.used),
            repaired=interpreter.repaired_strides - lease.repaired_before,
            left=left,
        )
        lease.writing = None if ended.over else [storage for storage, _ in storages]
        return ended

    def _copy_out(self, lease: _Running, order: e.CopyOut) -> None:
        interpreter = lease.tenant.interpreter
        pairs = zip(order.storages, order.places, strict=True)
        self.device.copy_out([(interpreter.storage(storage), place.slab, place.offset) for storage, place in pairs])
        dropped = self._spill(lease, order.storages) if order.spill else []
        self._post(e.CopiedOut(lease.serial, order.spill, dropped, self._use()))

    def _close(self, close: e.Close) -> None:
        lease = self._leases.get(close.serial)
        if lease is not None:  # else its END was faster
            self._guarded(lease.tenant.name, self._close_lease, lease, close)
        self.orders.skipped.discard(close.serial)
        self._unmapped.pop(close.serial, None)

    def _close_lease(self, lease: _Running, close: e.Close) -> None:
        tenant, kept = lease.tenant, []
        replies: list[bytes] = []
        left = self._join(lease, close.cancel)
        self.device.synchronize()
        if close.version is not None:
            if lease.serial not in self._unmapped:
                kept = [segment for _, segment, _, _ in close.brought]
                for storage, _, offset, nbytes in close.brought:
                    self.device.storage(offset, nbytes).copy_(tenant.interpreter.storage(storage))
                self.device.synchronize()  # another GPU reads without regard to our stream
            replies = tenant.interpreter.finish_end(close.version)
            tenant.unbind(lease.writing or ())  # they are the new manifest's from now on
        else:
            if close.refused and (request := tenant.interpreter.ending) is not None:
                failed = [wire.FAILED, request.token, "RuntimeError", close.refused, None]
                replies.append(msgpack.packb(failed))
            report = tenant.interpreter.abort()
            tenant.unbind([*report.dirty, *report.spoiled, *report.freed])
        dropped, repaired = tenant.over(), tenant.interpreter.repaired_strides - lease.repaired_before
        self._forget(lease)
        self._evidence.clear()
        used = list(tenant.used)
        self._post(e.Closed(lease.serial, replies, dropped, kept, used, repaired, left, self._use()))

    def _forget(self, lease: _Running) -> None:
        del self._leases[lease.serial]
        lease.tenant.over()
        if self._current is lease:
            lease.tenant.interpreter.pause()
            self._current = None

    def _join(self, lease: _Running, cancel: bool) -> e.Left:
        """No copy of its wake is under way any more; what did not arrive is out of reach."""
        board = lease.board
        if board is None:
            return e.Left()
        lease.board = lease.tenant.board = None
        if not cancel:
            board.await_sources()
        self._post(StopWake(lease.serial, cancel))
        there, lost = board.join(cancel)
        self._post(WakeOver(lease.serial))
        lease.tenant.unbind_segments(lost)
        return e.Left(there, lost, board.sources)

    # --- a seat that others need

    def _own(self, lease: _Running, order: e.Own) -> None:
        left = self._join(lease, cancel=True)
        own = lease.tenant.interpreter.table.own()
        self._post(e.Owned(lease.serial, [(number, stored.bytes().nbytes()) for number, stored in own], left))

    def _spill(self, lease: _Running, storages: Sequence[int]) -> list[int]:
        """Its own storages are elsewhere; returns claimed segments that nobody needs here any more."""
        tenant = lease.tenant
        dropped = list(tenant.claimed.values())
        tenant.claimed = {}
        for storage in tenant.interpreter.table.spill(storages):
            tenant.keep(storage)
        return dropped

    def _return(self, lease: _Running, order: e.Return) -> None:
        self._switch(lease)
        self._bind(lease, order.begin)
        table = lease.tenant.interpreter.table
        try:
            for number, place in zip(order.storages, order.places, strict=True):
                table.restore(number, self.device.read_back(place.slab, place.offset, place.nbytes))
        except (torch.OutOfMemoryError, DeviceError) as error:
            self._post(e.Returned(lease.serial, self._use(), str(error)))
            return
        self._post(e.Returned(lease.serial, self._use()))
