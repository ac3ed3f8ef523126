"""A store and two executors as real processes; supervisor, controller, router and instances are made of core links."""

import asyncio
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import msgspec
import pytest
from mailbox_of_link import WAIT_S, Mailbox
from warm_start import processes_start_warm  # noqa: F401  # for all modules of this folder

from dormouse.core.config import GpuSection, LimitsSection, NodeConfig, NodeSection
from dormouse.core.links.fds import PacketSocket
from dormouse.core.links.link import Link, RawLink
from dormouse.core.links.sockets import remove_path
from dormouse.core.links.zmq_link import ZmqLink, close_context
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.shm import SharedMemory
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

T = TypeVar("T")
GPU_NBYTES = 48 << 20
ARENA = m.Arena(request_nbytes=4096, response_nbytes=4096, stream_nbytes=8 << 20)
QUOTA_NBYTES = 1 << 20


class Instance:
    """A test-side instance: uploads to the store, writes frames by hand."""

    def __init__(self, kit: "Kit", name: str) -> None:
        self.kit = kit
        self.name = name
        self.directory = kit.paths.instance(name)
        os.mkdir(self.directory, 0o700)
        self.arena = SharedMemory.create("arena", ARENA.nbytes)
        self.stream = self.arena.view[ARENA.stream_offset :]
        self.links: dict[str, RawLink] = {}
        self.replies: dict[str, Mailbox] = {}
        self.numbers: dict[int, int] = {}
        self.told: set[str] = set()

    @property
    def attach(self) -> m.AttachInstance:
        return m.AttachInstance(
            instance=self.name,
            tenant="default",
            function="",  # as a session's: nothing is kept when it is gone
            function_version=0,
            directory=self.directory,
            uid=os.getuid(),
            arena=ARENA,
            quota_nbytes=QUOTA_NBYTES,
        )

    def connect(self) -> None:
        self.heard = Mailbox()
        self.store: Link[m.StoreToInstance, m.InstanceToStore] = Link(
            f"{self.directory}/store", bind=False, incoming=m.StoreToInstance, on_message=self.heard.put
        )
        for role in self.kit.gpus:
            self.open(role)

    def open(self, role: str) -> None:
        if role in self.links:
            self.links[role].close()
        box = self.replies[role] = Mailbox()

        def heard(data: bytes) -> None:
            for reply in wire.replies(data):
                box.put(reply)

        self.links[role] = RawLink(f"{self.directory}/{role}.{self.kit.epochs[role]}", bind=False, on_message=heard)
        self.told.discard(role)

    async def upload(self, storages: dict[int, bytes]) -> int:
        """Upload whole storages through the store and commit; returns the version."""
        for storage, data in storages.items():
            for offset in range(0, len(data), ARENA.stream_nbytes):
                part = data[offset : offset + ARENA.stream_nbytes]
                self.stream[: len(part)] = part
                self.store.send(
                    m.StoreUpload(
                        storage=storage, total_nbytes=len(data), offset=offset, arena_offset=0, nbytes=len(part)
                    )
                )
                await self.heard.of(m.Uploaded)
        self.store.send(m.Commit())
        return (await self.heard.of(m.Committed)).version

    def send(
        self, lease: m.Lease, commands: list[Any], metas: list[Any] | None = None, keys: list[Any] | None = None
    ) -> None:
        self.numbers[lease.serial] = number = self.numbers.get(lease.serial, 0) + 1
        frame = [lease.serial, lease.secret, number, [metas or [], keys or []], commands]
        self.links[f"gpu{lease.gpu}"].send_raw(msgpack.packb(frame))

    def define(self, lease: m.Lease, numel: int) -> None:
        """Meta 0: float32[numel]; key 0: add_(tensor, scalar); key 1: mul(tensor, scalar) -> fresh."""
        role = f"gpu{lease.gpu}"
        if role in self.told:
            return
        self.told.add(role)
        result = [[[wire.SAME, 0]], [], False]
        keys = [0, ["aten::add_.Scalar", [[wire.TENSOR, 0], [wire.SCALAR]], [], result, "float32"]]
        result = [[[wire.FRESH, 0, 0]], [], False]
        keys += [1, ["aten::mul.Scalar", [[wire.TENSOR, 0], [wire.SCALAR]], [], result, "float32"]]
        self.send(lease, [], [0, ["float32", [numel], [1], 0, 0]], keys)

    async def reply(self, lease: m.Lease, kind: int, key: int | None = None) -> list[Any]:
        """The next reply of a kind; ``key`` is its token or serial."""
        box = self.replies[f"gpu{lease.gpu}"]
        taken: list[Any] = await box.take(lambda reply: reply[0] == kind and (key is None or reply[1] == key))
        return taken

    async def download(self, lease: m.Lease, storage: int, nbytes: int) -> bytes:
        """A whole float32 storage (meta 0)."""
        token = next(self.kit.tokens)
        self.send(lease, [wire.DOWNLOAD, token, storage, 0, 0])
        reply = await self.answer(lease, token)
        assert reply == nbytes, reply
        return bytes(self.stream[:nbytes])

    async def answer(self, lease: m.Lease, token: int) -> Any:
        """VALUE's payload, or the FAILED reply."""
        box = self.replies[f"gpu{lease.gpu}"]
        reply = await box.take(lambda reply: reply[0] in (wire.VALUE, wire.FAILED) and reply[1] == token)
        return reply[2] if reply[0] == wire.VALUE else reply

    async def end(self, lease: m.Lease, wait: bool) -> Any:
        token = next(self.kit.tokens)
        self.send(lease, [wire.END, token, int(wait)])
        if not wait:
            return None
        answer = await self.answer(lease, token)
        return answer[0] if len(answer) == 3 else answer  # [version, error, poisoned]; or why nothing was kept

    def close(self) -> None:
        self.store.close()
        for link in self.links.values():
            link.close()
        self.stream.release()
        self.arena.close()


