"""The shim's `Backend` in a node: leases from the router, uploads to the store, channels to executors.

Owns this process's links. A wait for an executor also listens to the router, because a dead executor says nothing; and
each wait of a session to its tie, because a dead router says nothing either. The links are used under the stream's
lock, except the router's, which the main thread also reads between requests and which therefore has a lock of its own.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import msgspec

from dormouse.client_shim import backend
from dormouse.client_shim.backend import Tie
from dormouse.client_shim.failures import LeaseLost, NoLease, StoreRefused
from dormouse.client_shim.mapped_files import MappedFiles
from dormouse.client_shim.store_port import StorePort
from dormouse.core.link import BlockingLink, wait_readable
from dormouse.core.paths import FILES_SOCKET, STORE_SOCKET
from dormouse.schemas import messages as m
from dormouse.schemas.errors import PeerLost, RemoteProtocolError
from dormouse.schemas.stream import MAX_FRAME_NBYTES

P = ParamSpec("P")
T = TypeVar("T")

FOREVER_S: Final = 3600.0
SLICE_S: Final = 0.05  # how long a wait may be deaf to the router while the main thread reads that link


class Refusal(RuntimeError):
    """The router refused a lease; ``code`` says why."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class RouterPort:
    """The typed link to the router. Messages that the reader did not wait for are kept for who does."""

    def __init__(self, path: str, tie: Tie | None) -> None:
        self.link = BlockingLink(path)
        self.lock = threading.RLock()
        self._tie = tie
        self._decoder: msgspec.msgpack.Decoder[m.RouterToInstance] = msgspec.msgpack.Decoder(m.RouterToInstance)
        self._runs: deque[m.Run | m.Exit] = deque()
        self._answers: deque[m.LeaseGranted | m.LeaseRefused] = deque()

    def send(self, message: m.InstanceToRouter) -> None:
        with self.lock:
            self.link.send(msgspec.msgpack.encode(message))

    def next_run(self) -> m.Run | m.Exit:
        """Wait for the next request. Raises PeerLost, RemoteProtocolError."""
        while True:
            with self.lock:
                if self._runs:
                    return self._runs.popleft()
                self._take(math.inf)

    def check(self) -> None:
        """Raises SessionEnded."""
        if self._tie is not None:
            self._tie.check()

    def forget_answers(self) -> None:
        """What has been said about a lease that is over."""
        with self.lock:
            while self._take(0):
                pass
            self._answers.clear()

    def next_answer(self) -> m.Lease:
        """Wait for the answer to NeedLease. Raises Refusal."""
        while True:
            with self.lock:
                if self._answers:
                    answer = self._answers.popleft()
                    if isinstance(answer, m.LeaseGranted):
                        return answer.lease
                    raise Refusal(answer.code, answer.text)
                self.wait([self.link], FOREVER_S)
                self._take(0)

    def wait(self, links: list[BlockingLink], timeout_s: float) -> list[BlockingLink]:
        """Those of ``links`` that have a message. Raises SessionEnded."""
        ready = interruptible(wait_readable, links, timeout_s, () if self._tie is None else (self._tie.fileno(),))
        if not ready:
            self.check()
        return ready

    def look(self) -> None:
        """Take in what is there. Raises ConnectionError if the lease's executor is said to be lost."""
        while self._take(0):
            pass
        if self._answers and isinstance(self._answers[0], m.LeaseRefused):
            refusal = self._answers.popleft()
            assert isinstance(refusal, m.LeaseRefused)
            if refusal.code == "executor_lost":
                raise ConnectionError(refusal.text)
            raise LeaseLost(refusal.text)

    def _take(self, timeout_s: float) -> bool:
        data = self.link.recv(timeout_s)
        if data is None:
            return False
        try:
            message = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RemoteProtocolError(f"router: {error}") from error
        if isinstance(message, m.Run | m.Exit):
            self._runs.append(message)
        else:
            self._answers.append(message)
        return True


