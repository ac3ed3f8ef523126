"""One GPU's leases with one sleeping model, whose wakes and requests are timed; and the arms of Torpor's Figure 7."""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Any, Final

import msgpack
import torch

from benchmarks.wake_models import Recording
from dormouse.core.decisions.leases import events as e
from dormouse.core.decisions.memory.freelist import aligned
from dormouse.core.decisions.memory.transfer import Copy, Kind, slab
from dormouse.core.evidence import Evidence
from dormouse.core.links.loan import Loan
from dormouse.core.shm import SharedMemory
from dormouse.gpuserver.device.host.copies import Memmove
from dormouse.gpuserver.device.host.device import HostDevice
from dormouse.gpuserver.device.host.links import EmulatedLink
from dormouse.gpuserver.device.protocol import CopyJob, DeviceEvent
from dormouse.gpuserver.executor.compute import Compute
from dormouse.gpuserver.executor.leases import Leases
from dormouse.gpuserver.executor.orders import Orders
from dormouse.gpuserver.store.ingest.packing import pack
from dormouse.schemas import messages as m
from dormouse.schemas import stream as wire

MIB: Final = 1 << 20
BERT: Final = [
    2 * 1024 * 1024 * 4,
    *[1024 * 1024 * 4] * 4,
    1024 * 4,
    1024 * 4096 * 4,
    4096 * 4,
    4096 * 1024 * 4,
    1024 * 4,
]
"""Storages of one of BERT-large's layers, roughly: few large ones and many of a few KiB."""


def shapes(total_nbytes: int) -> list[int]:
    """Sizes of a model's storages, of at least ``total_nbytes`` together."""
    sizes: list[int] = []
    while sum(sizes) < total_nbytes:
        sizes += [*BERT, *[3072, 4096, 4096, 3072]]
    return sizes


class Arm(Enum):
    """Torpor §7.1, Figure 7, in its order: each adds one thing to the one before."""

    WHOLE = "whole"  # through a staging buffer, then run
    RESIDENT = "resident"  # host memory that can be copied from directly
    PARAMETERS = "parameters"  # run while copying, parameter by parameter
    SEGMENTS = "segments"  # small ones packed, neighbours copied together


class ArmDevice(HostDevice):
    """A device that copies as an arm does."""

    def __init__(self, arm: Arm, total_nbytes: int, nbytes_s: float, chunk_nbytes: int) -> None:
        super().__init__(total_nbytes, links=[EmulatedLink(nbytes_s)], chunk_nbytes=chunk_nbytes)
        self.arm = arm
        self._staging = ctypes.create_string_buffer(chunk_nbytes)

    def copy_in(self, copies: Sequence[Copy], on_done: Callable[[], None], after: DeviceEvent | None = None) -> CopyJob:
        if self.arm is Arm.PARAMETERS:
            return Jobs([super(ArmDevice, self).copy_in([copy], lambda: None) for copy in copies], on_done)
        return super().copy_in(copies, on_done)

    def _parts(self, copies: Sequence[Copy]) -> list[Memmove]:
        parts = super()._parts(copies)
        if self.arm is not Arm.WHOLE:
            return parts
        staging = ctypes.addressof(self._staging)
        staged = []
        for part in parts:
            staged.append(Memmove(Kind.POOL, staging, part.source, part.nbytes, 0))
            staged.append(part._replace(source=staging))
        return staged


class Jobs:
    """One job per copy, as one."""

    def __init__(self, jobs: list[CopyJob], on_done: Callable[[], None]) -> None:
        self._jobs = jobs
        self.events: list[DeviceEvent] = [job.events[0] for job in jobs]
        self._watch = threading.Thread(target=self._done, args=(on_done,), daemon=True)
        self._watch.start()

    def _done(self, on_done: Callable[[], None]) -> None:
        for job in self._jobs:
            job.join()
        on_done()

    def cancel(self) -> None:
        for job in self._jobs:
            job.cancel()

    def join(self) -> None:
        self._watch.join()


class Failed(Exception):
    """What is measured went wrong."""


