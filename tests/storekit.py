"""A store as a real process, and the ends of its links: supervisor, controller, executors and instances in this one."""

import asyncio
import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from mailbox_of_link import WAIT_S, Mailbox

from dormouse.core.config import LimitsSection, NodeConfig, NodeSection, StartSection
from dormouse.core.links.fds import Inbox, PacketSocket
from dormouse.core.links.link import Link
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.shm import SharedMemory
from dormouse.schemas import messages as m

T = TypeVar("T")
ARENA = m.Arena(request_nbytes=4096, response_nbytes=4096, stream_nbytes=4 << 20)


class TestInstance:
    """Uploads, commits and offers files."""

    __test__ = False

    def __init__(self, kit: "StoreKit", name: str, function: str, version: int, tenant: str, quota: int) -> None:
        self.name = name
        self.directory = kit.paths.instance(name)
        os.makedirs(self.directory, 0o700, exist_ok=True)
        self.arena = SharedMemory.create("arena", ARENA.nbytes)
        self.attach = m.AttachInstance(
            instance=name,
            tenant=tenant,
            function=function,
            function_version=version,
            directory=self.directory,
            uid=os.getuid(),
            arena=ARENA,
            quota_nbytes=quota,
        )
        self.heard = Mailbox()
        self._files: PacketSocket[m.FileAnswer, m.FileOffer] | None = None

    def connect(self) -> None:
        self.link: Link[m.StoreToInstance, m.InstanceToStore] = Link(
            f"{self.directory}/store", bind=False, incoming=m.StoreToInstance, on_message=self.heard.put
        )

    async def answer(self) -> Any:
        return await self.heard.of(m.Uploaded, m.Committed, m.StoreFailed)

    async def upload(self, storage: int, data: bytes, total: int | None = None, offset: int = 0) -> Any:
        """The last answer."""
        answer: Any = None
        for start in range(0, max(len(data), 1), ARENA.stream_nbytes):
            part = data[start : start + ARENA.stream_nbytes]
            self.arena.view[ARENA.stream_offset : ARENA.stream_offset + len(part)] = part
            self.link.send(
                m.StoreUpload(
                    storage=storage,
                    total_nbytes=len(data) if total is None else total,
                    offset=offset + start,
                    arena_offset=0,
                    nbytes=len(part),
                )
            )
            answer = await self.answer()
            if not isinstance(answer, m.Uploaded):
                break
        return answer

    async def commit(self) -> Any:
        self.link.send(m.Commit())
        return await self.answer()

    async def load(self, storages: dict[int, bytes]) -> m.Committed:
        for storage, data in storages.items():
            assert await self.upload(storage, data) == m.Uploaded()
        answer = await self.commit()
        assert isinstance(answer, m.Committed), answer
        return answer

    async def offer(self, file: int, fd: int) -> m.FileAnswer:
        """The answer comes from another thread of the loop's process, so the wait is a thread's."""

        def ask() -> m.FileAnswer:
            assert self._files is not None
            self._files.send(m.FileOffer(file=file), [fd])
            packet = self._files.recv()
            assert packet is not None
            return packet[0]

        if self._files is None:
            await self.file(0, 0, 0, 0)  # any answer: its socket is there
            self._files = PacketSocket.connect(f"{self.directory}/files", m.FileAnswer)
        return await asyncio.to_thread(ask)

    async def file(self, storage: int, file: int, start: int, nbytes: int, total: int = -1, offset: int = 0) -> Any:
        self.link.send(
            m.StoreFile(
                storage=storage,
                total_nbytes=nbytes if total < 0 else total,
                offset=offset,
                file=file,
                file_offset=start,
                nbytes=nbytes,
            )
        )
        return await self.answer()

    def close(self) -> None:
        self.link.close()
        if self._files is not None:
            self._files.close()
        self.arena.close()


