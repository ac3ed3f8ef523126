"""The processes of runtimes: forked blank when they are first needed, sent messages between two steps, ended by their
descriptor.

A process is known to be dead by its pidfd, not by its socket: as long as it lives, it may have memory mapped. On a real
GPU each has a context, beside the pool. When there is no room for one more, processes in which nobody has a lease end
first, those that were used longest ago before others; where there are none, CUDA decides whether it can have one. The
messages of runtimes are not inspected here.
"""

import os
import signal
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import count
from typing import Final

from dormouse.core.links.fds import PacketSocket, close_all
from dormouse.gpuserver.device.protocol import Device
from dormouse.gpuserver.executor.runtime_handle import Connection, Runtime, RuntimeHost
from dormouse.gpuserver.executor.runtime_zygote import RuntimeZygote
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost

WAITING: Final = 4096
"""Packets that wait until a runtime takes them, at most; it takes them between two steps."""

NO_LOAD: Final = m.EngineLoad(
    running=0, waiting=0, preempted=0, blocks=0, used=0, idle=0, block_nbytes=0, reused_nbytes=0
)
"""Of a runtime that has no model yet."""

NOW: Final = m.Batching()
"""Nobody waits for others."""


class RuntimeProcesses:
    """``said(runtime, message, fds)``: the descriptors are the callee's. ``gone(runtime)``: nothing is mapped there any
    more.
    """

    def __init__(
        self,
        host: RuntimeHost,
        device: Device,
        threads: int,
        first_uid: int,
        batching: m.Batching,
        cuda: bool,
        said: Callable[[Runtime, m.RuntimeToExecutor, list[int]], None],
        gone: Callable[[Runtime], None],
    ) -> None:
        self._host, self._device, self._threads = host, device, threads
        self._first_uid, self._batching = first_uid, batching
        self._on_said, self._on_gone = said, gone
        self.by_name: dict[str, Runtime] = {}  # the one that was used last is the last
        self.living: list[Runtime] = []  # these, and those that are being ended
        self._unforked: dict[Runtime, tuple[m.SpawnRuntime, socket.socket]] = {}  # of these, until there is room
        self._numbers = 0
        self._zygote = RuntimeZygote(self._spawned, self._zygote_gone, cuda)

    def warm(self) -> None:
        """One will be needed: the process that forks them gets warm."""
        self._zygote.warm()

    def used(self, name: str) -> None:
        self.by_name[name] = self.by_name.pop(name)

    @property
    def has_room(self) -> bool:
        """For one more, without the end of another."""
        return self._fits(len(self.living))

    def spawn(self, name: str, instance_uids: Collection[int]) -> Runtime:
        """``instance_uids``: of the instances that are there."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._numbers += 1
        connection: Connection = PacketSocket(ours, m.RuntimeToExecutor)
        runtime = self.by_name[name] = Runtime(self._numbers, name, connection, self._uid(instance_uids))
        self.living.append(runtime)
        # One that has hung up sends nothing any more; it may live.
        connection.serve(lambda message, fds: self._on_said(runtime, message, fds), lambda: self.kill(runtime))
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

    def _zygote_gone(self) -> None:
        """All that it has forked die with it; those that wait for room it has not forked."""
        forked = [each for each in self.living if each not in self._unforked]
        for runtime in forked:
            self.kill(runtime)  # so that pending ones wait for its room
        for runtime in forked:
            if runtime.pidfd < 0:
                self._bury(runtime)
        self._fork()

    def _uid(self, instance_uids: Collection[int]) -> int:
        """One that no other runtime has; the node's own where they cannot have one."""
        own = os.getuid()
        if own in instance_uids:
            return own
        taken = {each.uid for each in self.living}
        return next(uid for uid in count(self._first_uid) if uid not in taken)

    def _fits(self, there: int) -> bool:
        """Whether the context of one more has room beside the pool; one always may try."""
        return not there or (there + 1) * self._device.context_nbytes <= self._device.beside_nbytes

    def _fork(self) -> None:
        """Fork the pending runtimes whose contexts have room. Called again when one has ended and made room."""
        while self._unforked:
            there = [each for each in self.living if each not in self._unforked]
            if not self._fits(len(there)):
                if any(each.ending for each in there):
                    return
                resting = (each for each in self.by_name.values() if each.pidfd >= 0 and not each.serials)
                if (first := next(resting, None)) is not None:
                    self.kill(first)
                    return
            runtime = next(iter(self._unforked))
            self._zygote.fork(*self._unforked.pop(runtime))

    def _spawned(self, number: int, pidfd: int) -> None:
        runtime = next((each for each in self.living if each.number == number), None)
        if runtime is None or runtime.pidfd >= 0:
            os.close(pidfd)
            return
        runtime.pidfd = pidfd
        self._host.loop.add_reader(pidfd, self._gone, runtime)
        if runtime.ending:
            self.kill(runtime)
        elif not runtime.serials:  # it was opened before any lease
            self.tell_load(runtime, NO_LOAD)

    def send(self, runtime: Runtime, message: m.ExecutorToRuntime, fds: list[int] | None = None) -> None:
        """Takes the descriptors over."""
        if runtime.dead or runtime.ending or len(runtime.waiting) >= WAITING:
            close_all(fds or [])
            self.kill(runtime)
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

    def tell_load(self, runtime: Runtime, load: m.EngineLoad | None) -> None:
        told = m.RuntimeLoad(instances=list(runtime.members), number=runtime.number, pid=runtime.pid, load=load)
        self._host.to_controller(told)

    def kill(self, runtime: Runtime) -> None:
        runtime.ending = True
        if (unforked := self._unforked.pop(runtime, None)) is not None:
            unforked[1].close()
            self._host.loop.call_soon(self._gone, runtime)
        if runtime.pidfd >= 0 and not runtime.dead:
            with suppress(ProcessLookupError):  # it has ended by itself
                signal.pidfd_send_signal(runtime.pidfd, signal.SIGKILL)

    def _gone(self, runtime: Runtime) -> None:
        """The process is: nothing is mapped there, and another may have its room."""
        if not runtime.dead:
            self._bury(runtime)
            self._fork()

    def _bury(self, runtime: Runtime) -> None:
        runtime.dead = True
        self.tell_load(runtime, None)
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
        self.living.remove(runtime)
        if self.by_name.get(runtime.name) is runtime:
            del self.by_name[runtime.name]
        self._on_gone(runtime)

    def close(self) -> None:
        """All of them are ended; this process is about to be."""
        for _, theirs in self._unforked.values():
            theirs.close()
        self._unforked.clear()
        for runtime in list(self.living):
            self.kill(runtime)
            runtime.connection.close()
        self._zygote.close()