class Kit:
    """The processes and their other ends. Everything runs in one loop, driven by :meth:`run`."""

    gpus = ("gpu0", "gpu1")

    def __init__(self, **gpu: str) -> None:
        """``gpu``: settings of the section [gpu]."""
        self.runner = asyncio.Runner()
        self.directory = tempfile.mkdtemp(prefix="dm-")
        self.config = NodeConfig(
            node=NodeSection(run=f"{self.directory}/r", state=f"{self.directory}/s"),
            gpu=msgspec.structs.replace(
                GpuSection(device="host", count=2, memory=str(GPU_NBYTES), threads=1, poison=True), **gpu
            ),
            limits=LimitsSection(host=str(200 << 20)),
        )
        self.paths = RunPaths(self.config.run_directory)
        self.paths.make()
        StatePaths(self.config.state_directory).make()
        self.paths.node_json.write_bytes(msgspec.json.encode(self.config))
        self.tokens = itertools.count(1)
        self.serials = itertools.count(1)
        self.epochs: dict[str, int] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.supervised: dict[str, ZmqLink[m.ToSupervisor, m.FromSupervisor]] = {}
        self.said: dict[str, Mailbox] = {}  # to the supervisor, by role
        self.heard: dict[str, Mailbox] = {}  # by the controller, by role
        self.control: dict[str, Link[Any, Any]] = {}
        self.instances: dict[str, Instance] = {}
        self.run(self._start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def _start(self) -> None:
        for role in ("store", *self.gpus):
            self.spawn(role)
        for role in ("store", *self.gpus):
            await self.said[role].of(m.Ready)
        self.tell_peers()
        for role in self.gpus:
            await self.heard[role].of(m.Hello)

    def spawn(self, role: str) -> None:
        epoch = self.epochs[role] = self.epochs.get(role, 0) + 1
        box = self.said[role] = Mailbox()
        self.supervised[role] = ZmqLink(  # it answers their peers' heartbeats also while this loop rests
            self.paths.link("supervisor", role, epoch), bind=True, incoming=m.ToSupervisor, on_message=box.put
        )
        box = self.heard[role] = Mailbox()
        incoming: Any = m.StoreToController if role == "store" else m.ExecutorToController
        path = self.paths.link("controller", role, epoch)
        self.control[role] = Link(path, bind=True, incoming=incoming, on_message=box.put)
        module = "dormouse.gpuserver.store" if role == "store" else "dormouse.gpuserver.executor.main"
        self.processes[role] = subprocess.Popen(
            [sys.executable, "-m", module, "--run", str(self.paths.run), "--role", role, "--epoch", str(epoch)]
        )

    def tell_peers(self) -> None:
        for link in self.supervised.values():
            link.send(m.Peers(up=dict(self.epochs)))

    async def kill(self, role: str) -> None:
        """SIGKILL, as a supervisor sees it: closed links, Peers without it."""
        self.processes[role].kill()
        self.processes[role].wait()
        self.supervised.pop(role).close()
        self.control.pop(role).close()
        epoch = self.epochs[role]
        remove_path(self.paths.inbox(role, epoch))
        for path in self.paths.instances.glob(f"*/{role}.{epoch}"):  # also of instances that it had yet to forget
            remove_path(str(path))
        up = {peer: epoch for peer, epoch in self.epochs.items() if peer != role}
        for link in self.supervised.values():
            link.send(m.Peers(up=up))

    async def restart(self, role: str) -> None:
        self.spawn(role)
        await self.said[role].of(m.Ready)
        self.tell_peers()
        await self.introduced(role)

    async def introduced(self, role: str) -> None:
        """The new executor has said Hello, and is given all instances."""
        await self.heard[role].of(m.Hello)
        for instance in self.instances.values():
            self._packet(role, instance.attach, [instance.arena.fd])
            instance.open(role)

    def _packet(self, role: str, message: m.InboxPacket, fds: list[int]) -> None:
        packets: PacketSocket[Any, m.InboxPacket] = PacketSocket.connect(
            self.paths.inbox(role, self.epochs[role]), None
        )
        packets.send(message, fds)
        packets.close()

    def instance(self, name: str) -> Instance:
        """Attach a new instance everywhere."""

        async def attach() -> Instance:
            instance = self.instances[name] = Instance(self, name)
            for role in ("store", *self.gpus):
                self._packet(role, instance.attach, [instance.arena.fd])
            instance.connect()
            return instance

        return self.run(attach())

    def lease(self, gpu: int) -> m.Lease:
        serial = next(self.serials)
        return m.Lease(gpu=gpu, epoch=self.epochs[f"gpu{gpu}"], serial=serial, secret=serial * 7919)

    def wake(
        self,
        instance: Instance,
        gpu: int,
        version: int,
        worth: dict[str, float] | None = None,
        peers: tuple[int, ...] = (),
        lease: m.Lease | None = None,
    ) -> m.Lease:
        lease = lease or self.lease(gpu)
        wake = m.Wake(
            lease=lease,
            instance=instance.name,
            version=version,
            worth=worth or {},
            peers=list(peers),
            activation_nbytes=0,
        )
        self.control[f"gpu{gpu}"].send(wake)
        return lease

    async def done(self, lease: m.Lease) -> m.Done:
        taken: m.Done = await self.heard[f"gpu{lease.gpu}"].take(
            lambda message: isinstance(message, m.Done) and message.serial == lease.serial
        )
        return taken

    async def awake(self, lease: m.Lease) -> m.Awake:
        taken: m.Awake = await self.heard[f"gpu{lease.gpu}"].take(
            lambda message: isinstance(message, m.Awake) and message.serial == lease.serial
        )
        return taken

    async def violation(self, instance: Instance, gpu: int) -> m.Violation:
        taken: m.Violation = await self.heard[f"gpu{gpu}"].take(
            lambda message: isinstance(message, m.Violation) and message.instance == instance.name
        )
        return taken

    def forget(self, instance: Instance) -> None:
        """As router and controller do when an instance is gone."""

        async def forget() -> None:
            for role in ("store", *self.gpus):
                self._packet(role, m.DetachInstance(instance=instance.name), [])
            self.control["store"].send(m.StoreForget(instance=instance.name))
            for role in self.gpus:
                self.control[role].send(m.Forget(instance=instance.name))
            del self.instances[instance.name]
            instance.close()

        self.run(forget())

    async def _stop(self) -> None:
        for instance in self.instances.values():
            instance.close()
        for link in self.supervised.values():
            link.send(m.Shutdown())
        await asyncio.sleep(0)
        statuses = {}
        for role, process in self.processes.items():
            statuses[role] = await asyncio.to_thread(process.wait, WAIT_S)
        everything: list[Any] = [*self.supervised.values(), *self.control.values()]
        for end in everything:
            end.close()
        assert {role: status for role, status in statuses.items() if status not in (0, -9)} == {}

    def stop(self) -> list[str]:
        """Orderly; returns the sockets that were left in the run directory."""
        try:
            self.run(self._stop())
            return sorted(str(path) for path in Path(self.paths.run).rglob("*") if path.is_socket())
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait()
            self.runner.close()
            close_context()
            shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """A module's ``GPU`` has settings of its own."""
    kit = Kit(**getattr(request.module, "GPU", {}))
    yield kit
    assert kit.stop() == []
