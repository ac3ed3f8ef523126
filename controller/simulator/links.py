"""Links between memories as shared bandwidth over time: each copy has an equal part of every link that it crosses, and
the narrowest part counts; parts change when a copy begins or ends. Bandwidths in bytes per second.
"""

from collections.abc import Callable
from typing import Any


class SimulatedLink:
    """``bps`` for all copies over it together. ``busy_s``: how long it has carried any."""

    __slots__ = ("bps", "busy_s", "copies", "name", "since_s")

    def __init__(self, bps: float, name: str = "") -> None:
        self.bps = bps
        self.name = name
        self.busy_s = self.since_s = 0.0
        self.copies: list[SimulatedCopy] = []


class SimulatedCopy:
    """Some bytes on their way over ``links``; ``token`` is its owner's."""

    __slots__ = ("at_s", "left", "links", "rate", "token", "version")

    def __init__(self, nbytes: float, links: tuple[SimulatedLink, ...], token: Any) -> None:
        self.left = nbytes
        self.links = links
        self.token = token
        self.rate = 0.0
        self.at_s = 0.0
        self.version = 0


class Links:
    """All copies. ``due`` is called with ``(time, copy, version)`` whenever the end of a copy is expected anew; a
    version that is no longer the copy's is void.
    """

    def __init__(self, due: Callable[[float, SimulatedCopy, int], None]) -> None:
        self._due = due
        self.first_s = 0.0  # links count as busy from then on

    def begin(self, copy: SimulatedCopy, now_s: float) -> None:
        copy.at_s = now_s
        for link in copy.links:
            if not link.copies:
                link.since_s = now_s
            link.copies.append(copy)
        self._share(copy, now_s)

    def end(self, copy: SimulatedCopy, now_s: float) -> None:
        """It has arrived, or is given up."""
        copy.version += 1
        for link in copy.links:
            link.copies.remove(copy)
            if not link.copies and now_s > self.first_s:
                link.busy_s += now_s - (link.since_s if link.since_s > self.first_s else self.first_s)
        self._share(copy, now_s)

    def _share(self, changed: SimulatedCopy, now_s: float) -> None:
        for link in changed.links:
            for copy in link.copies:  # one on several links is met again, and has its rate by then
                rate = link.bps / len(link.copies)
                if len(copy.links) > 1:
                    rate = min([over.bps / len(over.copies) for over in copy.links])
                if rate == copy.rate:
                    continue
                left = copy.left - copy.rate * (now_s - copy.at_s)
                copy.left = left if left > 0.0 else 0.0
                copy.at_s, copy.rate = now_s, rate
                copy.version += 1
                self._due(now_s + copy.left / rate, copy, copy.version)
