"""The storages of cuda:0 in an instance: number, size, and the numbers of those whose last tensor has died.

Owns the numbers. Finalizers may run anywhere, even inside the stream, so they only append to a deque. C++ has its own
version of all this (`commands/recorder.cpp`), which `use` puts in its place: so callers use the module's name.
"""

from collections import deque
from itertools import count
from typing import Any

freed: Any = deque()
"""Id and bytes of storages whose last tensor has died. Module-level: a finalizer may outlive the stream."""

next_id: Any = count(1).__next__
"""Never used twice in a process, as finalizers may come late."""


class RemoteStorage:
    """The identity that a tensor and its views share. It has an `id` only once something has been put into it: an
    empty storage is free."""

    __slots__ = ("id", "nbytes")

    id: int

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __del__(self, freed: deque[tuple[int, int]] = freed) -> None:
        try:  # noqa: SIM105 - a context manager would double the cost of every storage
            freed.append((self.id, self.nbytes))
        except AttributeError:
            pass  # never brought into being

    @property
    def born(self) -> bool:
        return hasattr(self, "id")


def _born(nbytes: int, number: int) -> RemoteStorage:
    storage = RemoteStorage(nbytes)
    storage.id = number
    return storage


kind: Any = RemoteStorage
born_storage: Any = _born
_ours = freed, next_id, kind, born_storage


def use(native: Any) -> None:
    """Take a module of C++ for all of these; None: Python's own again."""
    global freed, next_id, kind, born_storage
    theirs = native and (native.Freed(), native.next_id, native.RemoteStorage, native.born_storage)
    freed, next_id, kind, born_storage = theirs or _ours
