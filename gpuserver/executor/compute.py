"""The compute thread of an executor: carries out the orders of leases (leases/machine.py) on the device.

`Compute` carries out its orders (orders.py), one at a time, and posts their outcomes. While it has no orders it
receives the frames of the lease with the turn itself, on a connection that it was lent: a handover between threads
costs more than most frames. A frame runs with the settings, random state and ownership of memory of its own instance:
these follow the turn. An exception raised on an instance's behalf ends that instance and nothing else, unless it is the
device's.
"""

import os
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, TypeVar, assert_never

import msgpack
import torch

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.leases.gate import follows
from dormouse.core.decisions.memory import transfer
from dormouse.core.decisions.memory.pools.protocol import PoolChange
from dormouse.core.decisions.memory.transfer import Copy
from dormouse.core.evidence import Evidence
from dormouse.core.links.loan import Loan
from dormouse.gpuserver.commands.interpreter import FindFastPath, ProtocolViolation
from dormouse.gpuserver.commands.running import RELIEFS
from dormouse.gpuserver.commands.storages import StorageFailure
from dormouse.gpuserver.device.protocol import Device, DeviceError, DeviceLost
from dormouse.gpuserver.executor.instance import ExecutorInstance, InstanceDevice
from dormouse.gpuserver.executor.leased import FrameOutcome, Leased, brought_ahead
from dormouse.gpuserver.executor.orders import Attach, Item, Orders, Posted, Repaid, Serve
from dormouse.schemas import stream as wire
from dormouse.schemas.messages import Place

T = TypeVar("T")

AWAKE_S: Final = 0.002
"""Time for which the compute thread stays awake for a program's next frame that is expected at once: waking the thread
takes longer than most of its work."""

STORY_LETTERS: Final = 4000
"""Of a traceback that goes to the log: its end, some dozen frames."""


