"""Room that nobody has asked for yet: for a model that is likely to be, beside what is worth more, and for anything;
and what it would cost. Pure.

A model's segments are kept as those of a seat are while they are on their way, under a name that no instance has. Only
what is worth less for each byte than what comes leaves or moves for it.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Final

from dormouse.core.decisions.memory.eviction_cost import WakeEvictionCost
from dormouse.core.decisions.memory.models import ModelLayout
from dormouse.core.decisions.memory.pools.protocol import PoolChange, PoolFull
from dormouse.core.decisions.memory.residency import Residency
from dormouse.core.decisions.memory.wake_plan import SeatedModel, WakePlan

KEEP: Final = 4.0
"""What is there is worth so many times as much as it says: copies are not for nothing."""


def owner_of(instance: str) -> str:
    """Whose seat it is that a model has while it is brought. Names of instances have no blanks."""
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
    """A seat for what is there of its model and what is not, until `Residency.leave` of its owner; None if there is no
    room.

    Args:
        worth, nbytes_s: as in `WakeEvictionCost`. ``worth`` has the instance, too.
        reserve_nbytes: what is to be free afterwards.
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
    """Drop the cheapest of what nobody uses, about so many bytes of it."""
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
    """What a byte of the first segment to be evicted costs, in expected seconds; None if there is none. With ``seats``,
    of what only these hold.
    """
    pool, by_owner = residency.pool, residency.seats.by_owner
    cost = WakeEvictionCost(residency.models, lambda: worth, nbytes_s, pool.nbytes)
    fixed = residency.seats.kept(but=seats)
    found = {segment for name in seats for segment in by_owner[name].held} if seats else pool.segments()
    loose = [segment for segment in found if segment in pool and segment not in fixed]
    first = next(iter(cost.ascending(dict.fromkeys(loose))), None)
    return None if first is None else cost(first) / pool.nbytes(first)
