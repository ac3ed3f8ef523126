"""The leases of a GPU with its device, driven by hand on the test's thread: what the executor's unit tests share."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from dormouse.core.decisions.leases import effects as o
from dormouse.core.decisions.leases import events as e
from dormouse.core.evidence import Evidence
from dormouse.core.links.loan import Loan
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.host.device import HostDevice
from dormouse.gpuserver.device.host.links import EmulatedLink
from dormouse.gpuserver.device.protocol import Device
from dormouse.gpuserver.executor.compute import Compute
from dormouse.gpuserver.executor.leases import Leases
from dormouse.gpuserver.executor.orders import Orders
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

MIB = 1 << 20
ARENA = m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=4096)
META = [0, ["uint8", [16], [1], 0, 0], 1, ["uint8", [MIB], [1], 0, 0]]
ADD = [0, ["aten::add_.Scalar", [[wire.TENSOR, 1], [wire.SCALAR]], [], [[[wire.SAME, 0]], [], False], "float32"]]
COUNT = 4
T = TypeVar("T")


def manifest(instance: str, *segments: int, version: int = 1) -> m.Manifest:
    """Storage n is the whole of the n-th segment."""
    entries = [m.Entry(storage=n, segment=segment, offset=0, nbytes=MIB) for n, segment in enumerate(segments)]
    return m.Manifest(
        instance=instance,
        version=version,
        entries=entries,
        segments=[(segment, MIB) for segment in dict.fromkeys(segments)],
    )


MODEL = manifest("a", 10, 11, 12, 13)


class Gate(EmulatedLink):
    """A link that a test can hold: it lets so many bytes pass, and the copy thread waits for the test with the rest."""

    def __init__(self, nbytes_s: float) -> None:
        super().__init__(nbytes_s)
        self._left_nbytes = float("inf")
        self._changed = threading.Condition()

    def hold(self, after_nbytes: int) -> None:
        self._left_nbytes = after_nbytes

    def release(self) -> None:
        with self._changed:
            self._left_nbytes = float("inf")
            self._changed.notify_all()

    def book(self, nbytes: int) -> float:
        with self._changed:
            self._changed.wait_for(lambda: self._left_nbytes >= nbytes)
            self._left_nbytes -= nbytes
        return super().book(nbytes)


@dataclass
class Reply:
    """What an instance was sent at once."""

    instance: str
    messages: list[bytes]


@dataclass
class AskPeer:
    """Another GPU was asked what it has."""

    gpu: int
    ticket: int
    segments: list[int]


@dataclass
class LeavePeer:
    """Nothing of its answer is read any more."""

    gpu: int
    ticket: int


Violated = o.Expel
Effect = Reply | Violated | AskPeer | LeavePeer | m.ExecutorToController | m.ExecutorToStore


class Engine:
    """What happens to the leases, from the compute thread's side: each call returns when that has nothing to do."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.residency = world.leases.machine.residency

    def manifest(self, manifest: m.Manifest) -> None:
        self._world.does(manifest)

    def revoke(self, serial: int) -> None:
        self._world.does(m.Revoke(serial=serial))

    def placed(self, placed: m.Placed) -> None:
        self._world.does(placed)

    def place_refused(self, refused: m.PlaceRefused) -> None:
        self._world.does(refused)

    def forget(self, instance: str) -> None:
        self._world.does(e.Detached(instance))

    def dropped(self, instance: str) -> None:
        self._world.does(m.Dropped(instance=instance))

    def forget_segments(self, segments: list[int]) -> None:
        self._world.does(e.Forgotten(segments))

    def relieve(self) -> None:
        """As if a command had been refused memory: what is idle goes."""
        self._world.heard(self._world.evict)
        self._world.run()


