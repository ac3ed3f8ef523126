"""Decides which physical granules are mapped where, in a pool whose segments do not move.

Addresses are divided into windows of a large granule's size and these into tiles of a small one's. A tile is mapped
while a resident segment touches it. A window that is wanted whole gets a large granule, one that is wanted in part
gets small ones; when a class runs out the other steps in: small ones for whole windows, a large one for a part. Only a
window where some tile is mapped small and in use can have nothing but small ones: its bytes do not move.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from dormouse.core.decisions.memory.pools.granules import Granules
from dormouse.core.decisions.memory.pools.protocol import Mapping, PoolChange


class GranuleWindow:
    """One large granule's worth of addresses: its resident segments, and its mapped granules."""

    __slots__ = ("large", "residents", "small", "users")

    def __init__(self, tiles: int) -> None:
        self.users = [0] * tiles  # resident segments by tile
        self.residents = 0  # segments that touch any tile
        self.large: int | None = None  # the granule that backs all of it
        self.small: dict[int, int] = {}  # granule by tile

    def missing(self) -> list[int]:
        """Tiles that are wanted and not mapped."""
        if self.large is not None:
            return []
        return [tile for tile, users in enumerate(self.users) if users and tile not in self.small]

    def missing_count(self) -> int:
        if self.large is not None:
            return 0
        return len(self.missing()) if self.small else len(self.users) - self.users.count(0)

    def spare_small(self) -> int:
        """Tiles that are mapped small and not wanted."""
        return sum(not self.users[tile] for tile in self.small)


class Demand(NamedTuple):
    """Granules to map for the segments that are to be resident."""

    beside: int  # tiles in windows where other tiles are mapped small and in use
    whole: list[int]  # windows wanted from end to end
    part: list[tuple[int, int]]  # (tiles, window) wanted in part, the most tiles first
    part_tiles: int


