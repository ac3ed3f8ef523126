"""The shim's `Backend` in a node: leases from the router, uploads to the store, channels to executors.

Owns this process's links. They are used under the stream's lock, except the router's.
"""

import os
import time
from collections.abc import Callable
from typing import Final

from dormouse.client_shim.node.executor_channel import ExecutorChannel
from dormouse.client_shim.node.mapped_files import MappedFiles
from dormouse.client_shim.node.router_port import RouterPort
from dormouse.client_shim.node.store_port import StorePort
from dormouse.client_shim.stream.backend import Liveness
from dormouse.client_shim.stream.failures import NoLease, StoreRefused
from dormouse.core.paths import FILES_SOCKET, STORE_SOCKET
from dormouse.schemas import messages as m

PROGRESS_S: Final = 1.0
"""Between two progress messages to the router during load(): its time limit is longer."""

SMALL_NBYTES: Final = 64 << 10
MAX_UNANSWERED: Final = 32
"""Uploads of at most this size are waited for together: each alone takes longer to be answered than to be copied. Fewer
than the answers that the store keeps for one that does not read.
"""


class NodeBackend:
    """`Backend` of an instance or, with a tie, of a `dormouse run` process."""

    def __init__(
        self,
        directory: str,
        arena: memoryview,
        checkpoint: Callable[[], None] = lambda: None,
        tie: Liveness | None = None,
    ) -> None:
        self.arena = arena
        self.router = RouterPort(os.path.join(directory, "router"), tie)
        self._tie = tie
        self.version = 0  # newest manifest version that we know
        self.nbytes = 0  # of the newest committed manifest
        self.may_acquire = True
        self.batch = 0, 0  # taken and together, as in LeaseEnded
        self.asked: set[int] = set()  # serials of leases that we asked for, rather than got with a request
        self._directory = directory
        self._checkpoint = checkpoint
        self._store: StorePort | None = None
        self._files = MappedFiles(os.path.join(directory, FILES_SOCKET))
        self._channels: dict[int, tuple[int, ExecutorChannel]] = {}  # epoch and channel by gpu
        self._committed = False
        self._progress_s = 0.0  # time of the last progress message

    def acquire(self) -> m.Lease:
        if not self.may_acquire:
            raise NoLease(
                "cuda was used outside of load() and handle(), where no GPU is held: finish the work of a thread before"
                " handle() returns"
            )
        self.lease_lost()  # if the last one ended without an END
        if not self._committed:
            self.commit()  # uploads so far must be in a manifest that the executor can bind
        self.router.forget_answers()
        self.router.send(m.NeedLease(version=self.version))
        while True:
            self._checkpoint()
            lease = self.router.next_answer()
            self.asked.add(lease.serial)
            return lease

    def executor(self, lease: m.Lease) -> ExecutorChannel:
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

    def _progress(self) -> None:
        now_s = time.monotonic()
        if self._tie is None and self.may_acquire and now_s >= self._progress_s + PROGRESS_S:
            self._progress_s = now_s
            self.router.send(m.LoadProgress())

    def store_upload(self, storage: int, total_nbytes: int, offset: int, arena_offset: int, nbytes: int) -> bool:
        self._committed = False
        self._progress()
        self.store.upload(
            m.StoreUpload(
                storage=storage, total_nbytes=total_nbytes, offset=offset, arena_offset=arena_offset, nbytes=nbytes
            )
        )
        if nbytes <= SMALL_NBYTES and self.store.unanswered < MAX_UNANSWERED:
            return False
        self.store.settle()
        return True

    def store_settle(self) -> None:
        self.store.settle()

    def store_file(self, storage: int, total_nbytes: int, offset: int, address: int, nbytes: int) -> bool:
        found = self._files.range_at(address, nbytes)
        if found is None:
            return False
        self._committed = False
        self._progress()
        message = m.StoreFile(
            storage=storage,
            total_nbytes=total_nbytes,
            offset=offset,
            file=found.file,
            file_offset=found.offset,
            nbytes=nbytes,
        )
        self.store.settle()  # so that no earlier answer is taken for the file's
        try:
            # The answer is waited for: afterwards the program may write to the file.
            self.store.ask(message, m.Uploaded, nbytes)
        except StoreRefused:
            if self._files.refused(found.file):
                return False
            raise
        return True

    def store_free(self, storages: list[int]) -> None:
        self._committed = False
        self.store.free(storages)

    def commit(self) -> int:
        answer = self.store.ask(m.Commit(), m.Committed)
        self.version, self.nbytes, self._committed = answer.version, answer.nbytes, True
        return answer.version

    def lease_ended(self, lease: m.Lease, manifest_version: int | None) -> None:
        if manifest_version is not None:
            self.version = manifest_version
        if lease.serial in self.asked:
            self.asked.discard(lease.serial)
            taken, together = self.batch
            self.router.send(m.LeaseEnded(serial=lease.serial, version=self.version, taken=taken, together=together))

    def lease_lost(self) -> None:
        """The stream dropped its lease without an END; the router must not wait for one."""
        for serial in sorted(self.asked):
            self.router.send(m.LeaseEnded(serial=serial, version=self.version))
        self.asked.clear()
