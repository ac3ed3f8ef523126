"""The runtimes of one GPU as processes: forked blank when they are first needed, ended by their descriptor; what they
say goes to the leases, and what they and their instances say to each other passes through here unread.

On the executor's thread. A runtime serves the instances of one group (lease/runtimes.py), or one instance, until all of
them are gone, and never others. That it is dead is known from its pidfd, not from its socket: as long as it lives, it
may have memory mapped.

On a real GPU each of them has a context, beside the pool. When there is no room for one more, processes in which nobody
has a lease end first, those that were used longest ago before others; where there are none, CUDA says what it can do.
"""

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any, Final

import msgspec

from dormouse.core.links.fds import MAX_FDS, MAX_PACKET_NBYTES, PacketSocket, close_all
from dormouse.gpuserver.device.protocol import Device, DeviceError
from dormouse.gpuserver.executor.ahead import AheadOfLease
from dormouse.gpuserver.executor.runtime_handle import Connection, Runtime, RuntimeHost
from dormouse.gpuserver.executor.runtime_zygote import RuntimeZygote
from dormouse.gpuserver.lease import events as e
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

UID_STEP: Final = 20_000
"""Runtimes have uids so far above the first of instances': neither may look into the other."""

UIDS: Final = 1024
"""For the runtimes of one executor: no two that live on a node have the same."""

MAKES: Final = (m.TurnBegins, m.GranulesGiven, m.SegmentsCame, m.SeatGiven)
"""What a runtime is needed for; all else is only for one that there is."""

ANSWERS: Final[dict[type[Any], type[Any]]] = {
    m.TurnEnds: m.TurnGivenBack,
    m.SeatEnds: m.SeatLeft,
    m.KvReclaim: m.KvReturned,
    m.MemberLeaves: m.MemberLeft,
}
"""What a runtime owes within a bound: its turn, its seat, memory. One that does not give it is ended."""

WAITING: Final = 4096
"""Packets that wait until a runtime takes them, at most; it takes them between two steps."""

INNER_NBYTES: Final = MAX_PACKET_NBYTES - 64
"""Of a message from an instance: with what is around it, it fits a packet."""

NO_LOAD: Final = m.EngineLoad(
    running=0, waiting=0, preempted=0, blocks=0, used=0, idle=0, block_nbytes=0, reused_nbytes=0
)
"""Of a runtime that has no model yet."""


