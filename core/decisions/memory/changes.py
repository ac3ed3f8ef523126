"""Changes on a GPU since the last look: for the controller, and for the count of bytes. Pure."""

from collections.abc import Iterable

from dormouse.core.decisions.memory.models import KnownModels


class Changes:
    """``instances``: those whose share of the pool may have changed. ``segments``: those that came, went, or have other
    owners; ``seats``: those that were given or left, by name. The last two are noted only if ``counts``; its user
    clears them.
    """

    def __init__(self, models: KnownModels) -> None:
        self._models = models
        self.counts = False
        self.instances: set[str] = set()
        self.segments: set[int] = set()
        self.seats: set[str] = set()

    def touch(self, segments: Iterable[int]) -> None:
        """Notes that the instances that have these have more or less here than before."""
        segments = list(segments)
        sharers, changed = self._models.sharers, self.instances
        for segment in segments:
            if segment in sharers:
                changed.update(sharers[segment])
        self.note(segments)

    def note(self, segments: Iterable[int], seat: str = "") -> None:
        if self.counts:
            self.segments.update(segments)
            if seat:
                self.seats.add(seat)
