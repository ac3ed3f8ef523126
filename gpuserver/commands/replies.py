"""Replies to an instance: those to its frame, and the first error, at the next command that waits."""

from collections.abc import Callable
from typing import Any, Final

import msgpack

from dormouse.gpuserver.commands.storages import StorageFailure
from dormouse.schemas import stream as wire

MAX_TOLD: Final = 1 << 14
MAX_TOLD_FAILURES: Final = 64
"""Poisoned storages reported when a lease ends: enough to name all that a program can use later, few enough for a
message.
"""


class Replies:
    """The replies to one instance. ``late`` names errors that show on the GPU only."""

    def __init__(self, late: Callable[[], StorageFailure | None]) -> None:
        self.frame = 0  # the number of the one that is run
        self.messages: list[bytes] = []
        self.error: StorageFailure | None = None  # the first since the lease began, or since one was reported
        self._late = late

    def give(self, *message: Any) -> None:
        self.messages.append(msgpack.packb(message))

    def note(self, failure: StorageFailure, what: str) -> StorageFailure:
        """Note the failure of a command that is no operation and does not wait."""
        failure = failure.at([self.frame, -1, what])
        self.error = self.error or failure
        return failure

    def late_fault(self) -> StorageFailure | None:
        failure = self._late()
        self.error = self.error or failure
        return failure

    def failed(self, token: int) -> bool:
        """Report the first error at a waiting command, once."""
        self.late_fault()
        if self.error is None:
            return False
        self.fail(token, self.error)
        self.error = None
        return True

    def fail(self, token: int, failure: StorageFailure) -> None:
        self.give(wire.FAILED, token, *failure.told())


def by_failure(poisoned: dict[int, StorageFailure]) -> list[list[Any]]:
    """``[[kind, text, where, storage, [numbers]], ...]``; of very many, the first."""
    grouped: dict[int, tuple[StorageFailure, list[int]]] = {}
    for number, failure in list(poisoned.items())[:MAX_TOLD]:
        grouped.setdefault(id(failure), (failure, []))[1].append(number)
    return [[*failure.told(), numbers] for failure, numbers in list(grouped.values())[:MAX_TOLD_FAILURES]]