class Backing:
    """The windows that have something resident or mapped."""

    def __init__(self, granules: Granules) -> None:
        self._granules = granules
        self._windows: dict[int, GranuleWindow] = {}
        self.spare_large = 0  # granules still mapped and not wanted; none between a pool's calls
        self.spare_small = 0

    def __contains__(self, window: object) -> bool:
        return window in self._windows

    def enter(self, offset: int, nbytes: int) -> None:
        """Count a segment at these addresses as resident; its tiles may not be mapped yet."""
        for number, low, high in self._touched(offset, nbytes):
            window = self._windows.get(number)
            if window is None:
                window = self._windows[number] = GranuleWindow(self._granules.per_large)
            before = window.spare_small() if window.small else 0
            if window.large is not None and not window.residents:
                self.spare_large -= 1
            window.residents += 1
            window.users[low:high] = [users + 1 for users in window.users[low:high]]
            if before:
                self.spare_small += window.spare_small() - before

    def leave(self, offset: int, nbytes: int) -> None:
        """Count a segment as gone; tiles that only it wanted are spare, and still mapped."""
        for number, low, high in self._touched(offset, nbytes):
            window = self._windows[number]
            before = window.spare_small() if window.small else 0
            window.residents -= 1
            window.users[low:high] = [users - 1 for users in window.users[low:high]]
            if window.large is not None:
                self.spare_large += not window.residents
            elif window.small:
                self.spare_small += window.spare_small() - before

    def wanted(self, tile: int) -> bool:
        """Whether a small granule's worth of addresses is mapped, or about to be, for resident segments."""
        number, inside = divmod(tile, self._granules.per_large)
        window = self._windows.get(number)
        if window is None:
            return False
        return bool(window.residents if window.large is not None else window.users[inside])

    def tidy(self, windows: Iterable[int]) -> None:
        """Those with nothing resident and nothing mapped are not kept."""
        for number in windows:
            window = self._windows.get(number)
            if window is not None and window.large is None and not window.small and not window.residents:
                del self._windows[number]

    def demand(self, windows: Iterable[int]) -> Demand:
        """Granules that these windows lack."""
        beside, whole, part = 0, list[int](), list[tuple[int, int]]()
        for number in windows:
            window = self._windows[number]
            tiles = window.missing_count()
            if tiles and window.small and any(window.users[tile] for tile in window.small):
                beside += tiles
            elif tiles == len(window.users):
                whole.append(number)
            elif tiles:
                part.append((tiles, number))
        return Demand(beside, whole, sorted(part, reverse=True), sum(tiles for tiles, _ in part))

    def fits(self, demand: Demand, reserve_nbytes: int, without: tuple[int, int] = (0, 0)) -> bool:
        """Whether free and spare granules, but for so many large and small ones, cover a demand and leave the
        reserve. With more granules of either class the result never turns to False.
        """
        granules = self._granules
        large = granules.free_large + self.spare_large - without[0]
        small = granules.free_small + self.spare_small - without[1] - demand.beside
        direct = min(large, len(demand.whole))
        large -= direct
        small -= (len(demand.whole) - direct) * granules.per_large
        parts = demand.part_tiles
        for tiles, _ in demand.part:
            if parts <= small or not large:
                break
            large -= 1
            parts -= tiles
        free_nbytes = large * granules.large_nbytes + (small - parts) * granules.small_nbytes
        return parts <= small and free_nbytes >= reserve_nbytes

    def unmap(self, windows: Iterable[int], plan: PoolChange) -> None:
        """Unmaps unwanted tiles of these windows. Once all windows with spare granules are done, none are spare."""
        granules = self._granules
        for number in windows:
            window, start = self._windows[number], number * granules.large_nbytes
            if window.large is not None and not window.residents:
                plan.unmapped.append(Mapping(start, window.large, granules.large_nbytes))
                granules.give(window.large)
                window.large = None
            for tile in sorted(tile for tile in window.small if not window.users[tile]):
                granule = window.small.pop(tile)
                plan.unmapped.append(Mapping(start + tile * granules.small_nbytes, granule, granules.small_nbytes))
                granules.give(granule)
            self.tidy([number])
        self.spare_large = self.spare_small = 0

    def map(self, windows: list[int], tenant: Callable[[int], str], plan: PoolChange) -> None:
        """Maps the missing tiles of these windows, which must fit; ``tenant`` returns the owner of a window's
        addresses.
        """
        granules, demand = self._granules, self.demand(windows)
        direct = min(granules.free_large, len(demand.whole))
        parts = demand.part_tiles
        small = granules.free_small - demand.beside - (len(demand.whole) - direct) * granules.per_large
        large = set(demand.whole[:direct])
        for (tiles, number), _ in zip(demand.part, range(granules.free_large - direct), strict=False):
            if parts <= small:
                break
            large.add(number)
            parts -= tiles
        for number in windows:
            window, start = self._windows[number], number * granules.large_nbytes
            if number in large:
                window.large, clear = granules.take(True, tenant(number))
                plan.mapped.append(Mapping(start, window.large, granules.large_nbytes, clear))
                continue
            for tile in window.missing():
                window.small[tile], clear = granules.take(False, tenant(number))
                at = start + tile * granules.small_nbytes
                plan.mapped.append(Mapping(at, window.small[tile], granules.small_nbytes, clear))

    def locate(self, address: int) -> tuple[int, int]:
        """``(granule, offset in it)`` of a mapped address."""
        number, inside = divmod(address, self._granules.large_nbytes)
        window = self._windows[number]
        if window.large is not None:
            return window.large, inside
        tile, inside = divmod(inside, self._granules.small_nbytes)
        return window.small[tile], inside

    def check(self, spans: Iterable[tuple[int, int]]) -> None:
        """Asserts that exactly the tiles that segments at these ``(offset, nbytes)`` touch are mapped, each granule
        once.
        """
        assert self.spare_large == self.spare_small == 0
        users: dict[int, list[int]] = {}
        residents: dict[int, int] = {}
        for offset, nbytes in spans:
            for number, low, high in self._touched(offset, nbytes):
                residents[number] = residents.get(number, 0) + 1
                counts = users.setdefault(number, [0] * self._granules.per_large)
                for tile in range(low, high):
                    counts[tile] += 1
        assert users == {number: window.users for number, window in self._windows.items()}
        assert residents == {number: window.residents for number, window in self._windows.items()}
        mapped = []
        for window in self._windows.values():
            for tile, count in enumerate(window.users):
                assert bool(count) == (tile in window.small) or window.large is not None
            assert window.large is None or not window.small
            mapped += [window.large] if window.large is not None else list(window.small.values())
        everything = sorted(mapped + self._granules.free())
        assert everything == list(range(self._granules.large_count + self._granules.small_count))

    def _touched(self, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """``(window, first tile, end)`` of the tiles that these addresses touch."""
        small, tiles = self._granules.small_nbytes, self._granules.per_large
        first, end = offset // small, -(-(offset + nbytes) // small)
        return [
            (number, max(first - number * tiles, 0), min(end - number * tiles, tiles))
            for number in range(first // tiles, -(-end // tiles))
        ]
