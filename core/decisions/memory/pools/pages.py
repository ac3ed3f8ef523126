"""Decides which segments leave a pool of pages, where nothing moves: segments keep their address for life, so views and
captured graphs stay valid over a swap, and free bytes need not lie together. Roaming segments keep theirs only while
they are resident: their next address depends on the segments evicted for them.

Addresses are given out in addresses.py, and physical granules put behind them in backing.py. A granule is shared by
neighbours, so an evicted segment frees only the granules that no resident neighbour touches: eviction counts those
alone.
"""

from collections.abc import Container, Iterable, KeysView, Sequence
from typing import Final

from dormouse.core.decisions.memory.freelist import aligned
from dormouse.core.decisions.memory.pools import eviction
from dormouse.core.decisions.memory.pools.addresses import Addresses
from dormouse.core.decisions.memory.pools.backing import Backing, Demand
from dormouse.core.decisions.memory.pools.granules import Granules
from dormouse.core.decisions.memory.pools.protocol import Cost, Granule, PoolChange, PoolFull, Span

TRIES: Final = 8
"""Roaming segments are tried again once this part of their bytes has been evicted: each try looks at all of them."""


class Pages:
    """The :class:`Pool` of granules ``(nbytes, count)`` of one or two sizes, mapped in ``address_nbytes``.

    A segment keeps its address until :meth:`forget`, a roaming one until it leaves. ``tenant`` counts where a segment
    gets its address.
    """

    def __init__(self, granules: list[tuple[int, int]], address_nbytes: int) -> None:
        self._granules = Granules(granules)
        self.capacity = self._granules.capacity
        self._addresses = Addresses(address_nbytes, self._granules.large_nbytes, self._granules.small_nbytes)
        self._nbytes: dict[int, int] = {}  # by resident segment, as asked for
        self._roaming: set[int] = set()  # of these
        self._backing = Backing(self._granules)
        self._used = 0

    @property
    def used_nbytes(self) -> int:
        return self._used

    @property
    def lost_nbytes(self) -> int:
        return self.capacity - self._used - self._granules.free_nbytes

    @property
    def free_nbytes(self) -> int:
        return self._granules.free_nbytes

    @property
    def largest_nbytes(self) -> int:
        return min(self._granules.free_nbytes, self._addresses.largest_nbytes)

    def place(
        self,
        needs: Sequence[tuple[int, int]],
        *,
        cost: Cost,
        fixed: Container[int] = (),
        reserve_nbytes: int = 0,
        tenant: str = "",
        roaming: Container[int] = (),
    ) -> PoolChange:
        segments = [segment for segment, _ in needs]
        if len(set(segments) - self._nbytes.keys()) < len(needs):
            raise ValueError("a segment is named twice or is there already")
        guests = [need for need in needs if need[0] in roaming and need[0] not in self._addresses]
        lent = {segment for segment, _ in guests}
        settled = [need for need in needs if need[0] not in lent]
        last = self._addresses.last(tenant)
        fresh = self._enter_all(settled, tenant)
        if fresh is None:
            raise PoolFull(f"{self._story(needs, reserve_nbytes)}: no addresses are left, forget segments first")
        stay = [segment for segment, _ in settled]
        evicted: list[int] = []
        windows: list[int] = []
        if not (self._fits_with(guests, stay, tenant, reserve_nbytes)):
            found = self._evict(stay, guests, cost, fixed, reserve_nbytes, tenant)
            if found is None:
                self._leave_all(settled, fresh, tenant, last)
                raise PoolFull(self._story(needs, reserve_nbytes))
            evicted, windows = found
        for segment, nbytes in guests:
            self._nbytes[segment] = nbytes
        self._roaming |= lent
        return self._commit(evicted, windows, segments)

    def adopt(self, segment: int, nbytes: int, *, reserve_nbytes: int = 0, tenant: str = "") -> PoolChange | None:
        if segment in self._nbytes:
            raise ValueError(f"segment {segment} is there already")
        needs = [(segment, nbytes)]
        last = self._addresses.last(tenant)
        fresh = self._enter_all(needs, tenant)
        if fresh is None:
            return None
        if not self._backing.fits(self._demand([segment]), reserve_nbytes):
            self._leave_all(needs, fresh, tenant, last)
            return None
        return self._commit([], [], [segment])

    def drop(self, segments: Iterable[int]) -> PoolChange:
        gone = [segment for segment in dict.fromkeys(segments) if segment in self._nbytes]
        windows = self._windows(gone)
        for segment in gone:
            self._leave(segment)
        return self._commit(gone, windows, [])

    def forget(self, segments: Iterable[int]) -> None:
        """Give back the addresses of these; resident ones keep theirs, drop them first."""
        self._addresses.forget(segment for segment in segments if segment not in self._nbytes)

    def rename(self, old: int, new: int) -> None:
        """``new`` has ``old``'s address from now on, and ``old`` none."""
        if new in self._nbytes:
            raise ValueError(f"segment {new} is there already")
        self._nbytes[new] = self._nbytes.pop(old)
        self._addresses.rename(old, new)
        if old in self._roaming:
            self._roaming.discard(old)
            self._roaming.add(new)

    def __contains__(self, segment: object) -> bool:
        return segment in self._nbytes

    def offset(self, segment: int) -> int:
        if segment not in self._nbytes:
            raise KeyError(segment)
        return self._addresses.offset(segment)

    def nbytes(self, segment: int) -> int:
        return self._nbytes[segment]

    def segments(self) -> KeysView[int]:
        return self._nbytes.keys()

    def owner(self, segment: int) -> str | None:
        return self._addresses.owner(self._addresses.windows(segment)[0])

    def extents(self, segment: int) -> list[Span]:
        granules, spans = self._granules, list[Span]()
        position, end = self.offset(segment), self.offset(segment) + self._nbytes[segment]
        while position < end:
            granule, inside = self._backing.locate(position)
            nbytes = min(granules.nbytes(granule) - inside, end - position)
            start = granules.physical(granule) + inside
            if spans and spans[-1].offset + spans[-1].nbytes == start:
                spans[-1] = Span(spans[-1].offset, spans[-1].nbytes + nbytes)
            else:
                spans.append(Span(start, nbytes))
            position += nbytes
        return spans

    def granules(self, segments: Iterable[int]) -> list[Granule]:
        granules, found = self._granules, dict[int, Granule]()
        for segment in segments:
            position, end = self.offset(segment), self.offset(segment) + self._nbytes[segment]
            while position < end:
                granule, inside = self._backing.locate(position)
                nbytes = granules.nbytes(granule)
                found[granule] = Granule(position - inside, granules.physical(granule), nbytes)
                position += nbytes - inside
        return list(found.values())

    def check(self) -> None:
        self._addresses.check()
        self._backing.check(
            (self._addresses.offset(segment), self._addresses.nbytes(segment)) for segment in self._nbytes
        )
        assert self._used == sum(aligned(nbytes) for nbytes in self._nbytes.values())
        assert self.used_nbytes + self.lost_nbytes + self.free_nbytes == self.capacity
        assert self.lost_nbytes >= 0
        assert self._roaming <= self._nbytes.keys()

    def _enter(self, segment: int) -> None:
        """Count a segment as resident; its tiles may not be mapped yet."""
        nbytes = self._addresses.nbytes(segment)
        self._backing.enter(self._addresses.offset(segment), nbytes)
        self._used += nbytes

    def _leave(self, segment: int) -> None:
        """Count a segment as gone; tiles that only it wanted are spare, and still mapped. A roaming one loses its
        address.
        """
        nbytes = self._addresses.nbytes(segment)
        self._backing.leave(self._addresses.offset(segment), nbytes)
        self._used -= nbytes
        if segment in self._roaming:
            self._addresses.vacate(segment)

    def _return(self, segment: int, offset: int) -> bool:
        """Undo ``_leave``; False if another one has its address."""
        if segment in self._roaming and not self._addresses.restore(segment, offset, aligned(self._nbytes[segment])):
            return False
        self._enter(segment)
        return True

    def _windows(self, segments: Iterable[int]) -> list[int]:
        """All that these touch, each once."""
        return list(dict.fromkeys(number for segment in segments for number in self._addresses.windows(segment)))

    def _demand(self, segments: Iterable[int]) -> Demand:
        return self._backing.demand(self._windows(segments))

    def _enter_all(self, needs: Sequence[tuple[int, int]], tenant: str) -> list[int] | None:
        """Count all as resident, with addresses for those that have none; returns the latter. None, and nothing has
        changed, if there are none left.
        """
        fresh = [(segment, nbytes) for segment, nbytes in needs if segment not in self._addresses]
        for segment, nbytes in needs:
            if segment in self._addresses and self._addresses.nbytes(segment) != aligned(nbytes):
                raise ValueError(f"segment {segment} has the address of another size")
        last = self._addresses.last(tenant)
        for share in (True, False):
            if not self._addresses.assign(fresh, tenant, share):
                return None
            for segment, _ in fresh:
                self._enter(segment)
            # sharing the last window is worth it unless its other tiles take small granules that there are not
            if not share or self._demand([segment for segment, _ in fresh]).beside <= self._granules.free_small:
                break
            for segment, _ in fresh:
                self._leave(segment)
            self._backing.tidy(self._windows(segment for segment, _ in fresh))
            self._addresses.withdraw([segment for segment, _ in fresh], tenant, last)
        known = {segment for segment, _ in needs} - {segment for segment, _ in fresh}
        for segment, nbytes in needs:
            self._nbytes[segment] = nbytes
            if segment in known:
                self._enter(segment)
        return [segment for segment, _ in fresh]

    def _leave_all(self, needs: Sequence[tuple[int, int]], fresh: Sequence[int], tenant: str, last: int) -> None:
        """Undo ``_enter_all``."""
        for segment, _ in needs:
            self._leave(segment)
            del self._nbytes[segment]
        self._backing.tidy(self._windows(segment for segment, _ in needs))
        self._addresses.withdraw(fresh, tenant, last)

    def _fits_with(
        self, guests: Sequence[tuple[int, int]], stay: Sequence[int], tenant: str, reserve_nbytes: int
    ) -> bool:
        """Whether there are granules for all of these. If so, guests are counted as resident, and have addresses."""
        if not guests:
            return self._backing.fits(self._demand(stay), reserve_nbytes)
        names, last = [segment for segment, _ in guests], self._addresses.last(tenant)
        for share in (True, False):  # room in the tenant's windows may take small granules that there are not
            if not self._addresses.lend(guests, tenant, self._backing.wanted, share):
                continue
            for segment in names:
                self._enter(segment)
            if self._backing.fits(self._demand([*stay, *names]), reserve_nbytes):
                return True
            windows = self._windows(names)
            for segment in names:
                self._leave(segment)
            self._backing.tidy(windows)
            self._addresses.withdraw(names, tenant, last, self._backing)
        return False

    def _evict(
        self,
        stay: Sequence[int],
        guests: Sequence[tuple[int, int]],
        cost: Cost,
        fixed: Container[int],
        reserve_nbytes: int,
        tenant: str,
    ) -> tuple[list[int], list[int]] | None:
        """The cheapest segments whose granules suffice, left already, and the windows that they were in; None, and all
        are back, if none do. Guests are entered.
        """
        kept, backing, addresses = set(stay), self._backing, self._addresses
        movable = [segment for segment in self._nbytes if segment not in kept and segment not in fixed]
        movable.sort(key=addresses.offset)
        places: dict[int, tuple[int, range]] = {}  # where those that leave were, and in which windows
        demand = self._demand(stay)
        total = sum(aligned(nbytes) for _, nbytes in guests)
        step = total // TRIES
        evicted: list[tuple[int, int, int]] = []  # (segment, large and small granules that it left)
        tried = (total - step, 0)
        for segment in eviction.ascending(movable, [addresses.nbytes(each) for each in movable], cost).names:
            large, small = backing.spare_large, backing.spare_small
            places[segment] = addresses.offset(segment), addresses.windows(segment)
            self._leave(segment)
            evicted.append((segment, backing.spare_large - large, backing.spare_small - small))
            if not guests:
                if backing.fits(demand, reserve_nbytes):
                    break
                continue
            spare_nbytes = self._granules.large_nbytes * backing.spare_large
            spare_nbytes += self._granules.small_nbytes * backing.spare_small
            now = (self.capacity - self._used - reserve_nbytes, spare_nbytes)
            if max(now[0] - tried[0], now[1] - tried[1]) < step or now[0] < total:
                continue  # too little has left since the last try
            if self._fits_with(guests, stay, tenant, reserve_nbytes):
                break
            tried = now
        else:
            # with all neighbours gone a window may take a large granule where it had small ones
            if not self._fits_with(guests, stay, tenant, reserve_nbytes):
                for segment, _, _ in evicted:
                    self._return(segment, places[segment][0])
                return None
        windows = self._windows([*stay, *(segment for segment, _ in guests)])
        demand, touched = backing.demand(windows), set(windows)
        gone: list[int] = []
        for segment, large, small in reversed(evicted):
            # back it takes at least what it left (more, if neighbours have gone since), and the demand grows no smaller
            less = (0, 0) if guests else (large, small)
            if backing.fits(demand, reserve_nbytes, less) and self._return(segment, places[segment][0]):
                # beside a neighbour that is back, a window takes small granules alone
                near = not touched.isdisjoint(places[segment][1])
                then = backing.demand(windows) if near else demand
                if backing.fits(then, reserve_nbytes):
                    demand = then
                    continue
                self._leave(segment)
            gone.append(segment)
        return gone[::-1], list(dict.fromkeys(number for segment in gone for number in places[segment][1]))

    def _commit(self, evicted: list[int], windows: Sequence[int], placed: Sequence[int]) -> PoolChange:
        """Unmaps unwanted granules in the windows of evicted segments, maps wanted ones."""
        plan = PoolChange(evicted=evicted)
        self._backing.unmap(sorted(windows), plan)
        for segment in evicted:
            del self._nbytes[segment]
        self._roaming.difference_update(evicted)
        self._addresses.trim(windows)
        self._backing.map(self._windows(placed), self._addresses.owner, plan)
        plan.placed = {segment: self._addresses.offset(segment) for segment in placed}
        return plan

    def _story(self, needs: Sequence[tuple[int, int]], reserve_nbytes: int) -> str:
        return (
            f"{sum(aligned(nbytes) for _, nbytes in needs)} bytes in {len(needs)} segments and {reserve_nbytes} bytes "
            f"of reserve do not fit {self.capacity} bytes of granules"
        )
