"""What has changed on a GPU since somebody last looked: for the controller, and for who counts bytes. Pure."""

from collections.abc import Iterable

from dormouse.core.decisions.memory.models import KnownModels


class Changes:
    """``instances``: those whose share of the pool may be another. ``segments``: that came, went, or have other owners;
    ``seats``: that were given or left, by name. The last two are noted only if somebody ``counts``, who clears them.
    """

    def __init__(self, models: KnownModels) -> None:
        self._models = models
        self.counts = False
        self.instances: set[str] = set()
        self.segments: set[int] = set()
        self.seats: set[str] = set()

    def touch(self, segments: Iterable[int]) -> None:
        """Whoever has these has more or less here than before."""
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