NOW: Final = m.Batching()
"""Nobody waits for others."""


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
        self._host, self._device, self._dispatch, self._threads = host, device, dispatch, threads
        self._yield_s, self._leave_s, self._first_uid = yield_s, min(yield_s, leave_s), first_uid
        self._batching = batching
        self._runtimes: dict[str, Runtime] = {}  # by name
        self._living: list[Runtime] = []  # these, and those that are being ended
        self._unforked: dict[Runtime, tuple[m.SpawnRuntime, socket.socket]] = {}  # of these, until there is room
        self._leases: dict[int, str] = {}  # instance by serial
        self._ahead = AheadOfLease()
        self._numbers = 0
        self._zygote = RuntimeZygote(self._spawned, self._zygote_gone, cuda)
        self._uids: dict[str, int] = {}  # of instances

    # --- instances

    def attach(self, attach: m.AttachInstance) -> None:
        """An instance that will want a runtime: the process that forks them gets warm."""
        self._uids[attach.instance] = attach.uid
        self._zygote.warm()

    def detach(self, instance: str) -> None:
        """The instance is gone; its runtime with it."""
        self._uids.pop(instance, None)
        self._ahead.forget(instance)
        for runtime in list(self._runtimes.values()):
            if instance in runtime.members:
                del runtime.members[instance]
                if not runtime.members:
                    self._kill(runtime)

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
                    self._send(runtime, m.ForRuntime(data=inner, serial=serial))
                elif self._ahead.may_begin(instance, serial):
                    self._ahead.park(instance, message)
                else:
                    self._answer(instance, m.SeatOver(serial=serial))  # it has crossed with the end of that

    # --- leases

    def _of(self, serial: int) -> Runtime | None:
        """Which one computes for this lease."""
        return next((each for each in self._runtimes.values() if serial in each.serials), None)

    def tell(self, serial: int, instance: str, name: str, message: m.ExecutorToRuntime) -> None:
        """What the leases say to the runtime of this name, about this lease."""
        runtime = self._runtimes.get(name)
        if isinstance(message, m.MemberLeaves):
            if runtime is not None and serial in runtime.serials:
                if message.granules or message.stays:
                    self._owes(runtime, m.MemberLeft)
                self._send(runtime, message)
            else:  # it has never had anything of it
                self._dispatch(e.SaidByRuntime(serial, m.MemberLeft(serial=serial)))
            return
        if runtime is None or (runtime.ending and not runtime.serials):  # that is nobody's any more
            if isinstance(message, m.SeatEnds):
                self._dispatch(e.SaidByRuntime(serial, m.SeatLeft()))
            if not isinstance(message, MAKES):
                return  # it has died
            runtime = self._spawn(name)
        self._runtimes[name] = self._runtimes.pop(name)  # the one that was used last
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
            self._send(runtime, message)
        for data in self._ahead.begun(instance, serial):
            self._send(runtime, m.ForRuntime(data=data, serial=serial))

    def _owes(self, runtime: Runtime, answer: type[Any]) -> None:
        if answer not in runtime.owed:
            within_s = self._leave_s if answer is m.SeatLeft else self._yield_s
            runtime.owed[answer] = self._host.loop.call_later(within_s, self._overdue, runtime, answer)

    def open(self, instance: str, name: str) -> None:
        """Have it there before a lease wants it, if there is room: for as long as its instances are."""
        if instance in self._uids and name not in self._runtimes and self._fits(len(self._living)):
            self._spawn(name).members[instance] = None

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
            self._send(runtime, m.GranulesGiven(granules=granules, writable=message.writable), fds)

    def lease_over(self, serial: int) -> None:
        """Its instance is told, if it was a runtime's, or was to be one's."""
        instance = self._ahead.over(serial, self._leases.pop(serial, None))
        if instance is not None:
            self._answer(instance, m.SeatOver(serial=serial))
        for runtime in self._living:
            runtime.serials.pop(serial, None)

    def _answer(self, instance: str, message: m.ExecutorToLlm) -> None:
        self._host.reply(instance, msgspec.msgpack.encode(message))

    # --- processes

    def _zygote_gone(self) -> None:
        """All that it has forked die with it."""
        for runtime in [each for each in self._living if each.pidfd < 0]:
            self._gone(runtime)

    def _uid(self) -> int:
        """One that no other runtime has; the node's own where they cannot have one."""
        own = os.getuid()
        if own in self._uids.values():
            return own
        taken = {each.uid for each in self._living}
        return next(uid for uid in count(self._first_uid) if uid not in taken)

    def _spawn(self, name: str) -> Runtime:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers += 1
        connection: Connection = PacketSocket(ours, m.RuntimeToExecutor)
        runtime = self._runtimes[name] = Runtime(self._numbers, name, connection, self._uid())
        self._living.append(runtime)
        connection.serve(lambda message, fds: self._said(runtime, message, fds), lambda: self._hung_up(runtime))
        spawn = m.SpawnRuntime(
            number=runtime.number,
            uid=runtime.uid,
            address_nbytes=self._device.address_nbytes,
            threads=self._threads,
            gpu=self._device.ordinal,
            activation_nbytes=self._device.activation_nbytes,
            batching=self._batching,
        )
        self._unforked[runtime] = spawn, theirs
        self._fork()
        return runtime

    def _fits(self, there: int) -> bool:
        """Whether the context of one more has room beside the pool; one always may try."""
        return not there or (there + 1) * self._device.context_nbytes <= self._device.beside_nbytes

    def _fork(self) -> None:
        """What is to be, if its context has room. When one has ended that makes room, this is looked at again."""
        while self._unforked:
            there = [each for each in self._living if each not in self._unforked]
            if not self._fits(len(there)):
                if any(each.ending for each in there):
                    return
                resting = (each for each in self._runtimes.values() if each.pidfd >= 0 and not each.serials)
                if (first := next(resting, None)) is not None:
                    self._kill(first)
                    return
            runtime = next(iter(self._unforked))
            self._zygote.fork(*self._unforked.pop(runtime))

    def _spawned(self, number: int, pidfd: int) -> None:
        runtime = next((each for each in self._living if each.number == number), None)
        if runtime is None or runtime.pidfd >= 0:
            os.close(pidfd)
            return
        runtime.pidfd = pidfd
        self._host.loop.add_reader(pidfd, self._gone, runtime)
        if runtime.ending:
            self._kill(runtime)
        elif not runtime.serials:  # it was opened before any lease
            self._tell_load(runtime, NO_LOAD)

    def _send(self, runtime: Runtime, message: m.ExecutorToRuntime, fds: list[int] | None = None) -> None:
        """Takes the descriptors over."""
        if runtime.dead or runtime.ending or len(runtime.waiting) >= WAITING:
            close_all(fds or [])
            self._kill(runtime)
            return
        runtime.waiting.append((message, fds or []))
        self._flush(runtime)

    def _flush(self, runtime: Runtime) -> None:
        sock = runtime.connection.sock
        while runtime.waiting and sock.fileno() >= 0:
            try:
                runtime.connection.send(*runtime.waiting[0])
            except BlockingIOError:
                self._host.loop.add_writer(sock.fileno(), self._flush, runtime)
                return
            except PeerLost:
                break
            close_all(runtime.waiting.popleft()[1])
        if sock.fileno() >= 0:
            self._host.loop.remove_writer(sock.fileno())

    def _said(self, runtime: Runtime, message: m.RuntimeToExecutor, fds: list[int]) -> None:
        close_all(fds)
        if isinstance(message, m.FromRuntime):
            instance = runtime.serials.get(message.serial, "")
            if instance and self._host.hears(instance):  # it has hung up, or is dead, and asks anew if it lives
                self._answer(instance, m.OfRuntime(serial=message.serial, data=message.data))
            return
        if isinstance(message, m.LoadChanged):
            self._tell_load(runtime, message.load)
        if (owed := runtime.owed.pop(type(message), None)) is not None:
            owed.cancel()
        if runtime.serials:
            self._dispatch(e.SaidByRuntime(next(iter(runtime.serials)), message))

    def _tell_load(self, runtime: Runtime, load: m.EngineLoad | None) -> None:
        told = m.RuntimeLoad(instances=list(runtime.members), number=runtime.number, pid=runtime.pid, load=load)
        self._host.to_controller(told)

    def _hung_up(self, runtime: Runtime) -> None:
        """It says nothing any more; it may live."""
        self._kill(runtime)

    def _overdue(self, runtime: Runtime, answer: type[Any]) -> None:
        del runtime.owed[answer]
        self._host.log.warning("runtime_does_not_yield", runtime=runtime.name, owed=answer.__name__)
        self._kill(runtime)

    def _kill(self, runtime: Runtime) -> None:
        runtime.ending = True
        if runtime in self._unforked:
            self._host.loop.call_soon(self._gone, runtime)
        if runtime.pidfd >= 0 and not runtime.dead:
            with suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(runtime.pidfd, signal.SIGKILL)

    def _gone(self, runtime: Runtime) -> None:
        """The process is: nothing is mapped there."""
        if runtime.dead:
            return
        runtime.dead = True
        self._tell_load(runtime, None)
        for owed in runtime.owed.values():
            owed.cancel()
        if runtime.pidfd >= 0:
            self._host.loop.remove_reader(runtime.pidfd)
            os.close(runtime.pidfd)
        if (fd := runtime.connection.sock.fileno()) >= 0:
            self._host.loop.remove_writer(fd)
        runtime.connection.close()
        for _, fds in runtime.waiting:
            close_all(fds)
        self._living.remove(runtime)
        if (unforked := self._unforked.pop(runtime, None)) is not None:
            unforked[1].close()
        if self._runtimes.get(runtime.name) is runtime:
            del self._runtimes[runtime.name]
        if runtime.serials:
            self._host.log.warning("runtime_died", runtime=runtime.name)
            self._dispatch(e.RuntimeGone(runtime.name))
        self._fork()

    def close(self) -> None:
        """All of them are ended; this process is about to be."""
        for _, theirs in self._unforked.values():
            theirs.close()
        self._unforked.clear()
        for runtime in list(self._living):
            self._kill(runtime)
            runtime.connection.close()
        self._zygote.close()