class World:
    """A GPU's leases; the calling thread is the compute thread. Its store answers at once."""

    def __init__(
        self,
        storages: dict[int, bytes | int],
        arena: bytes = bytes(4096),
        *,
        packs: bool = True,
        device: Callable[[int], HostDevice],
    ) -> None:
        sizes = {number: len(value) if isinstance(value, bytes) else value for number, value in storages.items()}
        layout, pack_nbytes = pack(list(sizes.values()), sum(sizes.values())) if packs else ([], 0)
        numbers = list(sizes)
        small = {numbers[index]: offset for index, offset in layout}
        self.sizes = {number: sizes[number] for number in numbers if number not in small}  # by segment
        if small:
            self.sizes = {0: pack_nbytes, **self.sizes}
        self.entries = [
            m.Entry(
                storage=number, segment=0 if number in small else number, offset=small.get(number, 0), nbytes=nbytes
            )
            for number, nbytes in sizes.items()
        ]
        self.offsets: dict[int, int] = {}
        end = 0
        for segment, nbytes in self.sizes.items():
            self.offsets[segment] = end
            end += aligned(nbytes)
        self.nbytes = sum(self.sizes.values())
        self.slab = SharedMemory.create("slab", -(-end // MIB) * MIB)
        self.slab.populate()
        for entry in self.entries:
            content = storages[entry.storage]
            if isinstance(content, bytes):
                start = self.offsets[entry.segment] + entry.offset
                self.slab.view[start : start + entry.nbytes] = content
        self.device = device(end + 512 * MIB)
        self.device.populated.wait()
        self.effects: queue.SimpleQueue[Any] = queue.SimpleQueue()  # messages, and what was raised
        self.replies: list[bytes] = []
        self.io = ThreadPoolExecutor(1, "executor")  # as the executor's own thread
        self.orders = Orders()
        self.leases = Leases(self.device, self.orders, self, self._post, batch_nbytes=1 << 40, turn_s=1e6)
        post = partial(self._post, self.leases.dispatch)
        self.compute = Compute(self.device, self.orders, post, Evidence())
        self.device.map_host(0, self.slab)
        layout_of = m.Arena(request_nbytes=0, response_nbytes=0, stream_nbytes=len(arena))
        attach = m.AttachInstance(
            instance="i",
            tenant="t",
            function="i",
            function_version=1,
            directory="",
            uid=0,
            arena=layout_of,
            quota_nbytes=0,
        )
        self.arena = SharedMemory.create("arena", layout_of.nbytes)
        self.arena.view[: len(arena)] = arena
        self._do(self.leases.attach, attach, self.arena)
        self.order = list(self.sizes)
        self._tell_manifest()
        self.copies: list[Copy] = []
        self.serial = self.number = 0
        self.recording: Recording | None = None
        self.first = True

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], chunk_nbytes: int) -> "World":
        return cls(
            {number + 1: nbytes for number, nbytes in enumerate(sizes)},
            device=lambda nbytes: HostDevice(nbytes, chunk_nbytes=chunk_nbytes),
        )

    @classmethod
    def of_recording(cls, recording: Recording, arm: Arm, nbytes_s: float) -> "World":
        world = cls(
            dict(recording.storages),
            recording.arena,
            packs=arm is Arm.SEGMENTS,
            device=lambda nbytes: ArmDevice(arm, nbytes, nbytes_s, 4 * MIB),
        )
        world.recording = recording
        world.wake()  # the definitions, and the order of first use
        world.run()
        world.end()
        world.sleep()
        return world

    def _tell_manifest(self) -> None:
        segments = [(segment, self.sizes[segment]) for segment in self.order]
        manifest = m.Manifest(instance="i", version=1, entries=self.entries, segments=segments)
        self._do(self.leases.dispatch, manifest)

    # --- the executor's thread

    def _post(self, work: Callable[..., Any], *arguments: Any) -> None:
        self.io.submit(work, *arguments).add_done_callback(self._posted)

    def _posted(self, done: "Future[Any]") -> None:
        if (error := done.exception()) is not None:
            self.effects.put(error)

    def to_controller(self, message: m.ExecutorToController) -> None:
        self.effects.put(message)

    def to_store(self, message: m.ExecutorToStore) -> None:
        if isinstance(message, m.Fetch):
            self._post(self._answer, message)
        self.effects.put(message)

    def _answer(self, fetch: m.Fetch) -> None:
        places = [
            m.Place(segment=segment, slab=0, offset=self.offsets[segment], nbytes=self.sizes[segment])
            for segment in fetch.segments
        ]
        self.leases.wakes.fetched(m.Fetched(ticket=fetch.ticket, places=places, file_nbytes=0, last=True))

    def reply(self, instance: str, message: bytes) -> None:
        self.replies.append(message)

    def lend(self, instance: str) -> Loan | None:
        return None  # there are no sockets here

    def take_back(self, loan: Loan) -> None:
        raise AssertionError("nothing was lent")

    def expel(self, instance: str, text: str, story: str) -> None:
        self.effects.put(Failed(f"{text}\n{story}"))

    def to_runtime(self, serial: int, instance: str, runtime: str, message: m.ExecutorToRuntime) -> None:
        raise AssertionError("no language model is here")

    def lease_over(self, serial: int) -> None:
        pass

    def open_runtime(self, instance: str, runtime: str) -> None:
        pass

    def ask_peer(self, gpu: int, ticket: int, segments: list[int]) -> None:
        """Nobody is asked: no wake here names a peer."""

    def leave_peer(self, gpu: int, ticket: int) -> None:
        """As before."""

    # --- the compute thread

    def _do(self, work: Callable[..., Any], *arguments: Any) -> None:
        """On the executor's thread, and all that it orders here."""
        self.io.submit(work, *arguments).result()
        self._work()

    def _work(self) -> None:
        """What has been ordered, and what comes of that; copies go on meanwhile."""
        while True:
            try:
                item = self.orders.items.get_nowait()
            except queue.Empty:
                return
            self.compute.carry_out(item)
            self.io.submit(lambda: None).result()

    def until(self, kind: type[Any]) -> Any:
        while not isinstance(effect := self.effects.get(timeout=60), kind):
            if isinstance(effect, BaseException):
                raise effect
            if isinstance(effect, m.FirstUse):
                self.order = [*effect.segments, *(s for s in self.order if s not in effect.segments)]
        return effect

    def begin(self) -> None:
        self.serial += 1
        self.number = 0
        lease = m.Lease(gpu=0, epoch=1, serial=self.serial, secret=0)
        wake = m.Wake(lease=lease, instance="i", version=1, worth={}, peers=[], activation_nbytes=0)
        self._do(self.leases.wake, wake)

    def wake(self) -> float:
        """Seconds from Wake to Awake."""
        began = time.perf_counter()
        self.begin()
        awake = self.until(m.Awake)
        took = time.perf_counter() - began
        assert awake.copied_nbytes == self.nbytes
        pool = self.leases.machine.residency.pool
        self.copies = [
            Copy(slab(0), self.offsets[segment], pool.offset(segment), self.sizes[segment]) for segment in self.order
        ]
        return took

    def run(self) -> float:
        """Seconds of a request on a model that is awake or on its way."""
        assert self.recording is not None
        if not self.first:
            self.end()
            self.begin()  # the model is there: a lease of its own for each request
        frames = self.recording.first if self.first else self.recording.later
        self.first = False
        return self._frames(frames)

    def wake_and_run(self) -> float:
        """Seconds from Wake to the answer, as the arm has it."""
        assert self.recording is not None
        frames = self._encoded(self.serial + 1, self.recording.later)
        began = time.perf_counter()
        self.begin()
        if isinstance(self.device, ArmDevice) and self.device.arm in (Arm.WHOLE, Arm.RESIDENT):
            self.until(m.Awake)
        self._send(frames)
        return time.perf_counter() - began

    def _encoded(self, serial: int, frames: list[list[Any]]) -> list[bytes]:
        return [
            msgpack.packb([serial, 0, number + 1, definitions, commands])
            for number, (definitions, commands) in enumerate(frames)
        ]

    def _frames(self, frames: list[list[Any]]) -> float:
        encoded = self._encoded(self.serial, frames)
        began = time.perf_counter()
        self._send(encoded)
        return time.perf_counter() - began

    def _send(self, frames: list[bytes]) -> None:
        """All frames of a request but its END; checks the answer."""
        assert self.recording is not None
        self.replies.clear()
        for frame in frames:
            self._do(self.leases.dispatch, e.Heard("i", frame))
        self.number = len(frames)
        said = [reply for message in self.replies for reply in wire.replies(message)]
        answer = [reply for reply in said if reply[0] == wire.VALUE][-1][2]
        if not isinstance(answer, bytes):
            answer = bytes(self.arena.view[:answer])
        result = torch.frombuffer(bytearray(answer), dtype=torch.float32).view(self.recording.expected.shape)
        assert torch.allclose(result, self.recording.expected, atol=1e-4), "a wrong answer"

    def end(self) -> None:
        end = msgpack.packb([self.serial, 0, self.number + 1, [[], []], [wire.END, 1, wire.END_ACK]])
        self._do(self.leases.dispatch, e.Heard("i", end))
        assert self.until(m.Done).outcome == "ended"

    def sleep(self) -> None:
        """Nothing of the model is here; the next wake brings it in the order of first use."""
        self._do(self.leases.dispatch, m.Dropped(instance="i"))
        self._tell_manifest()

    def close(self) -> None:
        self._do(self.leases.dispatch, e.Detached("i"))
        self.io.shutdown()
        self.orders.close()
        self.device.close()
