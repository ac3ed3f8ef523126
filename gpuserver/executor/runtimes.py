"""The runtimes of one GPU as processes: forked blank when they are first needed, ended by their descriptor; what they
say goes to the leases, and what they and their instances say to each other passes through here unread.

On the executor's thread. A runtime serves one instance until that is gone. That it is dead is known from its pidfd, not
from its socket: as long as it lives, it may have memory mapped.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

from dormouse.core.links.fds import MAX_FDS, PacketSocket, close_all
from dormouse.gpuserver.device.protocol import Device, DeviceError
from dormouse.gpuserver.lease import events as e
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError

UID_STEP: Final = 20_000
"""Runtimes have uids so far above their instances': neither may look into the other."""

YIELD_S: Final = 30.0
"""A runtime that has been told to give back its turn, or its seat, and does not, is ended."""

WAITING: Final = 4096
"""Packets that wait until a runtime takes them, at most; it takes them between two steps."""

Connection = PacketSocket[m.RuntimeToExecutor, m.ExecutorToRuntime]


class RuntimeHost(Protocol):
    """Who has runtimes: the executor."""

    loop: asyncio.AbstractEventLoop
    log: Any

    def reply(self, instance: str, message: bytes) -> None: ...

    def expel(self, instance: str, text: str, story: str) -> None: ...


@dataclass(eq=False)
class Runtime:
    """One process, or what waits for it to be there."""

    number: int
    instance: str
    connection: Connection
    serial: int = 0  # of the lease that it computes for; 0: none
    pidfd: int = -1
    waiting: deque[tuple[m.ExecutorToRuntime, list[int]]] = field(default_factory=deque)  # not taken yet
    owed: asyncio.TimerHandle | None = None  # it has to answer until then
    dead: bool = False
    ending: bool = False  # it is to be gone


