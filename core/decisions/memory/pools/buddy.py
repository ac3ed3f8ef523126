"""Decides what lies where in Torpor's block scheme, kept as the baseline: blocks of few sizes in partitions, nothing
ever moves.

Torpor manages the blocks that PyTorch's caching allocator would have asked for, not tensors. So the segments of a wake
are packed, in their order, as that allocator does: those of at most half a slot into blocks of one slot (1 MiB into 2
MiB), those below 5 slots (10 MiB) into blocks of ten (20 MiB), larger ones have a block each. A block is the unit of
eviction: its segments go together, its cost is their sum, and it stays while any of them is fixed. The bytes of a
dropped segment are lost until its block is empty.
"""

from collections.abc import Container, Iterable, KeysView, Sequence
from typing import Final

from dormouse.core.decisions.memory.freelist import aligned
from dormouse.core.decisions.memory.pools import eviction
from dormouse.core.decisions.memory.pools.block_eviction import PlaceSearch
from dormouse.core.decisions.memory.pools.blocks import Block, blocks_of
from dormouse.core.decisions.memory.pools.partitions import MIN, SLOTS, Partitions, rounded
from dormouse.core.decisions.memory.pools.protocol import Cost, Granule, PoolChange, PoolFull, Span

SLOT_NBYTES: Final = 2 << 20


