"""The segments of this GPU that other GPUs read, and that are kept for them. On the executor's thread only."""

import sys

from dormouse.core.decisions.memory.residency import Residency
from dormouse.schemas import messages as m


class Lending:
    """The pins of one GPU's pool."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._pinned: dict[tuple[int, int, int], list[int]] = {}  # segments by (gpu, epoch, ticket)

    def pin(self, pin: m.PeerPin, max_extents: int = sys.maxsize) -> list[tuple[int, list[tuple[int, int]]]]:
        """Keep those of these segments that are here for another GPU."""
        found = self._residency.pin(pin.segments, max_extents)
        if found:
            self._pinned.setdefault((pin.gpu, pin.epoch, pin.ticket), []).extend(segment for segment, _ in found)
        return found

    def unpin(self, unpin: m.PeerUnpin) -> list[int]:
        """Returns segments to be forgotten."""
        return self._residency.let_go(self._pinned.pop((unpin.gpu, unpin.epoch, unpin.ticket), []))

    def unpin_all(self, gpu: int) -> list[int]:
        """Unpin all that a dead peer had pinned. Returns segments to be forgotten."""
        gone = [key for key in self._pinned if key[0] == gpu]
        return [segment for key in gone for segment in self._residency.let_go(self._pinned.pop(key))]
