"""The runtimes of one GPU: their messages go to the leases; messages between them and their instances pass through here
unread.

On the executor's thread. A runtime serves the instances of one group (leases/runtimes.py), or one instance, until all
of them are gone, and never others. The start and end of its process are in runtime_processes.py.
"""

from collections.abc import Callable
from typing import Any, Final

import msgspec

from dormouse.core.decisions.leases import events as e
from dormouse.core.links.fds import MAX_FDS, MAX_PACKET_NBYTES, close_all
from dormouse.gpuserver.device.protocol import Device, DeviceError
from dormouse.gpuserver.executor.ahead import AheadOfLease
from dormouse.gpuserver.executor.runtime_handle import Runtime, RuntimeHost
from dormouse.gpuserver.executor.runtime_processes import NOW, RuntimeProcesses
from dormouse.schemas import messages as m
from dormouse.schemas.errors import RemoteProtocolError

UID_STEP: Final = 20_000
"""Runtimes have uids so far above the first of instances': neither may look into the other."""

UIDS: Final = 1024
"""For the runtimes of one executor: no two that live on a node have the same."""

MAKES: Final = (m.TurnBegins, m.GranulesGiven, m.SegmentsCame, m.SeatGiven)
"""Messages that need a runtime; all others are only for one that exists."""

ANSWERS: Final[dict[type[Any], type[Any]]] = {
    m.TurnEnds: m.TurnGivenBack,
    m.SeatEnds: m.SeatLeft,
    m.KvReclaim: m.KvReturned,
    m.MemberLeaves: m.MemberLeft,
}
"""Replies that a runtime owes within a bound: its turn, its seat, memory. A runtime that does not give them is ended.
"""

INNER_NBYTES: Final = MAX_PACKET_NBYTES - 64
"""Of a message from an instance: with its envelope, it fits a packet."""