class TestExecutor:
    """An executor's ends: maps slabs, fetches, writes back."""

    __test__ = False

    def __init__(self, kit: "StoreKit", role: str, epoch: int) -> None:
        self.heard = Mailbox()
        self.slabs: dict[int, SharedMemory] = {}
        self.gone: list[int] = []
        self.manifests: dict[str, m.Manifest] = {}
        self._came = Mailbox()
        self._tickets = itertools.count(1)
        self.inbox: Inbox[m.InboxPacket] = Inbox(kit.paths.inbox(role, epoch), m.InboxPacket, self._packet)
        self.link: Link[m.StoreToExecutor, m.ExecutorToStore] = Link(
            kit.paths.link("store", role, epoch), bind=False, incoming=m.StoreToExecutor, on_message=self._hear
        )

    def _packet(self, message: m.InboxPacket, fds: list[int]) -> None:
        match message:
            case m.SlabMade():
                assert message.slab not in self.gone
                self.slabs[message.slab] = SharedMemory.adopt(fds.pop(), message.nbytes, message.pinnable)
                self._came.put(message.slab)
            case m.SlabGone():
                self.slabs.pop(message.slab).close()
                self.gone.append(message.slab)
            case _:
                raise AssertionError(message)

    def _hear(self, message: m.StoreToExecutor) -> None:
        if isinstance(message, m.Manifest):
            self.manifests[message.instance] = message
        self.heard.put(message)

    async def manifest(self, instance: str, version: int) -> m.Manifest:
        manifest: m.Manifest = await self.heard.take(
            lambda said: isinstance(said, m.Manifest) and (said.instance, said.version) == (instance, version)
        )
        return manifest

    async def memory(self, slab: int) -> SharedMemory:
        while slab not in self.slabs:
            await self._came.take(lambda _: True)
        return self.slabs[slab]

    async def begin(self, segments: Sequence[int]) -> tuple[int, list[m.Fetched]]:
        """A ticket and its answers. Raises AssertionError with a failure's text."""
        ticket = next(self._tickets)
        self.link.send(m.Fetch(ticket=ticket, segments=list(segments)))
        answers: list[m.Fetched] = []
        while not answers or not answers[-1].last:
            answer = await self.heard.take(
                lambda said: isinstance(said, m.Fetched | m.FetchFailed) and said.ticket == ticket
            )
            assert isinstance(answer, m.Fetched), answer.text
            answers.append(answer)
        return ticket, answers

    async def read(self, place: m.Place) -> bytes:
        memory = await self.memory(place.slab)
        return bytes(memory.view[place.offset : place.offset + place.nbytes])

    def let_go(self, ticket: int) -> None:
        self.link.send(m.LetGo(ticket=ticket))

    async def contents(self, instance: str, version: int) -> dict[int, bytes]:
        """All storages of a manifest, as fetched."""
        manifest = await self.manifest(instance, version)
        return await self.model(manifest)

    async def model(self, manifest: m.Manifest) -> dict[int, bytes]:
        ticket, answers = await self.begin([segment for segment, _ in manifest.segments])
        data = {place.segment: await self.read(place) for answer in answers for place in answer.places}
        self.let_go(ticket)
        return {
            entry.storage: data[entry.segment][entry.offset : entry.offset + entry.nbytes] for entry in manifest.entries
        }

    async def place(self, instance: str, storages: list[tuple[int, int]]) -> tuple[int, Any]:
        ticket = next(self._tickets)
        self.link.send(m.AskPlace(ticket=ticket, instance=instance, storages=storages))
        answer = await self.heard.take(
            lambda said: isinstance(said, m.Placed | m.PlaceRefused) and said.ticket == ticket
        )
        return ticket, answer

    async def write_back(self, instance: str, storages: dict[int, bytes], freed: Sequence[int] = ()) -> list[int]:
        """Their new segments."""
        ticket, placed = await self.place(instance, [(storage, len(data)) for storage, data in storages.items()])
        assert isinstance(placed, m.Placed), placed
        for place, data in zip(placed.places, storages.values(), strict=True):
            memory = await self.memory(place.slab)
            memory.view[place.offset : place.offset + place.nbytes] = data
        self.link.send(m.Written(ticket=ticket, freed=list(freed)))
        return [place.segment for place in placed.places]

    def close(self) -> None:
        self.link.close()
        self.inbox.close()
        for memory in self.slabs.values():
            memory.close()


