"""A node in one process: a backend whose store is a dictionary and whose executors are interpreters on threads,
computing on CPU tensors.

For tests and for developing; nothing of it is shipped. Each emulated GPU has its own interpreter and thread, so a
lease can move.
"""

import queue
import threading
from collections.abc import Callable
from functools import partial

import torch
from msgspec import structs

from dormouse.client_shim.commands import handles, recorder
from dormouse.client_shim.node.mapped_files import MIN_NBYTES
from dormouse.client_shim.node.mappings import Mappings
from dormouse.client_shim.stream.stream import Stream
from dormouse.client_shim.torch_face.cuda_face import UNCONNECTED
from dormouse.client_shim.torch_face.install import install, uninstall
from dormouse.gpuserver.commands import fast_path
from dormouse.gpuserver.commands.interpreter import EndReport, FindFastPath, Interpreter, ProtocolViolation
from dormouse.gpuserver.device.protocol import Capture, computed_again
from dormouse.schemas.messages import Lease

_real_generator = torch._C.Generator


CHECKED = recorder.TemplateSettings(checked=True, seen=1, least_words=8)
"""Sequences that come a second time are followed, and both ends compare what they do with what they would have done."""


class LoopbackDevice:
    """A CPU that plays a GPU."""

    torch_device = torch.device("cpu")

    def __init__(self, captures: bool) -> None:
        self.capture: Capture | None = computed_again if captures else None
        self.relieved = 0
        self.relief: str | None = "nothing to evict"

    def generator(self) -> torch.Generator:
        return _real_generator("cpu")

    def relieve(self) -> str | None:
        self.relieved += 1
        return self.relief

    def activation_stats(self) -> tuple[int, int, int]:
        return 1000, 2000, 3000

    def synchronize(self) -> None:
        pass


class LoopbackExecutor:
    """One GPU: an interpreter on its own thread, which is also a `Channel`."""

    def __init__(self, node: "LoopbackNode") -> None:
        self.node = node
        self.device = LoopbackDevice(node.captures)
        self.interpreter = Interpreter(self.device, node.arena, node.find_fast)
        self.frames: list[bytes] = []
        self.keep_frames = False
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[bytes | Callable[[], None] | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="loopback-executor", daemon=True)
        self._thread.start()

    def send(self, frame: bytes) -> None:
        if self.keep_frames:
            self.frames.append(frame)
        self._inbox.put(frame)

    def recv(self, timeout_s: float) -> bytes | None:
        if self.failure is not None and self._outbox.empty():
            raise ConnectionError(f"the executor ended this instance: {self.failure!r}")
        try:
            return self._outbox.get(timeout=timeout_s) if timeout_s else self._outbox.get_nowait()
        except queue.Empty:
            return None

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def wake(self, lease: Lease) -> None:
        """Bind the model and begin, on the thread that owns the interpreter."""
        done = threading.Event()

        def wake() -> None:
            self._wake(lease)
            done.set()

        self._inbox.put(wake)
        done.wait()

    def _wake(self, lease: Lease) -> None:
        known = self.interpreter.table.by_id
        self.interpreter.table.unbind([number for number in known if number not in self.node.store])
        for number, content in self.node.store.items():
            if number not in known:
                self.interpreter.table.bind(number, len(content), partial(_pool_copy, content))
        self.interpreter.begin(lease.serial, lease.secret)

    def _serve(self) -> None:
        torch.set_num_threads(1)  # the setting is the calling thread's: see the fixture
        while (frame := self._inbox.get()) is not None:
            if callable(frame):
                frame()
                continue
            try:
                for reply in self.interpreter.execute(frame):
                    self._outbox.put(reply)
                while self.interpreter.ending is None and self.interpreter.ahead():
                    pass
                if self.interpreter.ending is not None:
                    for reply in self._end():
                        self._outbox.put(reply)
                if self._inbox.empty() and self.interpreter.may_capture:
                    self.interpreter.capture()
            except (ProtocolViolation, AssertionError) as error:
                self.failure = error
                self._outbox.put(b"\xc0")  # wakes a waiting client, which then fails

    def _end(self) -> list[bytes]:
        report = self.interpreter.report()
        self.node.write_back(report, self.interpreter, self)
        return self.interpreter.finish_end(self.node.version)


