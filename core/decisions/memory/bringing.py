"""Room ahead of requests: for a model that is likely to be wanted, beside models of more worth; for anything; and the
cost of such room. Pure.

The segments of a model on its way are kept as those of a seat are, under a name that no instance has. Only segments
worth less per byte are evicted or moved for it.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from dormouse.core.decisions.memory.eviction_cost import WakeEvictionCost
from dormouse.core.decisions.memory.models import ModelLayout
from dormouse.core.decisions.memory.pools.protocol import PoolChange, PoolFull
from dormouse.core.decisions.memory.residency import Residency
from dormouse.core.decisions.memory.wake_plan import SeatedModel, WakePlan

KEEP: Final = 4.0
"""Factor on the worth of resident segments: copies are not for nothing."""


def owner_of(instance: str) -> str:
    """Owner of the seat that a model has while it is brought. Names of instances have no blanks."""
    return f"preload of {instance}"


def bring(
    residency: Residency,
    instance: str,
    worth: Callable[[], Mapping[str, float]],
    nbytes_s: float,
    *,
    tenant: str = "",
    reserve_nbytes: int = 0,
    roams: Callable[[int], bool] = lambda segment: False,
) -> WakePlan | None:
    """A seat for all of its model, there or not, until `Residency.leave` of its owner; None if there is no room.

    Args:
        worth, nbytes_s: as in `WakeEvictionCost`. ``worth`` has the instance, too.
        reserve_nbytes: bytes to be free afterwards.
        roams: as of `Residency.wake`.
    """
    pool = residency.pool
    seat = SeatedModel(residency.models.by_instance.get(instance) or ModelLayout(()))
    resident = pool.segments()
    missing = [need for need in seat.model.needs if need[0] not in resident]
    cost = WakeEvictionCost(residency.models, worth, nbytes_s, pool.nbytes)
    fixed = residency.seats.kept().union(seat.model.nbytes)
    wanted_nbytes = sum([nbytes for _, nbytes in missing])
    byte = sum([cost.per_byte(segment) * nbytes for segment, nbytes in missing]) / max(1, wanted_nbytes)
    fixed.update([segment for segment in resident if KEEP * cost.per_byte(segment) >= byte])
    wake = WakePlan()
    roaming = {segment for segment, _ in missing if roams(segment)}
    try:
        plan = pool.place(
            missing, cost=cost, fixed=fixed, reserve_nbytes=reserve_nbytes, tenant=tenant, roaming=roaming
        )
    except PoolFull:
        return None
    residency.take(owner_of(instance), seat, plan, missing, wake)
    return wake


def spare(residency: Residency, nbytes: int, worth: Mapping[str, float], nbytes_s: float) -> PoolChange:
    """Drops the cheapest unused segments, about so many bytes of them."""
    cost = WakeEvictionCost(residency.models, lambda: worth, nbytes_s, residency.pool.nbytes)
    fixed, gone = residency.seats.kept(), list[int]()
    for segment in cost.ascending(residency.pool.segments()):
        if nbytes <= 0:
            break
        if segment not in fixed:
            gone.append(segment)
            nbytes -= residency.pool.nbytes(segment)
    return residency.forget(gone)


def cheapest_per_byte(
    residency: Residency, worth: Mapping[str, float], nbytes_s: float, seats: Collection[str] = ()
) -> float | None:
    """Cost of a byte of the first segment to be evicted, in expected seconds; None if there is none. With ``seats``, of
    segments that only these hold.
    """
    pool, by_owner = residency.pool, residency.seats.by_owner
    cost = WakeEvictionCost(residency.models, lambda: worth, nbytes_s, pool.nbytes)
    fixed = residency.seats.kept(but=seats)
    found = {segment for name in seats for segment in by_owner[name].held} if seats else pool.segments()
    loose = [segment for segment in found if segment in pool and segment not in fixed]
    first = next(iter(cost.ascending(dict.fromkeys(loose))), None)
    return None if first is None else cost(first) / pool.nbytes(first)