class Runtimes:
    """See the module. ``dispatch`` takes events to the leases."""

    def __init__(
        self,
        host: RuntimeHost,
        device: Device,
        dispatch: Callable[[e.Event], None],
        threads: int,
    ) -> None:
        self._host, self._device, self._dispatch, self._threads = host, device, dispatch, threads
        self._runtimes: dict[str, Runtime] = {}  # by instance
        self._leases: dict[int, str] = {}  # instance by serial
        self._numbers = 0
        self._zygote: PacketSocket[m.FromRuntimeZygote, m.ToRuntimeZygote] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._uids: dict[str, int] = {}  # of instances

    # --- instances

    def attach(self, attach: m.AttachInstance) -> None:
        """An instance that will want a runtime: the process that forks them gets warm."""
        self._uids[attach.instance] = attach.uid
        if self._zygote is None:
            self._start_zygote()

    def detach(self, instance: str) -> None:
        """The instance is gone; its runtime with it."""
        self._uids.pop(instance, None)
        if (runtime := self._runtimes.get(instance)) is not None:
            self._kill(runtime)

    def heard(self, instance: str, data: bytes) -> None:
        """From its endpoint. Raises RemoteProtocolError."""
        try:
            message = msgspec.msgpack.decode(data, type=m.LlmToExecutor)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"no message for a runtime: {error}") from error
        runtime = self._runtimes.get(instance)
        match message:
            case m.ToRuntime(serial=serial, data=inner):
                if self._leases.get(serial) != instance or runtime is None:
                    self._answer(instance, m.SeatOver(serial=serial))  # it has crossed with the end of that
                else:
                    self._send(runtime, m.ForRuntime(data=inner))
            case m.LeaveSeat(serial=serial):
                if self._leases.get(serial) == instance:
                    self._dispatch(e.SeatUnwanted(serial))

    # --- leases

    def tell(self, serial: int, instance: str, message: m.ExecutorToRuntime) -> None:
        """What the leases say to a runtime."""
        runtime = self._runtimes.get(instance)
        if runtime is None:
            if isinstance(message, m.SeatEnds):
                self._dispatch(e.SaidByRuntime(serial, m.SeatLeft()))
                return
            runtime = self._spawn(instance)
        self._leases[serial], runtime.serial = instance, serial
        if isinstance(message, m.SeatGiven) and message.refused:
            self._answer(instance, m.SeatOver(serial=serial, text=message.refused))
            self._dispatch(e.SeatUnwanted(serial, "revoked"))
            return
        if isinstance(message, m.TurnEnds | m.SeatEnds) and runtime.owed is None:
            runtime.owed = self._host.loop.call_later(YIELD_S, self._overdue, runtime)
        if isinstance(message, m.GranulesGiven):
            self._give(runtime, message)
        else:
            self._send(runtime, message)

    def _give(self, runtime: Runtime, message: m.GranulesGiven) -> None:
        """Descriptors of exactly these granules, with no more rights than are needed."""
        for start in range(0, len(message.granules), MAX_FDS):
            granules = message.granules[start : start + MAX_FDS]
            fds: list[int] = []
            try:
                for granule in granules:
                    fds.append(self._device.granule(granule.physical, message.writable))
            except (DeviceError, OSError) as error:
                close_all(fds)
                self._host.log.warning("runtime_gets_no_memory", instance=runtime.instance, error=str(error))
                self._answer(runtime.instance, m.SeatOver(serial=runtime.serial, text=str(error)))
                self._dispatch(e.SeatUnwanted(runtime.serial, "revoked"))
                return
            self._send(runtime, m.GranulesGiven(granules=granules, writable=message.writable), fds)

    def lease_over(self, serial: int) -> None:
        """Its instance is told, if it was a runtime's."""
        if (instance := self._leases.pop(serial, None)) is not None:
            self._answer(instance, m.SeatOver(serial=serial))
            runtime = self._runtimes.get(instance)
            if runtime is not None and runtime.serial == serial:
                runtime.serial = 0

    def _answer(self, instance: str, message: m.ExecutorToLlm) -> None:
        self._host.reply(instance, msgspec.msgpack.encode(message))

    # --- processes

    def _start_zygote(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "dormouse.gpuserver.runtime.zygote", str(theirs.fileno())]
        environment = {
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",  # else runtimes that wait take the cores from those that compute
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "DORMOUSE_PARENT": str(os.getpid()),
        }
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        self._zygote = PacketSocket(ours, m.FromRuntimeZygote)
        self._zygote.serve(self._from_zygote, self._zygote_gone)

    def _zygote_gone(self) -> None:
        """All that it has forked dies with it."""
        self._zygote = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for runtime in [each for each in self._runtimes.values() if each.pidfd < 0]:
            self._gone(runtime)

    def _spawn(self, instance: str) -> Runtime:
        if self._zygote is None:
            self._start_zygote()
        assert self._zygote is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers += 1
        connection: Connection = PacketSocket(ours, m.RuntimeToExecutor)
        runtime = self._runtimes[instance] = Runtime(self._numbers, instance, connection)
        connection.serve(lambda message, fds: self._said(runtime, message, fds), lambda: self._hung_up(runtime))
        uid = self._uids.get(instance, os.getuid())
        with theirs:
            self._zygote.send(
                m.SpawnRuntime(
                    number=runtime.number,
                    uid=uid + UID_STEP if uid != os.getuid() else uid,
                    address_nbytes=self._device.address_nbytes,
                    threads=self._threads,
                ),
                [theirs.fileno()],
            )
        return runtime

    def _from_zygote(self, message: m.FromRuntimeZygote, fds: list[int]) -> None:
        if isinstance(message, m.RuntimeSpawned) and len(fds) == 1:
            runtime = next((each for each in self._runtimes.values() if each.number == message.number), None)
            if runtime is not None and runtime.pidfd < 0:
                runtime.pidfd = fds.pop()
                self._host.loop.add_reader(runtime.pidfd, self._gone, runtime)
                if runtime.ending:
                    self._kill(runtime)
        close_all(fds)

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
        serial = runtime.serial
        if isinstance(message, m.FromRuntime):
            if serial:
                self._answer(runtime.instance, m.OfRuntime(serial=serial, data=message.data))
            return
        if isinstance(message, m.SeatLeft | m.TurnGivenBack) and runtime.owed is not None:
            runtime.owed.cancel()
            runtime.owed = None
        if serial:
            self._dispatch(e.SaidByRuntime(serial, message))

    def _hung_up(self, runtime: Runtime) -> None:
        """It says nothing any more; it may live."""
        self._kill(runtime)

    def _overdue(self, runtime: Runtime) -> None:
        runtime.owed = None
        self._host.log.warning("runtime_does_not_yield", instance=runtime.instance)
        self._kill(runtime)

    def _kill(self, runtime: Runtime) -> None:
        runtime.ending = True
        if runtime.pidfd >= 0 and not runtime.dead:
            with suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(runtime.pidfd, signal.SIGKILL)

    def _gone(self, runtime: Runtime) -> None:
        """The process is: nothing is mapped there."""
        if runtime.dead:
            return
        runtime.dead = True
        if runtime.owed is not None:
            runtime.owed.cancel()
        if runtime.pidfd >= 0:
            self._host.loop.remove_reader(runtime.pidfd)
            os.close(runtime.pidfd)
        if (fd := runtime.connection.sock.fileno()) >= 0:
            self._host.loop.remove_writer(fd)
        runtime.connection.close()
        for _, fds in runtime.waiting:
            close_all(fds)
        if self._runtimes.get(runtime.instance) is runtime:
            del self._runtimes[runtime.instance]
        if serial := runtime.serial:
            self._host.log.warning("runtime_died", instance=runtime.instance)
            self._dispatch(e.SeatUnwanted(serial, "revoked"))
            self._dispatch(e.SaidByRuntime(serial, m.SeatLeft()))

    def close(self) -> None:
        """All of them are ended; this process is about to be."""
        for runtime in list(self._runtimes.values()):
            self._kill(runtime)
            runtime.connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._zygote is not None:
            self._zygote.close()
