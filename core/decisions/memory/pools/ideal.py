"""Keeps count of a memory whose bytes need not lie together: no addresses, no moves, nothing lost. The reference for
pools that plan addresses, and the pool of simulations in which addresses do not matter.

The cheapest segments per byte leave; one that the last of them made needless stays.
"""

from collections.abc import Container, Iterable, KeysView, Sequence

from dormouse.core.decisions.memory.pools.protocol import EvictionCost, Granule, PoolChange, PoolFull, Span


class Ideal:
    """The :class:`Pool` of a memory without addresses; its counts are of bytes as asked for."""

    def __init__(self, capacity: int) -> None:
        self.capacity = self.free_nbytes = capacity
        self.lost_nbytes = 0
        self._nbytes: dict[int, int] = {}  # by segment

    @property
    def used_nbytes(self) -> int:
        return self.capacity - self.free_nbytes

    @property
    def largest_nbytes(self) -> int:
        return self.free_nbytes

    def place(
        self,
        needs: Sequence[tuple[int, int]],
        *,
        cost: EvictionCost,
        fixed: Container[int] = (),
        reserve_nbytes: int = 0,
        tenant: str = "",
        roaming: Container[int] = (),
    ) -> PoolChange:
        sizes = self._nbytes
        wanted = dict(needs)
        if len(wanted) < len(needs) or not sizes.keys().isdisjoint(wanted):
            raise ValueError("a segment is named twice or is there already")
        total = sum(wanted.values())
        evicted: list[int] = []
        short = total + reserve_nbytes - self.free_nbytes
        if short > 0:
            for segment in cost.ascending(sizes):
                if segment not in fixed:
                    evicted.append(segment)
                    short -= sizes[segment]
                    if short <= 0:
                        break
            if short > 0:
                raise PoolFull(
                    f"{total} bytes and {reserve_nbytes} bytes of reserve do not fit a pool of {self.capacity} bytes: "
                    f"{short} too many, whatever leaves"
                )
            if short < 0:
                evicted = self._needed(evicted, -short)
        for segment in evicted:
            self.free_nbytes += sizes.pop(segment)
        sizes |= wanted
        self.free_nbytes -= total
        return PoolChange(evicted=evicted, placed=dict.fromkeys(wanted, 0))

    def _needed(self, evicted: list[int], surplus_nbytes: int) -> list[int]:
        """Evictions without the needless ones, the dearest first."""
        needed: list[int] = []
        for segment in reversed(evicted):
            if self._nbytes[segment] <= surplus_nbytes:
                surplus_nbytes -= self._nbytes[segment]
            else:
                needed.append(segment)
        return needed[::-1]

    def adopt(self, segment: int, nbytes: int, *, reserve_nbytes: int = 0, tenant: str = "") -> PoolChange | None:
        if segment in self._nbytes:
            raise ValueError(f"segment {segment} is there already")
        if self.free_nbytes - nbytes < reserve_nbytes:
            return None
        self._nbytes[segment] = nbytes
        self.free_nbytes -= nbytes
        return PoolChange(placed={segment: 0})

    def drop(self, segments: Iterable[int]) -> PoolChange:
        gone = [segment for segment in dict.fromkeys(segments) if segment in self._nbytes]
        for segment in gone:
            self.free_nbytes += self._nbytes.pop(segment)
        return PoolChange(evicted=gone)

    def forget(self, segments: Iterable[int]) -> None:
        """There are no addresses to forget."""

    def rename(self, old: int, new: int) -> None:
        if new in self._nbytes:
            raise ValueError(f"segment {new} is there already")
        self._nbytes[new] = self._nbytes.pop(old)

    def __contains__(self, segment: object) -> bool:
        return segment in self._nbytes

    def offset(self, segment: int) -> int:
        """0: there are no addresses. Raises KeyError."""
        return 0 * self._nbytes[segment]

    def nbytes(self, segment: int) -> int:
        return self._nbytes[segment]

    def segments(self) -> KeysView[int]:
        return self._nbytes.keys()

    def owner(self, segment: int) -> str | None:
        return None

    def extents(self, segment: int) -> list[Span]:
        return [Span(0, self._nbytes[segment])]

    def granules(self, segments: Iterable[int]) -> list[Granule]:
        return [Granule(0, 0, self.capacity)]

    def check(self) -> None:
        assert self.used_nbytes == sum(self._nbytes.values())
        assert 0 <= self.free_nbytes <= self.capacity
