"""Of which segments instances consist, and who shares them: pure. A segment is an instance's own bytes, known by its
name, or what several have in common: a base, or all of a model that serves several instances.
"""

from collections.abc import Iterable, Mapping, Sequence

from dormouse.controller.simulator.devices import ModelSpec

Segments = tuple[tuple[str, int], ...]


class Contents:
    """``segments``: names and sizes, by instance. ``shared`` is whether any has more than one user."""

    def __init__(self) -> None:
        self.segments: dict[str, Segments] = {}
        self.shared = False
        self._users: dict[str, list[str]] = {}  # by segment that is shared

    def add(self, name: str, spec: ModelSpec, family: Sequence[str]) -> None:
        """A function's instances, ``family``, all have what the first, ``name``, has."""
        segments = spec.segments(name)
        self.segments |= dict.fromkeys(family, segments)
        for segment, _ in segments:
            if segment != name or len(family) > 1:
                self._users.setdefault(segment, []).extend(family)
                self.shared = True

    def missing(self, instance: str, resident: Mapping[str, int]) -> list[tuple[str, int, int]]:
        """Segments that are not all there: name, what is there, and size."""
        parts = [(name, resident.get(name, 0), nbytes) for name, nbytes in self.segments[instance]]
        return [part for part in parts if part[1] < part[2]]

    def ranked(self, resident: Iterable[str], worth: Mapping[str, float], instance: str) -> list[str]:
        """Segments, least worth first, without the instance's. A base is worth the sum of what its users would lose
        with it, as the executor has it (gpuserver/lease/residency.py).
        """
        total = dict.fromkeys(resident, 0.0)
        for user, its in worth.items():
            for segment, _ in self.segments[user]:
                if segment in total:
                    total[segment] += its
        for segment, _ in self.segments[instance]:
            total.pop(segment, None)
        return sorted(total, key=total.__getitem__)

    def of_users(self, changed: Iterable[str], resident: Mapping[str, int]) -> list[tuple[str, int]]:
        """What instances have whose segments have changed: all who share them."""
        users = [user for segment in changed for user in self._users.get(segment, (segment,))]
        return [
            (user, sum(resident.get(segment, 0) for segment, _ in self.segments[user])) for user in dict.fromkeys(users)
        ]