class LoopbackNode:
    """The backend, the store, and the executors."""

    def __init__(
        self,
        gpus: int = 1,
        arena_nbytes: int = 8 << 20,
        find_fast: FindFastPath = fast_path.load,
        captures: bool = False,
    ) -> None:
        self.find_fast, self.captures = find_fast, captures
        self.memory = bytearray(arena_nbytes)
        self.arena = memoryview(self.memory)
        self.store: dict[int, bytearray] = {}
        self.uploading: dict[int, bytearray] = {}
        self.version = 0
        self.serial = 0
        self.acquired = 0
        self.next_gpu = 0
        self.ended: list[tuple[Lease, int | None]] = []
        self.reports: list[EndReport] = []
        self.mappings = Mappings()
        self.executors = [LoopbackExecutor(self) for _ in range(gpus)]

    def lease(self, gpu: int | None = None) -> Lease:
        """Grant a lease, as the controller would, and wake the model there."""
        self.serial += 1
        chosen = self.next_gpu if gpu is None else gpu
        lease = Lease(gpu=chosen, epoch=1, serial=self.serial, secret=self.serial * 7919)
        executor = self.executors[chosen]
        executor.wake(lease)
        return lease

    def acquire(self) -> Lease:
        self.acquired += 1
        self.commit()
        return self.lease()

    def executor(self, lease: Lease) -> LoopbackExecutor:
        return self.executors[lease.gpu]

    def store_upload(self, storage: int, total_nbytes: int, offset: int, arena_offset: int, nbytes: int) -> bool:
        content = self.uploading.setdefault(storage, bytearray(total_nbytes))
        content[offset : offset + nbytes] = self.arena[arena_offset : arena_offset + nbytes]
        return True

    def store_settle(self) -> None:
        pass

    def store_file(self, storage: int, total_nbytes: int, offset: int, address: int, nbytes: int) -> bool:
        found = self.mappings.file_at(address, nbytes) if nbytes >= MIN_NBYTES else None
        if found is None:
            return False
        content = self.uploading.setdefault(storage, bytearray(total_nbytes))
        with open(found.path, "rb") as file:
            file.seek(found.offset)
            content[offset : offset + nbytes] = file.read(nbytes)
        return True

    def store_free(self, storages: list[int]) -> None:
        for storage in storages:
            del self.uploading[storage]

    def commit(self) -> int:
        if self.uploading:
            self.store |= self.uploading
            self.uploading = {}
            self.version += 1
        return self.version

    def lease_ended(self, lease: Lease, manifest_version: int | None) -> None:
        self.ended.append((lease, manifest_version))

    def write_back(self, report: EndReport, interpreter: Interpreter, executor: LoopbackExecutor) -> None:
        self.reports.append(report)
        for number in (*report.dirty, *(number for number, _ in report.created)):
            self.store[number] = bytearray(bytes(interpreter.storage(number)))
        for number in report.freed:
            self.store.pop(number, None)
        if report.dirty or report.created:
            self.version += 1
            for other in self.executors:
                if other is not executor:
                    other.interpreter.table.unbind(report.dirty)


def _pool_copy(content: bytearray) -> torch.UntypedStorage:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage()
        if content
        else torch.empty(0, dtype=torch.uint8).untyped_storage()
    )


class LoopbackWorld:
    """A node and this process's PyTorch, connected. `close` gives PyTorch back as it was."""

    def __init__(
        self,
        gpus: int = 1,
        arena_nbytes: int = 8 << 20,
        by_cpp: bool = True,
        templates: recorder.TemplateSettings | None = None,
        compiles: bool = False,
        captures: bool = False,
    ) -> None:
        """``by_cpp``: commands are recorded and run by C++, if that is built. ``captures``: sequences that come again,
        too.
        """
        recorder.template_settings = templates or recorder.TemplateSettings()
        self.node = LoopbackNode(gpus, arena_nbytes, fast_path.load if by_cpp else lambda: None, captures)
        self.stream: Stream = install(self.node, structs.replace(UNCONNECTED, compiles=compiles), by_cpp)
        self.by_cpp = handles.cpp.module is not None

    def hits(self) -> int:
        """Calls that C++ has followed a plan for, ever."""
        module = handles.cpp.module
        return 0 if module is None else int(module.counts()[0])

    def begin_lease(self, gpu: int = 0) -> None:
        self.stream.begin_lease(self.node.lease(gpu))

    def end_lease(self) -> int | None:
        """End the lease as the runner does after `load()` or a request."""
        return self.stream.end_lease() if self.stream.leased else self.stream.commit()

    def close(self) -> None:
        if self.stream.leased:
            self.stream.lose_lease()
        for executor in self.node.executors:
            executor.stop()
        self.node.mappings.close()
        uninstall()


def start(gpus: int = 1, arena_nbytes: int = 8 << 20) -> tuple[LoopbackNode, Stream]:
    """A node, and this process connected to it, for good."""
    world = LoopbackWorld(gpus, arena_nbytes)
    return world.node, world.stream
