"""Unusable remains of earlier leases: results of commands that failed, tensors that were lost.

Pure bookkeeping by storage id, empty in the ordinary case. A program that still holds such a tensor gets the reason at
each use, on any GPU; the stream asks here when an executor reports that a storage is not there.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Loss:
    """The storages ``[first, end)`` of a lost lease. ``made`` of them were alive then."""

    first: int
    end: int
    made: int
    why: str
    dead: set[int] = field(default_factory=set)  # since: a death may be reported twice

    @property
    def alive(self) -> int:
        return self.made - len(self.dead)

    @property
    def text(self) -> str:
        return f"made by a request that {self.why}: what it had made on the GPU is gone"


class Remains:
    def __init__(self) -> None:
        self._poisoned: dict[int, tuple[type[Exception], str]] = {}  # by storage
        self._losses: list[_Loss] = []

    def __bool__(self) -> bool:
        return bool(self._poisoned or self._losses)

    def poison(self, storages: Iterable[int], error: Exception) -> None:
        """The command that made or wrote these has failed."""
        for storage in storages:
            self._poisoned[storage] = type(error), str(error.args[0] if error.args else error)

    def lose(self, first: int, end: int, made: int, why: str) -> None:
        """The storages ``[first, end)`` have lost their values. ``made`` of them are alive, or have died without a
        report yet. ``why`` completes "a request that ...".
        """
        self._losses.append(_Loss(first, end, made, why))

    def free(self, storage: int) -> None:
        """The program has dropped it, or made it anew."""
        if self._poisoned.pop(storage, None) is None:
            for loss in self._losses:
                if loss.first <= storage < loss.end:
                    loss.dead.add(storage)
            self._losses = [loss for loss in self._losses if loss.alive > 0]

    def error(self, storage: int) -> Exception | None:
        """The error that a use of this storage raises; None if it has a value."""
        if storage in self._poisoned:
            kind, text = self._poisoned[storage]
            return kind(text)
        for loss in self._losses:
            if loss.first <= storage < loss.end:
                return RuntimeError(f"this tensor was {loss.text}")
        return None

    def story(self) -> str:
        """The storages without a value in words, for a person; empty if there are none."""
        counts = Counter(f"the command that made or wrote it failed: {text}" for _, text in self._poisoned.values())
        for loss in self._losses:
            counts[loss.text] += loss.alive
        return "; ".join(f"it keeps {_tensors(count)} that can never be used, {text}" for text, count in counts.items())


def _tensors(count: int) -> str:
    return "a tensor" if count == 1 else f"{count} tensors"