class World:
    """A GPU's leases; the compute thread is the test's. Its store answers by itself; it has segment 10 + n, of bytes n,
    in its slab.
    """

    def __init__(
        self,
        pool: str = "regions",
        total: int = 6 * MIB,
        nbytes_s: float = 10 * MIB,
        device: Device | None = None,
        batch_nbytes: int = 1 << 40,
        turns: int = 1,
        names: str = "ab",
    ) -> None:
        self.link = Gate(nbytes_s)
        self.device = device or HostDevice(
            total, links=[self.link], peer_links=[EmulatedLink(2 * nbytes_s)], chunk_nbytes=MIB, poison=True, pool=pool
        )
        self.effects: queue.SimpleQueue[Effect] = queue.SimpleQueue()
        self.orders = Orders()
        self.io = ThreadPoolExecutor(1, "executor")  # as the executor's own thread
        self.leases = Leases(self.device, self.orders, self, self.post, batch_nbytes, turns, turn_s=1e6)
        self.compute = Compute(self.device, self.orders, lambda event: self.post(self.hear, event), Evidence())
        self.wakes, self.lending = self.leases.wakes, self.leases.lending
        self.engine = Engine(self)
        self.raised: list[BaseException] = []
        self.told = threading.Event()  # something was done on the executor's thread
        self.answering = self.checking = True
        self.slab = SharedMemory.create("slab", 16 * MIB, pinnable=True)
        for number in range(COUNT):
            self.slab.view[number * MIB : (number + 1) * MIB] = bytes([number]) * MIB
        self.device.map_host(0, self.slab)
        self.device.settle()
        self.seen: list[Effect] = []
        self.numbers: dict[int, int] = {}
        self.names = names
        for name in names:
            self.attach(name)

    def attach(self, name: str, arena: m.Arena = ARENA, memory: SharedMemory | None = None) -> None:
        attach = m.AttachInstance(
            instance=name,
            tenant="t",
            function=name,
            function_version=1,
            directory="",
            uid=0,
            arena=arena,
            quota_nbytes=0,
        )
        self.heard(self.leases.attach, attach, memory or SharedMemory.create("arena", arena.nbytes))
        self.run()

    # --- the executor's thread

    def post(self, work: Callable[..., Any], *arguments: Any) -> None:
        """On the executor's thread, whoever asks for it."""
        self.io.submit(self._carry_out, work, arguments)

    def _carry_out(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self.raised.append(error)
            raise
        finally:
            self.told.set()

    def heard(self, work: Callable[..., T], *arguments: Any) -> T:
        """The same, and wait for it."""
        return self.io.submit(work, *arguments).result(60)

    def hear(self, event: Any) -> None:
        self.leases.dispatch(event)
        if self.checking:
            self.leases.machine.check()

    def evict(self) -> None:
        """What no seat holds, and no other GPU reads."""
        books = self.leases.machine._state
        books.arrange(books.residency.relieve())
        self.hear(e.Tick())

    def does(self, event: Any) -> None:
        """An event, and whatever comes of it here."""
        self.heard(self.hear, event)
        self.run()

    def to_controller(self, message: m.ExecutorToController) -> None:
        self.effects.put(message)

    def to_store(self, message: m.ExecutorToStore) -> None:
        if isinstance(message, m.Fetch) and self.answering:
            self.post(self.answer, message)
        self.effects.put(message)

    def reply(self, instance: str, message: bytes) -> None:
        self.effects.put(Reply(instance, [msgpack.packb(reply) for reply in wire.replies(message)]))

    def lend(self, instance: str) -> Loan | None:
        return None  # there are no sockets here

    def take_back(self, loan: Loan) -> None:
        raise AssertionError("nothing was lent")

    def expel(self, instance: str, text: str, story: str) -> None:
        self.effects.put(Violated(instance, text, story))

    def to_runtime(self, serial: int, instance: str, runtime: str, message: m.ExecutorToRuntime) -> None:
        raise AssertionError("no language model is here")

    def lease_over(self, serial: int) -> None:
        pass

    def open_runtime(self, instance: str, runtime: str) -> None:
        raise AssertionError("nothing comes here before it is asked for")

    def ask_peer(self, gpu: int, ticket: int, segments: list[int]) -> None:
        self.effects.put(AskPeer(gpu, ticket, segments))

    def leave_peer(self, gpu: int, ticket: int) -> None:
        self.effects.put(LeavePeer(gpu, ticket))

    def answer(self, fetch: m.Fetch) -> None:
        places = [m.Place(segment=s, slab=0, offset=(s - 10) * MIB, nbytes=MIB) for s in fetch.segments]
        self.wakes.fetched(m.Fetched(ticket=fetch.ticket, places=places, file_nbytes=0, last=True))

    # --- the compute thread

    def run(self) -> None:
        """What there is to do for it, and what comes of that."""
        while True:
            self.heard(lambda: None)
            if self.orders.idle:
                return
            self.compute.carry_out(self.orders.next_item())

    def wake(self, serial: int, instance: str = "a", worth: dict[str, float] | None = None, peers: Any = ()) -> None:
        self.woken(serial, instance, worth, peers)
        self.run()

    def woken(self, serial: int, instance: str, worth: dict[str, float] | None = None, peers: Any = ()) -> None:
        """The compute thread is yet to see it."""
        lease = m.Lease(gpu=0, epoch=1, serial=serial, secret=5)
        wake = m.Wake(
            lease=lease, instance=instance, version=0, worth=worth or {}, peers=list(peers), activation_nbytes=0
        )
        self.heard(self.leases.wake, wake)

    def frame(self, serial: int, number: int, *commands: Any, metas: Any = (), keys: Any = (), name: str = "a") -> None:
        data = msgpack.packb([serial, 5, number, [list(metas), list(keys)], list(commands)])
        self.does(e.Heard(name, data))

    def until(self, kind: type[T]) -> T:
        """The next effect of a kind; those before it are kept in ``seen``."""
        self.run()
        while not isinstance(effect := self._next(), kind):
            self.seen.append(effect)
        return effect

    def _next(self) -> Effect:
        """What the compute thread has to do before it comes is done."""
        for _ in range(3000):
            try:
                return self.effects.get(timeout=0.01)
            except queue.Empty:
                self.run()
        raise TimeoutError(f"nothing happened for 30 s, after {self.seen}")

    def read(self, serial: int, number: int, storage: int, name: str = "a", metas: Any = ()) -> bytes:
        self.frame(serial, number, wire.DOWNLOAD, 7, storage, 0, -1, metas=metas, name=name)
        while True:
            for message in self.until(Reply).messages:
                kind, _, *rest = msgpack.unpackb(message)
                if kind == wire.VALUE:
                    content: bytes = rest[0]
                    return content
                assert kind == wire.ACK, (rest, self.seen)

    def nothing_more(self) -> bool:
        self.run()  # what was emitted so far has been said
        return self.effects.empty()


def close(world: World) -> None:
    residency = world.engine.residency
    residency.check()
    for name in world.names:
        world.engine.forget(name)
    residency.check()
    assert residency.occupied_nbytes == 0
    assert not world.leases.machine.leases
    world.io.shutdown()
    assert world.raised == []
    world.orders.close()
    world.device.set_activation_limit(1 << 62)
    world.device.close()