class Compute:
    """See the module. ``post`` takes events to the executor's thread, in order."""

    def __init__(
        self,
        device: Device,
        orders: Orders,
        post: Callable[[Posted], None],
        evidence: Evidence,
        turn_s: float = 0.02,
        find_fast: FindFastPath = lambda: None,
        captures: bool = False,
    ) -> None:
        self.device = device
        self._find_fast = find_fast
        self._captures = captures
        self._turn_s = turn_s  # an instance that gives the GPU nothing for so long is not awaited here
        self.orders = orders
        self._post = post
        self._evidence = evidence
        self._instances: dict[str, ExecutorInstance] = {}  # by instance
        self._leases: dict[int, Leased] = {}  # by serial
        self._current: Leased | None = None  # whose settings hold
        self._unmapped: dict[int, str] = {}  # by lease: why its plans could not be carried out
        self._owners = 1  # of activations; 1 is the executor itself

    def run(self) -> None:
        """Until there is None to do."""
        while (item := self.orders.next_item()) is not None:
            self.carry_out(item)
            self._capture()

    def carry_out(self, item: Item) -> None:
        """Raises DeviceLost, and errors that are the executor's own fault."""
        if self.orders.plans:
            self._arrange()
        match item:
            case o.Execute():
                self._execute(item)
            case o.Begin():
                self._guarded(item.instance, self._begin, item)
            case o.Close():
                self._close(item)
            case Serve():
                self._serve(item)
            case o.Arrange() | o.Recall() | o.ComputeAnswer() | None:
                pass
            case o.CopyOut():
                self._leased(self._copy_out, item)
            case o.Own():
                self._leased(self._own, item)
            case o.Return():
                self._leased(self._return, item)
            case o.Adopt():
                if (instance := self._instances.get(item.manifest.instance)) is not None:
                    instance.adopt(item.manifest)
            case o.Bring():
                self._post(brought_ahead(self.device, item, self._unmapped.pop(item.serial, "")))
            case o.Mark():
                self.device.synchronize()  # a runtime's context is not ordered after our stream, as clearing is
                self._post(e.Marked(item.serial, item.extents))
            case Attach():
                self._owners += 1
                captures = self._captures and not item.attach.eager
                view = InstanceDevice(self.device, self.relieve, self.device.new_capture() if captures else None)
                instance = ExecutorInstance(item.attach, item.arena, view, self._owners, self._find_fast)
                self._instances[instance.name] = instance
            case o.Detach():
                if (instance := self._instances.pop(item.instance, None)) is not None:
                    self._drop_captured(instance)
                    instance.close()
            case _:
                assert_never(item)

    # --- memory

    def _arrange(self) -> None:
        """Bring the device into the state of the pool."""
        while self.orders.plans:
            arrange = self.orders.plans.popleft()
            moving: list[int] = []
            try:
                for plan in arrange.plans:
                    moving = [move.segment for move in plan.moves]
                    self._carry_out(plan)
                    if moving:
                        self._post(e.Came(arrange.serial, moving))
            except DeviceError as error:
                if self.orders.plans:
                    raise DeviceLost(f"the GPU refused memory that later plans count on: {error}") from error
                text = self._unmapped[arrange.serial] = f"the GPU refused memory for the model: {error}"
                self._post(e.Unmapped(arrange.serial, text, moving))
            self.device.set_activation_limit(arrange.limit_nbytes)

    def _carry_out(self, plan: PoolChange) -> None:
        homeless = [*plan.evicted, *(move.segment for move in plan.moves)]
        if homeless:
            for instance in self._instances.values():
                instance.unbind_segments(homeless)
        for span in plan.freed:
            self.device.poison(span.offset, span.nbytes)
        if plan.unmapped or plan.mapped:
            self.device.remap(plan.unmapped, plan.mapped)
        if plan.moves:
            moves = [Copy(transfer.POOL, move.source, move.target, move.nbytes) for move in plan.moves]
            self.device.copy_in(moves, lambda: None).join()

    def _ask(self, question: e.MayWrite | e.Relieve) -> Any:
        """Wait for the answer; orders that make room for it are carried out meanwhile."""
        self._post(question)
        while not isinstance(item := self.orders.urgent.get(), o.ComputeAnswer):
            current = self._current
            self.carry_out(item)
            self._switch(current)
        if self.orders.plans:
            self._arrange()
        return item.value

    def relieve(self) -> str | None:
        """An operation was refused memory: None if there may be room now, else why not. Idle models go last."""
        assert self._current is not None
        shared = self.device.activations_share_pool
        if self._drop_captured(*self._instances.values()) or (not shared and self.device.relieve()):
            return None
        refused = self.device.refused() if shared else (0, 0)
        answer: str | None = self._ask(e.Relieve(self._current.serial, *refused))
        if not shared:
            self.device.relieve()
        return answer

    def transient_nbytes(self) -> int:
        """Bytes that leases hold outside the pool, as far as their interpreters know."""
        return sum(lease.transient_nbytes() for lease in list(self._leases.values()))

    def _capture(self) -> None:
        """While there is nothing else to do: capture for the instance with the turn, or for any if there is no turn."""
        current = self._current
        allowed = self._instances.values() if current is None else [current.instance]
        found = (each for each in allowed if each.interpreter.may_capture)
        while (instance := next(found, None)) is not None and self.orders.rests:
            if current is None:
                self.device.set_owner(instance.number)
                instance.interpreter.resume()
            self._evidence.enter(instance.name)
            while instance.interpreter.may_capture and self.orders.rests:
                self._guarded(instance.name, instance.interpreter.capture)
            if current is None:
                self._evidence.clear()
                instance.interpreter.pause()
            else:
                self._evidence.leave()

    def _drop_captured(self, *instances: ExecutorInstance) -> bool:
        """Whether there was any. Their memory is another's next: nobody reads its remaining bytes."""
        if not sum(instance.interpreter.drop_captured() for instance in instances):
            return False
        self.device.set_owner(1)
        if self._current is not None:
            self.device.set_owner(self._current.instance.number)
        return True

    def _use(self) -> e.Use:
        now, peak, _ = self.device.activation_stats()
        return e.Use(now, peak)

    # --- turns

    def _switch(self, lease: Leased | None) -> None:
        """Switch to the lease whose commands come next: settings, random state and ownership of memory follow."""
        before = self._current
        if lease is before or lease is None:
            return
        if before is not None:
            self._guarded(before.instance.name, before.instance.interpreter.settle)
            self.device.synchronize()  # queued work is its own: its time, and its fault if it fails
            before.instance.interpreter.pause()
        self._current = lease
        self.device.set_owner(lease.instance.number)
        lease.instance.interpreter.resume()

    def _begin(self, begin: o.Begin) -> None:
        instance = self._instances[begin.instance]
        lease = Leased(begin.serial, instance, instance.counts(), self.device, self._post)
        self._leases[begin.serial] = lease
        if len(self._leases) == 1:
            self.device.reset_peak()
        instance.used.clear()
        if (before := self._current) is not None:  # commands that it owes are computed in its settings
            self._guarded(before.instance.name, before.instance.interpreter.settle)
        instance.interpreter.begin(begin.serial, begin.secret)
        self._switch(lease)
        self._bind(lease, begin)

    def _bind(self, lease: Leased, begin: o.Begin) -> None:
        if text := self._unmapped.pop(lease.serial, ""):
            lease.instance.bind_none(StorageFailure("OutOfMemoryError", text))
        else:
            lease.bind(begin, self._claim)

    def _claim(self, segment: int) -> int | None:
        """May the lease with the turn write this segment of its model in place? The segment's new number, or None."""
        assert self._current is not None
        number: int | None = self._ask(e.MayWrite(self._current.serial, segment))
        return number

    # --- commands

    def _execute(self, execute: o.Execute) -> None:
        run = self._run(execute.serial, execute.data)
        if run is not None:
            self._post(e.Executed(execute.serial, run.replies, run.busy_s, self._use(), run.ended))

    def _serve(self, serve: Serve) -> None:
        """The frames of a lease as its instance sends them. Any frame but the next one is left to the gate."""
        loan, serial, data = serve.loan, serve.serial, serve.given
        frames, busy_s, idle_s, ended = 0, 0.0, 0.0, None
        heard_before = 0 if data is None else 1
        most_s = self._turn_s if data is not None else max(0.0, serve.until_s - time.monotonic())
        with self.orders.hearing(loan):
            while serial in self._leases and serial not in self.orders.skipped:
                if data is None:
                    waited_s = time.monotonic()
                    if (data := self.orders.next_frame(loan, most_s)) is None:
                        idle_s = time.monotonic() - waited_s
                        break
                    if not follows(data, serve.header, frames + 1 - heard_before):
                        loan.heard.appendleft(data)
                        break
                if (run := self._run(serial, data)) is None:
                    break
                frames, data, most_s = frames + 1, None, self._turn_s
                busy_s += run.busy_s
                if run.replies:
                    loan.send(b"".join(run.replies))
                if (ended := run.ended) is not None:
                    break
                if (ahead_s := self._go_ahead(serial, loan)) is None:
                    break
                busy_s += ahead_s
        if frames or serve.given is None:
            heard = frames - heard_before
            self._post(e.Executed(serial, [], busy_s, self._use(), ended, frames, heard, idle_s))
        self._post(Repaid(loan))

    def _go_ahead(self, serial: int, loan: Loan) -> float | None:
        """Compute ahead for the lease until there is something else to do. Returns the seconds spent; None if that has
        ended its instance.
        """
        lease, began_s = self._leases.get(serial), time.perf_counter()
        if lease is None or lease is not self._current or serial in self.orders.skipped:
            return 0.0
        name, interpreter = lease.instance.name, lease.instance.interpreter
        self._evidence.enter(name)
        while (more := self._guarded(name, interpreter.ahead)) and not self.orders.pressing(loan):
            pass
        self._evidence.leave()
        busy_s = time.perf_counter() - began_s
        deadline_s = time.perf_counter() + AWAKE_S
        while interpreter.expecting and not self.orders.pressing(loan) and time.perf_counter() < deadline_s:
            os.sched_yield()
        return None if more is None else busy_s

    def _run(self, serial: int, data: bytes) -> FrameOutcome | None:
        """One frame; None if it is not to be run, or ends its instance."""
        lease = self._leases.get(serial)
        if lease is None or serial in self.orders.skipped:
            return None  # the lease is over, and its Close on its way
        name = lease.instance.name
        self._evidence.enter(name)
        run = self._guarded(name, self._interpret, lease, data)
        if serial in self._leases:
            self._evidence.leave()
        else:
            self._evidence.clear()
        return run

    def _interpret(self, lease: Leased, data: bytes) -> FrameOutcome:
        self._switch(lease)
        began_s = time.perf_counter()
        interpreter = lease.instance.interpreter
        replies = interpreter.execute(data)
        busy_s = time.perf_counter() - began_s
        ended = None
        if interpreter.ending is not None and lease.writing is None:
            ended = lease.end()
            if ended.over:
                replies = [*replies, *interpreter.finish_end(lease.instance.manifest.version)]
                self.device.synchronize()
                self._forget(lease)
        return FrameOutcome(replies, busy_s, ended)

    def _guarded(self, name: str, work: Callable[..., T], *arguments: Any) -> T | None:
        """The outermost frame of work on an instance's behalf. Errors that the instance has caused end it."""
        try:
            return work(*arguments)
        except ProtocolViolation as error:
            self._post(e.Escaped(name, str(error)))
        except DeviceLost:
            raise
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):
                self.device.synchronize()
            story = "".join(traceback.format_exception(error))[-STORY_LETTERS:]
            self._post(e.Escaped(name, f"what it sent raised {type(error).__name__} in the executor", story))
        return None

    def _leased(self, work: Callable[..., None], order: o.CopyOut | o.Own | o.Return) -> None:
        serial = order.begin.serial if isinstance(order, o.Return) else order.serial
        lease = self._leases.get(serial)
        if lease is not None:  # else it has ended, and a posted event says so
            self._guarded(lease.instance.name, work, lease, order)

    # --- ends

    def _copy_out(self, lease: Leased, order: o.CopyOut) -> None:
        interpreter = lease.instance.interpreter
        pairs = zip(order.storages, order.places, strict=True)
        self.device.copy_out([(interpreter.storage(storage), place.slab, place.offset) for storage, place in pairs])
        dropped = lease.spill(order.storages) if order.spill else []
        self._post(e.CopiedOut(lease.serial, order.spill, dropped, self._use()))

    def _close(self, close: o.Close) -> None:
        lease = self._leases.get(close.serial)
        if lease is not None:  # else its END was faster
            self._guarded(lease.instance.name, self._close_lease, lease, close)
        self.orders.skipped.discard(close.serial)
        self._unmapped.pop(close.serial, None)

    def _close_lease(self, lease: Leased, close: o.Close) -> None:
        instance, kept = lease.instance, []
        replies: list[bytes] = []
        left = lease.join(close.cancel)
        self.device.synchronize()
        if close.version is not None:
            if lease.serial not in self._unmapped:
                kept = [segment for _, segment, _, _ in close.brought]
                for storage, _, offset, nbytes in close.brought:
                    self.device.storage(offset, nbytes).copy_(instance.interpreter.storage(storage))
                self.device.synchronize()  # another GPU reads without regard to our stream
            replies = instance.interpreter.finish_end(close.version)
            instance.unbind(lease.writing or ())  # they are the new manifest's from now on
        else:
            if close.refused and (request := instance.interpreter.ending) is not None:
                failed = [wire.FAILED, request.token, "RuntimeError", close.refused, None]
                replies.append(msgpack.packb(failed))
            report = instance.interpreter.abort()
            instance.unbind([*report.dirty, *report.spoiled, *report.freed])
        dropped, counts = instance.over(), lease.counts
        self._forget(lease)
        self._evidence.clear()
        used = list(instance.used)
        self._post(e.Closed(lease.serial, replies, dropped, kept, used, counts, left, self._use()))

    def _forget(self, lease: Leased) -> None:
        del self._leases[lease.serial]
        lease.instance.over()
        if self._current is lease:
            lease.instance.interpreter.pause()
            self._current = None

    # --- a seat that others need

    def _own(self, lease: Leased, order: o.Own) -> None:
        left = lease.join(True)
        own = lease.instance.interpreter.table.own()
        self._post(e.Owned(lease.serial, [(number, stored.bytes().nbytes()) for number, stored in own], left))

    def _return(self, lease: Leased, order: o.Return) -> None:
        self._switch(lease)
        self._bind(lease, order.begin)
        table = lease.instance.interpreter.table
        try:
            for number, place in zip(order.storages, order.places, strict=True):
                table.restore(number, self._read_back(place))
        except (torch.OutOfMemoryError, DeviceError) as error:
            self.orders.skipped.add(lease.serial)  # frames sent since need memory that did not come back
            self._post(e.SeatReturned(lease.serial, self._use(), str(error)))
            return
        self._post(e.SeatReturned(lease.serial, self._use()))

    def _read_back(self, place: Place) -> torch.UntypedStorage:
        """As for an operation's results, idle models leave for it."""
        for _ in range(RELIEFS):
            try:
                return self.device.read_back(place.slab, place.offset, place.nbytes)
            except torch.OutOfMemoryError:
                if self.relieve() is not None:
                    raise
        return self.device.read_back(place.slab, place.offset, place.nbytes)
