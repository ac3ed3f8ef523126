"""A real executor process, and everything that it speaks to played by this one: supervisor, controller, store and
instances, without an event loop and without a fork per instance.

Nothing is checked here but that the executor lives and answers. An instance that was ended is replaced by another of
its kind: a packet, a manifest and a wake. Leases and their frames are sent ahead, many at a time: waiting for each
would cost both processes more than the frames do.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgpack
import msgspec

from dormouse.core.config import GpuSection, NodeConfig, NodeSection
from dormouse.core.decisions.leases.gate import Malformed, read_header
from dormouse.core.links.blocking_link import BlockingLink, wait_readable
from dormouse.core.links.fds import PacketSocket
from dormouse.core.paths import RunPaths, StatePaths
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.commands.storages import STORAGE_BITS
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire
from dormouse.schemas.errors import PeerLost

T = TypeVar("T")
ARENA: Final = m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=1 << 20)
BINDERS: Final = ("supervisor", "controller", "store")
"""Who binds a link to an executor."""

SLAB: Final = 1
SLAB_NBYTES: Final = 16 << 20
GPU: Final = "48MiB"
TAKES_TURN: Final = 3
"""Of so many leases one is given the turn of the lease in progress, which has it again afterwards."""

HUNG_S: Final = 20.0
"""Without a word of the executor: the recorded frames take it milliseconds."""

Pages = dict[int, tuple[int, int]]
"""Offset in the slab and number of bytes, by segment."""


class ExecutorDied(Exception):
    """The process has ended; the text is the end of its log."""


class ExecutorHung(Exception):
    """The process computes and computes."""


class World:
    """One executor of a small emulated GPU that poisons what it evicts."""

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        shm = "/dev/shm"  # a directory for each instance: milliseconds elsewhere
        self.directory = tempfile.mkdtemp(prefix="dm-", dir=shm if os.path.isdir(shm) else None)
        config = NodeConfig(
            node=NodeSection(run=f"{self.directory}/r", state=f"{self.directory}/s"),
            gpu=GpuSection(device="host", count=1, memory=GPU, threads=1, poison=True),
        )
        self.paths = RunPaths(config.run_directory)
        self.paths.make()
        self.state = StatePaths(config.state_directory)
        self.state.make()
        self.paths.node_json.write_bytes(msgspec.json.encode(config))
        self.slab = SharedMemory.create("slab", SLAB_NBYTES)
        self.arena = SharedMemory.create("arena", ARENA.nbytes)  # one for all: only one runs at a time
        self.pages: Pages = {}
        self._end = 0  # of what the slab holds
        self._scratch = 0
        self.models: dict[str, tuple[int, dict[int, int]]] = {}  # by instance: version, segments by storage
        self.peers: dict[str, Peer] = {}  # by instance
        self._writes: dict[int, tuple[str, list[tuple[int, int]]]] = {}  # by ticket: instance, (storage, segment)
        self._segments = 1_000_000
        self._names = self._serials = 0
        self.violations: dict[str, str] = {}  # by instance
        self.done: dict[int, str] = {}  # by serial: the outcome
        self._wakes: deque[tuple[Peer, m.Wake]] = deque()  # not sent
        self.nonsense: list[str] = []  # what the executor said that would end whom it said it to
        self._under_way: set[int] = set()  # serials of the leases whose Wake was sent
        self.awake: set[int] = set()
        self._environment = {**os.environ, **(environment or {}), "PYTHONWARNINGS": "ignore"}
        self._start()

    def _start(self) -> None:
        role = "gpu0"
        listeners = {self.paths.link(binder, role, 1): socket.socket(socket.AF_UNIX) for binder in BINDERS}
        for path, listener in listeners.items():
            listener.bind(path)
            listener.listen()
            listener.settimeout(120.0)
        command = [
            sys.executable,
            "-m",
            "dormouse.gpuserver.executor.main",
            "--run",
            str(self.paths.run),
            "--role",
            role,
        ]
        self.stderr = open(f"{self.directory}/stderr", "wb")  # noqa: SIM115
        self.process = subprocess.Popen([*command, "--epoch", "1"], env=self._environment, stderr=self.stderr)
        self.supervisor, self.controller, self.store = (
            BlockingLink(path, sock=listener.accept()[0]) for path, listener in listeners.items()
        )
        for listener in listeners.values():
            listener.close()
        self._decoders: dict[BlockingLink, msgspec.msgpack.Decoder[Any]] = {
            self.supervisor: msgspec.msgpack.Decoder(m.ToSupervisor),
            self.controller: msgspec.msgpack.Decoder(m.ExecutorToController),
            self.store: msgspec.msgpack.Decoder(m.ExecutorToStore),
        }
        self._ready = False
        self.wait(lambda: self._ready, seconds=120.0)
        self.inbox: PacketSocket[Any, m.InboxPacket] = PacketSocket.connect(self.paths.inbox(role, 1), None)
        self.inbox.send(m.SlabMade(slab=SLAB, nbytes=SLAB_NBYTES, pinnable=False), [self.slab.fd])

    # --- models and instances

    def model(self, storages: dict[int, bytes]) -> dict[int, int]:
        """Bytes that any instance may have; segments by storage."""
        segments = {}
        for storage, content in storages.items():
            self._segments += 1
            self.slab.view[self._end : self._end + len(content)] = content
            self.pages[self._segments] = self._end, len(content)
            segments[storage] = self._segments
            self._end += -(-len(content) // 512) * 512
        self._scratch = self._end
        return segments

    def instance(self, segments: dict[int, int]) -> "Peer":
        """Attached; its endpoint is there when its first lease has been woken."""
        self._names += 1
        peer = Peer(self, f"7-{self._names}", segments)
        os.mkdir(peer.directory, 0o700)
        self.inbox.send(peer.attachment, [self.arena.fd])
        self.models[peer.name] = 1, segments
        self.peers[peer.name] = peer
        self._tell_manifest(peer.name)
        return peer

    def _tell_manifest(self, name: str) -> None:
        version, segments = self.models[name]
        entries = [
            m.Entry(storage=storage, segment=segment, offset=0, nbytes=self.pages[segment][1])
            for storage, segment in segments.items()
        ]
        told = [(segment, self.pages[segment][1]) for segment in segments.values()]
        self._say(self.store, m.Manifest(instance=name, version=version, entries=entries, segments=told))

    # --- the other processes

    @staticmethod
    def _say(link: BlockingLink, message: Any) -> None:
        link.send(msgspec.msgpack.encode(message))

    def wait(self, condition: Callable[[], T], peer: "Peer | None" = None, seconds: float = HUNG_S) -> T:
        """Hear everybody until the condition is so. Raises ExecutorDied, ExecutorHung."""
        links = [self.controller, self.store, self.supervisor]
        if peer is not None and peer.link is not None:
            links.insert(0, peer.link)
        end_s = time.monotonic() + seconds
        while not (met := condition()):
            heard = wait_readable(links, 0.5)
            for link in heard:
                try:
                    self._drain(link, peer)
                except PeerLost as error:
                    if peer is None or link is not peer.link:
                        self.process.wait(HUNG_S)
                        raise ExecutorDied(self.story()) from error
                    peer.link = None  # it has ended this instance, and says so to the controller
                    links.remove(link)
            if self.supervisor in heard[:1]:  # nothing but a sign of life
                heard = []
            if heard:
                end_s = time.monotonic() + seconds
            elif self.process.poll() is not None:
                raise ExecutorDied(self.story())
            elif time.monotonic() > end_s:
                raise ExecutorHung(f"no word for {seconds:g} s")
        return met

    def _drain(self, link: BlockingLink, peer: "Peer | None") -> None:
        while (data := link.recv(0)) is not None:
            if peer is not None and link is peer.link:
                peer.heard(data)
            else:
                try:
                    message = self._decoders[link].decode(data)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    self.nonsense.append(str(error))
                else:
                    self._hear(message)

    def _hear(self, message: Any) -> None:
        match message:
            case m.Hello():
                self._ready = True
            case m.Done():
                self.done[message.serial] = message.outcome
                self._under_way.discard(message.serial)
                self._send_wakes()
            case m.Awake():
                self.awake.add(message.serial)
            case m.Violation():
                if (peer := self.peers.get(message.instance)) is not None:
                    self.violations[message.instance] = message.text
                    self.revoke(peer.serial)  # it may be waiting for its turn
            case m.Fetch():
                places = [self._place(segment) for segment in message.segments]
                self._say(self.store, m.Fetched(ticket=message.ticket, places=places, file_nbytes=0, last=True))
            case m.AskPlace():
                self._ask(message)
            case m.Written():
                self._written(message)
            case m.LetGo():
                for _, segment in self._writes.pop(message.ticket, ("", []))[1]:
                    del self.pages[segment]

    def forget(self, peer: "Peer") -> str:
        """How its lease ended, of which no more is heard."""
        self.awake.discard(peer.serial)
        return self.done.pop(peer.serial)

    def wake(self, peer: "Peer", wake: m.Wake) -> None:
        """When its turn comes."""
        self._wakes.append((peer, wake))
        self._send_wakes()

    def _send_wakes(self) -> None:
        """One ahead of the lease in progress, as controllers do."""
        while self._wakes and len(self._under_way) < 2:
            peer, wake = self._wakes.popleft()
            if peer.name in self.violations:  # it was ended meanwhile
                self.done[wake.lease.serial] = "revoked"
                continue
            others = sorted(self._under_way) if wake.lease.serial % TAKES_TURN == 0 else []
            self._under_way.add(wake.lease.serial)
            for serial in others:
                self._say(self.controller, m.Pause(serial=serial))
            self._say(self.controller, wake)
            for serial in others:
                self._say(self.controller, m.Turn(serial=serial))

    def revoke(self, serial: int) -> None:
        """As the controller does."""
        if serial in self._under_way:
            self._say(self.controller, m.Revoke(serial=serial))

    def _place(self, segment: int) -> m.Place:
        offset, nbytes = self.pages[segment]
        return m.Place(segment=segment, slab=SLAB, offset=offset, nbytes=nbytes)

    def _ask(self, ask: m.AskPlace) -> None:
        self.nonsense += [f"storage {storage}" for storage, _ in ask.storages if storage >> STORAGE_BITS]
        total = sum(-(-nbytes // 512) * 512 for _, nbytes in ask.storages)
        if total > SLAB_NBYTES - self._end:
            self._say(self.store, m.PlaceRefused(ticket=ask.ticket, text="no room"))
            return
        if total > SLAB_NBYTES - self._scratch:
            self._scratch = self._end
        pairs = []
        for storage, nbytes in ask.storages:
            self._segments += 1
            self.pages[self._segments] = self._scratch, nbytes
            self._scratch += -(-nbytes // 512) * 512
            pairs.append((storage, self._segments))
        self._writes[ask.ticket] = ask.instance, pairs
        places = [self._place(segment) for _, segment in pairs]
        self._say(self.store, m.Placed(ticket=ask.ticket, places=places))

    def _written(self, written: m.Written) -> None:
        name, pairs = self._writes.pop(written.ticket)
        version, segments = self.models[name]
        kept = {storage: segment for storage, segment in segments.items() if storage not in written.freed}
        self.models[name] = version + 1, {**kept, **dict(pairs)}
        self._tell_manifest(name)

    # --- ends

    def story(self) -> str:
        logs = [self.state.role_log("gpu0"), Path(self.directory, "stderr")]
        texts = [path.read_text(errors="replace")[-3000:] for path in logs if path.exists()]
        return f"status {self.process.poll()}\n" + "\n".join(texts)

    def close(self) -> int:
        """Orderly, if it is still there; its exit status."""
        if self.process.poll() is None:
            self._say(self.supervisor, m.Shutdown())
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        status = self.process.wait()
        self.inbox.close()
        for peer in self.peers.values():
            if peer.link is not None:
                peer.link.close()
        for link in (self.supervisor, self.controller, self.store):
            link.close()
        self.slab.close()
        self.arena.close()
        self.stderr.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        return status


class Peer:
    """An instance of this process, with or without a lease."""

    def __init__(self, world: World, name: str, segments: dict[int, int]) -> None:
        self.world = world
        self.name = name
        self.segments = segments
        self.directory = world.paths.instance(name)
        self.link: BlockingLink | None = None
        self.serial = self.number = 0
        self.replies: list[list[Any]] = []

    @property
    def attachment(self) -> m.AttachInstance:
        return m.AttachInstance(
            instance=self.name,
            tenant="default",
            function="",
            function_version=0,
            directory=self.directory,
            uid=os.getuid(),
            arena=ARENA,
            quota_nbytes=1 << 30,
        )

    @property
    def secret(self) -> int:
        return self.serial * 7919

    def heard(self, data: bytes) -> None:
        self.replies += wire.replies(data)

    def lease(self) -> None:
        """A lease is on its way, behind those of others. Frames can be sent for it at once."""
        world = self.world
        world._serials += 1
        self.serial, self.number = world._serials, 0
        self.replies.clear()
        lease = m.Lease(gpu=0, epoch=1, serial=self.serial, secret=self.secret)
        version, _ = world.models[self.name]
        wake = m.Wake(lease=lease, instance=self.name, version=version, worth={}, peers=[], activation_nbytes=0)
        world.wake(self, wake)
        if self.link is None:
            self.link = BlockingLink(os.path.join(self.directory, "gpu0.1"))

    @property
    def header(self) -> list[int]:
        """Of the next frame."""
        return [self.serial, self.secret, self.number + 1]

    @property
    def ended(self) -> bool:
        """Whether the lease is over."""
        return self.serial in self.world.done

    def say(self, definitions: list[Any], commands: list[Any]) -> None:
        """A frame as it should be."""
        self.push(bytes(msgpack.packb([*self.header, definitions, commands])))

    def push(self, data: bytes) -> bool:
        """Send a frame, whatever it is; answers whether the gate lets it through to the interpreter."""
        if self.link is None:  # ended
            return False
        with suppress(PeerLost):
            self.link.send(data)
        try:
            header = read_header(data)
        except Malformed:
            return False
        passes = [header.serial, header.secret, header.number] == self.header
        self.number += passes
        return passes

    @property
    def answered(self) -> bool:
        """Whether all frames were, or the lease is over without."""
        last = max((reply[2] for reply in self.replies if reply[0] == wire.ACK), default=0)
        return last >= self.number or self.name in self.world.violations

    def close(self) -> None:
        """Gone, as router, controller and store say it. Its lease is over."""
        world = self.world
        if self.link is not None:
            self.link.close()
        world.inbox.send(m.DetachInstance(instance=self.name))
        world._say(world.store, m.Dropped(instance=self.name))
        world.violations.pop(self.name, None)
        del world.peers[self.name]
        _, segments = world.models.pop(self.name)
        for segment in segments.values():
            if world.pages[segment][0] >= world._end:  # written back by this instance
                del world.pages[segment]
        shutil.rmtree(self.directory, ignore_errors=True)