class Buddy:
    """The :class:`Pool` of partitions of 64 slots; ``capacity`` is rounded down to whole ones."""

    def __init__(self, capacity: int, slot_nbytes: int = SLOT_NBYTES) -> None:
        if slot_nbytes % 1024:
            raise ValueError(f"slots of {slot_nbytes} bytes: half a slot must be a multiple of 512 bytes")
        self._slot = slot_nbytes
        self._partitions = Partitions(capacity // (SLOTS * slot_nbytes))
        self.capacity = self._partitions.count * SLOTS * slot_nbytes
        self._nbytes: dict[int, int] = {}  # by segment, as asked for
        self._home: dict[int, tuple[int, int]] = {}  # (block, offset in it) by segment
        self._blocks: dict[int, Block] = {}
        self._serial = 0
        self._used = 0

    @property
    def used_nbytes(self) -> int:
        return self._used

    @property
    def lost_nbytes(self) -> int:
        return self.capacity - self._used - self.free_nbytes

    @property
    def free_nbytes(self) -> int:
        return self._partitions.free_slots * self._slot

    @property
    def largest_nbytes(self) -> int:
        longest = self._partitions.longest_untyped()
        if longest:
            return longest * SLOTS * self._slot
        for slots in (32, 16, 10, MIN):
            if self._partitions.find(slots, {}) is not None:
                return slots * self._slot
        return self._slot // 2 if self._partitions.find(1, {}) is not None else 0

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
        if len({segment for segment, _ in needs} - self._nbytes.keys()) < len(needs):
            raise ValueError("a segment is named twice or is there already")
        wanted = blocks_of(needs, self._slot)
        search = self._search(wanted, reserve_nbytes)
        attempt = search.find([], {})
        if attempt is None:
            prices: dict[int, float] = {}
            for number, block in self._blocks.items():
                if not any(segment in fixed for segment, _ in block.members):
                    prices[number] = sum(cost(segment) for segment, _ in block.members)
            units = list(prices), [self._blocks[number].place.slots for number in prices]
            ordered = eviction.ascending(*units, prices.__getitem__).names
            attempt = search.find(ordered, prices) if ordered else None
        if attempt is None:
            raise PoolFull(
                f"{sum(aligned(nbytes) for _, nbytes in needs)} bytes in {len(wanted)} blocks and {reserve_nbytes} "
                f"bytes of reserve do not fit {self._partitions.count} partitions of {SLOTS * self._slot} bytes"
            )
        self._partitions, evicted = attempt
        plan = PoolChange()
        for number in evicted:
            self._remove(number, plan)
        self._record(wanted, needs, plan)
        return plan

    def adopt(self, segment: int, nbytes: int, *, reserve_nbytes: int = 0, tenant: str = "") -> PoolChange | None:
        if segment in self._nbytes:
            raise ValueError(f"segment {segment} is there already")
        wanted = blocks_of([(segment, nbytes)], self._slot)
        attempt = self._search(wanted, reserve_nbytes).find([], {})
        if attempt is None:
            return None
        self._partitions, _ = attempt
        plan = PoolChange()
        self._record(wanted, [(segment, nbytes)], plan)
        return plan

    def drop(self, segments: Iterable[int]) -> PoolChange:
        plan = PoolChange()
        for segment in segments:
            if segment not in self._nbytes:
                continue
            number, inside = self._home[segment]
            block = self._blocks[number]
            plan.evicted.append(segment)
            plan.freed.append(Span(self.offset(segment), aligned(self._nbytes[segment])))
            block.members.remove((segment, inside))
            self._forget(segment)
            if not block.members:
                self._partitions.give(block.place)
                del self._blocks[number]
        return plan

    def forget(self, segments: Iterable[int]) -> None:
        """An address lasts only while its segment is resident: there is none to forget."""

    def rename(self, old: int, new: int) -> None:
        if new in self._nbytes:
            raise ValueError(f"segment {new} is there already")
        self._nbytes[new] = self._nbytes.pop(old)
        number, inside = self._home[new] = self._home.pop(old)
        members = self._blocks[number].members
        members[members.index((old, inside))] = (new, inside)

    def __contains__(self, segment: object) -> bool:
        return segment in self._nbytes

    def offset(self, segment: int) -> int:
        number, inside = self._home[segment]
        return self._blocks[number].place.first * self._slot + inside

    def nbytes(self, segment: int) -> int:
        return self._nbytes[segment]

    def segments(self) -> KeysView[int]:
        return self._nbytes.keys()

    def owner(self, segment: int) -> str | None:
        return None

    def extents(self, segment: int) -> list[Span]:
        return [Span(self.offset(segment), self._nbytes[segment])]

    def granules(self, segments: Iterable[int]) -> list[Granule]:
        return [Granule(0, 0, self.capacity)]

    def check(self) -> None:
        partitions = Partitions(self._partitions.count)
        homes: dict[int, tuple[int, int]] = {}
        for number, block in self._blocks.items():
            assert block.members, "an empty block is kept"
            assert block.place.slots == rounded(block.slots)
            assert partitions.fits(block.place), "two blocks in one place"
            partitions.take(block.place)
            end = 0
            for segment, inside in sorted(block.members, key=lambda member: member[1]):
                homes[segment] = (number, inside)
                assert inside >= end, "two segments in one place"
                end = inside + aligned(self._nbytes[segment])
            assert end <= block.place.slots * self._slot
        assert homes == self._home
        assert homes.keys() == self._nbytes.keys()
        assert vars(partitions) == vars(self._partitions)
        assert self._used == sum(aligned(nbytes) for nbytes in self._nbytes.values())
        assert self.lost_nbytes >= 0

    def _search(self, wanted: Sequence[Block], reserve_nbytes: int) -> PlaceSearch:
        return PlaceSearch(self._partitions, self._blocks, wanted, -(-reserve_nbytes // self._slot))

    def _remove(self, number: int, plan: PoolChange) -> None:
        """Forget an evicted block; its slots are free already."""
        block = self._blocks[number]
        for segment, inside in block.members:
            plan.evicted.append(segment)
            plan.freed.append(Span(block.place.first * self._slot + inside, aligned(self._nbytes[segment])))
            self._forget(segment)
        del self._blocks[number]

    def _forget(self, segment: int) -> None:
        self._used -= aligned(self._nbytes.pop(segment))
        del self._home[segment]

    def _record(self, wanted: Sequence[Block], needs: Sequence[tuple[int, int]], plan: PoolChange) -> None:
        for block in wanted:
            self._serial += 1
            self._blocks[self._serial] = block
            for segment, inside in block.members:
                self._home[segment] = (self._serial, inside)
        for segment, nbytes in needs:
            self._nbytes[segment] = nbytes
            self._used += aligned(nbytes)
            plan.placed[segment] = self.offset(segment)
