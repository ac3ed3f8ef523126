"""Decides which physical granules are mapped where, in a pool whose segments keep their address for life: nothing
moves, so views and captured graphs stay valid over a swap, and free bytes need not lie together.

Addresses are divided into windows of a large granule's size and these into tiles of a small one's. A tile is mapped
while a resident segment touches it. A window that is wanted whole gets a large granule, one that is wanted in part
gets small ones; when a class runs out the other steps in: small ones for whole windows, a large one for a part. A
granule is shared by neighbours, so an evicted segment frees only what no resident neighbour touches: eviction counts
what really becomes free.
"""

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from dormouse.core.freelist import aligned
from dormouse.gpuserver.pools import eviction
from dormouse.gpuserver.pools.addresses import Addresses
from dormouse.gpuserver.pools.granules import Granules
from dormouse.gpuserver.pools.protocol import Cost, Mapping, Plan, PoolFull, Span


class Window:
    """One large granule's worth of addresses: who is there, and what is mapped."""

    __slots__ = ("large", "small", "users")

    def __init__(self, tiles: int) -> None:
        self.users = [0] * tiles  # resident segments by tile
        self.large: int | None = None  # the granule that backs all of it
        self.small: dict[int, int] = {}  # granule by tile

    def missing(self) -> list[int]:
        """Tiles that are wanted and not mapped."""
        if self.large is not None:
            return []
        return [tile for tile, users in enumerate(self.users) if users and tile not in self.small]


class Demand(NamedTuple):
    """What must be mapped for the segments that are to be resident."""

    beside: int  # tiles in windows where other tiles are mapped small
    whole: list[int]  # windows wanted from end to end
    part: list[tuple[int, int]]  # (tiles, window) wanted in part, the most tiles first


