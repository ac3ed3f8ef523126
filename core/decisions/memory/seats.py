"""Segments kept on one GPU: by instances through their seats, and by other GPUs that read segments pinned for them.
Pure books; places are residency.py's.
"""

from collections import Counter
from collections.abc import Collection, Iterable

from dormouse.core.decisions.memory.wake_plan import SeatedModel


class Seats:
    """``by_owner`` are instances, and the names under which models are brought (bringing.py)."""

    def __init__(self) -> None:
        self.by_owner: dict[str, SeatedModel] = {}
        self._pins: Counter[int] = Counter()
        self._doomed: set[int] = set()  # pinned, and to be dropped when it is let go

    @property
    def none(self) -> bool:
        """Whether no segment is kept."""
        return not self.by_owner and not self._pins

    def holders(self, segment: int) -> list[str]:
        """Owners whose seats hold it."""
        return [owner for owner, seat in self.by_owner.items() if seat.holds(segment)]

    def held(self, segment: int) -> bool:
        """Whether it is part of a seat."""
        return any(seat.holds(segment) for seat in self.by_owner.values())

    def kept(self, but: Collection[str] = ()) -> set[int]:
        """Segments that other seats hold, or other GPUs read."""
        held = {segment for owner, seat in self.by_owner.items() if owner not in but for segment in seat.held}
        return held.union(self._pins)

    def leave(self, owner: str) -> list[int]:
        """Removes its seat; returns the seat's segments."""
        seat = self.by_owner.pop(owner, None)
        return [] if seat is None else [*seat.model.nbytes, *seat.claimed]

    # --- segments written in place

    def rename(self, claimed: int, segment: int) -> None:
        """A claimed segment is a new segment now."""
        for seat in self.by_owner.values():
            if claimed in seat.claimed:
                seat.claimed[segment] = seat.claimed.pop(claimed)

    def drop(self, segment: int) -> bool:
        """No seat has it any more. Returns False if it is pinned, and goes when it is let go."""
        if segment in self._pins:
            self._doomed.add(segment)
            return False
        for seat in self.by_owner.values():
            seat.claimed.pop(segment, None)
        return True

    # --- other GPUs

    def pinned(self, segment: int) -> bool:
        return segment in self._pins

    def pin(self, segment: int) -> None:
        self._pins[segment] += 1

    def doomed(self, segment: int) -> bool:
        """Whether it is to go as soon as no GPU reads it."""
        return segment in self._doomed

    def let_go(self, segments: Iterable[int]) -> list[int]:
        """Undo :meth:`pin`; returns the segments to forget now."""
        ready = []
        for segment in segments:
            self._pins[segment] -= 1
            if self._pins[segment] <= 0:
                del self._pins[segment]
                if segment in self._doomed:
                    self._doomed.discard(segment)
                    ready.append(segment)
        return ready

    def check(self, resident: Collection[int]) -> None:
        """Assert that all of it is there."""
        assert self._doomed <= set(self._pins) <= set(resident)
        assert {claimed for seat in self.by_owner.values() for claimed in seat.claimed} <= set(resident)
