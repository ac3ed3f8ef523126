"""Decides which blocks leave partitions that are short of room, and where the wanted ones go then: the cheapest first,
and for a block of several partitions the cheapest run of them.

Nothing changes except the places noted in the wanted blocks; partitions are copied.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from dormouse.core.decisions.memory.pools.blocks import Block
from dormouse.core.decisions.memory.pools.partitions import SLOTS, Partitions, rounded


class Clearing:
    """Cost of emptying each partition.

    Args:
        blocks: all there are, by number.
        queue: those that may leave; the others stay, or have left.
        prices: of all that might leave or have left.
        placed: new ones, which stay.
    """

    def __init__(
        self,
        count: int,
        blocks: Mapping[int, Block],
        queue: Collection[int],
        prices: Mapping[int, float],
        placed: Sequence[Block],
    ) -> None:
        self._blocks = blocks
        self._inside: list[dict[int, float]] = [{} for _ in range(count)]  # share of the price by block, by partition
        self._fixed = [False] * count
        for number, block in blocks.items():
            for each in block.place.partitions:
                if number in queue:
                    self._inside[each][number] = prices[number] * min(1.0, SLOTS / block.place.slots)
                elif number not in prices:
                    self._fixed[each] = True
        for block in placed:
            self.stays(block)
        self._price = list(map(self._price_of, range(count)))

    def leaves(self, number: int) -> None:
        for each in self._blocks[number].place.partitions:
            del self._inside[each][number]
            self._price[each] = self._price_of(each)

    def stays(self, block: Block) -> None:
        """A wanted block has been placed."""
        for each in block.place.partitions:
            self._fixed[each] = True

    def cheapest(self, count: int) -> list[int]:
        """The blocks to evict so that ``count`` consecutive partitions are empty, at the least cost; none if every run
        contains a block that must stay.
        """
        price = [math.inf if fixed else price for fixed, price in zip(self._fixed, self._price, strict=True)]
        runs = range(len(price) - count + 1)
        best = min([(sum(price[first : first + count]), first) for first in runs], default=(math.inf, 0))
        if best[0] == math.inf:
            return []
        return list(dict.fromkeys(number for each in self._inside[best[1] : best[1] + count] for number in each))

    def _price_of(self, partition: int) -> float:
        return sum(self._inside[partition].values())


class PlaceSearch:
    """Places for all of ``wanted`` in ``partitions`` with ``blocks`` in them, by number.

    Args:
        reserve_slots: as many are free afterwards, at least.
    """

    def __init__(
        self, partitions: Partitions, blocks: Mapping[int, Block], wanted: Sequence[Block], reserve_slots: int
    ) -> None:
        self._before = partitions
        self._blocks = blocks
        self._wanted = wanted
        self._reserve = reserve_slots

    def find(self, ordered: Sequence[int], prices: Mapping[int, float]) -> tuple[Partitions, list[int]] | None:
        """The partitions then, and the blocks evicted for it. None if all of ``ordered`` do not suffice.

        Args:
            ordered: blocks that may leave, the cheapest first.
            prices: theirs.
        """
        partitions, evicted, queue = self._before.copy(), list[int](), dict.fromkeys(ordered)
        active: dict[int, None] = {}
        clearing: Clearing | None = None

        def evict(number: int) -> None:
            del queue[number]
            evicted.append(number)
            partitions.give(self._blocks[number].place)
            if clearing is not None:
                clearing.leaves(number)

        for index, block in enumerate(self._wanted):
            place = partitions.find(block.slots, active)
            while place is None and queue:
                run: Sequence[int] = ()
                if block.slots > SLOTS:
                    if clearing is None:
                        clearing = Clearing(partitions.count, self._blocks, queue, prices, self._wanted[:index])
                    run = clearing.cheapest(rounded(block.slots) // SLOTS)
                leaving = run or [next(iter(queue))]
                for number in leaving:
                    evict(number)
                # nowhere else has anything changed since the last look
                changed = {each for number in leaving for each in self._blocks[number].place.partitions}
                place = partitions.find(block.slots, active, sorted(changed))
            if place is None:
                return self._from_nothing(ordered)
            partitions.take(place)
            block.place = place
            if clearing is not None:
                clearing.stays(block)
        while partitions.free_slots < self._reserve and queue:
            evict(next(iter(queue)))
        return self._undone(partitions, evicted) if partitions.free_slots >= self._reserve else None

    def _from_nothing(self, ordered: Sequence[int]) -> tuple[Partitions, list[int]] | None:
        """With everything evicted first and the largest blocks placed first: the last resort."""
        partitions, active = self._before.copy(), dict[int, None]()
        for number in ordered:
            partitions.give(self._blocks[number].place)
        for block in sorted(self._wanted, key=lambda block: block.slots, reverse=True):
            place = partitions.find(block.slots, active)
            if place is None:
                return None
            partitions.take(place)
            block.place = place
        return self._undone(partitions, ordered) if partitions.free_slots >= self._reserve else None

    def _undone(self, partitions: Partitions, evicted: Sequence[int]) -> tuple[Partitions, list[int]]:
        """Takes back needless evictions, the dearest first."""
        gone: list[int] = []
        for number in reversed(evicted):
            place = self._blocks[number].place
            if partitions.free_slots - place.slots >= self._reserve and partitions.fits(place):
                partitions.take(place)
            else:
                gone.append(number)
        return partitions, gone[::-1]