class Runtimes:
    """See the module. ``dispatch`` takes events to the leases. A runtime that owes something has ``yield_s`` for it;
    for its seat ``leave_s`` at most: then the controller would end the executor.
    """

    def __init__(
        self,
        host: RuntimeHost,
        device: Device,
        dispatch: Callable[[e.Event], None],
        threads: int,
        yield_s: float,
        leave_s: float,
        first_uid: int = 0,
        batching: m.Batching = NOW,
        cuda: bool = False,
    ) -> None:
        self._host, self._device, self._dispatch = host, device, dispatch
        self._yield_s, self._leave_s = yield_s, min(yield_s, leave_s)
        self.processes = RuntimeProcesses(
            host, device, threads, first_uid, batching, cuda, said=self._said, gone=self._gone
        )
        self._leases: dict[int, str] = {}  # instance by serial
        self._ahead = AheadOfLease()
        self._uids: dict[str, int] = {}  # of instances

    # --- instances

    def attach(self, attach: m.AttachInstance) -> None:
        """An instance that will want a runtime."""
        self._uids[attach.instance] = attach.uid
        self.processes.warm()

    def detach(self, instance: str) -> None:
        """The instance is gone; its runtime with it."""
        self._uids.pop(instance, None)
        self._ahead.forget(instance)
        for runtime in list(self.processes.by_name.values()):
            if instance in runtime.members:
                del runtime.members[instance]
                if not runtime.members:
                    self.processes.kill(runtime)

    def heard(self, instance: str, data: bytes) -> None:
        """From its endpoint. Raises RemoteProtocolError."""
        try:
            message = msgspec.msgpack.decode(data, type=m.LlmToExecutor)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"no message for a runtime: {error}") from error
        match message:
            case m.ToRuntime(data=inner) if len(inner) > INNER_NBYTES:
                raise RemoteProtocolError(f"{len(inner):,} bytes for a runtime; at most {INNER_NBYTES:,}")
            case m.ToRuntime(serial=serial, data=inner):
                if self._leases.get(serial) == instance and (runtime := self._of(serial)) is not None:
                    self.processes.send(runtime, m.ForRuntime(data=inner, serial=serial))
                elif self._ahead.may_begin(instance, serial):
                    self._ahead.park(instance, message)
                else:
                    self._answer(instance, m.SeatOver(serial=serial))  # it has crossed with the end of that

    # --- leases

    def _of(self, serial: int) -> Runtime | None:
        """The runtime that computes for this lease."""
        return next((each for each in self.processes.by_name.values() if serial in each.serials), None)

    def tell(self, serial: int, instance: str, name: str, message: m.ExecutorToRuntime) -> None:
        """Send a message of the leases about this lease to the runtime of this name."""
        runtime = self.processes.by_name.get(name)
        if isinstance(message, m.MemberLeaves):
            if runtime is not None and serial in runtime.serials:
                if message.granules or message.stays:
                    self._owes(runtime, m.MemberLeft)
                self.processes.send(runtime, message)
            else:  # it has never had anything of it
                self._dispatch(e.SaidByRuntime(serial, m.MemberLeft(serial=serial)))
            return
        if runtime is None or (runtime.ending and not runtime.serials):  # that is nobody's any more
            if isinstance(message, m.SeatEnds):
                self._dispatch(e.SaidByRuntime(serial, m.SeatLeft()))
            if not isinstance(message, MAKES):
                return  # it has died
            runtime = self.processes.spawn(name, self._uids.values())
        self.processes.used(name)
        self._leases[serial] = runtime.serials[serial] = instance
        if instance in self._uids:
            runtime.members[instance] = None
        if isinstance(message, m.SeatGiven) and message.refused:
            self._answer(instance, m.SeatOver(serial=serial, text=message.refused))
            self._dispatch(e.SeatUnwanted(serial, "revoked"))
            return
        if (answer := ANSWERS.get(type(message))) is not None:
            self._owes(runtime, answer)
        if isinstance(message, m.GranulesGiven):
            self._give(runtime, serial, instance, message)
        else:
            self.processes.send(runtime, message)
        for data in self._ahead.begun(instance, serial):
            self.processes.send(runtime, m.ForRuntime(data=data, serial=serial))

    def _owes(self, runtime: Runtime, answer: type[Any]) -> None:
        if answer not in runtime.owed:
            within_s = self._leave_s if answer is m.SeatLeft else self._yield_s
            runtime.owed[answer] = self._host.loop.call_later(within_s, self._overdue, runtime, answer)

    def open(self, instance: str, name: str) -> None:
        """Have it there before a lease wants it, if there is room: for as long as its instances are."""
        if instance in self._uids and name not in self.processes.by_name and self.processes.has_room:
            self.processes.spawn(name, self._uids.values()).members[instance] = None

    def _give(self, runtime: Runtime, serial: int, instance: str, message: m.GranulesGiven) -> None:
        """Descriptors of exactly these granules, with no more rights than are needed."""
        for start in range(0, len(message.granules), MAX_FDS):
            granules = message.granules[start : start + MAX_FDS]
            fds: list[int] = []
            try:
                for granule in granules:
                    fds.append(self._device.granule(granule.physical, message.writable))
            except (DeviceError, OSError) as error:
                close_all(fds)
                self._host.log.warning("runtime_gets_no_memory", instance=instance, error=str(error))
                self._answer(instance, m.SeatOver(serial=serial, text=str(error)))
                self._dispatch(e.SeatUnwanted(serial, "revoked"))
                return
            self.processes.send(runtime, m.GranulesGiven(granules=granules, writable=message.writable), fds)

    def lease_over(self, serial: int) -> None:
        """Notify its instance, if it was a runtime's, or was to be one's."""
        instance = self._ahead.over(serial, self._leases.pop(serial, None))
        if instance is not None:
            self._answer(instance, m.SeatOver(serial=serial))
        for runtime in self.processes.living:
            runtime.serials.pop(serial, None)

    def _answer(self, instance: str, message: m.ExecutorToLlm) -> None:
        self._host.reply(instance, msgspec.msgpack.encode(message))

    # --- runtimes

    def _said(self, runtime: Runtime, message: m.RuntimeToExecutor, fds: list[int]) -> None:
        close_all(fds)
        if isinstance(message, m.FromRuntime):
            instance = runtime.serials.get(message.serial, "")
            if instance and self._host.hears(instance):  # it has hung up, or is dead, and asks anew if it lives
                self._answer(instance, m.OfRuntime(serial=message.serial, data=message.data))
            return
        if isinstance(message, m.LoadChanged):
            self.processes.tell_load(runtime, message.load)
        if (owed := runtime.owed.pop(type(message), None)) is not None:
            owed.cancel()
        if runtime.serials:
            self._dispatch(e.SaidByRuntime(next(iter(runtime.serials)), message))

    def _overdue(self, runtime: Runtime, answer: type[Any]) -> None:
        del runtime.owed[answer]
        self._host.log.warning("runtime_does_not_yield", runtime=runtime.name, owed=answer.__name__)
        self.processes.kill(runtime)

    def _gone(self, runtime: Runtime) -> None:
        if runtime.serials:
            self._host.log.warning("runtime_died", runtime=runtime.name)
            self._dispatch(e.RuntimeGone(runtime.name))

    def close(self) -> None:
        """All of them are ended; this process is about to be."""
        self.processes.close()
