"""Decides what lies where in Torpor's block scheme, kept as the baseline: blocks of few sizes in partitions, nothing
ever moves.

Torpor manages the blocks that PyTorch's caching allocator would have asked for, not tensors. So the segments of a wake
are packed, in their order, as that allocator does: those of at most half a slot into blocks of one slot (1 MiB into
2 MiB), those below 5 slots (10 MiB) into blocks of ten (20 MiB), larger ones have a block each. A block is the unit of
eviction: what is in it goes together, its cost is the sum, and it stays while any segment of it is fixed. Bytes that a
dropped segment leaves in a block are lost until the block is empty.
"""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from dormouse.core.freelist import aligned
from dormouse.gpuserver.pools import eviction
from dormouse.gpuserver.pools.partitions import LEAST, NOWHERE, SLOTS, Partitions, Place, rounded
from dormouse.gpuserver.pools.protocol import Cost, Plan, PoolFull, Span

SLOT_NBYTES: Final = 2 << 20


@dataclass(slots=True)
class Block:
    """Segments packed together, and the slots that they have been given."""

    slots: int  # as asked for
    members: list[tuple[int, int]] = field(default_factory=list)  # (segment, offset in the block)
    filled: int = 0
    place: Place = NOWHERE


def _partitions_of(place: Place) -> range:
    return range(place.first // SLOTS, -(-(place.first + place.slots) // SLOTS))


def blocks_of(needs: Sequence[tuple[int, int]], slot_nbytes: int) -> list[Block]:
    """The blocks that PyTorch's caching allocator would make for these ``(segment, nbytes)`` in their order."""
    blocks: list[Block] = []
    small: Block | None = None
    large: Block | None = None
    for segment, nbytes in needs:
        size = aligned(nbytes)
        if size <= slot_nbytes // 2:
            if small is None or small.filled + size > slot_nbytes:
                blocks.append(small := Block(1))
            block = small
        elif size < 5 * slot_nbytes:
            if large is None or large.filled + size > 10 * slot_nbytes:
                blocks.append(large := Block(10))
            block = large
        else:
            blocks.append(block := Block(-(-size // slot_nbytes)))
        block.members.append((segment, block.filled))
        block.filled += size
    return blocks


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
        for slots in (32, 16, 10, LEAST):
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
    ) -> Plan:
        if len({segment for segment, _ in needs} - self._nbytes.keys()) < len(needs):
            raise ValueError("a segment is named twice or is there already")
        wanted = blocks_of(needs, self._slot)
        attempt = self._attempt(wanted, [], {}, reserve_nbytes)
        if attempt is None:
            prices: dict[int, float] = {}
            for number, block in self._blocks.items():
                if not any(segment in fixed for segment, _ in block.members):
                    prices[number] = sum(cost(segment) for segment, _ in block.members)
            units = [(number, self._blocks[number].place.slots) for number in prices]
            ordered = [unit.name for unit in eviction.ascending(units, prices.__getitem__)]
            attempt = self._attempt(wanted, ordered, prices, reserve_nbytes) if ordered else None
        if attempt is None:
            raise PoolFull(
                f"{sum(aligned(nbytes) for _, nbytes in needs)} bytes in {len(wanted)} blocks and {reserve_nbytes} "
                f"bytes of reserve do not fit {self._partitions.count} partitions of {SLOTS * self._slot} bytes"
            )
        self._partitions, evicted = attempt
        plan = Plan()
        for number in evicted:
            self._remove(number, plan)
        self._record(wanted, needs, plan)
        return plan

    def adopt(self, segment: int, nbytes: int, *, reserve_nbytes: int = 0, tenant: str = "") -> Plan | None:
        if segment in self._nbytes:
            raise ValueError(f"segment {segment} is there already")
        wanted = blocks_of([(segment, nbytes)], self._slot)
        attempt = self._attempt(wanted, [], {}, reserve_nbytes)
        if attempt is None:
            return None
        self._partitions, _ = attempt
        plan = Plan()
        self._record(wanted, [(segment, nbytes)], plan)
        return plan

    def drop(self, segments: Iterable[int]) -> Plan:
        plan = Plan()
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
        """An address lasts only while its segment is resident: nothing is kept that could be forgotten."""

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

    def segments(self) -> Iterable[int]:
        return self._nbytes.keys()

    def extents(self, segment: int) -> list[Span]:
        return [Span(self.offset(segment), self._nbytes[segment])]

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

    def _attempt(
        self, wanted: Sequence[Block], ordered: list[int], prices: dict[int, float], reserve_nbytes: int
    ) -> tuple[Partitions, list[int]] | None:
        """Partitions with places for all of ``wanted``, and the blocks evicted for it: the cheapest first, and for a
        block of several partitions the cheapest run of them. None if all of ``ordered`` do not suffice.
        """
        partitions, evicted, queue = self._partitions.copy(), list[int](), dict.fromkeys(ordered)
        active: dict[int, None] = {}
        for index, block in enumerate(wanted):
            while (place := partitions.find(block.slots, active)) is None and queue:
                whole = block.slots > SLOTS
                run = self._cheapest_run(rounded(block.slots) // SLOTS, queue, prices, wanted[:index]) if whole else []
                for number in run or [next(iter(queue))]:
                    del queue[number]
                    evicted.append(number)
                    partitions.give(self._blocks[number].place)
            if place is None:
                break
            partitions.take(place)
            block.place = place
        else:
            while partitions.free_slots * self._slot < reserve_nbytes and queue:
                number = next(iter(queue))
                del queue[number]
                evicted.append(number)
                partitions.give(self._blocks[number].place)
            if partitions.free_slots * self._slot >= reserve_nbytes:
                return self._undone(partitions, evicted, reserve_nbytes)
            return None
        return self._from_nothing(wanted, ordered, reserve_nbytes)

    def _from_nothing(
        self, wanted: Sequence[Block], ordered: list[int], reserve_nbytes: int
    ) -> tuple[Partitions, list[int]] | None:
        """As ``_attempt`` with everything evicted first and the largest blocks placed first: the last resort."""
        partitions, active = self._partitions.copy(), dict[int, None]()
        for number in ordered:
            partitions.give(self._blocks[number].place)
        for block in sorted(wanted, key=lambda block: block.slots, reverse=True):
            place = partitions.find(block.slots, active)
            if place is None:
                return None
            partitions.take(place)
            block.place = place
        if partitions.free_slots * self._slot < reserve_nbytes:
            return None
        return self._undone(partitions, ordered, reserve_nbytes)

    def _undone(
        self, partitions: Partitions, evicted: Sequence[int], reserve_nbytes: int
    ) -> tuple[Partitions, list[int]]:
        """Take back evictions whose place nobody needed, the dearest first."""
        gone: list[int] = []
        for number in reversed(evicted):
            place = self._blocks[number].place
            if partitions.fits(place) and (partitions.free_slots - place.slots) * self._slot >= reserve_nbytes:
                partitions.take(place)
            else:
                gone.append(number)
        return partitions, gone[::-1]

    def _cheapest_run(
        self, count: int, queue: dict[int, None], prices: dict[int, float], placed: Sequence[Block]
    ) -> list[int]:
        """The blocks to evict so that ``count`` consecutive partitions are empty, at the least cost; none if there is
        something in all runs that must stay.
        """
        price = [0.0] * self._partitions.count
        inside: list[list[int]] = [[] for _ in price]
        for number, block in self._blocks.items():
            for each in _partitions_of(block.place):
                if number in queue:
                    inside[each].append(number)
                    price[each] += prices[number] * min(1.0, SLOTS / block.place.slots)
                elif number not in prices:
                    price[each] = math.inf
        for block in placed:
            for each in _partitions_of(block.place):
                price[each] = math.inf
        runs = range(self._partitions.count - count + 1)
        best = min(((sum(price[first : first + count]), first) for first in runs), default=(math.inf, 0))
        if best[0] == math.inf:
            return []
        return list(dict.fromkeys(number for each in inside[best[1] : best[1] + count] for number in each))

    def _remove(self, number: int, plan: Plan) -> None:
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

    def _record(self, wanted: Sequence[Block], needs: Sequence[tuple[int, int]], plan: Plan) -> None:
        for block in wanted:
            self._serial += 1
            self._blocks[self._serial] = block
            for segment, inside in block.members:
                self._home[segment] = (self._serial, inside)
        for segment, nbytes in needs:
            self._nbytes[segment] = nbytes
            self._used += aligned(nbytes)
            plan.placed[segment] = self.offset(segment)