class StoreKit:
    """The store's process and all ends. Everything runs in one loop, driven by :meth:`run`."""

    def __init__(
        self,
        host: int = 64 << 20,
        disk: str = "",
        sharing: str = "tenant",
        state: str = "",
        cuda: bool = False,
        tenants: str = "one",
    ) -> None:
        self.runner = asyncio.Runner()
        self.directory = tempfile.mkdtemp(prefix="dm-")
        self.config = NodeConfig(
            node=NodeSection(
                run=f"{self.directory}/r", state=state or f"{self.directory}/s", sharing=sharing, tenants=tenants
            ),
            limits=LimitsSection(host=str(host), disk=disk),
            start=StartSection(cuda=cuda),
        )
        self.paths = RunPaths(self.config.run_directory)
        self.paths.make()
        self.state = StatePaths(self.config.state_directory)
        self.state.make()
        self.paths.node_json.write_bytes(msgspec.json.encode(self.config))
        self.epoch = 0
        self.peers: dict[str, int] = {}
        self.executors: dict[str, TestExecutor] = {}
        self.instances: dict[str, TestInstance] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def start(self, ready: bool = True) -> None:
        self.epoch += 1
        self.said, self.heard = Mailbox(), Mailbox()
        self.last_status: m.StoreStatus | None = None
        self.supervisor: Link[m.ToSupervisor, m.FromSupervisor] = Link(
            self.paths.link("supervisor", "store", self.epoch),
            bind=True,
            incoming=m.ToSupervisor,
            on_message=self.said.put,
        )
        self.controller: Link[m.StoreToController, m.ControllerToStore] = Link(
            self.paths.link("controller", "store", self.epoch),
            bind=True,
            incoming=m.StoreToController,
            on_message=self.heard.put,
        )
        module = [sys.executable, "-P", "-m", "dormouse.gpuserver.store"]
        arguments = ["--run", str(self.paths.run), "--role", "store", "--epoch", str(self.epoch)]
        self.process = subprocess.Popen([*module, *arguments])  # noqa: ASYNC220
        if ready:
            await self.said.of(m.Ready)

    async def executor(self, role: str = "gpu0") -> TestExecutor:
        """A new one; an earlier one of this role has died."""
        before = self.executors.pop(role, None)
        epoch = self.peers.get(role, 0) + 1
        if before is not None:
            before.close()
        executor = self.executors[role] = TestExecutor(self, role, epoch)
        self.peers[role] = epoch
        self.supervisor.send(m.Peers(up=dict(self.peers)))
        return executor

    def kill_executor(self, role: str) -> None:
        self.executors.pop(role).close()
        self.supervisor.send(m.Peers(up={peer: epoch for peer, epoch in self.peers.items() if peer != role}))

    async def instance(
        self, name: str, function: str = "", version: int = 1, tenant: str = "t", quota: int = 1 << 20
    ) -> TestInstance:
        instance = self.instances[name] = TestInstance(self, name, function, version, tenant, quota)
        self._packet(instance.attach, [instance.arena.fd])
        instance.connect()
        return instance

    async def forget(self, instance: TestInstance) -> None:
        self._packet(m.DetachInstance(instance=instance.name), [])
        self.instances.pop(instance.name).close()
        while instance.name in await self.report():  # the packet and the question are on different sockets
            pass

    def _packet(self, message: m.InboxPacket, fds: list[int]) -> None:
        packets: PacketSocket[Any, m.InboxPacket] = PacketSocket.connect(self.paths.inbox("store", self.epoch), None)
        packets.send(message, fds)
        packets.close()

    async def status(self, wanted: Callable[[m.StoreStatus], bool]) -> m.StoreStatus:
        """The newest status, as soon as it is as wanted."""
        while self.last_status is None or not wanted(self.last_status):
            self.last_status = await self.heard.of(m.StoreStatus)
        return self.last_status

    async def report(self) -> dict[str, m.InstanceBytes]:
        self.controller.send(m.AskStore(query=1))
        report = await self.heard.of(m.StoreReport)
        return {each.instance: each for each in report.instances}

    async def stop(self, kill: bool = False) -> int:
        """End the store and close this side; returns its exit status."""
        if kill:
            self.process.kill()
        elif self.process.poll() is None:
            self.supervisor.send(m.Shutdown())
        status = await asyncio.to_thread(self.process.wait, WAIT_S)
        for instance in self.instances.values():
            instance.close()
            shutil.rmtree(instance.directory, ignore_errors=True)
        for executor in self.executors.values():
            executor.close()
        self.instances.clear()
        self.executors.clear()
        self.supervisor.close()
        self.controller.close()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(Exception):
            self.run(self.stop(kill=True))
        self.runner.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def files(self) -> list[Path]:
        """The segment files."""
        return sorted(path for path in self.state.store_segments.rglob("*") if path.is_file())