class Pages:
    """The :class:`Pool` of granules ``(nbytes, count)`` of one or two sizes, mapped in ``address_nbytes``.

    A segment keeps its address until :meth:`forget`. ``tenant`` counts where a segment gets its address.
    """

    def __init__(self, granules: list[tuple[int, int]], address_nbytes: int) -> None:
        self._granules = Granules(granules)
        self.capacity = self._granules.capacity
        self._addresses = Addresses(address_nbytes, self._granules.large_nbytes)
        self._nbytes: dict[int, int] = {}  # by resident segment, as asked for
        self._windows: dict[int, Window] = {}  # those with something resident
        self._used = 0
        self._spare_large = 0  # granules still mapped that nobody wants; none between calls
        self._spare_small = 0

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
    ) -> Plan:
        segments = [segment for segment, _ in needs]
        if len(set(segments) - self._nbytes.keys()) < len(needs):
            raise ValueError("a segment is named twice or is there already")
        tail = self._addresses.tail(tenant)
        fresh = self._enter_all(needs, tenant)
        if fresh is None:
            raise PoolFull(f"{self._story(needs, reserve_nbytes)}: no addresses are left, forget segments first")
        demand = self._demand(segments)
        evicted: list[int] = []
        if not self._fits(demand, reserve_nbytes):
            found = self._evict(segments, demand, cost, fixed, reserve_nbytes)
            if found is None:
                self._leave_all(needs, fresh, tenant, tail)
                raise PoolFull(self._story(needs, reserve_nbytes))
            evicted = found
        return self._commit(evicted, segments)

    def adopt(self, segment: int, nbytes: int, *, reserve_nbytes: int = 0, tenant: str = "") -> Plan | None:
        if segment in self._nbytes:
            raise ValueError(f"segment {segment} is there already")
        needs = [(segment, nbytes)]
        tail = self._addresses.tail(tenant)
        fresh = self._enter_all(needs, tenant)
        if fresh is None:
            return None
        if not self._fits(self._demand([segment]), reserve_nbytes):
            self._leave_all(needs, fresh, tenant, tail)
            return None
        return self._commit([], [segment])

    def drop(self, segments: Iterable[int]) -> Plan:
        gone = [segment for segment in dict.fromkeys(segments) if segment in self._nbytes]
        for segment in gone:
            self._leave(segment)
        return self._commit(gone, [])

    def forget(self, segments: Iterable[int]) -> None:
        """Give back the addresses of segments that no manifest has any more; resident ones keep theirs, drop them
        first.
        """
        self._addresses.forget(segment for segment in segments if segment not in self._nbytes)

    def rename(self, old: int, new: int) -> None:
        """``new`` has ``old``'s address from now on, and ``old`` none."""
        if new in self._nbytes:
            raise ValueError(f"segment {new} is there already")
        self._nbytes[new] = self._nbytes.pop(old)
        self._addresses.rename(old, new)

    def __contains__(self, segment: object) -> bool:
        return segment in self._nbytes

    def offset(self, segment: int) -> int:
        if segment not in self._nbytes:
            raise KeyError(segment)
        return self._addresses.offset(segment)

    def nbytes(self, segment: int) -> int:
        return self._nbytes[segment]

    def segments(self) -> Iterable[int]:
        return self._nbytes.keys()

    def extents(self, segment: int) -> list[Span]:
        granules, spans = self._granules, list[Span]()
        position, end = self.offset(segment), self.offset(segment) + self._nbytes[segment]
        while position < end:
            number, inside = divmod(position, granules.large_nbytes)
            window = self._windows[number]
            if window.large is not None:
                granule = window.large
            else:
                tile, inside = divmod(inside, granules.small_nbytes)
                granule = window.small[tile]
            nbytes = min(granules.nbytes(granule) - inside, end - position)
            start = granules.physical(granule) + inside
            if spans and spans[-1].offset + spans[-1].nbytes == start:
                spans[-1] = Span(spans[-1].offset, spans[-1].nbytes + nbytes)
            else:
                spans.append(Span(start, nbytes))
            position += nbytes
        return spans

    def check(self) -> None:
        self._addresses.check()
        assert self._spare_large == self._spare_small == 0
        assert self._used == sum(aligned(nbytes) for nbytes in self._nbytes.values())
        users: dict[tuple[int, int], int] = {}
        for segment in self._nbytes:
            for key in self._tiles(segment):
                users[key] = users.get(key, 0) + 1
        mapped = []
        for number, window in self._windows.items():
            for tile, count in enumerate(window.users):
                assert users.get((number, tile), 0) == count
                assert bool(count) == (tile in window.small) or window.large is not None
            assert any(window.users)
            assert window.large is None or not window.small
            mapped += [window.large] if window.large is not None else list(window.small.values())
        assert {number for number, _ in users} == self._windows.keys()
        everything = sorted(mapped + self._granules.free())
        assert everything == list(range(self._granules.large_count + self._granules.small_count))
        assert self.used_nbytes + self.lost_nbytes + self.free_nbytes == self.capacity
        assert self.lost_nbytes >= 0

    def _tiles(self, segment: int) -> Iterable[tuple[int, int]]:
        """``(window, tile)`` of every small granule's worth of addresses that it touches."""
        offset, nbytes = self._addresses.offset(segment), self._addresses.nbytes(segment)
        small, per_large = self._granules.small_nbytes, self._granules.per_large
        return (divmod(tile, per_large) for tile in range(offset // small, -(-(offset + nbytes) // small)))

    def _enter(self, segment: int) -> None:
        """Count a segment as resident; its tiles may not be mapped yet."""
        for number, tile in self._tiles(segment):
            window = self._windows.get(number)
            if window is None:
                window = self._windows[number] = Window(self._granules.per_large)
            if window.large is not None:
                if not any(window.users):
                    self._spare_large -= 1
            elif not window.users[tile] and tile in window.small:
                self._spare_small -= 1
            window.users[tile] += 1
        self._used += self._addresses.nbytes(segment)

    def _leave(self, segment: int) -> None:
        """Count a segment as gone; what only it wanted is spare, and still mapped."""
        for number, tile in self._tiles(segment):
            window = self._windows[number]
            window.users[tile] -= 1
            if window.large is not None:
                if not any(window.users):
                    self._spare_large += 1
            elif not window.users[tile] and tile in window.small:
                self._spare_small += 1
        self._used -= self._addresses.nbytes(segment)

    def _enter_all(self, needs: Sequence[tuple[int, int]], tenant: str) -> list[int] | None:
        """Count all as resident, with addresses for those that have none; returns the latter. None, and nothing has
        changed, if there are none left.
        """
        fresh = [(segment, nbytes) for segment, nbytes in needs if segment not in self._addresses]
        for segment, nbytes in needs:
            if segment in self._addresses and self._addresses.nbytes(segment) != aligned(nbytes):
                raise ValueError(f"segment {segment} has the address of another size")
        tail = self._addresses.tail(tenant)
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
            self._tidy({window for segment, _ in fresh for window in self._addresses.windows(segment)})
            self._addresses.withdraw([segment for segment, _ in fresh], tenant, tail)
        known = {segment for segment, _ in needs} - {segment for segment, _ in fresh}
        for segment, nbytes in needs:
            self._nbytes[segment] = nbytes
            if segment in known:
                self._enter(segment)
        return [segment for segment, _ in fresh]

    def _leave_all(
        self, needs: Sequence[tuple[int, int]], fresh: Sequence[int], tenant: str, tail: tuple[int, int]
    ) -> None:
        """Undo ``_enter_all``."""
        for segment, _ in needs:
            self._leave(segment)
            del self._nbytes[segment]
        self._tidy({window for segment, _ in needs for window in self._addresses.windows(segment)})
        self._addresses.withdraw(fresh, tenant, tail)

    def _tidy(self, windows: Iterable[int]) -> None:
        """Windows with nothing resident are not kept."""
        for number in windows:
            window = self._windows.get(number)
            if window is not None and window.large is None and not window.small and not any(window.users):
                del self._windows[number]

    def _demand(self, segments: Sequence[int]) -> Demand:
        beside, whole, part = 0, list[int](), list[tuple[int, int]]()
        for number in dict.fromkeys(number for segment in segments for number in self._addresses.windows(segment)):
            window = self._windows[number]
            tiles = len(window.missing())
            if tiles and any(window.users[tile] for tile in window.small):
                beside += tiles
            elif tiles == len(window.users):
                whole.append(number)
            elif tiles:
                part.append((tiles, number))
        return Demand(beside, whole, sorted(part, reverse=True))

    def _fits(self, demand: Demand, reserve_nbytes: int) -> bool:
        """Whether what is free and spare covers a demand and leaves the reserve."""
        granules = self._granules
        large = granules.free_large + self._spare_large
        small = granules.free_small + self._spare_small - demand.beside
        direct = min(large, len(demand.whole))
        large -= direct
        small -= (len(demand.whole) - direct) * granules.per_large
        parts = sum(tiles for tiles, _ in demand.part)
        for tiles, _ in demand.part:
            if parts <= small or not large:
                break
            large -= 1
            parts -= tiles
        return (
            parts <= small and large * granules.large_nbytes + (small - parts) * granules.small_nbytes >= reserve_nbytes
        )

    def _evict(
        self, needs: Sequence[int], demand: Demand, cost: Cost, fixed: Container[int], reserve_nbytes: int
    ) -> list[int] | None:
        """The cheapest segments whose granules suffice, left already; None, and all are back, if none do."""
        kept = set(needs)
        movable = [(segment, self._addresses.nbytes(segment)) for segment in self._nbytes if segment not in kept]
        movable = [unit for unit in movable if unit[0] not in fixed]
        movable.sort(key=lambda unit: self._addresses.offset(unit[0]))
        evicted: list[int] = []
        again = False
        for segment, _, _ in eviction.ascending(movable, cost):
            self._leave(segment)
            evicted.append(segment)
            if self._fits(demand, reserve_nbytes):
                break
        else:
            # with all neighbours gone a window may take a large granule where it had small ones
            again = True
            if not self._fits(self._demand(needs), reserve_nbytes):
                for segment in evicted:
                    self._enter(segment)
                return None
        gone: list[int] = []
        for segment in reversed(evicted):
            self._enter(segment)
            if not self._fits(self._demand(needs) if again else demand, reserve_nbytes):
                self._leave(segment)
                gone.append(segment)
        return gone[::-1]

    def _commit(self, evicted: list[int], placed: Sequence[int]) -> Plan:
        """Unmap what nobody wants, map what is wanted."""
        plan = Plan(evicted=evicted)
        for number in sorted({window for segment in evicted for window in self._addresses.windows(segment)}):
            self._unmap(number, plan)
        for segment in evicted:
            del self._nbytes[segment]
        self._spare_large = self._spare_small = 0
        demand = self._demand(placed)
        granules = self._granules
        direct = min(granules.free_large, len(demand.whole))
        parts = sum(tiles for tiles, _ in demand.part)
        small = granules.free_small - demand.beside - (len(demand.whole) - direct) * granules.per_large
        large = set(demand.whole[:direct])
        for (tiles, number), _ in zip(demand.part, range(granules.free_large - direct), strict=False):
            if parts <= small:
                break
            large.add(number)
            parts -= tiles
        for number in dict.fromkeys(number for segment in placed for number in self._addresses.windows(segment)):
            self._back(number, number in large, plan)
        plan.placed = {segment: self._addresses.offset(segment) for segment in placed}
        return plan

    def _unmap(self, number: int, plan: Plan) -> None:
        window, granules = self._windows[number], self._granules
        start = number * granules.large_nbytes
        if window.large is not None and not any(window.users):
            plan.unmapped.append(Mapping(start, window.large, granules.large_nbytes))
            granules.give(window.large)
            window.large = None
        for tile in sorted(tile for tile in window.small if not window.users[tile]):
            granule = window.small.pop(tile)
            plan.unmapped.append(Mapping(start + tile * granules.small_nbytes, granule, granules.small_nbytes))
            granules.give(granule)
        self._tidy([number])

    def _back(self, number: int, large: bool, plan: Plan) -> None:
        """Map what a window lacks, by one large granule or by small ones."""
        window, granules = self._windows[number], self._granules
        start, tenant = number * granules.large_nbytes, self._addresses.owner(number)
        if large:
            window.large, clear = granules.take(True, tenant)
            plan.mapped.append(Mapping(start, window.large, granules.large_nbytes, clear))
            return
        for tile in window.missing():
            granule, clear = granules.take(False, tenant)
            window.small[tile] = granule
            plan.mapped.append(Mapping(start + tile * granules.small_nbytes, granule, granules.small_nbytes, clear))

    def _story(self, needs: Sequence[tuple[int, int]], reserve_nbytes: int) -> str:
        return (
            f"{sum(aligned(nbytes) for _, nbytes in needs)} bytes in {len(needs)} segments and {reserve_nbytes} bytes "
            f"of reserve do not fit {self.capacity} bytes of granules"
        )
