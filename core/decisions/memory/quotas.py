"""Quotas of tenants' models on a GPU: models beyond the quota are worth almost nothing there, and go first. Pure.

The models of most worth fill a tenant's quota, by the bytes that are really there: shared bytes count once. Others of
them are over it. Nothing is refused, and nothing is evicted as long as there is room.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from dormouse.core.decisions.memory.holdings import OwnerGroup
from dormouse.core.decisions.memory.residency import Residency

OVER: Final = 2.0**-300
"""Factor of their worth: less than any other but that of copies that another GPU has, too (keeping.py in the scheduling
core). Products of the two stay within a float's limits.
"""


class MemoryQuotas:
    """``limits`` in bytes, by tenant. ``tenant`` returns an instance's tenant; "" if unknown."""

    def __init__(self, limits: Mapping[str, int], tenant: Callable[[str], str]) -> None:
        self._limits, self._tenant = limits, tenant

    def __bool__(self) -> bool:
        return bool(self._limits)

    def adjusted(
        self, worth: Mapping[str, float], held: "Held", kv: Mapping[str, int], coming: str = ""
    ) -> Mapping[str, float]:
        """Worth of a byte of each model, ascending. ``held``: bytes of models that are there, or of the one that is
        ``coming``; ``kv``: those of keys and values, by tenant.
        """
        own: dict[str, dict[OwnerGroup, int]] = {tenant: {} for tenant in self._limits}
        for group, nbytes in held.items():
            for tenant in {self._tenant(owner) for owner in group.owners} & own.keys():
                own[tenant][group] = nbytes
        over: set[str] = set()
        for tenant, groups in own.items():
            left = self._limits[tenant] - kv.get(tenant, 0)
            if sum(groups.values()) > left:
                names = [name for name in worth if self._tenant(name) == tenant and name != coming]
                names.sort(key=lambda name: (-worth[name], name))
                over |= _over([coming, *names] if coming else names, groups, left)
        if not over.intersection(worth):
            return worth
        adjusted = {name: value * OVER if name in over else value for name, value in worth.items()}
        return dict(sorted(adjusted.items(), key=lambda item: item[1]))

    def limits(self, instance: str) -> bool:
        """Whether its tenant has one."""
        return self._tenant(instance) in self._limits


Held = Mapping[OwnerGroup, int]


def _over(names: list[str], groups: Held, left: int) -> set[str]:
    """Models that do not fit beside those before them."""
    counted: set[OwnerGroup] = set()
    over: set[str] = set()
    for name in names:
        more = [group for group in groups if name in group.owners and group not in counted]
        nbytes = sum(groups[group] for group in more)
        if nbytes > max(0, left):
            over.add(name)
        else:
            left -= nbytes
            counted.update(more)
    return over


def missing(residency: Residency, instance: str) -> Counter[OwnerGroup]:
    """Bytes that a wake would bring, by their owners."""
    found: Counter[OwnerGroup] = Counter()
    model = residency.models.by_instance.get(instance)
    for segment, nbytes in model.needs if model is not None else ():
        if segment not in residency.pool:
            found[OwnerGroup.of("weights", residency.holders(segment))] += nbytes
    return found


def held(residency: Residency) -> tuple[Counter[OwnerGroup], Counter[str]]:
    """Bytes of models by their owners, and those of keys and values by theirs; looks at each segment."""
    models: Counter[OwnerGroup] = Counter()
    claimed: Counter[str] = Counter()
    for segment in residency.pool.segments():
        holders, nbytes = residency.holders(segment), residency.pool.nbytes(segment)
        if segment >= 0:
            models[OwnerGroup.of("weights", holders)] += nbytes
        else:
            claimed.update(dict.fromkeys(holders, nbytes))
    return models, claimed
