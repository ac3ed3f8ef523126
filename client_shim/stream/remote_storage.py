"""The storages of cuda:0 as an instance knows them: number, size, and the numbers of those whose last tensor has died.

Owns the numbers. Finalizers may run anywhere, even inside the stream, so they only append to a deque.
"""

from collections import deque
from itertools import count

freed: deque[tuple[int, int]] = deque()
"""Id and bytes of storages whose last tensor has died. Module-level: a finalizer may outlive the stream."""

next_id = count(1).__next__
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


def born_storage(nbytes: int, number: int) -> RemoteStorage:
    storage = RemoteStorage(nbytes)
    storage.id = number
    return storage
