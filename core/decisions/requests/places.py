"""The part of the router's policy on permission to load. Pure: looks at a RouterState and does no I/O.

Instances that replace others, of functions that are served, have ``limits.loads`` places; new versions and extra
instances have as many of their own, so that no deploy keeps served functions from coming back. On a node of many
tenants, each may have half of either, or one.

An author chooses the length of a load. So one that has had its place for HELD_S counts for its own tenant alone: no
tenant waits longer than that behind others, however many they are.
"""

from collections import Counter
from typing import Final

from dormouse.core.decisions.requests.state import Instance, RouterState
from dormouse.schemas import messages as m

HELD_S: Final = 10.0
"""Most loads take less, and few clients have given up by then."""


class LoadPlaces:
    """Places taken in the current state of ``p``."""

    def __init__(self, p: RouterState) -> None:
        self._p = p
        self._own: Counter[tuple[str, bool]] = Counter()  # by tenant, and whether they replace
        self._young: Counter[tuple[str, bool]] = Counter()
        for instance in p.instances.values():
            if instance.state.loads:
                self.take(instance)

    def take(self, instance: Instance) -> None:
        key = instance.spec.tenant, instance.replaces
        self._own[key] += 1
        self._young[key] += instance.started_s + HELD_S > self._p.now_s

    def free(self, spec: m.FunctionSpec, replaces: bool) -> bool:
        """Whether one more may load."""
        key, loads = (spec.tenant, replaces), self._p.loads
        others = sum(self._young[each] for each in self._young if each[1] is replaces and each != key)
        return self._own[key] < self._p.part(loads) and self._own[key] + others < loads
