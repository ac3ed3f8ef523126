"""An engine with a device, driven by hand on the test's thread: what the unit tests of the executor share."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgpack

from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device import Device
from dormouse.gpuserver.effects import BeginWake, Effect, Reply, StopWake, WakeOver
from dormouse.gpuserver.engine import Engine
from dormouse.gpuserver.host_device import HostDevice
from dormouse.gpuserver.lease.wakes import Wakes
from dormouse.gpuserver.lending import Lending
from dormouse.gpuserver.links import Link
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


class Gate(Link):
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


class World:
    """An engine on this thread. Its store answers from another one; it has segment 10 + n, of bytes n, in its slab."""

    def __init__(
        self,
        pool: str = "regions",
        total: int = 6 * MIB,
        nbytes_s: float = 10 * MIB,
        device: Device | None = None,
        batch_nbytes: int = 1 << 40,
    ) -> None:
        self.link = Gate(nbytes_s)
        self.device = device or HostDevice(
            total, links=[self.link], peer_links=[Link(2 * nbytes_s)], chunk_nbytes=MIB, poison=True, pool=pool
        )
        self.effects: queue.SimpleQueue[Effect] = queue.SimpleQueue()
        self.engine = Engine(self.device, self._emit)
        self.io = ThreadPoolExecutor(1, "executor")  # as the executor's own thread
        self.wakes = Wakes(self.device, self.engine.residency, batch_nbytes, self._say, self.post)
        self.lending = Lending(self.engine.residency)
        self.raised: list[BaseException] = []
        self.answering = True
        self.slab = SharedMemory.create("slab", 16 * MIB, pinnable=True)
        for number in range(COUNT):
            self.slab.view[number * MIB : (number + 1) * MIB] = bytes([number]) * MIB
        self.device.map_host(0, self.slab)
        self.device.settle()
        self.seen: list[Effect] = []
        self.numbers: dict[int, int] = {}
        for name in "ab":
            attach = m.AttachInstance(
                instance=name,
                tenant="t",
                function=name,
                function_version=1,
                directory="",
                uid=0,
                arena=ARENA,
                quota_nbytes=0,
            )
            self.engine.attach(attach, SharedMemory.create("arena", ARENA.nbytes))

    def post(self, work: Callable[..., Any], *arguments: Any) -> None:
        """On the executor's thread, whoever asks for it."""
        self.io.submit(self._carry_out, work, arguments)

    def _carry_out(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self.raised.append(error)
            raise

    def heard(self, work: Callable[..., T], *arguments: Any) -> T:
        """The same, and wait for it."""
        return self.io.submit(work, *arguments).result(30)

    def _emit(self, effect: Effect) -> None:
        """In one order with what the executor's thread says."""
        self.post(self.wakes.handle if isinstance(effect, BeginWake | StopWake | WakeOver) else self._say, effect)

    def _say(self, effect: Effect) -> None:
        if isinstance(effect, m.Fetch) and self.answering:
            self.post(self.answer, effect)
        self.effects.put(effect)

    def answer(self, fetch: m.Fetch) -> None:
        places = [m.Place(segment=s, slab=0, offset=(s - 10) * MIB, nbytes=MIB) for s in fetch.segments]
        self.wakes.fetched(m.Fetched(ticket=fetch.ticket, places=places, file_nbytes=0, last=True))

    def wake(self, serial: int, instance: str = "a", worth: dict[str, float] | None = None, peers: Any = ()) -> None:
        lease = m.Lease(gpu=0, epoch=1, serial=serial, secret=5)
        wake = m.Wake(
            lease=lease, instance=instance, version=1, worth=worth or {}, peers=list(peers), activation_nbytes=0
        )
        self.engine.wake(wake)

    def frame(self, serial: int, number: int, *commands: Any, metas: Any = (), keys: Any = (), name: str = "a") -> None:
        data = msgpack.packb([serial, 5, number, [list(metas), list(keys)], list(commands)])
        self.engine.frame(name, serial, data)

    def until(self, kind: type[T]) -> T:
        """The next effect of a kind; those before it are kept in ``seen``."""
        while not isinstance(effect := self.effects.get(timeout=30), kind):
            self.seen.append(effect)
        return effect

    def read(self, serial: int, number: int, storage: int, name: str = "a", metas: Any = ()) -> bytes:
        self.frame(serial, number, wire.DOWNLOAD, 7, storage, 0, -1, metas=metas, name=name)
        kind, rest = wire.ACK, []
        while kind == wire.ACK:
            kind, _, *rest = msgpack.unpackb(self.until(Reply).messages[0])
        assert kind == wire.VALUE, rest
        content: bytes = rest[0]
        return content

    def nothing_more(self) -> bool:
        self.heard(lambda: None)  # what was emitted so far has been said
        return self.effects.empty()


def close(world: World) -> None:
    world.engine.residency.check()
    for name in "ab":
        world.engine.forget(name)
    world.engine.residency.check()
    assert world.engine.residency.occupied_nbytes == 0
    world.io.shutdown()
    assert world.raised == []
    world.device.set_activation_limit(1 << 62)
    world.device.close()