def interruptible(wait: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Wait where a cancellation may be raised; cancel.py knows this function by its name."""
    return wait(*args, **kwargs)


class ExecutorChannel:
    """One executor, as a `Channel`. ``checkpoint`` is called whenever a wait was interrupted: it may raise."""

    def __init__(self, path: str, router: RouterPort, checkpoint: Callable[[], None]) -> None:
        self._link = BlockingLink(path, max_nbytes=2 * MAX_FRAME_NBYTES)
        self._router = router
        self._checkpoint = checkpoint

    def send(self, frame: bytes) -> None:
        self._router.check()
        try:
            self._link.send(frame)
        except PeerLost as error:
            raise ConnectionError(str(error)) from error

    def recv(self, timeout_s: float) -> bytes | None:
        try:
            reply = self._link.recv(0)
            if reply is not None or timeout_s <= 0:
                return reply
            deadline_s = time.monotonic() + timeout_s
            while reply is None and (left_s := deadline_s - time.monotonic()) > 0:
                self._checkpoint()
                reply = self._wait(left_s)
            return reply
        except PeerLost as error:
            raise ConnectionError(str(error)) from error

    def _wait(self, left_s: float) -> bytes | None:
        if not self._router.lock.acquire(blocking=False):
            ready = self._router.wait([self._link], min(left_s, SLICE_S))
            return self._link.recv(0) if ready else None
        try:
            ready = self._router.wait([self._link, self._router.link], left_s)
            reply = self._link.recv(0) if self._link in ready else None
            if reply is None and ready:
                self._router.look()
            return reply
        finally:
            self._router.lock.release()

    def close(self) -> None:
        self._link.close()


class NodeBackend:
    """`Backend` of an instance or, with a tie, of a `dormouse run` process."""

    def __init__(
        self,
        directory: str,
        arena: memoryview,
        checkpoint: Callable[[], None] = lambda: None,
        tie: Tie | None = None,
    ) -> None:
        self.arena = arena
        self.router = RouterPort(os.path.join(directory, "router"), tie)
        self._tie = tie
        self.version = 0  # newest manifest version that we know
        self.nbytes = 0  # of the newest committed manifest
        self.may_acquire = True
        self.asked: set[int] = set()  # serials of leases that we asked for, rather than got with a request
        self._directory = directory
        self._checkpoint = checkpoint
        self._store: StorePort | None = None
        self._files = MappedFiles(os.path.join(directory, FILES_SOCKET))
        self._channels: dict[int, tuple[int, ExecutorChannel]] = {}  # epoch and channel by gpu
        self._committed = False

    def acquire(self) -> backend.Lease:
        if not self.may_acquire:
            raise NoLease(
                "cuda was used outside of load() and handle(), where no GPU is held: finish the work of a thread before"
                " handle() returns"
            )
        self.lease_lost()  # if the last one ended without an END
        if not self._committed:
            self.commit()  # what was uploaded so far must be in a manifest that the executor can bind
        self.router.forget_answers()
        self.router.send(m.NeedLease(version=self.version))
        while True:
            self._checkpoint()
            lease = self.router.next_answer()
            self.asked.add(lease.serial)
            return backend.Lease(gpu=lease.gpu, epoch=lease.epoch, serial=lease.serial, secret=lease.secret)

    def executor(self, lease: backend.Lease) -> ExecutorChannel:
        epoch, channel = self._channels.get(lease.gpu, (0, None))
        if channel is None or epoch != lease.epoch:
            if channel is not None:
                channel.close()
            path = os.path.join(self._directory, f"gpu{lease.gpu}.{lease.epoch}")
            channel = ExecutorChannel(path, self.router, self._checkpoint)
            self._channels[lease.gpu] = (lease.epoch, channel)
        return channel

    @property
    def store(self) -> StorePort:
        if self._store is None:
            self._store = StorePort(os.path.join(self._directory, STORE_SOCKET), self._tie)
        return self._store

    def store_upload(self, storage: int, total_nbytes: int, offset: int, arena_offset: int, nbytes: int) -> None:
        self._committed = False
        self.store.send(
            m.StoreUpload(
                storage=storage, total_nbytes=total_nbytes, offset=offset, arena_offset=arena_offset, nbytes=nbytes
            )
        )
        answer = self.store.answer()
        if not isinstance(answer, m.Uploaded):
            raise RemoteProtocolError(f"the store answered an upload with {answer}")

    def store_file(self, storage: int, total_nbytes: int, offset: int, address: int, nbytes: int) -> bool:
        found = self._files.range_at(address, nbytes)
        if found is None:
            return False
        self._committed = False
        # The answer is waited for: afterwards the program may write to the file.
        self.store.send(
            m.StoreFile(
                storage=storage,
                total_nbytes=total_nbytes,
                offset=offset,
                file=found.file,
                file_offset=found.offset,
                nbytes=nbytes,
            )
        )
        try:
            answer = self.store.answer(nbytes)
        except StoreRefused:
            if self._files.refused(found.file):
                return False
            raise
        if not isinstance(answer, m.Uploaded):
            raise RemoteProtocolError(f"the store answered a range of a file with {answer}")
        return True

    def store_free(self, storages: list[int]) -> None:
        self._committed = False
        self.store.send(m.StoreFree(storages=storages))

    def commit(self) -> int:
        self.store.send(m.Commit())
        answer = self.store.answer()
        if not isinstance(answer, m.Committed):
            raise RemoteProtocolError(f"the store answered a commit with {answer}")
        self.version, self.nbytes, self._committed = answer.version, answer.nbytes, True
        return answer.version

    def lease_ended(self, lease: backend.Lease, manifest_version: int | None) -> None:
        if manifest_version is not None:
            self.version = manifest_version
        if lease.serial in self.asked:
            self.asked.discard(lease.serial)
            self.router.send(m.LeaseEnded(serial=lease.serial, version=self.version))

    def lease_lost(self) -> None:
        """The stream dropped its lease without an END; the router must not wait for one."""
        for serial in sorted(self.asked):
            self.router.send(m.LeaseEnded(serial=serial, version=self.version))
        self.asked.clear()
