"""Keeps the unmapped physical granules of a pool of pages, by size class and by the tenant whose bytes they hold.

Granules are numbered from 0, large ones first; a granule's bytes lie at the sum of the sizes before it. A tenant is
given a free granule that it had last, else an unused one, else another's, which must be cleared.
"""

from collections import defaultdict
from typing import Final

NOBODY: Final = None
"""The tenant of a granule that has not been used since the memory was made: its bytes are zero."""


class Granules:
    """Free granules of at most two classes; ``small_nbytes`` divides ``large_nbytes``.

    With one class both names mean it: every granule counts as large, ``per_large`` is 1 and there are no small ones.
    """

    def __init__(self, classes: list[tuple[int, int]]) -> None:
        ordered = sorted(classes, reverse=True)
        if not 1 <= len(ordered) <= 2 or ordered[0][0] % ordered[-1][0] or ordered[-1][0] % 512:
            raise ValueError(f"granules {classes}: one or two sizes, the smaller a divisor of the larger, of 512 bytes")
        self.large_nbytes, self.large_count = ordered[0]
        self.small_nbytes = ordered[-1][0]
        self.small_count = ordered[1][1] if len(ordered) == 2 else 0
        self.per_large = self.large_nbytes // self.small_nbytes
        self.free_large, self.free_small = self.large_count, self.small_count
        self._tenant: dict[int, str] = {}  # by granule, of those that were ever mapped
        self._free: dict[bool, defaultdict[str | None, list[int]]] = {True: defaultdict(list), False: defaultdict(list)}
        self._free[True][NOBODY] = list(reversed(range(self.large_count)))
        self._free[False][NOBODY] = list(reversed(range(self.large_count, self.large_count + self.small_count)))

    @property
    def capacity(self) -> int:
        return self.large_nbytes * self.large_count + self.small_nbytes * self.small_count

    @property
    def free_nbytes(self) -> int:
        return self.large_nbytes * self.free_large + self.small_nbytes * self.free_small

    def nbytes(self, granule: int) -> int:
        return self.large_nbytes if granule < self.large_count else self.small_nbytes

    def physical(self, granule: int) -> int:
        """Offset of its first byte in the memory of all granules."""
        if granule < self.large_count:
            return granule * self.large_nbytes
        return self.large_count * self.large_nbytes + (granule - self.large_count) * self.small_nbytes

    def take(self, large: bool, tenant: str) -> tuple[int, bool]:
        """``(granule, clear)`` for a tenant. Raises IndexError if the class has none left."""
        free = self._free[large]
        owner: str | None = tenant
        if not free.get(owner):
            owner = NOBODY
        if not free.get(owner):
            owner = next((each for each, granules in free.items() if granules), NOBODY)
        granule = free[owner].pop()
        if not free[owner] and owner is not NOBODY:
            del free[owner]
        self._tenant[granule] = tenant
        if large:
            self.free_large -= 1
        else:
            self.free_small -= 1
        return granule, owner not in (tenant, NOBODY)

    def give(self, granule: int) -> None:
        large = granule < self.large_count
        self._free[large][self._tenant[granule]].append(granule)
        if large:
            self.free_large += 1
        else:
            self.free_small += 1

    def free(self) -> list[int]:
        """All that are not mapped."""
        return [granule for by_tenant in self._free.values() for granules in by_tenant.values() for granule in granules]
