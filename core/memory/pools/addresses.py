"""Decides at which address a segment lies for life in a pool of pages.

Addresses are plenty and physical granules are not: the segments that come together for one tenant lie side by side, so
that neighbours share granules and only the end of a batch wastes part of one. A batch begins at a large granule's
boundary and owns whole large windows, so that granules are never shared by two tenants; what is left of the window
at its end goes to the same tenant's next segments that fit there. A batch that fits in a small granule lies in one.
"""

import itertools
from collections.abc import Iterable, Sequence

from dormouse.core.freelist import FreeList, aligned


class Addresses:
    """Windows of ``window_nbytes`` in ``[0, nbytes)``, and what is known to lie in them. ``tile_nbytes``: of a small
    granule.
    """

    def __init__(self, nbytes: int, window_nbytes: int, tile_nbytes: int) -> None:
        self._window, self._tile = window_nbytes, tile_nbytes
        self._free = FreeList(nbytes // window_nbytes * window_nbytes)
        self._known: dict[int, tuple[int, int]] = {}  # (offset, aligned nbytes) by segment
        self._count: dict[int, int] = {}  # known segments by window that they touch
        self._owner: dict[int, str] = {}  # tenant by window in use
        self._tail: dict[str, tuple[int, int]] = {}  # unused [start, end) of the last window, by tenant

    @property
    def largest_nbytes(self) -> int:
        """Longest run of addresses that no segment has."""
        return self._free.largest

    def __contains__(self, segment: int) -> bool:
        return segment in self._known

    def offset(self, segment: int) -> int:
        return self._known[segment][0]

    def nbytes(self, segment: int) -> int:
        """Of its addresses, that is, with the rounding. Raises KeyError."""
        return self._known[segment][1]

    def owner(self, window: int) -> str:
        """The tenant that the window's addresses are of."""
        return self._owner[window]

    def tail(self, tenant: str) -> tuple[int, int]:
        """Unused ``[start, end)`` in the tenant's last window."""
        return self._tail.get(tenant, (0, 0))

    def assign(self, needs: Sequence[tuple[int, int]], tenant: str, share: bool) -> bool:
        """Addresses side by side for segments that have none; False, and nothing has changed, if there are none left.

        Args:
            share: they may lie in the tenant's last window, beside what is there.
        """
        if not needs:
            return True
        sizes = [aligned(nbytes) for _, nbytes in needs]
        total = sum(sizes)
        start, end = before = self.tail(tenant)
        if total <= self._tile < start % self._tile + total:
            start = -(-start // self._tile) * self._tile  # else it takes two granules when it is here without others
        if not share or end - start < total:
            windows = -(-total // self._window)
            found = self._free.find(windows * self._window)
            if found is None:
                return False
            self._free.take_all(found, [self._window] * windows)
            start, end = found, found + windows * self._window
            for window in range(start // self._window, end // self._window):
                self._owner[window], self._count[window] = tenant, 0
        for (segment, _), size in zip(needs, sizes, strict=True):
            self._known[segment] = (start, size)
            for window in self.windows(segment):
                self._count[window] += 1
            start += size
        if end == before[1] or end - start > before[1] - before[0]:
            self._tail[tenant] = (start, end)
        return True

    def withdraw(self, segments: Iterable[int], tenant: str, tail: tuple[int, int]) -> None:
        """Undo ``assign``; ``tail`` is what it was before."""
        self.forget(segments)
        self._tail.pop(tenant, None)
        if tail[1] > tail[0]:
            self._tail[tenant] = tail

    def windows(self, segment: int) -> range:
        """The windows that a segment touches."""
        offset, nbytes = self._known[segment]
        return range(offset // self._window, -(-(offset + nbytes) // self._window))

    def forget(self, segments: Iterable[int]) -> None:
        """Give back the addresses of these; a window is free for others once nothing known touches it."""
        for segment in segments:
            if segment not in self._known:
                continue
            for window in self.windows(segment):
                self._count[window] -= 1
                if not self._count[window]:
                    del self._count[window]
                    tenant = self._owner.pop(window)
                    if self._tail.get(tenant, (0, 0))[1] == (window + 1) * self._window:
                        del self._tail[tenant]
                    self._free.give(window * self._window)
            del self._known[segment]

    def rename(self, old: int, new: int) -> None:
        """``old``'s addresses are ``new``'s; those that ``new`` had are given back."""
        self.forget([new])
        self._known[new] = self._known.pop(old)

    def check(self) -> None:
        self._free.check()
        spans = sorted(self._known.values())
        for (offset, nbytes), (after, _) in itertools.pairwise(spans):
            assert offset + nbytes <= after, "two segments at one address"
        count: dict[int, int] = {}
        for segment in self._known:
            for window in self.windows(segment):
                count[window] = count.get(window, 0) + 1
        assert count == self._count
        assert count.keys() == self._owner.keys()
        assert sorted(self._free.taken) == sorted(window * self._window for window in count)
        for tenant, (start, end) in self._tail.items():
            assert start <= end
            assert start == end or self._owner[end // self._window - 1] == tenant
            assert not any(offset < end and start < offset + nbytes for offset, nbytes in spans)
