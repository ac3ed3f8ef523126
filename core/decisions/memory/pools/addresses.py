"""Decides at which address a segment lies in a pool of pages: for life, or for as long as it is resident.

Addresses are plenty and physical granules are not: the segments that come together for one tenant lie side by side, so
that neighbours share granules and only the end of a batch wastes part of one. A batch begins at a large granule's
boundary and owns whole large windows, so that granules are never shared by two tenants; the rest of the window
at its end goes to the same tenant's next segments that fit there. A batch that fits in a small granule lies in one.

Roaming segments have an address only while they are resident. They fill the rest of the tenant's windows, first
where memory is mapped in any case: so they take as many granules as their bytes do, whichever of them come and go.
"""

import bisect
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from dormouse.core.decisions.memory.freelist import FreeList, Holes, aligned, check_tiling


class Addresses:
    """Windows of ``window_nbytes`` in ``[0, nbytes)``, and the known segments in them. ``tile_nbytes``: of a small
    granule.
    """

    def __init__(self, nbytes: int, window_nbytes: int, tile_nbytes: int) -> None:
        self._window, self._tile = window_nbytes, tile_nbytes
        self._free = FreeList(nbytes // window_nbytes * window_nbytes)
        self._known: dict[int, tuple[int, int]] = {}  # (offset, aligned nbytes) by segment
        self._count: dict[int, int] = {}  # known segments by window that they touch
        self._owner: dict[int, str] = {}  # tenant by window in use
        self._holes: dict[str, Holes] = {}  # parts of a tenant's windows that no known segment has
        self._last: dict[str, int] = {}  # end of the window whose rest the tenant's next segments get

    @property
    def largest_nbytes(self) -> int:
        """Longest run of addresses that no segment has."""
        return self._free.largest

    def __contains__(self, segment: int) -> bool:
        return segment in self._known

    def offset(self, segment: int) -> int:
        return self._known[segment][0]

    def nbytes(self, segment: int) -> int:
        """Size of its addresses, with the rounding. Raises KeyError."""
        return self._known[segment][1]

    def owner(self, window: int) -> str:
        """The tenant that owns the window's addresses."""
        return self._owner[window]

    def last(self, tenant: str) -> int:
        """End of the window whose rest the tenant's next segments get; 0 if there is none."""
        return self._last.get(tenant, 0)

    def _tail(self, tenant: str) -> tuple[int, int]:
        """Unused ``[start, end)`` before that."""
        end = self.last(tenant)
        if end:
            holes = self._holes[tenant]
            index = bisect.bisect_left(holes.ends, end)
            if index < len(holes.starts) and holes.starts[index] < end:
                return holes.starts[index], end
        return 0, 0

    def assign(self, needs: Sequence[tuple[int, int]], tenant: str, share: bool) -> bool:
        """Addresses side by side for segments that have none; False, and nothing has changed, if there are none left.

        Args:
            share: they may lie in the tenant's last window, beside others.
        """
        if not needs:
            return True
        sizes = {segment: aligned(nbytes) for segment, nbytes in needs}
        total = sum(sizes.values())
        start, end = self._tail(tenant)
        if total <= self._tile < start % self._tile + total:
            start = -(-start // self._tile) * self._tile  # else it takes two granules when it is here without others
        if share and end - start >= total:
            self._put(sizes, start, tenant)
            return True
        return self._open(sizes, tenant)

    def lend(self, needs: Sequence[tuple[int, int]], tenant: str, wanted: Callable[[int], bool], share: bool) -> bool:
        """Addresses for segments that roam; False, and nothing has changed, if there are none left.

        Args:
            wanted: whether a small granule's worth of addresses, by its number, is mapped in any case.
            share: they may lie wherever there is room in the tenant's windows, else only in wanted granules.
        """
        sizes = {segment: aligned(nbytes) for segment, nbytes in needs}
        left = dict(sizes)
        least, total = min(left.values(), default=0), sum(left.values())

        def fill(start: int, end: int, from_end: bool) -> None:
            chosen, room = dict[int, int](), end - start
            whole = total <= room  # else the largest first: the remaining room is easier to fill
            for segment, size in left.items() if whole else sorted(left.items(), key=lambda each: -each[1]):
                if size <= room:
                    chosen[segment] = size
                    room -= size
                    if room < least:
                        break
            self._put(chosen, start + room if from_end else start, tenant)
            for segment in chosen:
                del left[segment]

        for filled_only in (True, False) if share else (True,):
            if not left:
                break
            pieces = self._wanted_pieces(tenant, wanted) if filled_only else self._pieces(tenant)
            ranked = []
            for start, end in pieces:
                if (size := end - start) >= least:
                    first, last = wanted(start // self._tile), wanted((end - 1) // self._tile)
                    alone = not (first or last)  # a segment beside another takes fewer granules
                    ranked.append((alone, size < total, abs(size - total), start, end, last and not first))
            for *_, start, end, from_end in sorted(ranked):
                if not left:
                    break
                fill(start, end, from_end)
        if left and not (share and self._extend(left, tenant)) and not self._open(left, tenant):
            for segment in sizes.keys() - left.keys():
                self.vacate(segment)
            return False
        return True

    def _pieces(self, tenant: str) -> list[tuple[int, int]]:
        """Parts of its windows that no known segment has."""
        holes = self._holes.get(tenant)
        return [] if holes is None else list(zip(holes.starts, holes.ends, strict=True))

    def _wanted_pieces(self, tenant: str, wanted: Callable[[int], bool]) -> Iterator[tuple[int, int]]:
        """The same, only where memory is mapped in any case."""
        tile = self._tile
        for start, end in self._pieces(tenant):
            tiles = range(start // tile, -(-end // tile))
            for there, run in itertools.groupby(tiles, wanted):
                found = list(run)
                if there:
                    yield max(start, found[0] * tile), min(end, (found[-1] + 1) * tile)

    def _extend(self, sizes: dict[int, int], tenant: str) -> bool:
        """The windows behind the tenant's last one for these, so that nothing is left at its end; False if they are not
        free.
        """
        (start, end), total = self._tail(tenant), sum(sizes.values())
        if start == end:
            return False
        windows = -(-(start + total - end) // self._window)
        if not self._free.take_all(end, [self._window] * windows):
            return False
        self._own(end, windows, tenant)
        self._put(sizes, start, tenant)
        self._last[tenant] = end + windows * self._window
        return True

    def _own(self, start: int, windows: int, tenant: str) -> None:
        """These windows are the tenant's, and nothing lies there."""
        for window in range(start // self._window, start // self._window + windows):
            self._owner[window], self._count[window] = tenant, 0
        self._holes.setdefault(tenant, Holes(0)).give(start, windows * self._window)

    def _open(self, sizes: dict[int, int], tenant: str) -> bool:
        """New windows for these, side by side; False if there are none left."""
        total = sum(sizes.values())
        windows = -(-total // self._window)
        start = self._free.find(windows * self._window)
        if start is None:
            return False
        self._free.take_all(start, [self._window] * windows)
        before, after, end = self._tail(tenant), start + total, start + windows * self._window
        self._own(start, windows, tenant)
        self._put(sizes, start, tenant)
        if end - after > before[1] - before[0]:
            self._last[tenant] = end
        return True

    def _put(self, sizes: dict[int, int], start: int, tenant: str) -> None:
        """Places them side by side in addresses that no known segment has."""
        for segment, size in sizes.items():
            taken = self._holes[tenant].take(start, size)
            assert taken, "two segments at one address"
            self._known[segment] = (start, size)
            for window in self.windows(segment):
                self._count[window] += 1
            start += size

    def withdraw(self, segments: Sequence[int], tenant: str, last: int, mapped: Container[int] = ()) -> None:
        """Undo ``assign`` and ``lend``; ``last`` is its earlier value. ``mapped``: windows that stay the tenant's."""
        windows = [window for segment in segments for window in self.windows(segment)]
        for segment in segments:
            self.vacate(segment)
        self.trim(window for window in windows if window not in mapped)
        self._last.pop(tenant, None)
        if last:
            self._last[tenant] = last

    def windows(self, segment: int) -> range:
        """The windows that a segment touches."""
        offset, nbytes = self._known[segment]
        return range(offset // self._window, -(-(offset + nbytes) // self._window))

    def vacate(self, segment: int) -> None:
        """Its addresses may be reused by its tenant. Its windows stay the tenant's until they are trimmed: memory
        mapped there holds that tenant's bytes.
        """
        offset, nbytes = self._known[segment]
        windows = self.windows(segment)
        for window in windows:
            self._count[window] -= 1
        self._holes[self._owner[windows[0]]].give(offset, nbytes)
        del self._known[segment]

    def restore(self, segment: int, offset: int, nbytes: int) -> bool:
        """Undo :meth:`vacate`; False if something else has come there."""
        holes = self._holes[self._owner[offset // self._window]]
        if not holes.take(offset, nbytes):
            return False
        self._known[segment] = (offset, nbytes)
        for window in self.windows(segment):
            self._count[window] += 1
        return True

    def trim(self, windows: Iterable[int]) -> None:
        """Frees the windows in which no known segment lies."""
        for window in windows:
            if self._count.get(window, 1):
                continue
            del self._count[window]
            tenant, start = self._owner.pop(window), window * self._window
            holes = self._holes[tenant]
            holes.take(start, self._window)
            if self.last(tenant) == start + self._window:
                del self._last[tenant]
            if not holes.starts and tenant not in self._owner.values():
                del self._holes[tenant]
            self._free.give(start)

    def forget(self, segments: Iterable[int]) -> None:
        """Give back the addresses of these; a window is free for others once nothing known touches it."""
        for segment in segments:
            if segment in self._known:
                windows = self.windows(segment)
                self.vacate(segment)
                self.trim(windows)

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
        for tenant, holes in self._holes.items():
            theirs = [window for window, owner in self._owner.items() if owner == tenant]
            assert theirs
            elsewhere = [(window * self._window, self._window) for window in range(max(theirs) + 1)]
            taken = [(at, size) for at, size in elsewhere if at // self._window not in theirs]
            taken += [self._known[each] for each in self._known if self._owner[self.windows(each)[0]] == tenant]
            whole = Holes(0)
            whole.reset(zip(holes.starts, holes.ends, strict=True))
            whole.capacity = (max(theirs) + 1) * self._window
            check_tiling(taken, whole)
            assert self.last(tenant) % self._window == 0
            assert not self.last(tenant) or self._owner[self.last(tenant) // self._window - 1] == tenant
        assert self._last.keys() <= self._holes.keys()
        assert set(self._owner.values()) == self._holes.keys()
