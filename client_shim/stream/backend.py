"""The interfaces that the command stream needs from its process: leases, channels to executors, the store, and the
shared arena.

Protocols only; `client_shim` never names a transport. The sandbox implements them over links, the tests in one
process.
"""

from typing import Protocol

from dormouse.schemas.messages import Lease


class Channel(Protocol):
    """An ordered connection to one executor."""

    def send(self, frame: bytes) -> None: ...

    def recv(self, timeout_s: float) -> bytes | None:
        """Wait for a reply; None when time is up (0: only look). ConnectionError when the executor is lost."""
        ...


class Backend(Protocol):
    @property
    def arena(self) -> memoryview:
        """The stream area of the instance's arena: writable bytes that executors and the store also see."""
        ...

    def acquire(self) -> Lease:
        """Called at the first computing command when no lease is held. Blocks; raises if it is refused."""
        ...

    def executor(self, lease: Lease) -> Channel:
        """The connection to the lease's executor: the same object for the same (gpu, epoch)."""
        ...

    def store_upload(self, storage: int, total_nbytes: int, offset: int, arena_offset: int, nbytes: int) -> bool:
        """Hand bytes in the arena to the store; whether all that were handed over so far may be written again."""
        ...

    def store_settle(self) -> None:
        """Return when they may. Raises the store's error about one of them."""
        ...

    def store_file(self, storage: int, total_nbytes: int, offset: int, address: int, nbytes: int) -> bool:
        """Let the store read bytes of this process's memory from the file that they are mapped from; returns when it
        has. False if they are no file's, or it cannot: they must be uploaded.
        """
        ...

    def store_free(self, storages: list[int]) -> None:
        """Storages that were uploaded without a lease and died before a commit or a lease."""
        ...

    def commit(self) -> int:
        """Make the uploads part of the model; returns the new manifest version."""
        ...

    def lease_ended(self, lease: Lease, manifest_version: int | None) -> None:
        """The END of this lease is on its way (or, with a version, written back)."""
        ...


class Liveness(Protocol):
    """Says whether a session's node still lives. A forked instance has none: it is killed when the node's processes
    die.
    """

    def fileno(self) -> int:
        """Readable once the session is over."""
        ...

    def check(self) -> None:
        """Raises SessionEnded if the session is over."""
        ...
