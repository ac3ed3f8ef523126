"""Costs of evictions for pools that are tested alone."""

from collections.abc import Collection, Container, Sequence

from dormouse.core.decisions.memory.pools.protocol import Cost, Pool, PoolChange


class Costs:
    """An `EvictionCost` by a function of segments."""

    def __init__(self, cost: Cost, pool: Pool) -> None:
        self._cost, self._pool = cost, pool

    def __call__(self, segment: int) -> float:
        return self._cost(segment)

    def ascending(self, resident: Collection[int]) -> list[int]:
        return sorted(resident, key=lambda segment: self._cost(segment) / self._pool.nbytes(segment))


def place(
    pool: Pool,
    needs: Sequence[tuple[int, int]],
    *,
    cost: Cost,
    fixed: Container[int] = (),
    reserve_nbytes: int = 0,
    tenant: str = "",
    roaming: Container[int] = (),
) -> PoolChange:
    known = Costs(cost, pool)
    return pool.place(needs, cost=known, fixed=fixed, reserve_nbytes=reserve_nbytes, tenant=tenant, roaming=roaming)
